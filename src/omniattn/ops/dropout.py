"""Seed and offset of dropout: drawn, as users have them, and as kernels read them; `dropout_mask`."""

from __future__ import annotations

import contextlib
import numbers
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..checks.dropout import EXAMPLE, EXPECTED, NOTHING_DRAWN, check_p
from ..errors import ArgumentError, UnsupportedError
from ..frameworks import compiling
from ..plan.engine import is_describing
from ..problems import OPERANDS
from ..problems.dropout import DropoutProblem, dropout_of

_WORD = 0xFFFFFFFF


def of_forward(
    q: Any, p: Any, rng: Any, return_rng: Any, function: str
) -> tuple[float, Any, bool, Callable[[], object] | None]:
    """`of_call`, and ``return_rng``, which is checked before anything is drawn; and what undoes a draw.

    A call that is then refused runs within `undone_on_error`.
    """
    return_rng = arguments.check_bool(return_rng, "return_rng", function)
    torch, undo = sys.modules.get("torch"), None
    if rng is None and check_p(p, function) and not compiling() and torch is not None and isinstance(q, torch.Tensor):
        from ..frameworks.torch.dropout import undo_of_draw

        undo = None if is_describing() else undo_of_draw(q)
    return *of_call(q, p, rng, function), return_rng, undo


@contextlib.contextmanager
def undone_on_error(undo: Callable[[], object] | None) -> Iterator[None]:
    """Calls ``undo`` where the body raises: who drew for a call that is refused has drawn nothing."""
    try:
        yield
    except BaseException:
        if undo is not None:
            undo()
        raise


def of_call(q: Any, p: Any, rng: Any, function: str) -> tuple[float, Any]:
    """``dropout_p`` as a number, and ``dropout_rng`` as an array where q lies, drawn where it is None.

    Without dropout the array is what the caller gave.

    Raises
    ------
    ArgumentError
        p is no share below 1; rng is none, or has to be given, because q is of another library than torch.
    UnsupportedError
        q is quantized.
    """
    p = check_p(p, function)
    if not p:
        if rng is not None and not compiling():
            _check_kind(rng, function)
        return p, rng
    if q.__class__ in OPERANDS:
        raise UnsupportedError(f"{function}(): dropout_p={p:g} with quantized operands", instead="dropout_p=0.0")
    if isinstance(rng, (tuple, list)) and not compiling():  # NumPy's integers are integers to every library
        rng = [int(x) if not isinstance(x, bool) and isinstance(x, numbers.Integral) else x for x in rng]
    root = type(q).__module__.partition(".")[0]
    of_jax = root in ("jax", "jaxlib")
    if not (rng is None or of_jax or compiling()):
        _check_kind(rng, function)
    if root == "torch" or compiling() or arrays.needs_torch_operator((q,)):
        from ..frameworks.torch.dropout import rng_of

        if rng is None and not compiling() and is_describing():
            rng = (0, 0)  # what a call runs does not depend on it, and nothing is drawn for one that does not run
        return p, rng_of(q, rng, function)
    if of_jax:
        from ..frameworks.jax.dropout import rng_of as rng_of_jax

        return p, rng_of_jax(q, rng, function)
    if rng is None:
        raise ArgumentError("dropout_rng", EXPECTED, NOTHING_DRAWN, function=function, hint=EXAMPLE)
    if not isinstance(rng, (tuple, list)):
        return p, rng
    seed, offset = pair_of(rng, function)
    import numpy as np

    pair = np.array([seed, offset], dtype=np.uint64)
    if root == "cupy":
        with q.device:
            return p, sys.modules["cupy"].asarray(pair)
    return p, pair


def _check_kind(rng: Any, function: str) -> None:
    """Raise for what is neither a pair of integers nor an array or key of a library, whose numbers are not read."""
    if isinstance(rng, (tuple, list)):
        if len(rng) != 2:
            raise ArgumentError("dropout_rng", EXPECTED, f"{len(rng)} elements", function=function, hint=EXAMPLE)
        for x in rng:
            if not hasattr(x, "__dlpack__"):  # torch takes tensors
                arguments.check_int(x, "dropout_rng", function, most=2**64 - 1)
    elif not (hasattr(rng, "__dlpack__") or type(rng).__module__.partition(".")[0] in ("jax", "jaxlib")):
        raise ArgumentError("dropout_rng", EXPECTED, arguments.kind_of(rng), function=function, hint=EXAMPLE)


def pair_of(rng: Any, function: str) -> tuple[int, int]:
    """Seed and offset of a pair of integers."""
    if len(rng) != 2:
        raise ArgumentError("dropout_rng", EXPECTED, f"{len(rng)} elements", function=function)
    seed, offset = (arguments.check_int(x, "dropout_rng", function, most=2**64 - 1) for x in rng)
    return seed, offset


def integers_of(rng: Any, function: str) -> tuple[int, int]:
    """Seed and offset of a pair, or of an array on the CPU (elsewhere torch and CuPy copy it)."""
    import numpy as np

    if isinstance(rng, (tuple, list)):
        return pair_of(rng, function)
    _check_kind(rng, function)
    rng = rng.get() if type(rng).__module__.startswith("cupy") else rng.cpu() if hasattr(rng, "cpu") else rng
    try:
        words = np.ascontiguousarray(np.asarray(rng))
    except TypeError:  # a key of JAX
        hint = "The four words of a key are what attention(..., return_rng=True) returns"
        raise ArgumentError("dropout_rng", EXPECTED, str(rng.dtype), function=function, hint=hint) from None
    if words.dtype.kind not in "iu" or words.nbytes != 16 or words.ndim != 1:
        raise ArgumentError("dropout_rng", EXPECTED, f"{words.dtype} {words.shape}", function=function)
    seed, offset = (int(x) for x in words.view(np.uint64))
    return seed, offset


def reference_of(dropout: DropoutProblem, rng: Tensor) -> Any:
    """The reference's dropout of a call on the CPU. rng: seed and offset."""
    from ..reference.dropout import Dropout

    return Dropout(dropout.threshold, *integers_of(arrays.to_numpy(rng), "attention"))


def dropout_mask(shape: tuple[int, int, int, int], dropout_p: float, dropout_rng: Any) -> Any:
    """Which probabilities `attention` keeps under ``dropout_p`` and ``dropout_rng``: for tests.

    ::

        o = (softmax(S) * dropout_mask(...) / (1 - p)) @ v          p: dropout_p rounded to a multiple of 1/256

    Parameters
    ----------
    shape : (batch, num_q_heads, seqlen_q, seqlen_k)
        Of packed sequences: their number, and the longest ones. What a shorter shape has is the same.
    dropout_p : float
        At least 0 and less than 1.
    dropout_rng : (seed, offset) or array
        As `attention` takes it; a key of JAX as the four words that `attention` returned with ``return_rng``.

    Returns
    -------
    numpy.ndarray, bool
        True: kept. The byte of a probability is at least 256 p; it is one of Philox 4x32-10 (Salmon et al. 2011), keyed
        by seed and offset and counted by sequence, query head, query and key (docs/backward.md).

    Raises
    ------
    ArgumentError
        A bad shape, p or rng.
    """
    import numpy as np

    from ..reference.dropout import Dropout

    function = "dropout_mask"
    p = check_p(dropout_p, function)
    if not isinstance(shape, (tuple, list)) or len(shape) != 4:
        raise ArgumentError("shape", "(batch, num_q_heads, seqlen_q, seqlen_k)", repr(shape), function=function)
    extents = [arguments.check_int(n, "shape", function, most=arguments.MAX_ROWS) for n in shape]
    made = np.ones(extents, dtype=np.bool_)
    dropout = dropout_of(p)
    if dropout is not None:
        of_call = Dropout(dropout.threshold, *integers_of(dropout_rng, function))
        rows, keys = np.arange(extents[2]), np.arange(extents[3])
        for b in range(extents[0]):
            for h in range(extents[1]):
                made[b, h] = of_call.kept(b, h, rows, keys)
    return made
