"""The kernels that prepare masks on a GPU against NumPy: the same bits, and nothing written outside of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from omniattn.problems import AttentionStrides  # noqa: E402
from omniattn.reference import mask_tiles  # noqa: E402
from omniattn.registry import by_name  # noqa: E402
from omniattn.testing.frameworks import TorchFramework  # noqa: E402
from omniattn.testing.mask_cases import PACK_OPS, MaskCase, MaskShape, run_kernels  # noqa: E402
from omniattn.testing.tile_cases import expression_cases  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTHS = (1, 63, 65, 257, 1000)
WINDOWS = ((-1, -1), (-1, 0), (100, 0), (64, 200), (-1, 37))


def check(shape: MaskShape, dtype: str = "bfloat16") -> None:
    """Each kernel alone, then both as attention starts them."""
    case = MaskCase(dtype, shape, by_name("mask_list_sm80"))
    framework, numbers = TorchFramework(), case.prepare()
    for ops in (*((op,) for op in PACK_OPS), PACK_OPS):
        assert case.run(framework, numbers, ops) == "", f"{case.name}, {dtype}, {ops}"


@pytest.mark.parametrize("seqlen_k", LENGTHS)
@pytest.mark.parametrize("seqlen_q", LENGTHS)
def test_booleans(seqlen_q: int, seqlen_k: int) -> None:
    for broadcast in ("", "b", "h", "bh", "q", "bhq"):
        check(MaskShape("bool", 2, 3, seqlen_q, seqlen_k, broadcast))


@pytest.mark.parametrize("pad", [0, 1, 2, 4, 8, 16])
@pytest.mark.parametrize("offset", [0, 1, 2, 3, 4, 16])
@pytest.mark.parametrize("seqlen_k", [63, 240, 257, 1024])
def test_booleans_at_any_address(seqlen_k: int, offset: int, pad: int) -> None:
    """Rows of 16 aligned bytes, of words, and both at the mask's first and last bytes."""
    for layout in ("rows", "backwards"):
        check(MaskShape("bool", 1, 2, 130, seqlen_k, layout=layout, pad=pad, offset=offset))


@pytest.mark.parametrize("layout", ["spread", "columns"])
@pytest.mark.parametrize("broadcast", ["", "h", "q", "k", "qk"])
def test_booleans_of_any_strides(broadcast: str, layout: str) -> None:
    for seqlen_q, seqlen_k in ((65, 1), (63, 300), (200, 257)):
        check(MaskShape("bool", 2, 2, seqlen_q, seqlen_k, broadcast, layout, pad=3, offset=5))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["float32", "io"])
@pytest.mark.parametrize("seqlen_k", LENGTHS)
def test_values_for_each_key(seqlen_k: int, kind: str, dtype: str) -> None:
    for broadcast in ("q", "bq", "hq", "bhq"):
        for layout, offset in (("rows", 0), ("rows", 1), ("spread", 3)):
            check(MaskShape(kind, 2, 2, 130, seqlen_k, broadcast, layout, offset=offset), dtype)
    check(MaskShape(kind, 2, 2, 1, seqlen_k), dtype)
    check(MaskShape(kind, 2, 2, 70, seqlen_k, "qk"), dtype)


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("block_m", [64, 128, 192, 256])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1000, 1000), (257, 1000), (700, 130), (300, 9000)])
def test_lists(seqlen_q: int, seqlen_k: int, block_m: int, window: tuple[int, int]) -> None:
    for lead_rows in range(0, block_m, 64):
        check(MaskShape("bool", 2, 1, seqlen_q, seqlen_k, window=window, block_m=block_m, lead_rows=lead_rows))
    check(MaskShape("float32", 1, 2, seqlen_q, seqlen_k, "q", window=window, block_m=block_m))


def test_many_tiles() -> None:
    """More CTAs than a GPU holds at a time."""
    check(MaskShape("bool", 2, 2, 4096, 4096, window=(-1, 0), block_m=128))
    check(MaskShape("bool", 1, 3, 3001, 2999, block_m=192))


def test_offsets_beyond_31_bits() -> None:
    shape = MaskShape("bool", 2, 1, 100, 300, block_m=128)
    none, stride_b = (0, 0, 0), 2**31 + 16
    strides = AttentionStrides(none, none, none, none, (0, 0), (stride_b, 0, 304, 1))
    problem = replace(shape.problem("bfloat16"), strides=strides)
    mask = np.random.default_rng(0).random((2, 1, 100, 300)) < 0.5
    memory = torch.empty(stride_b + 100 * 304, dtype=torch.uint8, device="cuda")
    view = memory.as_strided((2, 1, 100, 300), (stride_b, 0, 304, 1))
    view.copy_(torch.from_numpy(mask.astype(np.uint8)))
    bits, kinds = mask_tiles.pack_bits(mask)
    lists = mask_tiles.lists(
        kinds, num_m_blocks=1, block_m=128, lead_rows=0, seqlen_q=100, seqlen_k=300, window_left=-1, window_right=-1,
        broadcast_rows=False,
    )  # fmt: skip
    wanted = {"bits": bits, "kinds": kinds, "lists": lists}
    assert run_kernels(TorchFramework(), shape, problem, memory.data_ptr(), wanted) == ""


def test_repeated_runs_give_the_same_bits() -> None:
    """The list kernel may begin while the packing one runs."""
    case = MaskCase("bfloat16", MaskShape("bool", 1, 4, 1000, 2000, block_m=128), by_name("mask_list_sm80"))
    framework, numbers = TorchFramework(), case.prepare()
    assert [case.run(framework, numbers) for _ in range(20)] == [""] * 20


def test_kinds_of_mask_expressions() -> None:
    for case in expression_cases(by_name("tile_kinds_sm80")):
        assert case.check(TorchFramework(), case.prepare())[1] == "", case.name
