"""What the backend for SGLang refuses by its name, and versions of SGLang that it does not know."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omniattn.errors import UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
pytest.importorskip("transformers")

from sglang.srt import runtime_context  # noqa: E402
from sglang.srt.layers.attention import attention_registry  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from omniattn.integrations import sglang as integration  # noqa: E402
from omniattn.integrations import sglang_backend, sglang_versions  # noqa: E402
from tests.unit.integrations.sglang_server import HEADS, KV_HEADS, SCALE, Server, configuration, guess  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    with configuration():
        yield


@pytest.mark.parametrize(
    ("of_runner", "says"),
    [
        ({"use_mla_backend": True}, "latent attention on SGLang's MHATokenToKVPool"),
        ({"is_draft_worker": True}, "draft model"),
        ({"prefill_aware_swa": True}, "prefill_aware_swa"),
        ({"enable_hisparse": True}, "hisparse"),
        ({"kv_index_translator": SimpleNamespace(is_translating=True)}, "unified-memory"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_runners_that_are_refused(of_runner: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        Server(**of_runner)


@pytest.mark.parametrize(
    ("of_layer", "says"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"v_head_dim": 8}, "value heads of 8 beside key heads of 16"),
        ({"use_irope": True}, "use_irope"),
        ({"logit_cap": 3.0, "logit_capping_method": "clamp"}, "capped by clamp"),
        ({"pos_encoding_mode": "ALIBI"}, "positions"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_layers_that_are_refused_when_the_model_is_loaded(of_layer: Any, says: str) -> None:
    with pytest.raises(UnsupportedError, match=says):
        Server(layer=of_layer)


def test_other_models_that_are_refused() -> None:
    for name, says in (("is_encoder_decoder", "cross attention"), ("is_local_attention_model", "chunks")):
        server = Server()
        setattr(server.runner.model_config, name, True)
        with pytest.raises(UnsupportedError, match=says):
            attention_registry.ATTENTION_BACKENDS["omniattn"](server.runner)


def test_pools_that_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="e5m2"):
        Server(cache_dtype=torch.float8_e5m2)
    server = Server()
    pool = MLATokenToKVPool(
        64, page_size=16, dtype=torch.bfloat16, kv_lora_rank=64, qk_rope_head_dim=16, layer_num=1, device="cpu",
        enable_memory_saver=False,
    )  # fmt: skip
    server.runner.token_to_kv_pool = pool
    with pytest.raises(UnsupportedError, match="MLATokenToKVPool"):
        attention_registry.ATTENTION_BACKENDS["omniattn"](server.runner)


@pytest.mark.parametrize(
    ("capability", "of_model", "says"),
    [
        ((7, 5), torch.float16, "compute capability 7.5"),
        ((9, 0), torch.float32, "a model in torch.float32"),
        ((9, 0), torch.bfloat16, "KV cache in torch.float16 of a model in torch.bfloat16"),
    ],
)
def test_gpus_that_are_refused(capability: Any, of_model: Any, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    found = Server().runner
    found.device, found.gpu_id, found.dtype = "cuda", 0, of_model
    with pytest.raises(UnsupportedError, match=says):
        attention_registry.ATTENTION_BACKENDS["omniattn"](found)


@pytest.mark.parametrize("head_dim", [20, 520])
def test_heads_that_are_refused(head_dim: int) -> None:
    server = Server()
    server.layers.append(RadixAttention(HEADS, head_dim, SCALE, KV_HEADS, layer_id=2))
    with pytest.raises(UnsupportedError, match=f"heads of {head_dim} in torch.float16"):
        attention_registry.ATTENTION_BACKENDS["omniattn"](server.runner)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4}, "trees"),
        ({"speculative_algorithm": "DFLASH"}, "DFLASH"),
        ({"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 1}, "NGRAM"),
    ],
)
def test_speculation_that_is_refused(fields: Any, says: str) -> None:
    with configuration(**fields), pytest.raises(UnsupportedError, match=says):
        Server()


def test_a_chain_may_be_verified() -> None:
    with configuration(speculative_algorithm="EAGLE", speculative_eagle_topk=1):
        Server()


@pytest.mark.parametrize("name", ["attn_dcp_size", "attn_cp_size"])
def test_context_parallelism_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    widths = SimpleNamespace(**{"attn_dcp_size": 1, "attn_cp_size": 1, name: 2})
    server = Server()
    monkeypatch.setattr(runtime_context, "get_parallel", lambda: widths)
    with pytest.raises(UnsupportedError, match=name):
        attention_registry.ATTENTION_BACKENDS["omniattn"](server.runner)


def test_steps_that_are_refused() -> None:
    server = Server()
    server.run({1: 20})
    server.backend.init_cuda_graph_state(4, 16)
    step = server.requests.step({1: 2})
    for mode, spec_info, says in (
        (ForwardMode.TARGET_VERIFY, guess(3), "trees"),
        (ForwardMode.TARGET_VERIFY, SimpleNamespace(tree_topk=-1), "trees"),
        (ForwardMode.TARGET_VERIFY, SimpleNamespace(topk=1, ragged_verify_layout=object()), "differ between requests"),
        (ForwardMode.DECODE, guess(), "draft model"),
        (ForwardMode.DRAFT_EXTEND_V2, guess(), "draft model"),
        (ForwardMode.DLLM_EXTEND, None, "dLLM"),
    ):
        with pytest.raises(UnsupportedError, match=says):
            server.backend.init_forward_metadata(server.batch(step, mode, spec_info=spec_info))
    with pytest.raises(UnsupportedError, match="CUDA graph of EXTEND"):
        server.backend.init_forward_metadata_out_graph(server.batch(step), in_capture=True)
    for field in ("encoder_lens", "multi_item_delimiter_indices"):
        batch = server.batch(step)
        setattr(batch, field, [torch.ones(1)])
        with pytest.raises(UnsupportedError):
            server.backend.init_forward_metadata(batch)


@pytest.mark.parametrize("name", ["q_rope", "rel_bias", "score_mod", "something_new"])
def test_keywords_that_are_refused(name: str) -> None:
    with pytest.raises(UnsupportedError, match=name):
        Server().run({1: 3}, **{name: torch.zeros(3, 1)})


# Other versions.


@pytest.mark.parametrize(
    ("owner", "name", "says"),
    [
        ("base_attn_backend.AttentionBackend", "init_forward_metadata_in_graph", "init_forward_metadata_in_graph"),
        ("memory_pool", "KVWriteLoc", "KVWriteLoc"),
    ],
)
def test_an_interface_that_has_moved(owner: str, name: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found: Any = sglang_backend
    for part in owner.split("."):
        found = getattr(found, part)
    monkeypatch.delattr(found, name)
    with pytest.raises(UnsupportedError, match=says) as raised:
        integration.register()
    assert "0.5.21, 0.5.22, 0.5.23" in str(raised.value)


def test_an_argument_that_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MHATokenToKVPool, "set_kv_buffer", lambda self, layer, loc_info, cache_k, cache_v: None)
    with pytest.raises(UnsupportedError, match=r"MHATokenToKVPool.set_kv_buffer\(k_scale=\)"):
        integration._create(None)


def test_a_registry_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_registry, "register_attention_backend")
    with pytest.raises(UnsupportedError, match="register_attention_backend"):
        integration.plugin()


def test_an_unknown_version_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(sglang_versions.metadata, "version", lambda name: "0.9.9")
    integration.register()
    assert "not with 0.9.9" in caplog.text
