"""Latent attention by the calls of SGLang's engine on a GPU, without SGLang: eager steps and captured graphs.

`LatentSlotBackend` is what SGLang's backend is made of. The pool, batches and layers have stand-ins here; those of
SGLang call the same in tests/unit.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.integrations.latent_slots import LatentSlotBackend  # noqa: E402
from tests.gpu.test_sglang_calls_gpu import Mode  # noqa: E402
from tests.latent_requests import LatentRequests  # noqa: E402
from tests.latent_steps import NOPE, RANK, ROPE, V  # noqa: E402
from tests.slot_requests import layer_of  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
SCALE, CONTEXT, SLOTS = (NOPE + ROPE) ** -0.5, 2048, 8192


class Pool:
    """SGLang's MLATokenToKVPool, NaN where nothing has been written."""

    def __init__(self, page: int, dtype: Any) -> None:
        self.dtype = dtype
        self.rows = torch.full((SLOTS + page, 1, RANK + ROPE), math.nan, device="cuda").to(dtype)

    def get_key_buffer(self, layer_id: int) -> Any:
        return self.rows

    def write(self, slots: Any, rows: Any) -> None:
        if self.dtype.itemsize == 1:
            self.rows.view(torch.uint8)[slots] = rows.to(self.dtype).view(torch.uint8)
        else:
            self.rows[slots] = rows


class Backend(LatentSlotBackend):
    """LatentSlotBackend with the pool's own writing, as SGLang's has it."""

    def _store_rows(self, layer: Any, slots: Any, rows: Any) -> None:
        self.token_to_kv_pool.write(slots, rows)


class Server:
    """A pool, requests, DeepSeek's two layers on it, and the backend."""

    def __init__(
        self, page: int = 64, *, heads: int = 16, dtype: Any = torch.bfloat16, cache_dtype: Any = None,
        deterministic: bool = False,
    ) -> None:  # fmt: skip
        req_to_token = torch.zeros((16, CONTEXT), dtype=torch.int32, device="cuda")
        cache_dtype = cache_dtype or dtype
        self.requests = LatentRequests(
            req_to_token, SLOTS // page, page, heads=heads, dtype=dtype, cache_dtype=cache_dtype
        )
        self.pool = Pool(page, cache_dtype)
        self.backend = Backend(self.pool, req_to_token, page, deterministic=deterministic)
        common = {"scaling": SCALE, "tp_q_head_num": heads}
        self.absorbed = layer_of(
            self.requests, tp_k_head_num=1, head_dim=RANK + ROPE, v_head_dim=RANK, **common
        )  # fmt: skip
        self.own = layer_of(self.requests, tp_k_head_num=heads, head_dim=NOPE + ROPE, v_head_dim=V, **common)

    def batch(self, step: Any, mode: Mode) -> Any:
        fields = step.fields(mode, counts_new=not mode.is_target_verify())
        return SimpleNamespace(**fields, spec_info=None, encoder_lens=None)

    def over_rows(self, q: Any, rows: Any, batch: Any) -> Any:
        forward = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        return forward(q, rows, rows[..., :RANK], self.absorbed, batch)

    def run(self, new: dict[int, int], mode: Mode = Mode.EXTEND) -> tuple[Any, Any]:
        """A step over the pool's rows, which the layer writes."""
        step = self.requests.step(new)
        batch = self.batch(step, mode)
        self.backend.init_forward_metadata(batch)
        q = self.requests.weights.absorbed(step.q)
        return self.up(self.over_rows(q, step.rows_new, batch)), step

    def run_own(self, new: dict[int, int]) -> tuple[Any, Any]:
        """A step of prompts over keys and values in heads of their own, which the model makes and writes."""
        step = self.requests.step(new)
        batch = self.batch(step, Mode.EXTEND)
        self.backend.init_forward_metadata(batch)
        self.pool.write(step.slots, step.rows_new)
        batch.mha_return_lse, batch.attn_attend_prefix_cache = True, False
        states = [self.backend.forward_extend(step.q, *self._own(step.rows_new[:, 0].cpu()), self.own, batch, False)]
        batch.attn_attend_prefix_cache = True
        batch.prefix_chunk_cu_seq_lens, batch.prefix_chunk_max_seq_lens = [], []
        for part in range(2 if any(step.before) else 0):
            bounds = [(n * part // 2, n * (part + 1) // 2) for n in step.before]
            lengths = torch.tensor([0] + [end - begin for begin, end in bounds])
            batch.prefix_chunk_cu_seq_lens.append(lengths.cumsum(0).int().cuda())
            batch.prefix_chunk_max_seq_lens.append(int(lengths.max()))
            batch.prefix_chunk_idx = part
            rows = [self.requests.kept(row)[a:b] for row, (a, b) in zip(step.rows, bounds, strict=True)]
            states.append(self.backend.forward_extend(step.q, *self._own(torch.cat(rows)), self.own, batch, False))
        lse = torch.stack([x.double() for _, x in states])
        weights = (lse - lse.logsumexp(0)).exp()
        return sum(w[..., None] * o.double() for w, (o, _) in zip(weights, states, strict=True)).cpu(), step

    def _own(self, rows: Any) -> tuple[Any, Any]:
        k, v = (x.to(self.requests.dtype).cuda() for x in self.requests.weights.heads_of(rows))
        return k, torch.cat([k[..., :NOPE], v], -1)[..., NOPE:]

    def up(self, o: Any) -> Any:
        """o of latent channels in those of heads, fp64, on the host."""
        of_v = self.requests.weights.of_v.double()
        return torch.einsum("thr,hrd->thd", o.cpu().double().unflatten(-1, (-1, RANK)), of_v)

    def check(self, got: Any, step: Any, *, own: bool = False, bound: float = 1.2e-2) -> None:
        want = self.requests.expected(step, scale=SCALE, new_are_exact=own)
        got = got[: len(want)]
        assert not got.isnan().any()
        assert (got - want).norm() < bound * want.norm(), float((got - want).norm() / want.norm())


STEPS: tuple[tuple[Mode, dict[int, int]], ...] = (
    (Mode.EXTEND, {3: 300, 1: 1, 5: 133}),
    (Mode.EXTEND, {1: 200, 3: 17}),
    (Mode.DECODE, {5: 1, 3: 1, 1: 1}),
    (Mode.MIXED, {2: 150, 5: 1, 1: 16, 3: 1}),
    (Mode.DECODE, {2: 1}),
)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("heads", [16, 128])
@pytest.mark.parametrize("cache_dtype", [None, E4M3])
def test_steps(page: int, heads: int, cache_dtype: Any) -> None:
    """Prompts too, in runs of as many tokens as a call takes."""
    server = Server(page, heads=heads, cache_dtype=cache_dtype)
    for mode, new in STEPS:
        server.check(*server.run(new, mode))


@pytest.mark.parametrize("cache_dtype", [None, E4M3])
def test_prompts_in_heads_of_their_own(cache_dtype: Any) -> None:
    server = Server(cache_dtype=cache_dtype)
    for new in ({3: 300, 1: 1, 5: 133}, {1: 200, 3: 17, 2: 40}):
        server.check(*server.run_own(new), own=True)
    server.check(*server.run({1: 1, 2: 1}, Mode.DECODE))


def test_float16() -> None:
    server = Server(dtype=torch.float16)
    server.check(*server.run_own({1: 130, 2: 20}), own=True, bound=3e-3)
    server.check(*server.run({1: 1, 2: 1}, Mode.DECODE), bound=3e-3)


def test_deterministic_inference() -> None:
    """The bits of a request among others and alone."""
    results = []
    for others in ({}, {2: 100, 6: 1}):
        server = Server(deterministic=True)
        server.run({1: 300})
        step = server.requests.step({1: 30})
        rows_new, q = step.rows_new, step.q
        if others:
            more = server.requests.step(others)
            step = step.beside(more)
            rows_new, q = torch.cat([rows_new, more.rows_new]), torch.cat([q, more.q])
        batch = server.batch(step, Mode.EXTEND)
        server.backend.init_forward_metadata(batch)
        results.append(server.over_rows(server.requests.weights.absorbed(q), rows_new, batch)[:30])
    assert torch.equal(*results)


@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize(("page", "cache_dtype"), [(1, None), (64, None), (64, E4M3)])
def test_graphs(page: int, cache_dtype: Any, tokens: int) -> None:
    """Captured as SGLang's graph runner does, with padded requests; replayed with other requests and lengths."""
    server = Server(page, cache_dtype=cache_dtype)
    server.pool.rows.view(torch.uint8)[:page] = 0  # the page of padding
    server.run({1: 150, 2: 70, 3: 1})
    bs, mode = 4, Mode.TARGET_VERIFY if tokens > 1 else Mode.DECODE
    server.backend.init_cuda_graph_state(bs, bs * tokens)

    def zeros(*shape: int, dtype: Any = torch.int64) -> Any:
        return torch.zeros(shape, dtype=dtype, device="cuda")

    q, rows = (zeros(bs * tokens, n, RANK + ROPE, dtype=torch.bfloat16) for n in (16, 1))
    batch = SimpleNamespace(
        forward_mode=mode, batch_size=bs, input_ids=zeros(bs * tokens), req_pool_indices=zeros(bs),
        seq_lens=zeros(bs) + 1, out_cache_loc=zeros(bs * tokens), spec_info=None, encoder_lens=None,
    )  # fmt: skip
    server.backend.init_forward_metadata_out_graph(batch, in_capture=True)

    def body() -> Any:
        server.backend.init_forward_metadata_in_graph(batch)
        return server.over_rows(q, rows, batch)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = body()
    for new in ({1: tokens, 2: tokens, 3: tokens}, {2: tokens}, {3: tokens, 1: tokens}):
        step = server.requests.step(new)
        fields = step.fields(mode, counts_new=mode is Mode.DECODE)
        for name, padding in (("req_pool_indices", 0), ("seq_lens", 1), ("out_cache_loc", 0)):
            getattr(batch, name).fill_(padding)[: fields[name].shape[0]] = fields[name]
        q.zero_()[: len(step.q)] = server.requests.weights.absorbed(step.q)
        rows.zero_()[: len(step.q)] = step.rows_new
        server.backend.init_forward_metadata_out_graph(batch)
        graph.replay()
        server.check(server.up(o), step)


def test_no_step_waits() -> None:
    """Nothing that a step does, its tables and runs included, reads what lies on the device."""
    server = Server(cache_dtype=E4M3)
    steps = [(server.requests.step(new), mode) for mode, new in STEPS]
    made = [(server.requests.weights.absorbed(s.q), s, server.batch(s, mode)) for s, mode in steps]

    def run_all() -> None:
        for q, step, batch in made:
            server.backend.init_forward_metadata(batch)
            server.over_rows(q, step.rows_new, batch)

    run_all()  # plans may load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")
