"""The merge of context_parallel's partial results in torch's ring, by `merge_states`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from torch.distributed.tensor.experimental._context_parallel import _attention  # noqa: E402

from omniattn.torch import context_parallel  # noqa: E402
from omniattn.torch.flash import Active  # noqa: E402

TORCH = _attention._SDPAMerger
SHAPE = (2, 3, 8, 16)


def _parts(steps: int, partial: tuple[int, ...], dtype: Any = torch.float32) -> list[tuple[Any, Any, bool]]:
    """Results of steps; of those in ``partial``, of the second half of the rows."""
    torch.manual_seed(5)
    batch, heads, rows, channels = SHAPE
    made = []
    for step in range(steps):
        of = rows // 2 if step in partial else rows
        lse = 3 * torch.randn(batch, heads, of)
        made.append((torch.randn(batch, heads, of, channels).to(dtype), lse, step in partial))
    return made


def _merged(merger: Any, parts: list[tuple[Any, Any, bool]], rank: int = 3) -> tuple[Any, Any]:
    for out, lse, partial in parts:
        merger.step(out.clone(), (lse.unsqueeze(-1) if rank == 4 else lse).clone(), partial)
    return merger.results()


def _expected(parts: list[tuple[Any, Any, bool]]) -> tuple[Any, Any]:
    rows = SHAPE[2]
    lses, outs = [], []
    for out, lse, partial in parts:
        missing = rows // 2 if partial else 0
        lses.append(torch.nn.functional.pad(lse.double(), (missing, 0), value=-torch.inf))
        outs.append(torch.nn.functional.pad(out.double(), (0, 0, missing, 0)))
    weights = torch.stack(lses).softmax(0).unsqueeze(-1)
    return (weights * torch.stack(outs)).sum(0), torch.stack(lses).logsumexp(0)


@pytest.mark.parametrize("rank", [3, 4])
@pytest.mark.parametrize("partial", [(), (1,), (2, 3)], ids=str)
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_results(steps: int, partial: tuple[int, ...], rank: int) -> None:
    parts = _parts(steps, partial)
    merger = context_parallel.merger_class(TORCH)(True, 2)
    out, lse = _merged(merger, parts, rank)
    wanted, wanted_lse = _expected(parts)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=1e-6)
    assert lse.dim() == rank
    torch.testing.assert_close(lse.reshape(wanted_lse.shape).double(), wanted_lse, rtol=1e-6, atol=1e-6)
    assert merger._out is None  # torch's class has seen nothing


@pytest.mark.parametrize("steps", [2, 4])
def test_half_precision_is_rounded_once(steps: int) -> None:
    parts = _parts(steps, (1,), torch.bfloat16)
    out, _ = _merged(context_parallel.merger_class(TORCH)(True, 2), parts)
    assert out.dtype == torch.bfloat16
    wanted = _expected(parts)[0]
    assert ((out.double() - wanted).abs() <= 2.0**-8 * wanted.abs() + 1e-6).all()


def test_memory_of_a_query_in_the_other_layout() -> None:
    parts = [(out.transpose(1, 2).contiguous().transpose(1, 2), *rest) for out, *rest in _parts(2, (1,))]
    out, _ = _merged(context_parallel.merger_class(TORCH)(True, 2), parts)
    torch.testing.assert_close(out.double(), _expected(parts)[0], rtol=1e-5, atol=1e-6)


def test_rows_that_no_step_has_seen() -> None:
    parts = _parts(2, ())
    for _, lse, _ in parts:
        lse[:, :, 3] = -torch.inf
    out, lse = _merged(context_parallel.merger_class(TORCH)(True, 2), parts)
    assert (out[:, :, 3] == 0).all()
    assert (lse[:, :, 3] == -torch.inf).all()
    assert torch.isfinite(out).all()


@pytest.mark.parametrize("dtype", [torch.complex64, "subclass", "other dimension"], ids=str)
def test_other_results_are_merged_by_torch(dtype: Any) -> None:
    """Dtypes without kernels, tensors of tracing, other layouts."""
    taken: list[Any] = []

    class Base:
        def __init__(self, convert_to_f32: bool, seq_dim: int) -> None:
            self._out: Any = None

        def step(self, out: Any, lse: Any, partial: bool) -> None:
            taken.append(out)
            self._out = out

        def results(self) -> tuple[Any, str]:
            return self._out, "torch"

    merger = context_parallel.merger_class(Base)(True, 1 if dtype == "other dimension" else 2)
    for out, lse, partial in _parts(3, ()):
        if dtype == "subclass":
            out = torch.nn.Parameter(out)
        elif isinstance(dtype, torch.dtype):
            out = out.to(dtype)
        merger.step(out, lse, partial)
    assert merger.results()[1] == "torch"
    assert len(taken) == 3


def test_it_is_there_while_the_implementation_is_active() -> None:
    active = Active("CPU")
    try:
        assert _attention._SDPAMerger is not TORCH
        assert issubclass(_attention._SDPAMerger, TORCH)
    finally:
        active.remove()
    assert _attention._SDPAMerger is TORCH


def test_an_unknown_merger_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(TORCH):  # type: ignore[misc, valid-type]
        def step(self, out: Any, lse: Any) -> None:
            raise NotImplementedError

    for found in (SimpleNamespace(_SDPAMerger=Other), SimpleNamespace()):
        monkeypatch.setattr(context_parallel.importlib, "import_module", lambda _, found=found: found)
        patch = context_parallel.MergePatch()
        assert patch.module is None
        patch.remove()
    assert _attention._SDPAMerger is TORCH
