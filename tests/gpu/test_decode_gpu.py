"""append, decode and copy_blocks on the GPU: bytes and values against NumPy, plans, graphs, repeats."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from omniattn.bench.decode import FORMATS, run_decode  # noqa: E402
from omniattn.bench.decode_report import DecodeShape  # noqa: E402
from omniattn.errors import ArgumentError, DtypeError  # noqa: E402
from omniattn.kv.cache import PagedKVCache  # noqa: E402
from omniattn.ops import copy_blocks, decode  # noqa: E402
from omniattn.reference.decode import append_tokens  # noqa: E402
from omniattn.reference.kv_cache import rotate  # noqa: E402
from tests.gpu.decode_cases import COMMON, Case, Filled, compare  # noqa: E402
from tests.unit.docs.test_docs_recipes import check_prefix  # noqa: E402

pytestmark = pytest.mark.gpu
#: Besides the common formats: groups, and K and V of different formats (compiled at run time).
RARE = (("int4", "int4", 32), ("int4", "fp8", None), ("io", "int4", 32), ("int8", "io", 64))
DTYPES = ("bfloat16", "float16")


def sized(formats: tuple[str, str, int | None]) -> dict[str, Any]:
    return dict(zip(("k_dtype", "v_dtype", "group_size"), formats, strict=True))


def expected_bytes(filled: Filled, **rope: Any) -> dict[str, np.ndarray[Any, Any]]:
    """What NumPy appends to a cache full of 0xff."""
    host = filled.on_host()
    before = {name: getattr(host, name) for name in ("k", "v", "k_params", "v_params")}
    for plane in before.values():
        plane[...] = 0xFF if plane.dtype == np.uint8 else 0xFFFFFFFF
    k, v = (x.float().cpu().numpy() for x in (filled.k, filled.v))
    at = 0
    for b, n in enumerate(filled.case.lengths):
        keys = k[at : at + n]
        if rope:
            cos, sin = (rope[name].cpu().numpy()[:n, None] for name in ("cos", "sin"))
            keys = rotate(keys, cos, sin, rope["rope"] == "interleaved")
        table = np.array([b]) if filled.table is None else filled.table[b].cpu().numpy()
        append_tokens(host, keys, v[at : at + n], table, 0)
        at += n
    return before


def check_bytes(filled: Filled, **rope: Any) -> None:
    filled.append(**rope)
    got = {name: plane.copy() for name, plane in filled.planes().items()}
    want = expected_bytes(filled, **rope)
    for name, plane in got.items():
        np.testing.assert_array_equal(plane.reshape(-1), want[name].view(np.uint8).reshape(-1), err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formats", COMMON, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 72])
def test_append_writes_the_bytes_that_numpy_writes(formats: Any, dtype: str, head_dim: int) -> None:
    for block_size, heads in ((0, 1), (1, 2), (3, 1), (16, 2)):
        case = Case(dtype, **sized(formats), lengths=(37, 0, 70), heads_kv=heads, head_dim=head_dim)
        case.block_size = block_size
        check_bytes(Filled(case))


@pytest.mark.parametrize("formats", [*COMMON, *RARE], ids=str)
@pytest.mark.parametrize("kind", ["normal", "biased", "wild"])
def test_append_of_other_values_and_formats(formats: Any, kind: str) -> None:
    check_bytes(Filled(Case(**sized(formats), kind=kind, block_size=16)))


@pytest.mark.parametrize("head_dim", [8, 200, 256])
@pytest.mark.parametrize("formats", COMMON, ids=str)
def test_append_of_other_widths(formats: Any, head_dim: int) -> None:
    check_bytes(Filled(Case(**sized(formats), head_dim=head_dim, lengths=(40, 3))))


@pytest.mark.parametrize("style", ["half", "interleaved"])
@pytest.mark.parametrize("pairs", [64, 20, 7])
def test_append_rotates(style: str, pairs: int) -> None:
    angle = torch.rand(80, pairs, generator=torch.Generator().manual_seed(0)) * 100
    tables = {"cos": angle.cos().cuda(), "sin": angle.sin().cuda(), "rope": style}
    for formats in COMMON:
        check_bytes(Filled(Case("float16", **sized(formats), lengths=(80, 5), heads_kv=2)), **tables)


@pytest.mark.parametrize("names", [("k_mean",), ("k_channel_scale",), ("hadamard",), ("k_mean", "hadamard")], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 120])
def test_changes_of_keys(names: tuple[str, ...], head_dim: int) -> None:
    rng = np.random.default_rng(1)
    given: dict[str, Any] = {
        "k_mean": rng.standard_normal((2, head_dim)).astype(np.float32),
        "k_channel_scale": np.exp(rng.standard_normal((2, head_dim))).astype(np.float32), "hadamard": True,
    }  # fmt: skip
    for formats in COMMON[1:]:
        case = Case(**sized(formats), head_dim=head_dim, heads_kv=2, kind="biased", lengths=(200, 33))
        case.cache_options = {name: given[name] for name in names}
        filled = Filled(case)
        check_bytes(filled)
        for options in ({}, {"softcap": 10.0, "sinks": torch.randn(8, device="cuda")}):
            host = {n: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
            compare(filled.decode(**options), filled.reference(**host), case, f"{formats} {list(options)}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("formats", COMMON, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_decode_is_attention_over_the_cache(formats: Any, dtype: str, head_dim: int) -> None:
    for block_size, heads_kv, kind in ((0, 1, "normal"), (1, 2, "biased"), (16, 4, "wild"), (48, 1, "normal")):
        case = Case(dtype, **sized(formats), heads_kv=heads_kv, head_dim=head_dim, block_size=block_size, kind=kind)
        filled = Filled(case)
        filled.append()
        label = f"{formats} {block_size} {kind}"
        compare(filled.decode(), filled.reference(), case, label)
        compare(filled.decode(deterministic=True), filled.reference(), case, label)


@pytest.mark.parametrize("formats", RARE, ids=str)
def test_decode_of_rare_formats(formats: Any) -> None:
    for kind in ("normal", "wild"):
        case = Case(**sized(formats), kind=kind, heads_kv=2, block_size=16)
        filled = Filled(case)
        filled.append()
        compare(filled.decode(), filled.reference(), case, str(formats))


@pytest.mark.parametrize("formats", COMMON, ids=str)
@pytest.mark.parametrize("head_dim", [24, 256])
def test_decode_of_other_widths(formats: Any, head_dim: int) -> None:
    case = Case(**sized(formats), head_dim=head_dim, heads_kv=2)
    filled = Filled(case)
    filled.append()
    compare(filled.decode(), filled.reference(), case, str(formats))


@pytest.mark.parametrize(("q_len", "heads_q", "heads_kv"), [(2, 4, 1), (16, 2, 2), (4, 8, 1), (5, 6, 2), (1, 24, 1)])
def test_several_queries_and_groups(q_len: int, heads_q: int, heads_kv: int) -> None:
    for formats in (COMMON[0], COMMON[3]):
        case = Case(**sized(formats), q_len=q_len, heads_q=heads_q, heads_kv=heads_kv, lengths=(300, 3, 0, 129))
        filled = Filled(case)
        filled.append()
        for options in ({}, {"window": (70, 0)}):
            compare(filled.decode(**options), filled.reference(**options), case, f"{formats} {options}")


@pytest.mark.parametrize("formats", COMMON, ids=str)
def test_options(formats: Any) -> None:
    case = Case("float16", **sized(formats), q_len=2, heads_q=4, lengths=(1, 0, 500, 2000))
    filled = Filled(case)
    filled.append()
    sinks = torch.tensor([0.5, -3.0, 4.0, 0.0], device="cuda")
    for options in (
        {"window": (0, 0)}, {"window": (130, -1)}, {"softmax_scale": 0.3}, {"softmax_scale": -0.1},
        {"softcap": 3.0}, {"sinks": sinks}, {"sinks": sinks, "window": (5, 0), "softcap": 30.0},
    ):  # fmt: skip
        host = {n: x.cpu().numpy() if isinstance(x, torch.Tensor) else x for n, x in options.items()}
        compare(filled.decode(**options), filled.reference(**host), case, f"{formats} {options}")


@pytest.mark.parametrize("formats", COMMON, ids=str)
def test_long_and_many_sequences(formats: Any) -> None:
    rng = np.random.default_rng(5)
    for lengths in ((20000,), tuple(int(n) for n in rng.lognormal(4.5, 1.2, 400)), (0,) * 5 + (700,)):
        case = Case(**sized(formats), lengths=lengths)
        filled = Filled(case)
        filled.append()
        compare(filled.decode(), filled.reference(), case, f"{formats} {len(lengths)}")


@pytest.mark.parametrize("formats", COMMON, ids=str)
def test_repeats_give_the_same_bits(formats: Any) -> None:
    filled = Filled(Case(**sized(formats), lengths=(5000, 300, 77)))
    filled.append()
    for deterministic in (False, True):
        first = filled.decode(deterministic=deterministic)
        for _ in range(5):
            again = filled.decode(deterministic=deterministic)
            assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@pytest.mark.parametrize("formats", COMMON, ids=str)
def test_deterministic_results_do_not_depend_on_the_batch(formats: Any) -> None:
    alone = Filled(Case(**sized(formats), lengths=(3000,), seed=3))
    alone.append()
    many = Filled(Case(**sized(formats), lengths=(3000, 100, 4000, 1), seed=3))
    many.k[:3000], many.v[:3000], many.q[:1] = alone.k, alone.v, alone.q
    many.append()
    a, b = alone.decode(deterministic=True), many.decode(deterministic=True)
    assert torch.equal(a[0][0], b[0][0])
    assert torch.equal(a[1][0], b[1][0])


@pytest.mark.parametrize("formats", COMMON, ids=str)
@pytest.mark.parametrize("block_size", [0, 16])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_captured_graph_follows_the_lengths(formats: Any, block_size: int, deterministic: bool) -> None:
    case = Case(**sized(formats), lengths=(900, 400, 900), block_size=block_size)
    filled = Filled(case)
    filled.append()
    filled.decode(deterministic=deterministic)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        filled.decode(deterministic=deterministic)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = filled.decode(deterministic=deterministic)
    torch.cuda.current_stream().wait_stream(stream)
    for lengths in ((900, 400, 900), (1, 0, 333), (512, 400, 17)):
        filled.lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        graph.replay()
        torch.cuda.synchronize()
        compare(results, filled.reference(), case, str(lengths))


def test_values_that_are_not_finite_stay_where_they_are() -> None:
    for formats in COMMON:
        filled = Filled(Case("bfloat16", **sized(formats), lengths=(200, 200), heads_kv=2))
        filled.k[50, 0, 3] = float("nan")
        filled.v[300, 1, 5] = float("inf")
        filled.append()
        o, lse = filled.decode()
        assert torch.isnan(o[0, 0, :4]).all()
        assert torch.isnan(lse[0, :4]).all()
        assert torch.isfinite(o[0, 0, 4:]).all()
        assert torch.isfinite(o[1, 0, :4]).all()
        assert not torch.isfinite(o[1, 0, 4:, 5]).any()
        assert torch.isfinite(lse[1]).all()


def test_blocks_and_lengths_outside_the_cache_touch_nothing_else() -> None:
    for formats in (COMMON[0], COMMON[3]):
        filled = Filled(Case(**sized(formats), lengths=(40, 64), block_size=16))
        filled.append()
        before = filled.planes()
        assert filled.table is not None
        filled.table.fill_(-5)
        filled.append()
        filled.decode(seq_lens=torch.tensor([2**31 - 1, -7], dtype=torch.int32, device="cuda"))
        torch.cuda.synchronize()
        after = filled.planes()
        assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("formats", [*COMMON, RARE[0]], ids=str)
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_copies_of_blocks(formats: Any, block_size: int) -> None:
    filled = Filled(Case(**sized(formats), lengths=(200, 31), block_size=block_size, heads_kv=3))
    filled.append()
    cache = filled.cache
    assert isinstance(cache, PagedKVCache)
    before = {
        name: getattr(cache, name).clone() for name in ("k", "v", "k_params", "v_params") if name in filled.planes()
    }
    order = np.random.default_rng(2).permutation(cache.num_blocks)
    count = cache.num_blocks // 2
    pairs = [(int(order[i]), int(order[count + i])) for i in range(count)]
    copy_blocks(cache, pairs)
    for name, plane in before.items():
        for source, destination in pairs:
            plane[destination] = plane[source]
        assert torch.equal(plane.view(torch.uint8), getattr(cache, name).view(torch.uint8)), name


def test_a_16_bit_cache_wants_its_own_type() -> None:
    filled = Filled(Case("bfloat16", lengths=(5,)))
    filled.append()
    filled.q = filled.q.half()
    with pytest.raises(DtypeError):
        filled.decode()


@pytest.mark.parametrize("formats", COMMON, ids=str)
def test_strides_and_streams(formats: Any) -> None:
    case = Case("float16", **sized(formats), q_len=3, heads_q=4, heads_kv=2, lengths=(90, 200))
    filled = Filled(case)
    wide = torch.randn(2, 4, 5, 136, device="cuda", dtype=torch.float16)
    filled.q = wide[:, :, 1:4, :128].transpose(1, 2)
    filled.k = torch.randn(2, 290, 136, device="cuda", dtype=torch.float16)[..., 8:].transpose(0, 1)
    filled.append()
    out = torch.full((2, 4, 3, 128), float("nan"), device="cuda", dtype=torch.float16).transpose(1, 2)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    result = filled.decode(out=out, stream=stream)
    torch.cuda.synchronize()
    assert result[0] is out
    compare(result, filled.reference(), case, str(formats))


@pytest.mark.parametrize("cache_dtype", ["bf16", "fp8", "int8", "int4"])
@pytest.mark.parametrize("q_len", [1, 3])
def test_a_shared_prefix_is_read_once(cache_dtype: str, q_len: int) -> None:
    check_prefix("cuda", torch.bfloat16, cache_dtype, q_len, 0.015)


@pytest.mark.parametrize("formats", COMMON, ids=str)
@pytest.mark.parametrize(("q_len", "heads_q", "heads_kv", "block_size"), [(1, 8, 1, 16), (3, 6, 2, 16), (2, 8, 8, 5)])
def test_the_first_blocks_of_all_are_read_once(
    formats: Any, q_len: int, heads_q: int, heads_kv: int, block_size: int
) -> None:
    """Sequences whose tables begin alike, with and without the kernels knowing it; with other lengths in a graph."""
    more = {"heads_q": heads_q, "heads_kv": heads_kv, "q_len": q_len, "block_size": block_size}
    case = Case(**sized(formats), lengths=(460, 323, 700, 900), **more)
    filled = Filled(case)
    filled.append()
    assert filled.table is not None
    prefix = 320
    filled.table[:, : prefix // block_size] = filled.table[0, : prefix // block_size].clone()
    sinks = torch.linspace(-1, 3, heads_q, device="cuda")
    compare(filled.decode(shared_prefix=prefix), filled.reference(), case, "plain")
    options = {"sinks": sinks, "softcap": 15.0}
    expected = filled.reference(softcap=15.0, sinks=sinks.cpu().numpy())
    compare(filled.decode(shared_prefix=prefix, **options), expected, case, "options")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            results = filled.decode(shared_prefix=prefix)
    torch.cuda.current_stream().wait_stream(stream)
    filled.lens.copy_(torch.tensor((323, 323, 500, 899), dtype=torch.int32))
    graph.replay()
    torch.cuda.synchronize()
    compare(results, filled.reference(), case, "replayed")


def test_a_prefix_of_many_queries() -> None:
    case = Case(k_dtype="int4", v_dtype="int4", lengths=(2056,) * 70, q_len=4, block_size=16)
    filled = Filled(case)
    filled.append()
    assert filled.table is not None
    filled.table[:, :128] = filled.table[0, :128].clone()
    compare(filled.decode(shared_prefix=2048), filled.reference(), case)
    apart = filled.q.transpose(0, 1).contiguous().transpose(0, 1)
    with pytest.raises(ArgumentError, match="as one"):
        decode(apart, filled.cache, seq_lens=filled.lens, block_table=filled.table, shared_prefix=2048)


def test_what_the_benchmark_times_is_right() -> None:
    shapes = (DecodeShape(3, 8, 1, 700), DecodeShape(5, 16, 2, 300, block_size=16, ragged=True))
    report = run_decode(shapes, formats=tuple(FORMATS), iters=1)
    assert [m.reason for m in report.measurements if m.key in FORMATS] == [""] * (len(shapes) * len(FORMATS))
    assert all(m.timing is not None for m in report.measurements if m.key in FORMATS)
