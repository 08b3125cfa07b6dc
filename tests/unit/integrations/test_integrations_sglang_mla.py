"""Latent attention: SGLang's own classes call the backend on the CPU, against float64 on the model's equations."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from omniattn.errors import UnsupportedError

torch = pytest.importorskip("torch")
pytest.importorskip("sglang")
pytest.importorskip("transformers")

from sglang.srt.configs.model_config import AttentionArch  # noqa: E402
from sglang.srt.layers.radix_attention import RadixAttention  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode  # noqa: E402
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context  # noqa: E402
from sglang.srt.model_executor.model_runner_components import attention_backend_setup  # noqa: E402
from sglang.srt.models.deepseek_common import attention_backend_handler as handlers  # noqa: E402

from omniattn.integrations import sglang_backend  # noqa: E402
from tests.latent_requests import LatentRequests  # noqa: E402
from tests.latent_steps import NOPE, RANK, ROPE, V  # noqa: E402
from tests.unit.integrations.sglang_server import CONTEXT, PAGES, configuration, guess, runner  # noqa: E402

pytestmark = pytest.mark.frameworks

HEADS, SCALE = 4, (NOPE + ROPE) ** -0.5
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


@pytest.fixture(autouse=True)
def _configuration() -> Iterator[None]:
    with configuration():
        yield


class Server:
    """A model of one layer of latent attention, its pool, and requests."""

    def __init__(
        self, page_size: int = 16, *, cache_dtype: Any = BF16, layer: dict[str, Any] | None = None, pool: Any = None,
        **of_runner: Any,
    ) -> None:  # fmt: skip
        size = PAGES * max(page_size, 16)
        self.slots = ReqToTokenPool(8, CONTEXT, "cpu", False)
        self.pool = pool or MLATokenToKVPool(
            size, page_size, cache_dtype, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=1, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip
        if pool is None:
            for buffer in self.pool.kv_buffer:  # what nobody has written may be anything
                buffer.fill_(0x7F if buffer.dtype == torch.uint8 else float("nan"))
        options = {"layer_id": 0, **(layer or {})}
        # As DeepSeek's models make them, on one pool.
        self.absorbed = RadixAttention(HEADS, RANK + ROPE, SCALE, num_kv_heads=1, v_head_dim=RANK, **options)
        self.own = RadixAttention(HEADS, NOPE + ROPE, SCALE, num_kv_heads=HEADS, v_head_dim=V, **options)
        self.runner = runner(
            self.pool, self.slots, page_size, torch.nn.ModuleList([self.absorbed, self.own]), use_mla_backend=True,
            **of_runner,
        )  # fmt: skip
        self.runner.model_config.attention_arch = AttentionArch.MLA
        self.backend = attention_backend_setup.build_attention_backends(model_runner=self.runner).attn_backend
        self.requests = LatentRequests(
            self.slots.req_to_token, size // page_size, page_size, heads=HEADS, dtype=BF16, cache_dtype=cache_dtype
        )
        self.attn = SimpleNamespace(
            disable_chunked_prefix_cache=False, chunked_prefix_cache_threshold=30, current_attention_backend="omniattn"
        )

    def run(self, new: dict[int, int], mode: Any = ForwardMode.EXTEND, *, way: Any = None, **more: Any) -> Any:
        """A step as DeepSeek's models make it, by the way that our handler says: (o, step, way)."""
        step = self.requests.step(new)
        batch = ForwardBatch(**step.fields(mode, counts_new=not mode.is_target_verify()), **more)
        self.backend.init_forward_metadata(batch)
        way = way or handlers.AttentionBackendRegistry.get_handler("omniattn")(self.attn, batch)
        with forward_context(ForwardContext(attn_backend=self.backend)):
            o = self.own_heads(step, batch) if way == handlers.AttnForwardMethod.MHA_CHUNKED_KV else None
            if o is None:
                o = self.over_rows(step, batch)
        return o, step, way

    def over_rows(self, step: Any, batch: Any) -> Any:
        """As ``forward_absorb_core``: the layer writes the rows."""
        q, weights = self.requests.weights.absorbed(step.q), self.requests.weights
        o = self.absorbed(q, step.rows_new, step.rows_new[..., :RANK], batch, save_kv_cache=True)
        o = o.view(-1, HEADS, RANK)
        return torch.einsum("thr,hrd->thd", o.double(), weights.of_v.double())

    def own_heads(self, step: Any, batch: Any) -> Any:
        """As ``forward_normal_chunked_kv_core``: the model writes the rows, and older ones come in two parts."""
        self.pool.set_kv_buffer(self.own, step.slots, step.rows_new, None)
        k, v = (x.to(BF16) for x in self.requests.weights.heads_of(step.rows_new[:, 0]))
        older = any(step.before)
        batch.mha_return_lse = older
        batch.set_attn_attend_prefix_cache(False)
        found = self.own(step.q, k, v, batch, save_kv_cache=False)
        if not older:
            return found.view(-1, HEADS, V).double()
        states = [found]
        cuts = [(0, min(20, n), n) for n in step.before]
        batch.prefix_chunk_cu_seq_lens, batch.prefix_chunk_max_seq_lens, keys = [], [], []
        for part in (0, 1):
            spans = [cut[part : part + 2] for cut in cuts]
            lengths = torch.tensor([0] + [end - begin for begin, end in spans])
            batch.prefix_chunk_cu_seq_lens.append(lengths.cumsum(0).int())
            batch.prefix_chunk_max_seq_lens.append(int(lengths.max()))
            rows = [self.requests.kept(row)[begin:end] for row, (begin, end) in zip(step.rows, spans, strict=True)]
            keys.append([x.to(BF16) for x in self.requests.weights.heads_of(torch.cat(rows))])
        batch.set_attn_attend_prefix_cache(True)
        for part in (0, 1):
            batch.set_prefix_chunk_idx(part)
            states.append(
                self.own(step.q, *keys[part], batch, save_kv_cache=False, key_value_num_tokens=len(keys[part][0]))
            )
        lse = torch.stack([x.double() for _, x in states])
        assert all(o.shape == (len(step.q), HEADS, V) and x.shape == (len(step.q), HEADS) for o, x in states)
        weights = (lse - lse.logsumexp(0)).exp()
        return sum(w[..., None] * o.double() for w, (o, _) in zip(weights, states, strict=True))

    def check(self, got: Any, step: Any, way: Any = None, bound: float = 1.2e-2) -> None:
        exact = way == handlers.AttnForwardMethod.MHA_CHUNKED_KV
        want = self.requests.expected(step, scale=SCALE, new_are_exact=exact)
        assert not got.isnan().any()
        assert (got[: len(want)] - want).norm() < bound * want.norm()


STEPS: tuple[tuple[Any, dict[int, int]], ...] = (
    (ForwardMode.EXTEND, {3: 70, 1: 1, 5: 33}),  # prompts
    (ForwardMode.EXTEND, {1: 40, 3: 7}),  # chunks behind others
    (ForwardMode.DECODE, {5: 1, 3: 1, 1: 1}),
    (ForwardMode.MIXED, {2: 65, 5: 1, 1: 16, 3: 1}),
    (ForwardMode.DECODE, {2: 1}),
)
OWN, ABSORBED = handlers.AttnForwardMethod.MHA_CHUNKED_KV, handlers.AttnForwardMethod.MLA


def test_sglang_builds_it() -> None:
    server = Server()
    assert type(server.backend) is sglang_backend.OmniattnMLABackend
    assert not server.backend.needs_cpu_seq_lens
    from sglang.srt.arg_groups import choices

    assert choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS.count("omniattn") == 1


@pytest.mark.parametrize("cache_dtype", [BF16, E4M3])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_steps(page_size: int, cache_dtype: Any) -> None:
    server = Server(page_size, cache_dtype=cache_dtype)
    ways = []
    for mode, new in STEPS:
        o, step, way = server.run(new, mode)
        server.check(o, step, way)
        ways.append(way)
    assert ways == [OWN, OWN, ABSORBED, OWN, ABSORBED]


@pytest.mark.parametrize("page_size", [1, 16])
def test_prompts_over_rows(page_size: int) -> None:
    """As with few older tokens, and as in captured graphs of prompts: more tokens than one call takes."""
    server = Server(page_size)
    for mode, new in STEPS:
        server.check(*server.run(new, mode, way=ABSORBED)[:2])


def test_which_way_a_step_goes() -> None:
    server = Server()
    assert server.run({1: 10})[2] == OWN
    assert server.run({1: 10})[2] == ABSORBED  # few older tokens
    assert server.run({1: 20, 2: 3})[2] == ABSORBED
    assert server.run({1: 5})[2] == OWN
    server.attn.disable_chunked_prefix_cache = True
    assert server.run({1: 5})[2] == ABSORBED
    assert server.run({3: 5})[2] == OWN


def test_deterministic_inference() -> None:
    with configuration(enable_deterministic_inference=True):
        server = Server()
        assert server.backend.deterministic
        for mode, new in STEPS:
            o, step, way = server.run(new, mode)
            assert way == ABSORBED
            server.check(o, step)


def test_parts_of_queries_and_keys() -> None:
    """Some of SGLang's models give the layer the rotary channels beside the others."""
    server = Server()
    step = server.requests.step({1: 12, 2: 5})
    batch = ForwardBatch(**step.fields(ForwardMode.EXTEND))
    server.backend.init_forward_metadata(batch)
    q = server.requests.weights.absorbed(step.q)
    with forward_context(ForwardContext(attn_backend=server.backend)):
        o = server.absorbed(
            q[..., :RANK], step.rows_new[..., :RANK], step.rows_new[..., :RANK], batch, q_rope=q[..., RANK:],
            k_rope=step.rows_new[..., RANK:],
        )  # fmt: skip
    got = torch.einsum("thr,hrd->thd", o.view(-1, HEADS, RANK).double(), server.requests.weights.of_v.double())
    server.check(got, step)


def test_verification_of_a_chain() -> None:
    server = Server()
    server.run({1: 30, 2: 9})
    o, step, way = server.run(
        {1: 4, 2: 4}, ForwardMode.TARGET_VERIFY, spec_info=guess(draft_token_num=4, num_tokens_per_req=4)
    )
    assert way == ABSORBED
    server.check(o, step)
    server.requests.drop(1, 2)  # two guesses were wrong
    o, step, _ = server.run({1: 1, 2: 1}, ForwardMode.DECODE)
    server.check(o, step)


def test_captured_steps() -> None:
    """Arrays of a graph are those of before, and padded requests have one token of slot 0's page."""
    server = Server()
    server.pool.kv_buffer[0][:16] = 0
    server.run({1: 30, 2: 9})
    server.backend.init_cuda_graph_state(4, 4)
    places = set()
    for new in ({1: 1, 2: 1}, {2: 1, 1: 1}):
        step = server.requests.step(new)
        fields = step.fields(ForwardMode.DECODE)
        fields["batch_size"] = 3
        for name, value in (("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0), ("input_ids", 0)):
            fields[name] = torch.cat((fields[name], torch.tensor([value])))
        batch = ForwardBatch(**fields)
        server.backend.init_forward_metadata_out_graph(batch)
        server.backend.init_forward_metadata_in_graph(batch)
        padded = (torch.cat((x, torch.zeros_like(x[:1]))) for x in (step.q, step.rows_new))
        q, rows = padded
        with forward_context(ForwardContext(attn_backend=server.backend)):
            o = server.over_rows(SimpleNamespace(q=q, rows_new=rows), batch)
        server.check(o, step)
        places.add(server.backend.forward_metadata.table.data_ptr())
    assert len(places) == 1


# Refused


def test_pools_that_are_not_served() -> None:
    other = MLATokenToKVPool(
        64, 16, BF16, kv_lora_rank=256, qk_rope_head_dim=32, layer_num=1, device="cpu", enable_memory_saver=False
    )
    with pytest.raises(UnsupportedError, match="latent rows of 256 and 32 channels"):
        Server(pool=other)
    with pytest.raises(UnsupportedError, match=r"KV cache in torch\.float8_e5m2"):
        Server(cache_dtype=torch.float8_e5m2)

    class DSATokenToKVPool(MLATokenToKVPool):  # type: ignore[misc]
        pass

    sparse = DSATokenToKVPool(
        64, 16, BF16, kv_lora_rank=RANK, qk_rope_head_dim=ROPE, layer_num=1, device="cpu", enable_memory_saver=False
    )
    with pytest.raises(UnsupportedError, match="SGLang's DSATokenToKVPool"):
        Server(pool=sparse)


@pytest.mark.parametrize(
    ("layer", "names"),
    [({"sliding_window_size": 20}, "a sliding window"), ({"is_cross_attention": True}, "a causal decoder's")],
)
def test_layers_that_are_not_served(layer: dict[str, Any], names: str) -> None:
    with pytest.raises(UnsupportedError, match=f"layer 0 of latent attention .*{names}"):
        Server(layer=layer)


def test_scales_of_rows_are_not_served() -> None:
    server = Server(cache_dtype=E4M3)
    server.absorbed.k_scale_float = 0.5
    with pytest.raises(UnsupportedError, match=r"a k_scale of 0\.5"):
        server.run({1: 3}, way=ABSORBED)


@pytest.mark.parametrize(
    ("more", "names"),
    [({"topk_indices": 1}, "'topk_indices'"), ({"sinks": torch.ones(1)}, "with sinks"), ({"tree": 1}, "'tree'")],
)
def test_calls_that_are_not_served(more: dict[str, Any], names: str) -> None:
    server = Server()
    step = server.requests.step({1: 3})
    batch = ForwardBatch(**step.fields(ForwardMode.EXTEND))
    server.backend.init_forward_metadata(batch)
    q = server.requests.weights.absorbed(step.q)
    given = (q, step.rows_new, step.rows_new[..., :RANK], server.absorbed, batch)
    with pytest.raises(UnsupportedError, match=names):
        server.backend.forward_extend(*given, **more)


def test_one_shot_and_keys_to_be_written_are_refused() -> None:
    server = Server()
    step = server.requests.step({1: 3})
    batch = ForwardBatch(**step.fields(ForwardMode.EXTEND))
    server.backend.init_forward_metadata(batch)
    k, v = (x.to(BF16) for x in server.requests.weights.heads_of(step.rows_new[:, 0]))
    with pytest.raises(UnsupportedError, match="save_kv_cache=False"):
        server.backend.forward_extend(step.q, k, v, server.own, batch)
    batch.mha_one_shot = True
    with pytest.raises(UnsupportedError, match="MHA_ONE_SHOT"):
        server.backend.forward_extend(step.q, k, v, server.own, batch, save_kv_cache=False)
