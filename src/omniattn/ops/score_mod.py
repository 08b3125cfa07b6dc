"""``ScoreMod``: what a user does to scores between product and softmax."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..arrays.identity import key_of
from ..checks.score_mod import check_array_names, check_reference, check_text
from ..errors import ArgumentError
from ..frameworks import FUNCTIONS


class ScoreMod:
    """A function of each score, compiled into the attention kernels.

    ::

        oa.attention(q, k, v, score_mod=oa.ScoreMod("score + slopes[h] * (k - q)", slopes=slopes))  # ALiBi

    Parameters
    ----------
    expression : str
        The new score, an expression of CUDA C++ over ``float score`` (``softmax_scale * q.k``, after softcap), ``int
        b, h, q, k`` (sequence, query head, query, key; q and k count from the start of the sequence) and the arrays.
        -inf (``-INFINITY``) hides the key. fp32 functions of CUDA (``expf``, ``tanhf``, ``fminf``) can be called.
    mask : str, optional
        Whether key k is visible to query q: an expression over ``b, h, q, k`` and the arrays. Tiles of keys that it
        hides are never loaded.
    reference : callable, optional
        ``reference(score, b, h, q, k, **arrays)`` for arrays on the CPU: the same by NumPy, -inf where a key is hidden.
        ``score`` is (rows, keys), ``q`` (rows, 1), ``k`` (1, keys), ``b`` and ``h`` are numbers.
    grad : str, optional
        The derivative of the new score by the old one, for backward passes: an expression over the same names, in which
        ``score`` is the score before the modification. Without it a backward pass raises. Where a key is hidden its
        value does not matter.
    reference_grad : callable, optional
        ``reference_grad(score, b, h, q, k, **arrays)``: the same as ``grad`` by NumPy, for arrays on the CPU.
    **arrays
        What the expressions call ``name[i]`` (one dimension), ``name(i, j)`` or ``name()`` (none): any DLPack array on
        the device of q, of up to 4 dimensions and any strides; float32, float16, bfloat16 (read as float), int32,
        int64, int8, uint8 or bool. Up to 8. Read where they are, at each call: change their contents between calls as
        you like.

    Attributes
    ----------
    expression, mask, reference, grad, reference_grad, arrays
        As given; ``arrays`` cannot be changed.

    Raises
    ------
    ArgumentError
        A text that is not one expression, a name that no expression can use, a reference that cannot be called so.
        What else is wrong with an expression the compiler says, at the first call: `CompileError` with the line.

    Notes
    -----
    An expression is code that runs on the GPU: do not take it from strangers. It is compiled by NVRTC at the first
    call, for each kernel that needs it, and kept in the disk cache by its text; other contents, shapes and strides of
    the arrays compile nothing. Indices are the caller's: what lies outside an array is read as any other memory.
    OMNIATTN_CHECK_SCORE_MOD=1 compares them with the extents, reports the first that is outside and ends the kernel.
    Gradients of the arrays are not computed: a torch tensor among them that requires one raises.
    It is evaluated for every pair of query and key of a tile, those that causal, a window or a mask hide included.
    """

    __slots__ = ("__weakref__", "_arrays", "_expression", "_grad", "_key", "_mask", "_reference", "_reference_grad")

    def __init__(
        self,
        expression: str,
        mask: str | None = None,
        reference: Callable[..., Any] | None = None,
        grad: str | None = None,
        reference_grad: Callable[..., Any] | None = None,
        **arrays: Any,
    ) -> None:
        self._expression = check_text(expression, "expression")
        self._mask = None if mask is None else check_text(mask, "mask")
        self._grad = None if grad is None else check_text(grad, "grad")
        check_array_names(tuple(arrays))
        self._reference = check_reference(reference, arrays)
        self._reference_grad = check_reference(reference_grad, arrays, "reference_grad")
        for name, x in arrays.items():
            if x is None:
                raise ArgumentError(name, "an array", "None", function="ScoreMod")
        self._arrays = dict(arrays)
        self._key = key_of(self)

    @property
    def expression(self) -> str:
        """The new score."""
        return self._expression

    @property
    def mask(self) -> str | None:
        """Which keys are visible."""
        return self._mask

    @property
    def reference(self) -> Callable[..., Any] | None:
        """The same by NumPy."""
        return self._reference

    @property
    def grad(self) -> str | None:
        """The derivative of the new score by the old one."""
        return self._grad

    @property
    def reference_grad(self) -> Callable[..., Any] | None:
        """The derivative by NumPy."""
        return self._reference_grad

    @property
    def arrays(self) -> Mapping[str, Any]:
        """Arrays by name."""
        return MappingProxyType(self._arrays)

    @property
    def facts(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """What an operator gets of it: key, texts and names; then the arrays. torch.compile can read it."""
        return (self._key, self._expression, self._mask, self._grad, (*self._arrays,)), (*self._arrays.values(),)

    @property
    def key(self) -> int:
        """The object's number in this process."""
        return self._key

    def __repr__(self) -> str:
        texts = [f"{name}={text!r}" for name, text in (("mask", self.mask), ("grad", self.grad)) if text is not None]
        parts = [repr(self.expression), *texts, *self.arrays]
        return f"ScoreMod({', '.join(parts)})"


FUNCTIONS["ScoreMod"] = ScoreMod
