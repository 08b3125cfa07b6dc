"""The short way of warm calls: what it takes for known, and what it leaves to the long way."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from omniattn.launch.params import PARAMS

from omniattn import arrays, repeat
from omniattn.launch.merge_states import _PARAMS, MergePlan
from omniattn.problems import AttentionProblem as Problem

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from omniattn.arrays import from_torch  # noqa: E402

STREAM = 0x51


class Tensor:
    """What `look` reads of a torch tensor, all of it open to change."""

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
    monkeypatch.setattr(from_torch, "_PLAIN", (Tensor,))


@pytest.mark.usefixtures("plain")
def test_look_tells_apart_what_describe_tells_apart() -> None:
    seen = from_torch.look((Tensor(0x10), None, Tensor(0x20)))
    assert seen is not None
    facts, addresses = seen
    assert addresses == [0x10, 0, 0x20]
    again = from_torch.look((Tensor(0x30), None, Tensor(0x40)))
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
        other = from_torch.look(objects)
        assert other is not None
        assert other[0] != facts


@pytest.mark.usefixtures("plain")
def test_look_leaves_to_describe_what_it_may_refuse() -> None:
    class Tagged(Tensor):
        pass

    doubtful = [
        Tensor(is_cuda=False), Tensor(negated=True), Tensor(requires_grad=True), Tensor(address=0), Tagged(), [1.0], 7,
    ]  # fmt: skip
    for obj in doubtful:
        assert from_torch.look((Tensor(), obj)) is None
    with torch.no_grad():
        assert from_torch.look((Tensor(requires_grad=True),)) is not None


def test_look_takes_no_tensor_on_the_cpu() -> None:
    x = torch.zeros(2, 8)
    assert arrays.describe(x, "q").device == "cpu"
    assert arrays.look((x, x, x)) is None
    assert from_torch.look((x.to_sparse(),)) is None
    assert from_torch.look((torch.zeros(2, device="meta"),)) is None


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
    np = pytest.importorskip("numpy")
    ref = arrays.describe(np.zeros((2, 8), np.float32), "q")
    assert arrays.allocator(ref, (2, 8), "float32") is None
    assert arrays.stream_query(ref) is None


class Forward:
    """A plan that writes down what it is asked to launch."""

    def __init__(self) -> None:
        self.launched: list[tuple[int, tuple[int, ...]]] = []

    def launch(self, stream: int, pointers: tuple[int, ...]) -> None:
        self.launched.append((stream, pointers))


def forward(
    *, lse: bool = False, mask: str = "none", sinks: str = "none", new_workspace: Any = None
) -> tuple[Forward, repeat.RepeatedForward]:
    problem = Problem(
        "float16", 1, 4, 4, 2, 2, 8, -1, -1, 1.0, 0.0, mask, sinks, False, "exact", False, tensor_maps=False
    )
    plan = Forward()
    new_lse = (lambda like: torch.empty(2, 4)) if lse else None
    return plan, repeat.RepeatedForward(
        plan,
        problem,
        torch.empty_like,
        new_lse,
        new_workspace,
        lambda: STREAM,  # type: ignore[arg-type]
    )


def test_forward_passes_every_pointer_in_its_place() -> None:
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    plan, call = forward()
    o = call(q, None, [0x10, 0x20, 0x30], None)
    assert o.shape == q.shape
    assert plan.launched.pop() == (STREAM, (0x10, 0x20, 0x30, o.data_ptr(), 0, 0, 0, 0, 0))
    plan, call = forward(lse=True, mask="io", sinks="float32")
    out = torch.zeros_like(q)
    addresses = [0x10, 0x20, 0x30, 0x40, 0x54, 0x64, 0x72, 0x84]
    o, lse = call(q, out, addresses, STREAM)
    assert o is out
    assert plan.launched == [(STREAM, (0x10, 0x20, 0x30, 0x40, lse.data_ptr(), 0x54, 0x64, 0x72, 0x84))]


@pytest.mark.parametrize("lse", [False, True])
def test_the_workspace_is_the_last_pointer_and_new_at_every_call(lse: bool) -> None:
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    given = []

    def new_workspace(like: Any) -> Any:
        assert like is q
        given.append(torch.empty(100, dtype=torch.uint8))
        return given[-1]

    plan, call = forward(lse=lse, new_workspace=new_workspace)
    result = call(q, None, [0x10, 0x20, 0x30], None)
    o, at_lse = (result[0], result[1].data_ptr()) if lse else (result, 0)
    assert plan.launched.pop() == (
        STREAM, (0x10, 0x20, 0x30, o.data_ptr(), at_lse, 0, 0, 0, 0, given[0].data_ptr()),
    )  # fmt: skip
    out = torch.zeros_like(q)
    call(q, out, [0x10, 0x20, 0x30, 0x40, 0x54, 0x64, 0, 0x84], STREAM)
    ((_, pointers),) = plan.launched
    assert pointers[:4] == (0x10, 0x20, 0x30, 0x40)
    assert pointers[5:] == (0x54, 0x64, 0, 0x84, given[1].data_ptr())
    assert len(given) == 2


def test_no_workspace_for_a_call_that_goes_the_long_way() -> None:
    def new_workspace(like: Any) -> Any:
        raise AssertionError("allocated for nothing")

    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    plan, call = forward(new_workspace=new_workspace)
    assert call(q, None, [0x10, 0x20, 0x38], None) is None
    assert call(q, None, [0x10, 0x20, 0x30], STREAM + 1) is None
    assert plan.launched == []


@pytest.mark.parametrize(
    ("at", "address"),
    [
        (0, 0x18),
        (1, 0x28),
        (2, 0x31),
        (3, 0x48),
        (4, 0x52),
        (5, 0x61),
        (6, 0x71),
        (7, 0x82),
        (3, 0x10),
        (3, 0x20),
        (3, 0x30),
    ],
)
def test_forward_leaves_odd_addresses_to_the_long_way(at: int, address: int) -> None:
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    plan, call = forward(mask="io", sinks="float32")
    addresses = [0x10, 0x20, 0x30, 0x40, 0x54, 0x64, 0x72, 0x84]
    assert call(q, q, addresses, None) is q
    plan.launched.clear()
    addresses[at] = address
    assert call(q, q, addresses, None) is None
    assert plan.launched == []


def test_forward_leaves_other_streams_and_inference_tensors_to_the_long_way() -> None:
    q = torch.zeros(4, 2, 8, dtype=torch.float16)
    plan, call = forward()
    assert call(q, None, [0x10, 0x20, 0x30], STREAM + 1) is None
    assert call(q, None, [0x10, 0x20, 0x30], 0) is None
    with torch.inference_mode():
        out = torch.zeros_like(q)
    assert call(q, out, [0x10, 0x20, 0x30, 0x40, 0, 0, 0, 0], None) is None
    assert plan.launched == []


class Kernel:
    """Keeps the arguments of its launches."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def launch(
        self, grid: tuple[int, int, int], block_x: int, stream: int, params_address: int, cluster: Any = None
    ) -> None:
        assert params_address == PARAMS.address
        self.calls.append((grid, block_x, stream, _PARAMS.unpack_from(PARAMS.buffer)))


def merge(rows: int = 5) -> tuple[Kernel, repeat.RepeatedMerge]:
    kernel = Kernel()
    strides, lse_strides = ((1, 2, 3), (4, 5, 6), (7, 8, 9)), ((11, 12, 13), (14, 15, 16), (17, 18, 19))
    plan = MergePlan(kernel, strides, lse_strides, (2, rows, 3, 64), 2)  # type: ignore[arg-type]
    return kernel, repeat.RepeatedMerge(plan, torch.empty_like, torch.empty_like, lambda: STREAM)


def test_merge_packs_the_whole_struct() -> None:
    o_a, lse_a = torch.zeros(2, 5, 3, 64, dtype=torch.float16), torch.zeros(2, 3, 5)
    kernel, call = merge()
    o, lse = call(o_a, lse_a, None, [0x10, 0x20, 0x34, 0x44, 0], STREAM)
    total = 2 * 5 * 3 * 8
    (grid, block_x, stream, fields), = kernel.calls  # fmt: skip
    assert (grid, block_x, stream) == ((1, 1, 1), 256, STREAM)
    assert fields == (
        0x10, 0x20, o.data_ptr(), 0x34, 0x44, lse.data_ptr(), 1, 2, 3, 4, 5, 6, 7, 8, 9, 11, 12, 13, 14, 15, 16, 17, 18,
        19, total, 5, 3, 8, 0,
    )  # fmt: skip
    out = torch.zeros_like(o_a)
    assert call(o_a, lse_a, out, [0x10, 0x20, 0x34, 0x44, 0x50], None)[0] is out
    assert kernel.calls[1][3][2] == 0x50


def test_merge_leaves_the_unusual_to_the_long_way() -> None:
    o_a, lse_a = torch.zeros(2, 5, 3, 64, dtype=torch.float16), torch.zeros(2, 3, 5)
    kernel, call = merge()
    usual = [0x10, 0x20, 0x34, 0x44, 0x50]
    for at, address in ((0, 0x18), (1, 0x21), (2, 0x32), (3, 0x41), (4, 0x58), (4, 0x10), (4, 0x20)):
        addresses = [address if i == at else x for i, x in enumerate(usual)]
        assert call(o_a, lse_a, torch.zeros_like(o_a), addresses, None) is None
    assert call(o_a, lse_a, None, [*usual[:4], 0], STREAM + 1) is None
    with torch.inference_mode():
        out = torch.zeros_like(o_a)
    assert call(o_a, lse_a, out, usual, None) is None
    assert kernel.calls == []


def test_merge_of_nothing_launches_nothing() -> None:
    kernel, call = merge(rows=0)
    call(torch.zeros(2, 0, 3, 64), torch.zeros(2, 3, 0), None, [0, 0, 0, 0, 0], None)
    assert kernel.calls == []


def test_arguments_that_do_not_fit_are_refused() -> None:
    with pytest.raises(struct.error):
        struct.Struct("<2000s").pack_into(PARAMS.buffer, 0, b"")
    with pytest.raises(ValueError, match="2000 bytes exceed"):
        PARAMS.write(bytes(2000))
    assert PARAMS.write(b"abc") == PARAMS.address
    assert PARAMS.buffer.raw[:3] == b"abc"
