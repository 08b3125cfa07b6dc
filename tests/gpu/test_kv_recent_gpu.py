"""The newest tokens of a quantized cache in 16 bits, on the GPU: bytes of append, values of decode, copies, graphs."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

# JAX would otherwise take most of the GPU's memory for itself.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

torch = pytest.importorskip("torch")

from omniattn.errors import DtypeError  # noqa: E402
from omniattn.kv.cache import RECENT_SPARE, PagedKVCache  # noqa: E402
from omniattn.ops import append, copy_recent, decode  # noqa: E402
from omniattn.reference.decode import CacheArrays, append_tokens  # noqa: E402
from tests.gpu.decode_cases import PLANES, Case, Filled, compare  # noqa: E402

pytestmark = pytest.mark.gpu
#: (k_dtype, v_dtype, layout): common ones, V alone quantized, FBGEMM's rows.
FORMATS = (
    ("int4", "int4", ""),
    ("fp8", "fp8", ""),
    ("int8", "int8", ""),
    ("io", "int4", ""),
    ("int4", "int4", "fbgemm"),
)


def case(formats: tuple[str, str, str] = FORMATS[0], window: int = 40, **more: Any) -> Case:
    dtype = more.get("dtype", "bfloat16")
    options: dict[str, Any] = {"recent_window": window, "recent_dtype": {"bfloat16": "bf16", "float16": "fp16"}[dtype]}
    if more.get("block_size"):
        options["recent_slots"] = len(more.get("lengths", (300, 17, 1000))) + 2
    if formats[2]:
        options["layout"] = formats[2]
    return Case(k_dtype=formats[0], v_dtype=formats[1], cache_options=options, **more)


def emptied(host: CacheArrays) -> None:
    """As `Filled` makes a cache."""
    assert host.recent is not None
    for plane in (host.k, host.v, host.recent.k, host.recent.v):
        plane[...] = 0xFF
    for plane in (host.k_params, host.v_params):
        plane[...] = 0xFFFFFFFF
    host.recent.state[...] = 0


def place(filled: Filled, b: int) -> tuple[np.ndarray[Any, Any], int]:
    """Block table and slot of a sequence."""
    table = np.array([b]) if filled.table is None else filled.table[b].cpu().numpy()
    return table, b if filled.slots is None else int(filled.slots[b])


def same(a: CacheArrays, b: CacheArrays) -> None:
    assert a.recent is not None
    assert b.recent is not None
    np.testing.assert_array_equal(a.recent.state, b.recent.state)
    for name in ("k", "v"):
        np.testing.assert_array_equal(getattr(a.recent, name), getattr(b.recent, name), err_msg=f"recent {name}")
        np.testing.assert_array_equal(getattr(a, name), getattr(b, name), err_msg=name)
        np.testing.assert_array_equal(getattr(a, name + "_params"), getattr(b, name + "_params"), err_msg=name)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("block_size", [0, 16])
def test_append_writes_what_numpy_writes(formats: tuple[str, str, str], block_size: int) -> None:
    """A prompt, then guesses of which some are dropped, then prompts again; ragged, some without new tokens."""
    for dim, heads in ((128, 1), (64, 2)):
        filled = Filled(case(formats, 20, lengths=(150, 150, 150), block_size=block_size, head_dim=dim, heads_kv=heads))
        host = filled.on_host()
        emptied(host)
        rng = np.random.default_rng(0)
        lengths = [0, 0, 0]
        for counts, drops in (((70, 3, 0), (0, 0, 0)), ((1, 16, 40), (0, 9, 30)), ((1, 1, 90), (0, 0, 0))):
            starts = np.cumsum([0, *counts])
            k, v = (rng.standard_normal((starts[-1], heads, dim)).astype(np.float32) for _ in range(2))
            on_gpu = [torch.from_numpy(x).to("cuda", filled.io) for x in (k, v)]
            lengths = [n + m for n, m in zip(lengths, counts, strict=True)]
            append(
                filled.cache, *on_gpu, seq_lens=torch.tensor(lengths, dtype=torch.int32, device="cuda"),
                cu_seqlens=torch.tensor(starts, dtype=torch.int32, device="cuda"), block_table=filled.table,
                recent_slots=filled.slots,
            )  # fmt: skip
            k, v = (x.float().cpu().numpy() for x in on_gpu)
            for b in range(3):
                table, slot = place(filled, b)
                rows = slice(starts[b], starts[b + 1])
                append_tokens(host, k[rows], v[rows], table, lengths[b] - counts[b], slot)
            lengths = [n - m for n, m in zip(lengths, drops, strict=True)]
        same(filled.on_host(), host)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("block_size", [0, 16])
def test_padding_rows_leave_the_window_alone(formats: tuple[str, str, str], block_size: int) -> None:
    """Rows with seq_lens 0 (a paused sequence, padding) write nothing and leave every state as it is."""
    filled = Filled(case(formats, 20, lengths=(150, 33, 90), block_size=block_size, heads_kv=2))
    filled.append()
    host = filled.on_host()
    k, v = (torch.randn(3, 1, 2, 128, device="cuda", dtype=filled.io) for _ in range(2))
    slots = filled.slots
    if slots is not None:  # padding rows of a captured graph all name one slot, here that of a sequence
        slots = slots[1:2].repeat(3)
    append(
        filled.cache, k, v, seq_lens=torch.zeros(3, dtype=torch.int32, device="cuda"), block_table=filled.table,
        recent_slots=slots,
    )  # fmt: skip
    same(filled.on_host(), host)
    # One row goes on; what pads beside it must not race it for the slot's state.
    lengths = torch.tensor([0, 34, 0], dtype=torch.int32, device="cuda")
    for _ in range(20):
        append(filled.cache, k, v, seq_lens=lengths, block_table=filled.table, recent_slots=slots)
    table, slot = place(filled, 1)
    append_tokens(host, k[1].float().cpu().numpy(), v[1].float().cpu().numpy(), table, 33, slot)
    same(filled.on_host(), host)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_decode_reads_both_sides(formats: tuple[str, str, str], dtype: str) -> None:
    for block_size, heads, window, kind in ((0, 1, 40, "normal"), (16, 2, 1, "biased"), (16, 4, 333, "normal")):
        lengths = (300, 17, 0, 1000)
        filled = Filled(
            case(formats, window, dtype=dtype, heads_kv=heads, block_size=block_size, kind=kind, lengths=lengths)
        )
        filled.append()
        label = f"{formats} {block_size} {window}"
        compare(filled.decode(), filled.reference(), filled.case, label)
        compare(filled.decode(deterministic=True), filled.reference(), filled.case, label)
        # Some tokens are dropped again: as many as the window bears, and more.
        fewer = torch.tensor([300 - RECENT_SPARE, 3, 0, 800], dtype=torch.int32, device="cuda")
        compare(filled.decode(seq_lens=fewer), filled.reference(seq_lens=fewer), filled.case, f"{label} fewer")


def test_the_newest_are_as_in_a_16_bit_cache() -> None:
    """A window over everything: O and LSE of a bf16 cache, whatever K is changed by."""
    rng = np.random.default_rng(2)
    filled = Filled(case(window=400, lengths=(400, 33), heads_kv=2))
    plain = Filled(Case(lengths=(400, 33), heads_kv=2))
    for each in (filled, plain):
        each.k, each.v, each.q = plain.k, plain.v, plain.q
        each.append()
    a, b = filled.decode(), plain.decode()
    assert (a[0].float() - b[0].float()).abs().max() <= 8e-3 * b[0].float().abs().max()
    assert (a[1] - b[1]).abs().max() <= 1e-4
    changes = {"k_mean": rng.standard_normal((2, 128)).astype(np.float32), "hadamard": True}
    changed = case(window=100, lengths=(400, 33), heads_kv=2, kind="biased")
    changed.cache_options |= changes
    filled = Filled(changed)
    filled.append()
    compare(filled.decode(), filled.reference(), filled.case)


def test_options_and_several_queries() -> None:
    for q_len, heads_q, heads_kv in ((4, 4, 1), (3, 24, 2), (16, 2, 2)):
        filled = Filled(
            case(q_len=q_len, heads_q=heads_q, heads_kv=heads_kv, lengths=(500, 5, 0, 129), block_size=16, window=30)
        )
        filled.append()
        sinks = torch.randn(heads_q, device="cuda")
        for options in (
            {}, {"window": (70, 0)}, {"window": (10, 0)}, {"softcap": 10.0, "softmax_scale": 0.2}, {"sinks": sinks},
            {"sinks": sinks, "window": (20, -1), "softcap": 30.0},
        ):  # fmt: skip
            host = {n: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
            compare(filled.decode(**options), filled.reference(**host), filled.case, f"{q_len} {options}")
    out = torch.full((16, 4, 2, 128), float("nan"), device="cuda", dtype=torch.bfloat16).transpose(0, 1)
    result = filled.decode(out=out)
    assert result[0] is out
    compare(result, filled.reference(), filled.case, "out")


def test_copies_of_slots() -> None:
    filled = Filled(case(lengths=(100, 50, 70), block_size=16, heads_kv=3))
    filled.append()
    cache = filled.cache
    before = {name: getattr(cache, name).clone() for name in (*PLANES, "recent_state") if name in filled.planes()}
    copy_recent(cache, [(0, 3), (4, 1)])
    for name, plane in before.items():
        if name.startswith("recent"):
            for source, destination in ((0, 3), (4, 1)):
                plane[destination] = plane[source]
        assert torch.equal(plane.view(torch.uint8), getattr(cache, name).view(torch.uint8)), name


@pytest.mark.parametrize("block_size", [0, 16])
def test_a_captured_step_moves_the_window(block_size: int) -> None:
    """append and decode of one token in a graph, replayed: the lengths grow, the window follows them."""
    filled = Filled(case(lengths=(200, 90), block_size=block_size, window=20))
    lengths = [100, 60]
    filled.lens.copy_(torch.tensor(lengths, dtype=torch.int32))
    rows = torch.cat([torch.arange(100), torch.arange(200, 260)])
    places: dict[str, Any] = {"block_table": filled.table, "recent_slots": filled.slots}
    starts = torch.tensor([0, 100, 160], dtype=torch.int32, device="cuda")
    append(filled.cache, filled.k[rows], filled.v[rows], seq_lens=filled.lens, cu_seqlens=starts, **places)
    k, v = (torch.zeros(2, 1, 1, 128, device="cuda", dtype=filled.io) for _ in range(2))

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        filled.lens.add_(1)
        append(filled.cache, k, v, seq_lens=filled.lens, **places)
        return decode(filled.q, filled.cache, seq_lens=filled.lens, return_lse=True, **places)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
        filled.lens.sub_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = step()
    torch.cuda.current_stream().wait_stream(stream)
    for _ in range(25):
        lengths = [n + 1 for n in lengths]
        new = torch.tensor([lengths[0] - 1, 200 + lengths[1] - 1], device="cuda")
        k.copy_(filled.k[new][:, None])
        v.copy_(filled.v[new][:, None])
        graph.replay()
        torch.cuda.synchronize()
        assert filled.lens.tolist() == lengths
        compare(results, filled.reference(), filled.case, str(lengths))
    host = filled.on_host()
    assert host.recent is not None
    for b in range(2):
        _, slot = place(filled, b)
        assert host.recent.state[slot].tolist() == [lengths[b] - host.recent.k.shape[2], lengths[b]]
        ring = torch.from_numpy(host.recent.k.copy()).view(filled.io)[slot, 0]
        for t in range(lengths[b] - 20, lengths[b]):
            assert torch.equal(ring[t % len(ring)], filled.k[200 * b + t, 0].cpu())


def test_slots_outside_the_cache_touch_nothing_else() -> None:
    filled = Filled(case(lengths=(40, 64), block_size=16))
    filled.append()
    before = filled.planes()
    assert filled.slots is not None
    good = filled.slots.clone()
    filled.slots.copy_(torch.tensor([-3, 2**31 - 1]))
    filled.append()
    filled.decode()
    filled.decode(seq_lens=torch.tensor([2**31 - 1, -7], dtype=torch.int32, device="cuda"))
    torch.cuda.synchronize()
    after = filled.planes()
    assert all(np.array_equal(before[name], after[name]) for name in before)
    filled.slots.copy_(good)
    compare(filled.decode(), filled.reference(), filled.case)


def test_the_window_wants_the_type_of_the_tokens() -> None:
    filled = Filled(case(lengths=(5,)))
    filled.append()
    filled.q, filled.k, filled.v = (x.half() for x in (filled.q, filled.k, filled.v))
    with pytest.raises(DtypeError):
        filled.append()
    with pytest.raises(DtypeError):
        filled.decode()


@pytest.mark.parametrize("framework", ["cupy", "jax"])
def test_other_frameworks(framework: str) -> None:
    """Rings begin empty there too: what torch's arrays give."""
    module = pytest.importorskip(framework)
    convert = module.asarray if framework == "cupy" else module.numpy.asarray
    rng = np.random.default_rng(6)
    k, v, q = (rng.standard_normal((2, n, 1, 64)).astype(np.float16) for n in (50, 50, 1))
    table = np.array([[3, 1, 4, 0], [5, 2, 6, 7]], dtype=np.int32)
    results = []
    for make in (lambda x: torch.from_numpy(x).cuda(), convert):
        places = {"block_table": make(table), "recent_slots": make(np.array([2, 0], dtype=np.int32))}
        options: dict[str, Any] = {"k_dtype": "int4", "recent_window": 9, "recent_slots": 3, "recent_dtype": "fp16"}
        cache = PagedKVCache(8, 16, 1, 64, like=make(q), **options)
        before = make(np.array([41, 41], dtype=np.int32))
        append(cache, make(k[:, :41]), make(v[:, :41]), seq_lens=before, **places)
        lens = make(np.array([50, 50], dtype=np.int32))
        append(cache, make(k[:, 41:]), make(v[:, 41:]), seq_lens=lens, **places)
        copy_recent(cache, [(0, 1)])
        places["recent_slots"] = make(np.array([2, 1], dtype=np.int32))
        o, lse = decode(make(q), cache, seq_lens=lens, return_lse=True, **places)
        results.append([torch.from_dlpack(x).cpu().numpy() for x in (o, lse, cache.recent_state)])
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)
    assert results[0][2].tolist() == [[25, 50], [25, 50], [25, 50]]
