"""The fast path of repeated calls: what it takes for known, and what it leaves to the engine."""

from __future__ import annotations

import struct
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays
from omniattn.launch.host_struct import At
from omniattn.launch.structs import MERGE_STATES
from omniattn.plan import engine
from omniattn.plan.engine import CACHE_OPERANDS
from omniattn.plan.others import plan_merge
from omniattn.plan.repeat import Repeat
from omniattn.problems import MergeProblem, Output, Target
from omniattn.problems.memory import WORKSPACE_ALIGNMENT
from omniattn.registry import REGISTRY
from omniattn.runtime.record import LaunchRecord, Pointer, Program
from omniattn.select import Selection
from tests.unit.launch.launch_fakes import Kernel, fields_of_record, program_of, unpacked

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from omniattn.arrays import from_torch  # noqa: E402

STREAM = 0x51


class Tensor:
    """What `torch_facts` reads of a torch tensor, all of it open to change."""

    dtype, shape, is_cuda, requires_grad = torch.float16, torch.Size((2, 8)), True, False

    def __init__(self, address: int = 0x1000, **changes: Any) -> None:
        self.address = address
        self.steps: tuple[int, ...] = (8, 1)
        self.ordinal = 0
        self.negated = False
        self.__dict__.update(changes)

    def data_ptr(self) -> int:
        if not self.address:
            raise RuntimeError("no storage")
        return self.address

    def stride(self) -> tuple[int, ...]:
        return self.steps

    def get_device(self) -> int:
        return self.ordinal

    def is_neg(self) -> bool:
        return self.negated


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `Tensor` pass for torch's own class."""
    monkeypatch.setattr(from_torch, "PLAIN", (Tensor,))


@pytest.mark.usefixtures("plain")
def test_facts_tell_apart_what_describe_tells_apart() -> None:
    seen = from_torch.torch_facts((Tensor(0x10), None, Tensor(0x20)))
    assert seen is not None
    facts, addresses = seen
    assert addresses == [0x10, 0, 0x20]
    again = from_torch.torch_facts((Tensor(0x30), None, Tensor(0x40)))
    assert again is not None
    assert again[0] == facts
    assert hash(again[0]) == hash(facts)
    others = [
        (Tensor(), Tensor(), None),
        (Tensor(), None),
        (Tensor(), None, Tensor(dtype=torch.bfloat16)),
        (Tensor(), None, Tensor(shape=torch.Size((1, 8)))),
        (Tensor(), None, Tensor(steps=(16, 1))),
        (Tensor(), None, Tensor(ordinal=1)),
    ]
    for objects in others:
        other = from_torch.torch_facts(objects)
        assert other is not None
        assert other[0] != facts


@pytest.mark.usefixtures("plain")
def test_facts_leave_to_describe_what_it_may_refuse() -> None:
    class Tagged(Tensor):
        pass

    doubtful = [
        Tensor(is_cuda=False), Tensor(negated=True), Tensor(requires_grad=True), Tensor(address=0), Tagged(), [1.0], 7,
    ]  # fmt: skip
    for obj in doubtful:
        assert from_torch.torch_facts((Tensor(), obj)) is None
    with torch.no_grad():
        assert from_torch.torch_facts((Tensor(requires_grad=True),)) is not None


def test_facts_of_no_tensor_on_the_cpu() -> None:
    x = torch.zeros(2, 8)
    assert arrays.describe(x, "q").device == "cpu"
    assert arrays.torch_facts((x, x, x)) is None
    assert from_torch.torch_facts((x.to_sparse(),)) is None
    assert from_torch.torch_facts((torch.zeros(2, device="meta"),)) is None


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_allocator_gives_what_empty_gives(dtype: str, transposed: bool) -> None:
    base = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16)
    x = base.transpose(1, 2) if transposed else base
    ref = arrays.describe(x, "q")
    for shape in (tuple(x.shape), (2, 4, 3), (2, 0, 3)):
        make = arrays.allocator(ref, shape, dtype)
        assert make is not None
        got, expected = make(x), arrays.empty_like_framework(ref, shape, dtype).obj
        assert (got.shape, got.stride(), got.dtype, got.device) == (
            expected.shape, expected.stride(), expected.dtype, expected.device,
        )  # fmt: skip
        assert got.is_contiguous()
        assert got.data_ptr() != x.data_ptr()


def test_allocator_ignores_odd_strides_of_single_rows() -> None:
    x = torch.zeros(2, 8)[:1].as_strided((1, 8), (24, 1))
    assert x.is_contiguous()
    make = arrays.allocator(arrays.describe(x, "q"), (1, 8), "float32")
    assert make is not None
    assert make(x).stride() == (8, 1)


def test_allocator_of_other_frameworks() -> None:
    ref = arrays.describe(np.zeros((2, 8), np.float32), "q")
    assert arrays.allocator(ref, (2, 8), "float32") is None
    assert arrays.stream_query(ref) is None


ARRAYS = ("q", "k", "v", "out", "cu_seqlens_q", "cu_seqlens_k", "mask", "sinks")
SPEC = next(spec for spec in REGISTRY if spec.op == "attention")
GIVEN = [0x1000, 0x2000, 0x3000, 0x4000, 0x5004, 0x6004, 0x7002, 0x8004]


class Cache:
    """What the fast path asks of a cache."""

    addresses = tuple(0x1000 * (i + 1) for i in range(len(CACHE_OPERANDS)))


def fast(
    monkeypatch: pytest.MonkeyPatch,
    *,
    lse: bool = False,
    out: bool = False,
    others: bool = False,
    workspace_bytes: int = 0,
    cache: bool = False,
) -> tuple[Kernel, Repeat, tuple[str, ...]]:
    """The fast path of a call of attention that launches its operands' addresses, one behind the other."""
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    given = {"q": q, "k": q, "v": q}
    if out:
        given["out"] = q
    if others:
        given |= dict.fromkeys(ARRAYS[4:6], torch.zeros(3, dtype=torch.int32))
        given |= {"mask": q, "sinks": torch.zeros(2)}
    tensors = {name: arrays.describe(given[name], name) for name in ARRAYS if name in given}
    for name, t in tensors.items():
        t.ptr = GIVEN[ARRAYS.index(name)]
    outputs = (Output("o", (4, 2, 8), "float16"), *((Output("lse", (2, 4), "float32"),) if lse else ()))
    operands = (*ARRAYS, *(CACHE_OPERANDS if cache else ()), *(x.name for x in outputs), "workspace")
    read = operands if workspace_bytes else operands[:-1]
    pointers = tuple(Pointer(8 * i, name) for i, name in enumerate(read))
    record = LaunchRecord(SPEC, (3, 1, 1), 64, bytes(8 * len(operands)), pointers)
    program, (kernel,) = program_of([record], operands)
    monkeypatch.setattr(arrays, "stream_query", lambda ref: lambda: STREAM)
    aligned = frozenset({"q", "k", "v", "out"})
    repeat = Repeat.of(program, ARRAYS, aligned, tensors, outputs, workspace_bytes, {"o": "out"})
    assert repeat is not None
    assert (repeat.writes is not None) == out
    if repeat.writes is not None:
        none = [0] * len(ARRAYS)
        assert repeat([None] * len(ARRAYS), none, None, None) is None, "no call has been checked"
        repeat.writes.allow(tensors, None)
    return kernel, repeat, operands


def objects(**changes: Any) -> list[Any]:
    """The caller's arrays of a call with all of them."""
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    return [{"q": q, "k": q, "v": q, "out": q, **changes}.get(name, q) for name in ARRAYS]


def addresses_of(call: Any, count: int) -> tuple[int, ...]:
    _, grid, threads, stream, data, attributes = call
    assert (grid, threads, stream, attributes) == ((3, 1, 1), 64, STREAM, None)
    return struct.unpack_from(f"<{count}Q", data)


def test_every_address_gets_to_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call, operands = fast(monkeypatch)
    (o,) = call(objects(out=None), [0x10, 0x20, 0x30, 0, 0, 0, 0, 0], None, None)  # type: ignore[misc]
    assert (o.shape, o.dtype) == ((4, 2, 8), torch.float16)
    found = addresses_of(kernel.log.pop(), len(operands))
    assert found == (0x10, 0x20, 0x30, 0, 0, 0, 0, 0, o.data_ptr(), 0)
    kernel, call, operands = fast(monkeypatch, lse=True, out=True, others=True)
    out = torch.zeros(4, 2, 8, dtype=torch.float16)
    got = call(objects(out=out), list(GIVEN), None, STREAM)
    assert got is not None
    assert got[0] is out
    assert (got[1].shape, got[1].dtype) == ((2, 4), torch.float32)
    found = addresses_of(kernel.log.pop(), len(operands))
    assert found == (*GIVEN, 0x4000, got[1].data_ptr(), 0)


def test_addresses_of_a_cache_come_behind_those_of_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call, operands = fast(monkeypatch, cache=True, lse=True)
    got = call(objects(out=None), [0x10, 0x20, 0x30, 0, 0, 0, 0, 0], Cache(), None)  # type: ignore[arg-type]
    assert got is not None
    found = addresses_of(kernel.log.pop(), len(operands))
    assert found == (0x10, 0x20, 0x30, 0, 0, 0, 0, 0, *Cache.addresses, got[0].data_ptr(), got[1].data_ptr(), 0)


@pytest.mark.parametrize("lse", [False, True])
def test_the_workspace_is_aligned_and_new_at_every_call(lse: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    plain = arrays.allocator

    def allocator(ref: Any, shape: tuple[int, ...], dtype: str) -> Any:
        if dtype != "uint8":
            return plain(ref, shape, dtype)
        assert shape == (100 + WORKSPACE_ALIGNMENT,)

        def make(like: Any) -> Any:
            given.append(torch.empty(shape[0] + 64, dtype=torch.uint8)[len(given) :])
            return given[-1]

        return make

    monkeypatch.setattr(arrays, "allocator", allocator)
    kernel, call, operands = fast(monkeypatch, lse=lse, workspace_bytes=100)
    for _ in range(2):
        got = call(objects(out=None), [0x10, 0x20, 0x30, 0, 0, 0, 0, 0], None, None)
        assert got is not None
        assert len(got) == 1 + lse
    assert len(given) == 2
    for launch, memory in zip(kernel.log, given, strict=True):
        at = addresses_of(launch, len(operands))[-1]
        assert at % WORKSPACE_ALIGNMENT == 0
        assert memory.data_ptr() <= at < memory.data_ptr() + WORKSPACE_ALIGNMENT


@pytest.mark.parametrize("of", ["output", "workspace"])
def test_what_has_no_memory_is_left_to_the_engine(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under FakeTensorMode torch's allocator gives tensors whose address is 0."""
    plain = arrays.allocator

    def allocator(ref: Any, shape: tuple[int, ...], dtype: str) -> Any:
        if (dtype == "uint8") != (of == "workspace"):
            return plain(ref, shape, dtype)
        return lambda like: SimpleNamespace(data_ptr=lambda: 0)

    monkeypatch.setattr(arrays, "allocator", allocator)
    kernel, call, _ = fast(monkeypatch, workspace_bytes=100)
    assert call(objects(out=None), [0x10, 0x20, 0x30, 0, 0, 0, 0, 0], None, None) is None
    assert kernel.log == []


def test_nothing_is_allocated_for_a_call_that_is_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def allocator(ref: Any, shape: tuple[int, ...], dtype: str) -> Any:
        def make(like: Any) -> Any:
            raise AssertionError("allocated for nothing")

        return make

    monkeypatch.setattr(arrays, "allocator", allocator)
    kernel, call, _ = fast(monkeypatch, workspace_bytes=100)
    none = [0, 0, 0, 0, 0]
    assert call(objects(out=None), [0x10, 0x20, 0x38, *none], None, None) is None
    assert call(objects(out=None), [0x10, 0x20, 0x30, *none], None, STREAM + 1) is None
    assert kernel.log == []


@pytest.mark.parametrize(
    ("at", "address"),
    [
        (0, 0x1008), (1, 0x2008), (2, 0x3001), (3, 0x4008), (4, 0x5002), (5, 0x6001), (6, 0x7001), (7, 0x8002),
        (3, 0x1000), (3, 0x2000), (3, 0x3000), (3, 0x1010), (3, 0x3070), (3, 0x2f90), (3, 0x4ff0), (3, 0x5000),
        (3, 0x6f90), (3, 0x8000), (0, 0x4070), (1, 0x3f90), (3, 0),
    ],
)  # fmt: skip
def test_odd_addresses_and_overlaps_are_left_to_the_engine(
    at: int, address: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, call, _ = fast(monkeypatch, out=True, others=True)
    assert call(objects(), list(GIVEN), None, None) is not None
    kernel.log.clear()
    addresses = list(GIVEN)
    addresses[at] = address
    assert call(objects(), addresses, None, None) is None
    assert kernel.log == []


def test_arrays_side_by_side_are_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call, _ = fast(monkeypatch, out=True, others=True)
    for address in (0x1080, 0x2F80, 0x5010, 0x4F80):
        assert call(objects(), [*GIVEN[:3], address, *GIVEN[4:]], None, None) is not None, hex(address)
    assert len(kernel.log) == 4


def test_what_has_been_checked_may_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    """``out`` that is q: the same difference of addresses, wherever both are."""
    kernel, call, _ = fast(monkeypatch, out=True)
    assert call.writes is not None
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    tensors = {name: arrays.describe(q, name) for name in ARRAYS[:4]}
    for t, address in zip(tensors.values(), (0x1000, 0x2000, 0x3000, 0x1000), strict=True):
        t.ptr = address
    call.writes.allow(tensors, None)
    none = [0, 0, 0, 0]
    for addresses in ([0x1000, 0x2000, 0x3000, 0x1000], [0x8000, 0x2000, 0x3000, 0x8000], GIVEN[:4]):
        assert call(objects(), [*addresses, *none], None, None) is not None
    for addresses in ([0x1000, 0x2000, 0x3000, 0x1010], [0x1000, 0x2000, 0x3000, 0x2000]):
        assert call(objects(), [*addresses, *none], None, None) is None
    assert len(kernel.log) == 3


def test_what_is_written_counts_as_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    _, call, _ = fast(monkeypatch, out=True, lse=True)
    out = torch.zeros(4, 2, 8, dtype=torch.float16)
    given = objects(out=out)
    q = given[0]
    for count in (1, 2):
        results = call(given, list(GIVEN), None, None)
        assert results is not None
        assert (out._version, q._version, results[1]._version) == (count, 0, 0)
    assert call(given, [*GIVEN[:3], GIVEN[0], *GIVEN[4:]], None, None) is None
    assert out._version == 2


def test_other_streams_and_inference_tensors_are_left_to_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, call, _ = fast(monkeypatch, out=True)
    addresses = [*GIVEN[:4], 0, 0, 0, 0]
    for stream in (STREAM + 1, 0):
        assert call(objects(), list(addresses), None, stream) is None
    with torch.inference_mode():
        out = torch.zeros(4, 2, 8, dtype=torch.float16)
    assert call(objects(out=out), list(addresses), None, None) is None
    assert kernel.log == []
    with torch.inference_mode():  # where such a tensor is one like others
        assert call(objects(out=out), list(addresses), None, None) is not None


def test_several_given_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any of the results, in their order; the arrays' own places in the call have other names."""
    x = torch.zeros(4, 2, 8, dtype=torch.float16)
    names = ("q", "into.a", "into.b", "into.c")
    given = {"a": "into.a", "b": "into.b", "c": "into.c"}
    outputs = tuple(Output(name, (4, 2, 8), "float16") for name in ("a", "b", "c"))
    monkeypatch.setattr(arrays, "stream_query", lambda ref: lambda: STREAM)
    for places in ((), (1,), (2,), (1, 3), (1, 2, 3)):
        tensors = {name: arrays.describe(x, name) for i, name in enumerate(names) if i == 0 or i in places}
        for i, t in enumerate(tensors.values()):
            t.ptr = 0x1000 * (i + 1)
        operands = (*names, "a", "b", "c")
        pointers = tuple(Pointer(8 * i, name) for i, name in enumerate(operands))
        record = LaunchRecord(SPEC, (3, 1, 1), 64, bytes(8 * len(operands)), pointers)
        program, (kernel,) = program_of([record], operands)
        call = Repeat.of(program, names, frozenset(names), tensors, outputs, 0, given)
        assert call is not None
        if call.writes is not None:
            call.writes.allow(tensors, None)
        own = [torch.zeros(4, 2, 8, dtype=torch.float16) if i in (0, *places) else None for i in range(4)]
        addresses = [0x1000 * (i + 1) if t is not None else 0 for i, t in enumerate(own)]
        results = call(own, list(addresses), None, None)
        assert results is not None
        for i, result in enumerate(results, 1):
            assert (result is own[i], result._version) == ((True, 1) if i in places else (False, 0))
        found = addresses_of(kernel.log.pop(), len(operands))
        at = [addresses[i] if i in places else results[i - 1].data_ptr() for i in (1, 2, 3)]
        assert found == (*addresses, *at)
        # Two results in one place, or one in that of an input, are left to the engine.
        for i in places:
            for other in {0, *places} - {i}:
                near = addresses[other] + 0x10
                assert call(own, [near if j == i else a for j, a in enumerate(addresses)], None, None) is None
        assert kernel.log == []


def test_other_frameworks_have_no_fast_path() -> None:
    program = Program([], (), lambda spec: None)  # type: ignore[arg-type, return-value]
    t = arrays.describe(np.zeros((4, 8), np.float16), "q")
    assert Repeat.of(program, ("q",), frozenset(), {"q": t}, (), 0, {}) is None


def test_merge_packs_the_whole_struct(monkeypatch: pytest.MonkeyPatch) -> None:
    strides, lse_strides = ((1, 2, 3), (4, 5, 6), (7, 8, 9)), ((11, 12, 13), (14, 15, 16), (17, 18, 19))
    problem = MergeProblem("float16", (2, 5, 3, 64), strides, lse_strides)
    launches = plan_merge(problem, Target((8, 0), 99 << 10, 108), None)
    (record,) = launches.records
    total = 2 * 5 * 3 * 8
    assert (record.grid, record.threads, launches.workspace_bytes) == ((1, 1, 1), 256, 0)
    fields = fields_of_record(record, MERGE_STATES)
    assert list(fields.values()) == [
        *(At(name) for name in ("o_a", "o_b", "o", "lse_a", "lse_b", "lse")), None, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12,
        13, 14, 15, 16, 17, 18, 19, total, 5, 3, 8, 0,
    ]  # fmt: skip
    # The fast path of merge_states: names of its own, no q.
    names = ("o_a", "o_b", "lse_a", "lse_b", "out")
    o_a, lse_a = torch.zeros(2, 5, 3, 64, dtype=torch.float16), torch.zeros(2, 3, 5)
    tensors = {n: arrays.describe(x, n) for n, x in zip(names, (o_a, o_a, lse_a, lse_a), strict=False)}
    program, (kernel,) = program_of([record], (*names, "o", "lse", "workspace"))
    monkeypatch.setattr(arrays, "stream_query", lambda ref: lambda: STREAM)
    call = Repeat.of(program, names, frozenset({"o_a", "o_b", "out"}), tensors, problem.outputs, 0, {"o": "out"})
    assert call is not None
    got = call((o_a, o_a, lse_a, lse_a, None), [0x10, 0x20, 0x34, 0x44, 0], None, STREAM)
    assert got is not None
    o, lse = got
    assert (o.shape, lse.shape, lse.dtype) == (o_a.shape, lse_a.shape, torch.float32)
    found = unpacked(kernel.log[0][4], MERGE_STATES)
    assert list(found.values())[:6] == [0x10, 0x20, o.data_ptr(), 0x34, 0x44, lse.data_ptr()]
    for at, address in ((0, 0x18), (1, 0x21), (2, 0x32), (3, 0x41)):
        addresses = [address if i == at else x for i, x in enumerate([0x10, 0x20, 0x34, 0x44, 0])]
        assert call((o_a, o_a, lse_a, lse_a, None), addresses, None, None) is None
    assert len(kernel.log) == 1


def test_merge_of_nothing_launches_nothing() -> None:
    problem = MergeProblem("float16", (2, 0, 3, 64), ((0, 0, 0),) * 3, ((0, 0, 0),) * 3)
    assert plan_merge(problem, Target((8, 0), 99 << 10, 108), None).records == ()


def test_no_fast_path_beside_a_cache_of_another_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only torch's arrays are known to be ready on torch's stream. Two such caches may share a plan."""
    asked: list[Any] = []
    launches = engine.Launches(Selection(SPEC, ()), ())
    program = Program([], (), lambda spec: None)  # type: ignore[arg-type, return-value]
    plan = engine.Plan(SimpleNamespace(outputs=()), launches, program, 0)
    monkeypatch.setattr(engine, "make_plan", lambda *_, **__: plan)
    monkeypatch.setattr(engine, "execute", lambda *_: [None])

    class Fast:
        writes = None

        def __call__(self, objects: Any, addresses: Any, cache: Any, raw: Any) -> list[None]:
            asked.append(cache)
            return [None]

    monkeypatch.setattr(engine.Repeat, "of", lambda *_: Fast())
    likes = {"numpy": np.zeros(1, np.float32), "torch": torch.zeros(1)}
    caches = {name: oa.KVCache(2, 16, 2, 64, like=like, k_dtype="int8") for name, like in likes.items()}
    monkeypatch.setattr(arrays, "torch_facts", lambda objects: (("facts",), [0x10] * len(objects)))
    engine.PLANS.clear()
    for cache in (*caches.values(), *caches.values()):
        oa.decode(torch.zeros(2, 1, 4, 64), cache, seq_lens=torch.zeros(2, dtype=torch.int32))
    engine.PLANS.clear()
    assert [x is caches["torch"] for x in asked] == [True] * len(asked)
    assert asked
