"""Latent attention by vLLM's own classes on the CPU: chosen, built, called; against fp64 on the model's equations."""

from __future__ import annotations

import re
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests import vllm_host as host  # noqa: E402
from tests import vllm_mla_host as mla  # noqa: E402

from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402  isort: skip
from vllm.v1.attention.selector import get_attn_backend  # noqa: E402  isort: skip

from omniattn.errors import UnsupportedError  # noqa: E402
from omniattn.integrations import vllm as integration  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


# Chosen


def test_each_kind_of_layer_gets_its_class() -> None:
    """A draft model without latent attention may be beside one with it."""
    asked = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto"}
    with mla.config():
        dense = get_attn_backend(**asked, use_mla=True)
        plain = get_attn_backend(64, torch.bfloat16, "auto")
        sparse = get_attn_backend(**asked, use_mla=True, use_sparse=True)
        again = get_attn_backend(128, torch.bfloat16, "auto")
    names = [kind.full_cls_name()[1] for kind in (dense, plain, sparse, again)]
    assert names == ["OmniattnMLABackend", "OmniattnBackend", "OmniattnSparseMLABackend", "OmniattnBackend"]
    assert all(AttentionBackendEnum[kind.get_name()] is AttentionBackendEnum.CUSTOM for kind in (dense, plain, sparse))


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 320}, "head_size not supported"),
        ({"dtype": torch.float32}, "dtype not supported"),
        ({"kv_cache_dtype": "nvfp4_ds_mla"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "fp8_per_token_head"}, "with MLA: only auto, float16, bfloat16, fp8, fp8_e4m3, fp8_ds_mla"),
        ({"kv_cache_dtype": "fp8_ds_mla", "dtype": torch.float16}, "'fp8_ds_mla' with torch.float16: only torch.bf"),
        ({"kv_cache_dtype": "float16"}, "'float16' with torch.bfloat16: only 'auto', or that of the model"),
        ({"has_sink": True}, "sinks not supported"),
        ({"has_sliding_window": True}, "sliding window not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    ],
)
def test_vllm_says_what_is_not_served(asked: dict[str, Any], reason: str, sparse: bool) -> None:
    options = {"head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "use_mla": True, **asked}
    with mla.config(), pytest.raises(ValueError, match=re.escape(reason)):
        get_attn_backend(**options, use_sparse=sparse)
    with mla.config():  # what was refused leaves nothing behind
        assert get_attn_backend(96, torch.bfloat16, "auto").full_cls_name()[1] == "OmniattnBackend"


def test_prefill_context_parallelism_and_non_causal_drafts_are_refused() -> None:
    kind = AttentionBackendEnum.CUSTOM.get_class()
    given = {
        "head_size": 576, "dtype": torch.bfloat16, "kv_cache_dtype": "auto", "block_size": 64, "use_mla": True,
        "has_sink": False, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": False,
        "attn_type": "decoder", "has_sliding_window": False, "use_batch_invariant": True, "use_kv_connector": True,
        "use_adaptive_verification": True, "use_dcp": True, "device_capability": host.DeviceCapability(8, 0),
    }  # fmt: skip
    assert kind.validate_configuration(**given) == []
    assert kind.validate_configuration(**given, use_pcp=True) == ["PCP not supported"]
    assert kind.validate_configuration(**given, use_non_causal=True)[0] == "non-causal attention not supported"
    kind.full_cls_name()


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"alibi_slopes": [1.0]}, "ALiBi"),
        ({"sliding_window": 8}, "a sliding window"),
        ({"logits_soft_cap": 3.0}, "a softcap"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
        ({"kv_sharing_target_layer_name": "x"}, "another layer's KV cache"),
        ({"kv_lora_rank": 256}, "kv_lora_rank 256: only 512"),
        ({"something": 1}, "layers with something"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "'fp8_e5m2' with MLA"),
    ],
)
def test_layers_that_are_not_served(options: dict[str, Any], names: str, sparse: bool) -> None:
    given: dict[str, Any] = {
        "num_heads": 4, "head_size": 576, "scale": 0.1, "num_kv_heads": 1, "alibi_slopes": None, "sliding_window": None,
        "kv_cache_dtype": "auto", "logits_soft_cap": None, "attn_type": "decoder",
        "kv_sharing_target_layer_name": None, "q_lora_rank": None, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "qk_head_dim": 192, "v_head_dim": 128, "kv_b_proj": None, "indexer": None, **options,
    }  # fmt: skip
    with mla.config():
        impl = get_attn_backend(576, torch.bfloat16, "auto", use_mla=True, use_sparse=sparse).get_impl_cls()
        with pytest.raises(UnsupportedError, match=f"{names}.*--attention-backend"):
            impl(**given)


def test_a_version_whose_latent_attention_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.integrations.vllm.versions import check_latent_version

    check_latent_version(sparse=True)

    def build(self: Any, tree: Any) -> None: ...

    for module, name, other, says in (
        (mla.mla_attention.MLACommonMetadataBuilder, "_build_decode", build, r"_build_decode\(self, tree\) in place"),
        (mla.mla_attention, "QueryLenSupport", None, r"no .*mla_attention\.QueryLenSupport\.VARLEN"),
        (mla.sparse_utils, "triton_convert_req_index_to_global_index", build, r"no .*_index\(BLOCK_SIZE=\)"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            with pytest.raises(UnsupportedError, match=rf"its latent attention.*{says}.*vllm 0\.31\.0"):
                check_latent_version(sparse=True)


# Built and called


@pytest.mark.parametrize("layout", ["LBNHC", "BLNHC"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps(layout: str, dtype: Any) -> None:
    """Prompts, parts of prompts behind others, single tokens, mixtures, padding; caches full of NaN."""
    with mla.config(dtype=dtype) as made:
        run = mla.Engine(made, layout=layout)
        run.check(run.step(("a", 40), ("b", 5)))
        run.check(run.step(("a", 1), ("b", 1), padding=2, rows_of_padding=3))
        run.check(run.step(("a", 1), ("c", 33)))
        run.check(run.step(("b", 1), ("a", 20), ("c", 7), ("d", 3)))  # with and without older tokens


@pytest.mark.parametrize("name", ["fp8", "fp8_e4m3", "fp8_ds_mla"])
def test_formats(name: str) -> None:
    with mla.config(name) as made:
        run = mla.Engine(made)
        run.layer._k_scale = torch.tensor(0.03125, dtype=torch.float32)
        run.check(run.step(("a", 40), ("b", 5)))
        run.check(run.step(("a", 1), ("b", 1), padding=1))
        run.check(run.step(("a", 1), ("b", 12)))


def test_older_tokens_in_several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A workspace that is smaller than a request's older tokens: results of parts are merged by their LSE."""
    builder = mla.mla_attention.MLACommonMetadataBuilder
    monkeypatch.setattr(builder, "determine_chunked_prefill_workspace_size", staticmethod(lambda _: 48))
    with mla.config() as made:
        run = mla.Engine(made)
        run.check(run.step(("a", 100), ("b", 20)))
        run.check(run.step(("a", 9), ("c", 4), ("b", 30)))


def test_drafts_of_speculative_decoding() -> None:
    """Several tokens of each request, as many as it is: they are attended as single ones are."""
    with mla.config() as made:
        made.speculative_config = None
        run = mla.Engine(made)
        run.builder.reorder_batch_threshold = 4
        run.check(run.step(("a", 40), ("b", 5), ("c", 70)))
        results = run.step(("a", 4), ("b", 1), ("c", 3), padding=1)
        assert run.builder.build(0, run.metadata((("a", 4), ("b", 2)))).prefill is None
        run.check(results)


def test_more_drafts_than_a_call_takes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.integrations.vllm import latent

    with mla.config() as made:
        monkeypatch.setattr(latent.OmniattnMLAMetadataBuilder, "reorder_batch_threshold", 17)
        with pytest.raises(UnsupportedError, match=r"17 tokens a request of speculative decoding\. What"):
            mla.Engine(made)
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with mla.config() as made:
        monkeypatch.setattr(latent.OmniattnMLAMetadataBuilder, "reorder_batch_threshold", 5)
        with pytest.raises(UnsupportedError, match=r"5 tokens a request .* with VLLM_BATCH_INVARIANT"):
            mla.Engine(made)


def test_results_of_parts_of_the_tokens() -> None:
    """Decode context parallelism: each rank has some of a request's tokens, or none; LSE says how much they weigh."""
    from omniattn.integrations.vllm.latent import OmniattnMLADecodeMetadata

    with mla.config() as made:
        run = mla.Engine(made)
        run.layer.impl.need_to_return_lse_for_decode = True
        rows = run.random(40, 576)
        q = run.random(2, mla.HEADS, 576)
        parts = []
        for some in (rows[::2], rows[1::2]):
            cache = torch.full((5, 16, 576), float("nan"), dtype=torch.bfloat16)
            cache[[3, 1]] = torch.nn.functional.pad(some, (0, 0, 0, 12)).view(2, 16, 576)
            step = OmniattnMLADecodeMetadata(
                block_table=torch.tensor([[3, 1], [0, 0]], dtype=torch.int32), dcp_tot_seq_lens=None,
                seq_lens=torch.tensor([20, 0], dtype=torch.int32), max_query_len=1,
                query_start_loc=torch.tensor([0, 1, 2], dtype=torch.int32),
            )  # fmt: skip
            metadata = type("Step", (), {"decode": step})
            parts.append(run.layer.impl.forward_mqa((q[..., :512], q[..., 512:]), cache, metadata, run.layer))
        total = torch.logaddexp(*(lse.double() for _, lse in parts))
        o = sum(o[0].double() * (lse.double() - total)[0].exp()[:, None] for o, lse in parts)
        p = (torch.einsum("hd,kd->hk", q[0].double(), rows.double()) * run.layer.scale).softmax(-1)
        want = p @ rows[:, :512].double()
        assert (o - want).norm() < 1e-2 * want.norm()
        assert all(lse[1].isneginf().all() and not o[1].any() for o, lse in parts)
        assert all(lse.shape == (2, mla.HEADS) and lse.dtype == torch.float32 for _, lse in parts)


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    import omniattn

    seen: list[Any] = []
    for name in ("attention_with_kvcache", "attention_varlen"):
        function = getattr(omniattn, name)
        monkeypatch.setattr(
            omniattn, name, lambda *x, _f=function, **o: (seen.append(o["deterministic"]), _f(*x, **o))[1]
        )
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with mla.config() as made:
        run = mla.Engine(made)
        run.check(run.step(("a", 20)))
        run.check(run.step(("a", 1), ("b", 5)))
    assert seen == [True, True, True]


def test_graphs_read_vllms_own_arrays() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    with mla.config() as made:
        run = mla.Engine(made)
        assert run.builder.get_cudagraph_support(made, run.spec) == AttentionCGSupport.UNIFORM_BATCH
        assert run.builder.supports_draft_decode_metadata_update
        run.step(("a", 20), ("b", 1))
        common = run.metadata((("a", 1), ("b", 1)))
        built = run.builder.build_for_cudagraph_capture(common)
        run.builder.update_draft_decode_metadata(built)
        for mine, given in (
            (built.decode.seq_lens, common.seq_lens), (built.decode.query_start_loc, common.query_start_loc),
            (built.decode.block_table, common.block_table_tensor),
        ):  # fmt: skip
            assert mine.data_ptr() == given.data_ptr()


def test_prompts_are_ours_unless_the_user_chooses(monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.integrations.vllm.latent import OmniattnMLAPrefill

    class Another(OmniattnMLAPrefill):
        pass

    with monkeypatch.context() as patch:  # vLLM's own choice on a GPU, which is replaced
        patch.setattr(mla.mla_attention, "get_mla_prefill_backend", lambda _: Another)
        with mla.config(prefill=None) as made:
            run = mla.Engine(made)
            assert type(run.layer.prefill_backend) is OmniattnMLAPrefill
            assert type(run.builder._prefill_backend) is OmniattnMLAPrefill
            run.check(run.step(("a", 20)))
    chosen = mla.MLAPrefillBackendEnum.CUSTOM.get_class()
    assert chosen is OmniattnMLAPrefill
    monkeypatch.setattr(mla.MLAPrefillBackendEnum, "get_class", lambda _: Another)
    with mla.config() as made:
        run = mla.Engine(made)
        assert type(run.builder._prefill_backend) is Another


def test_profiling_gives_zeros() -> None:
    with mla.config() as made:
        run = mla.Engine(made)
        q, latent, rope = run.random(3, mla.HEADS, 192), run.random(3, 512), run.random(3, 1, 64)
        out = torch.full((3, mla.HEADS * 128), float("nan"), dtype=torch.bfloat16)
        assert not run.layer.forward_impl(q, latent, rope, run.layer.kv_cache, None, out).any()


# Lists of rows


@pytest.mark.parametrize("name", ["auto", "fp8", "fp8_ds_mla"])
def test_sparse_steps(name: str) -> None:
    """Prompts longer than a list and short ones, single tokens, padding."""
    with mla.config(name) as made:
        run = mla.Engine(made, sparse=True, layout="BLNHC")
        run.layer._k_scale = torch.tensor(0.03125, dtype=torch.float32)
        run.check(run.step(("a", 150), ("b", 5)))
        run.check(run.step(("a", 1), ("b", 1), padding=1))
        run.check(run.step(("a", 3), ("b", 1), ("c", 20)))


def test_short_prompts_are_dense() -> None:
    with mla.config() as made:
        run = mla.Engine(made, sparse=True)
        run.builder.reorder_batch_threshold = 1
        run.check(run.step(("a", 40), ("b", 5)))
        run.check(run.step(("a", 1), ("b", 12)))
        assert run.builder.build(0, run.metadata((("a", 7),))).prefill.use_dense_mha
