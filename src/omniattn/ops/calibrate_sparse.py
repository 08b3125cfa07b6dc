"""``calibrate_sparse``: how few blocks each head may keep, measured on the user's own tensors."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import arguments
from ..checks import values
from ..checks.extras import check_block_size
from ..errors import ArgumentError
from ..problems import Auto
from ..problems.calibration import CalibratedHeads, SparseCalibration
from ..problems.sparse_blocks import visible_count
from .attention import attention
from .sparse_blocks import sparse_blocks

_NAME = "calibrate_sparse"
Triple = tuple[Any, Any, Any]
Numbers = npt.NDArray[np.float64]

#: What is tried, from little to everything. Weights of blocks are concentrated: of them the last per cent count.
SHARES: dict[str, tuple[float, ...]] = {
    "topk": tuple(i / 20 for i in range(1, 21)),
    "cdf": (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.92, 0.94, 0.96, 0.97, 0.98, 0.99, 0.995, 0.999, 1.0),
}


def calibrate_sparse(
    tensors: Any,
    *,
    max_error: float = 0.05,
    by: str = "topk",
    shares: Sequence[float] | None = None,
    similarity: float = -0.1,
    block_size: int | tuple[int, int] = (128, 64),
    keep_first: int = 0,
    causal: bool = False,
    softmax_scale: float | None = None,
    layout: str = "NHD",
    precision: Any = "exact",
    file: str | os.PathLike[str] | None = None,
) -> SparseCalibration:
    """Of each head the smallest share of blocks that leaves the result of attention within a bound, for `Sparse`.

    ::

        error[h] = sum |o_sparse[:, h] - o[:, h]| / sum |o[:, h]|        o: exact attention of the same q, k, v

    Parameters
    ----------
    tensors : (q, k, v), sequence of (q, k, v), or mapping of str to either
        What attention is called with, as recorded from a model: several samples of one layer (steps, prompts), or of
        layers by name. Arrays of any framework, as `attention` takes them. Names are asked for one after the other and
        samples run through several times, one at a time, so that both may be read from files as they are wanted; an
        iterator, which gives them once, raises.
    max_error : float
        Bound of each head's relative L1 on each sample, above 0.
    by : "topk" or "cdf"
        What the shares are of: all blocks of keys, or their weights.
    shares : sequence of float, optional
        What is tried, above 0, at most 1. 1 is always among them.
    similarity, block_size, keep_first
        As in `sparse_blocks`; `Sparse` gets them from the file.
    causal, softmax_scale, layout
        As in `attention`.
    precision : str or Int8, Int4, Fp8
        What the sparse result is computed in. "exact": the error is that of the blocks left out alone. With another
        one it has both errors: that precision's own has to be within the bound.
    file : str or path, optional
        Where the result is written too.

    Returns
    -------
    SparseCalibration
        ``sparse(name)`` is the `Sparse` of a name, ``save(file)`` writes what ``Sparse(file=, name=)`` reads, and
        ``entries`` has shares, errors and kept blocks. Tensors without a name are named "attention".

    Raises
    ------
    ArgumentError
        Tensors in another form, and ``max_error`` that a head exceeds with all blocks, NaN in its tensors for instance.
    ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
        As `attention` and `sparse_blocks`.

    Notes
    -----
    The search takes errors to fall with the share: of each sample half of the rest is tried at a time, all heads in
    one call. At the end each sample is measured with the shares that were found, and heads above the bound get the next
    larger one, until none is. The host waits for each result. Outside of these tensors the error is whatever it is:
    other prompts and other lengths need samples of their own.
    """
    entries = _entries(tensors)
    bound = arguments.check_number(max_error, "max_error", _NAME)
    if not bound > 0.0:
        raise ArgumentError("max_error", "a number above 0", repr(max_error), function=_NAME)
    if not isinstance(by, str) or by not in SHARES:
        raise ArgumentError("by", "'topk' or 'cdf'", repr(by), function=_NAME)
    values.check_layout(layout, _NAME)
    if isinstance(precision, Auto) or precision == "auto" or getattr(precision, "sparse", None) is not None:
        raise ArgumentError("precision", "one that is known, without sparse=", repr(precision), function=_NAME)
    values.check_precision(precision, _NAME)
    size = check_block_size(block_size, _NAME)
    similarity = arguments.check_number(similarity, "similarity", _NAME)
    first = arguments.check_int(keep_first, "keep_first", _NAME, most=arguments.MAX_ROWS)
    causal = arguments.check_bool(causal, "causal", _NAME)
    if file is not None and not isinstance(file, (str, os.PathLike)):
        raise ArgumentError("file", "None, or the path of a file", repr(file), function=_NAME)
    if file is not None and (Path(file).is_dir() or not Path(file).resolve().parent.is_dir()):
        raise ArgumentError("file", "a file in a folder that exists", repr(file), function=_NAME)
    options = {"causal": causal, "layout": layout}
    search = _Search(
        bound, by, _ladder(shares, by), {"similarity": similarity, "keep_first": first, **options}, size,
        {"softmax_scale": softmax_scale, **options}, precision,
    )  # fmt: skip
    found = {name: search.heads(name, samples) for name, samples in entries}
    text = precision if isinstance(precision, str) else repr(precision)
    made = SparseCalibration(by, bound, similarity, size, first, causal, text, found)
    if file is not None:
        made.save(file)
    return made


def _ladder(shares: Any, by: str) -> tuple[float, ...]:
    if shares is None:
        return SHARES[by]
    if not isinstance(shares, (Sequence, np.ndarray)) or isinstance(shares, str) or not len(shares):
        raise ArgumentError("shares", "None, or numbers above 0, at most 1", repr(shares), function=_NAME)
    each = [arguments.check_number(x, "shares", _NAME) for x in shares]
    if not all(0.0 < x <= 1.0 for x in each):
        raise ArgumentError("shares", "numbers above 0, at most 1", repr(shares), function=_NAME)
    return tuple(sorted({*each, 1.0}))


def _is_triple(x: Any) -> bool:
    return isinstance(x, (tuple, list)) and len(x) == 3 and all(arguments.shape_of(y) is not None for y in x)


def _entries(tensors: Any) -> Iterator[tuple[str, Iterable[Triple]]]:
    """Names with their samples; raises before anything is computed for what is none of the forms."""
    expected = "(q, k, v), a sequence of them, or a mapping of names to either"
    named: Mapping[Any, Any] = tensors if isinstance(tensors, Mapping) else {"attention": tensors}
    if not named:
        raise ArgumentError("tensors", expected, "an empty mapping", function=_NAME)
    for name in named:
        if not isinstance(name, str):
            raise ArgumentError("tensors", f"{expected}, by str", f"the name {name!r}", function=_NAME)

    def samples_of(name: str) -> Iterable[Triple]:
        given = named[name]
        if _is_triple(given):
            return [tuple(given)]
        if isinstance(given, str) or not isinstance(given, Iterable) or arguments.shape_of(given) is not None:
            raise ArgumentError("tensors", expected, f"{type(given).__name__} of {name!r}", function=_NAME)
        if isinstance(given, Iterator):
            again = f"{expected}, that can be run through more than once"
            raise ArgumentError("tensors", again, f"an iterator of {name!r}", function=_NAME)
        return given

    return ((name, samples_of(name)) for name in named)


class _Search:
    """What all names have in common."""

    def __init__(
        self, bound: float, by: str, ladder: tuple[float, ...], rule: dict[str, Any], size: tuple[int, int],
        options: dict[str, Any], precision: Any,
    ) -> None:  # fmt: skip
        self.bound, self.by, self.ladder, self.rule, self.size = bound, by, ladder, rule, size
        self.options, self.precision = options, precision

    def heads(self, name: str, samples: Iterable[Triple]) -> CalibratedHeads:
        """The smallest shares of a name's heads."""
        at: npt.NDArray[np.int64] | None = None
        for q, k, v in self._checked(name, samples):
            exact = attention(q, k, v, **self.options)
            if at is None:
                at = np.zeros(q.shape[self._axis], dtype=np.int64)
            elif len(at) != q.shape[self._axis]:
                expected = f"samples of {name!r} with {len(at)} query heads, as the first has"
                raise ArgumentError("tensors", expected, f"{q.shape[self._axis]}", function=_NAME)
            # Nothing is known of a share below `low`; `high` is within the bound, or the last one.
            low, high = at.copy(), np.full_like(at, len(self.ladder) - 1)
            trial = low.copy()
            while (low < high).any():
                within = self._errors(q, k, v, exact, trial)[0] <= self.bound
                high = np.where(within, np.minimum(high, trial), high)
                low = np.where(within, low, np.maximum(low, trial + 1))
                low = np.minimum(low, high)
                trial = (low + high) // 2
            at = high
        if at is None:
            raise ArgumentError("tensors", "at least one (q, k, v) of each name", f"none of {name!r}", function=_NAME)
        while True:
            errors, kept, count, facts = self._measured(name, samples, at)
            above = ~(errors <= self.bound)
            if not above.any():
                break
            worst = int(np.argmax(above & (at == len(self.ladder) - 1)))
            if above[worst] and at[worst] == len(self.ladder) - 1:
                expected = f"at least what all blocks give: {errors[worst]:.4g} of head {worst} of {name!r}"
                raise ArgumentError("max_error", expected, repr(self.bound), function=_NAME)
            at = at + above
        shares = tuple(self.ladder[i] for i in at)
        return CalibratedHeads(shares, tuple(map(float, errors)), tuple(map(float, kept)), count, *facts)

    @property
    def _axis(self) -> int:
        return 2 if self.options["layout"] == "NHD" else 1

    def _checked(self, name: str, samples: Iterable[Triple]) -> Iterator[Triple]:
        for sample in samples:
            if not _is_triple(sample) or any(len(x.shape) != 4 for x in sample):
                expected = "(q, k, v) of four dimensions each"
                received = f"{type(sample).__name__} among those of {name!r}"
                raise ArgumentError("tensors", expected, received, function=_NAME)
            q, k, v = (x.detach() if getattr(x, "requires_grad", False) else x for x in sample)
            yield q, k, v

    def _measured(
        self, name: str, samples: Iterable[Triple], at: npt.NDArray[np.int64]
    ) -> tuple[Numbers, Numbers, int, tuple[int, int, int]]:
        """Errors and kept blocks of all samples with given shares, how many there are, and the last one's facts."""
        errors, kept = np.zeros(len(at)), np.zeros(len(at))
        count, facts = 0, (0, 0, 0)
        for q, k, v in self._checked(name, samples):
            error, share = self._errors(q, k, v, attention(q, k, v, **self.options), at)
            # NaN stays.
            errors, kept, count = np.maximum(errors, error), kept + share, count + 1
            seq = 3 - self._axis
            facts = (q.shape[seq], k.shape[seq], q.shape[-1])
        return errors, kept / max(count, 1), count, facts

    def _errors(self, q: Any, k: Any, v: Any, exact: Any, at: npt.NDArray[np.int64]) -> tuple[Numbers, Numbers]:
        """Relative L1 of each head, and the share of the visible blocks that it keeps."""
        shares: dict[str, Any] = {self.by: tuple(self.ladder[i] for i in at)}
        blocks = sparse_blocks(q, k, **shares, block_size=self.size, **self.rule)
        o = attention(q, k, v, block_mask=blocks, block_size=self.size, precision=self.precision, **self.options)
        others = tuple(axis for axis in range(4) if axis != self._axis)
        a, b = _float32(o), _float32(exact)
        difference, whole = (_on_host(abs(x).sum(axis=others)) for x in (a - b, b))
        with np.errstate(divide="ignore", invalid="ignore"):
            errors = np.where((difference == 0) & (whole == 0), 0.0, difference / whole)
        seq = 3 - self._axis
        visible = visible_count(q.shape[seq], k.shape[seq], self.size, self.rule["causal"])
        return errors, _on_host(blocks.sum(axis=(0, 2, 3))) / max(q.shape[0] * visible, 1)


def _float32(x: Any) -> Any:
    return x.float() if hasattr(x, "float") else x.astype("float32")


def _on_host(x: Any) -> Numbers:
    """A small array of any framework as NumPy's; waits."""
    if hasattr(x, "cpu"):  # torch's
        x = x.cpu().numpy()
    elif hasattr(x, "get"):  # CuPy's
        x = x.get()
    return np.asarray(x, dtype=np.float64)
