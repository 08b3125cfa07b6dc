"""The calls of SGLang's engine on a GPU, with its layouts and without SGLang: eager steps and captured graphs.

`SlotBackend` is what SGLang's backend is made of. Pools, batches, modes and layers have stand-ins here; those of SGLang
call the same in tests/unit.
"""

from __future__ import annotations

import math
from enum import Enum, auto
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.integrations.token_slots import SlotBackend  # noqa: E402
from tests.slot_requests import Batch, Requests, layer_of  # noqa: E402

pytestmark = pytest.mark.gpu

E4M3 = torch.float8_e4m3fn
SCALE, CONTEXT, SLOTS = 0.09, 4096, 16384


class Mode(Enum):
    """SGLang's ForwardMode, as far as a backend asks."""

    EXTEND = auto()
    DECODE = auto()
    MIXED = auto()
    TARGET_VERIFY = auto()

    def is_extend(self) -> bool:
        return self is not Mode.DECODE

    def is_decode(self) -> bool:
        return self is Mode.DECODE

    def is_decode_or_idle(self) -> bool:
        return self is Mode.DECODE

    def is_target_verify(self) -> bool:
        return self is Mode.TARGET_VERIFY

    def is_idle(self) -> bool:
        return False

    def is_draft_extend_v2(self) -> bool:
        return False

    def is_dllm_extend(self) -> bool:
        return False


class Pool:
    """SGLang's MHATokenToKVPool, or its SWAKVPool with layer 0 in the pool of windows and layer 1 in the other one."""

    def __init__(self, page: int, kv_heads: int, dim: int, dtype: Any, order: str, *, window_pool: bool) -> None:
        self.dtype, self.page, self.order = dtype, page, order
        slots = SLOTS + page
        shape = (slots, kv_heads, dim) if order == "nhd" else (slots // page, kv_heads, page, dim)
        # K and V of a layer are halves of one allocation, as SGLang has them; NaN where nothing has been written.
        if dtype.itemsize == 1:
            nans = torch.full((2, 2, *shape), 0x7F, dtype=torch.uint8, device="cuda").view(dtype)
        else:
            nans = torch.full((2, 2, *shape), math.nan, dtype=dtype, device="cuda")
        self.layers = list(nans)
        if window_pool:
            self.layers_mapping = {0: (0, True), 1: (0, False)}
            order_of = torch.cat((torch.zeros(1, dtype=torch.int64), torch.roll(torch.arange(1, slots // page), 5)))
            mapping = (order_of[:, None] * page + torch.arange(page)).reshape(-1)
            self.full_to_swa_index_mapping = torch.cat((mapping, torch.tensor([-1]))).cuda()

    def get_kv_buffer(self, layer_id: int) -> tuple[Any, Any]:
        return self.layers[layer_id][0], self.layers[layer_id][1]

    def write(self, layer: Any, slots: Any, k: Any, v: Any) -> None:
        """As set_kv_buffer does it."""
        buffers, scales = self.get_kv_buffer(layer.layer_id), (layer.k_scale, layer.v_scale)
        for buffer, x, scale in zip(buffers, (k, v), scales, strict=True):
            if self.dtype.itemsize == 1:
                codes = (x if scale is None else x / scale).to(self.dtype).view(torch.uint8)
                self._put(buffer.view(torch.uint8), slots, codes)
            else:
                self._put(buffer, slots, x)

    def _put(self, buffer: Any, slots: Any, x: Any) -> None:
        if self.order == "nhd":
            buffer[slots] = x
        else:
            buffer[slots // self.page, :, slots % self.page] = x


class Backend(SlotBackend):
    """SlotBackend with the pool's own writing, as SGLang's has it."""

    def _store(self, layer: Any, slots: Any, window_slots: Any, k: Any, v: Any) -> None:
        in_window_pool = self._layers is not None and self._layers[layer.layer_id][1]
        self.token_to_kv_pool.write(layer, window_slots if in_window_pool else slots, k, v)


class Server:
    """Pools, requests, a layer or two, and the backend."""

    def __init__(
        self,
        page: int = 16,
        *,
        order: str = "nhd",
        dtype: Any = torch.bfloat16,
        cache_dtype: Any = None,
        heads: tuple[int, int] = (8, 2),
        dim: int = 128,
        scales: tuple[float, float] | None = None,
        window_pool: bool = False,
        deterministic: bool = False,
        **of_layer: Any,
    ) -> None:
        req_to_token = torch.zeros((16, CONTEXT), dtype=torch.int32, device="cuda")
        self.requests = Requests(
            req_to_token, SLOTS // page, page, heads=heads[0], kv_heads=heads[1], dim=dim, dtype=dtype,
            cache_dtype=cache_dtype or dtype, scales=scales or (1.0, 1.0),
        )  # fmt: skip
        self.pool = Pool(page, heads[1], dim, cache_dtype or dtype, order, window_pool=window_pool)
        self.backend = Backend(self.pool, req_to_token, page, deterministic=deterministic)
        tensors = (None, None) if scales is None else tuple(torch.tensor(s, device="cuda") for s in scales)
        self.layers = [
            layer_of(self.requests, layer_id=i, scaling=SCALE, k_scale=tensors[0], v_scale=tensors[1], **of_layer)
            for i in range(2)
        ]

    def batch(self, step: Batch, mode: Mode) -> Any:
        fields = step.fields(mode, counts_new=not mode.is_target_verify())
        return SimpleNamespace(**fields, spec_info=None, encoder_lens=None)

    def call(self, step: Any, batch: Any, layer: int = 0, **more: Any) -> Any:
        forward = self.backend.forward_decode if batch.forward_mode.is_decode() else self.backend.forward_extend
        q = step.q.reshape(step.q.shape[0], -1)
        return forward(q, step.k, step.v, self.layers[layer], batch, **more)

    def run(self, new: dict[int, int], mode: Mode = Mode.EXTEND, **more: Any) -> tuple[Any, Batch]:
        step = self.requests.step(new)
        batch = self.batch(step, mode)
        self.backend.init_forward_metadata(batch)
        return self.call(step, batch, **more), step

    def check(self, got: Any, step: Batch, *, in_8_bits: bool = False, **options: Any) -> None:
        """Within the rounding of the output, and of P in 16 bits."""
        want, _ = self.requests.expected(step, scale=SCALE, **options)
        assert got.shape == (sum(step.new), self.requests.heads * self.requests.dim)
        bits = 10 if self.requests.dtype == torch.float16 else 7
        got = got.double().cpu().view_as(want)
        torch.testing.assert_close(got, want, rtol=2.0**-bits, atol=(8 if in_8_bits else 4) * 2.0**-bits)


STEPS: tuple[tuple[Mode, dict[int, int]], ...] = (
    (Mode.EXTEND, {3: 700, 1: 1, 5: 333}),
    (Mode.EXTEND, {1: 400, 3: 77}),
    (Mode.DECODE, {5: 1, 3: 1, 1: 1}),
    (Mode.MIXED, {2: 650, 5: 1, 1: 160, 3: 1}),
    (Mode.DECODE, {2: 1}),
)


def check_steps(server: Server, *, kwargs: Any = None, **options: Any) -> None:
    for mode, new in STEPS:
        got, step = server.run(new, mode, **(kwargs or {}))
        server.check(got, step, **options)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("order", ["nhd", "hnd"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_steps(page: int, order: str, dtype: Any) -> None:
    check_steps(Server(page, order=order, dtype=dtype))


@pytest.mark.parametrize("heads", [(4, 4), (32, 8), (16, 1)])
@pytest.mark.parametrize("dim", [64, 256])
def test_heads(heads: tuple[int, int], dim: int) -> None:
    check_steps(Server(heads=heads, dim=dim))


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("scales", [None, (0.5, 0.125)])
def test_e4m3(page: int, scales: Any) -> None:
    check_steps(Server(page, cache_dtype=E4M3, scales=scales), in_8_bits=True)


@pytest.mark.parametrize("page", [1, 16])
def test_options(page: int) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0] * 2, device="cuda")
    server = Server(page, sliding_window_size=127, logit_cap=2.0)
    check_steps(server, kwargs={"sinks": sinks}, sinks=sinks, left=127, softcap=2.0)


@pytest.mark.parametrize("page", [1, 64])
def test_windows_with_a_pool_of_their_own(page: int) -> None:
    server = Server(page, window_pool=True, sliding_window_size=200)
    for mode, new in STEPS:
        step = server.requests.step(new)
        batch = server.batch(step, mode)
        server.backend.init_forward_metadata(batch)
        for layer in (0, 1):
            server.check(server.call(step, batch, layer), step, left=200)


def test_bidirectional_prompts() -> None:
    server = Server(attn_type="encoder_only", sliding_window_size=60)
    got, step = server.run({1: 300, 2: 170})
    server.check(got, step, left=60, right=60)


@pytest.mark.parametrize("mode", [Mode.EXTEND, Mode.DECODE])
def test_lse(mode: Mode) -> None:
    server = Server()
    server.run({1: 200, 2: 50})
    (o, lse), step = server.run({1: 1, 2: 1}, mode, return_lse=True)
    server.check(o, step)
    _, want = server.requests.expected(step, scale=SCALE)
    torch.testing.assert_close(lse.double().cpu(), want, rtol=0, atol=2e-3)


def test_no_step_waits() -> None:
    """Nothing that a step does, its tables included, reads what lies on the device."""
    server = Server(cache_dtype=E4M3, window_pool=True, sliding_window_size=300)
    steps = [(server.requests.step(new), mode) for mode, new in STEPS]
    batches = [(step, server.batch(step, mode)) for step, mode in steps]

    def run_all() -> None:
        for step, batch in batches:
            server.backend.init_forward_metadata(batch)
            for layer in (0, 1):
                server.call(step, batch, layer)

    run_all()  # plans may load kernels
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_all()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_deterministic_inference() -> None:
    """The bits of a request among others and alone."""
    results = []
    for others in ({}, {2: 300, 6: 1, 7: 45}):
        server = Server(deterministic=True)
        server.run({1: 500})
        step = server.requests.step({1: 30})
        step = step.beside(server.requests.step(others))
        batch = server.batch(step, Mode.EXTEND)
        server.backend.init_forward_metadata(batch)
        results.append(server.call(step, batch)[:30])
    assert torch.equal(*results)


class Graph:
    """A captured step, as SGLang's graph runner has it: arrays that stay, padded requests, two layers."""

    def __init__(self, server: Server, bs: int, tokens: int, **more: Any) -> None:
        self.server, self.bs, self.rows, self.more = server, bs, bs * tokens, more
        self.mode = Mode.TARGET_VERIFY if tokens > 1 else Mode.DECODE
        self.fill = server.backend.get_cuda_graph_seq_len_fill_value()

        def zeros(*shape: int, dtype: Any = torch.int64) -> Any:
            return torch.zeros(shape, dtype=dtype, device="cuda")

        requests, dtype = server.requests, server.requests.dtype
        self.inputs = SimpleNamespace(
            q=zeros(self.rows, requests.heads, requests.dim, dtype=dtype),
            k=zeros(self.rows, requests.kv_heads, requests.dim, dtype=dtype),
            v=zeros(self.rows, requests.kv_heads, requests.dim, dtype=dtype),
        )
        self.batch = SimpleNamespace(
            forward_mode=self.mode, batch_size=bs, input_ids=zeros(self.rows), req_pool_indices=zeros(bs),
            seq_lens=zeros(bs) + self.fill, out_cache_loc=zeros(self.rows), spec_info=None, encoder_lens=None,
        )  # fmt: skip
        backend = server.backend
        backend.init_forward_metadata_out_graph(self.batch, in_capture=True)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._body()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.o = self._body()

    def _body(self) -> list[Any]:
        self.server.backend.init_forward_metadata_in_graph(self.batch)
        return [self.server.call(self.inputs, self.batch, layer, **self.more) for layer in (0, 1)]

    def replay(self, new: dict[int, int]) -> tuple[list[Any], Batch]:
        step = self.server.requests.step(new)
        fields = step.fields(self.mode, counts_new=self.mode is Mode.DECODE)
        for name, padding in (("req_pool_indices", 0), ("seq_lens", self.fill), ("out_cache_loc", 0)):
            getattr(self.batch, name).fill_(padding)[: fields[name].shape[0]] = fields[name]
        for name in "qkv":
            x = getattr(step, name)
            getattr(self.inputs, name).zero_()[: x.shape[0]] = x
        self.server.backend.init_forward_metadata_out_graph(self.batch)
        self.graph.replay()
        return [o[: sum(step.new)].clone() for o in self.o], step


def extend(server: Server, new: dict[int, int]) -> None:
    """Prompts, in both layers."""
    step = server.requests.step(new)
    batch = server.batch(step, Mode.EXTEND)
    server.backend.init_forward_metadata(batch)
    for layer in (0, 1):
        server.call(step, batch, layer)


def replay(server: Server, graph: Graph, new: dict[int, int], left: int = 500, **options: Any) -> None:
    """A step of the graph, compared."""
    results, step = graph.replay(new)
    for o in results:
        server.check(o, step, left=left, **options)


@pytest.mark.parametrize("page", [1, 16, 64])
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("window_pool", [False, True])
def test_graphs(page: int, tokens: int, window_pool: bool) -> None:
    """One capture, replayed with other requests and other lengths, short and long."""
    server = Server(page, window_pool=window_pool, sliding_window_size=500)
    server.backend.init_cuda_graph_state(8, 8 * tokens)
    graph = Graph(server, 4, tokens)
    extend(server, {1: 3, 2: 700})
    for new in ((2, 1), (1,), (2, 1)):
        replay(server, graph, dict.fromkeys(new, tokens))
    extend(server, {3: 2500, 4: 1})
    replay(server, graph, dict.fromkeys((4, 3, 1, 2), tokens))
    replay(server, graph, dict.fromkeys((3,), tokens))


def test_graphs_in_e4m3() -> None:
    server = Server(16, cache_dtype=E4M3, scales=(0.5, 0.25), logit_cap=3.0)
    server.backend.init_cuda_graph_state(8, 8)
    sinks = torch.linspace(-1, 1, 8, device="cuda")
    graph = Graph(server, 8, 1, sinks=sinks)
    extend(server, {1: 5, 2: 900, 3: 64})
    for new in ((1, 2, 3), (3,), (2, 1)):
        replay(server, graph, dict.fromkeys(new, 1), in_8_bits=True, softcap=3.0, sinks=sinks, left=-1)
