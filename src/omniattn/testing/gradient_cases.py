"""The kernels of the backward: gradients beside those of the NumPy reference in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import omniattn
from omniattn.reference import attention, attention_varlen
from omniattn.reference import backward as reference
from omniattn.registry import KernelSpec
from omniattn.testing.expected import Values
from omniattn.testing.frameworks import Framework
from omniattn.testing.rounding import round_to

#: Operations of the registry that have these cases.
BACKWARD_OPS: tuple[str, ...] = (
    "attention_backward", "attention_backward_dq", "attention_backward_prepare", "attention_backward_finish",
)  # fmt: skip

#: Largest relative L2 error, and largest error relative to the largest gradient. Products round P and dS to 16 bits.
TOLERANCE: dict[str, tuple[float, float]] = {"bfloat16": (1.5e-2, 5e-2), "float16": (2e-3, 8e-3)}

_EXTENTS: dict[str, tuple[int, int, int, int, int]] = {  # batch, seqlen_q, seqlen_k, num_q_heads, num_kv_heads
    "short": (2, 150, 203, 6, 2),
    "long": (1, 513, 700, 2, 1),
}
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("long", {}),
    "causal": ("short", {"causal": True}),
    "window, sinks": ("short", {"window": (37, 11), "sinks": True}),
    "softcap": ("short", {"softcap": 3.0, "causal": True}),
    "additive mask and its gradient": ("short", {"mask": True}),
    "packed": ("short", {"packed": True, "causal": True}),
    "packed, softcap": ("short", {"packed": True, "softcap": 3.0}),
    "mask of keys": ("short", {"keys": True}),
    "blocks": ("long", {"blocks": True}),
    "blocks, causal": ("short", {"blocks": True, "causal": True}),
    "blocks, softcap": ("short", {"blocks": True, "softcap": 3.0, "window": (120, 40)}),
}
#: Queries and keys of a block.
_BLOCK = 64
_STARTS_Q, _STARTS_K = [0, 70, 70, 150], [0, 131, 136, 203]


@dataclass(frozen=True)
class GradientCase:
    """A call of ``attention_backward`` or ``attention_varlen_backward``: `testing.rows.RowCase`.

    Attributes
    ----------
    name : str
        In ``_OPTIONS``.
    dtype : str
    head_dim : int
    dq : bool
        Whether dq is wanted alone, the same at every run; not a part of the numbers.
    ordered : bool
        Whether dq is wanted with the same bits at every run, beside the others; not a part of the numbers.
    """

    name: str
    dtype: str
    head_dim: int
    dq: bool = field(default=False, compare=False)
    ordered: bool = field(default=False, compare=False)

    def prepare(self) -> tuple[dict[str, Values], dict[str, Any], dict[str, Values]]:
        """Arrays by name, options, gradients."""
        extents, options = _OPTIONS[self.name]
        batch, seqlen_q, seqlen_k, heads, kv_heads = _EXTENTS[extents]
        options = dict(options)
        packed, masked, keys, sinks, blocks = (
            options.pop(name, False) for name in ("packed", "mask", "keys", "sinks", "blocks")
        )
        rng = np.random.default_rng((self.head_dim, len(self.name)))
        lead = () if packed else (batch,)

        def normal(*shape: int) -> Values:
            made: Values = rng.standard_normal((*lead, *shape)).astype(np.float32)
            return round_to(made, self.dtype)

        made = {
            "do": normal(seqlen_q, heads, self.head_dim),
            "q": normal(seqlen_q, heads, self.head_dim),
            "k": normal(seqlen_k, kv_heads, self.head_dim),
            "v": normal(seqlen_k, kv_heads, self.head_dim),
        }
        arrays: dict[str, Any] = {}
        if masked:
            arrays["mask"] = rng.standard_normal((1, heads, seqlen_q, seqlen_k)).astype(np.float32)
        if keys:
            bias = rng.standard_normal((batch, 1, 1, seqlen_k))
            arrays["mask"] = np.where(rng.random(bias.shape) < 0.8, bias, -np.inf).astype(np.float32)
        hidden: dict[str, Any] = {}
        if blocks:
            shown = rng.random((batch, heads, -(-seqlen_q // _BLOCK), -(-seqlen_k // _BLOCK))) < 0.5
            shown[:, :, 1], shown[..., 2] = False, False  # rows that attend to nothing, keys that nobody sees
            hidden["block_mask"] = shown
            # What the reference is told in its place.
            arrays["mask"] = shown.repeat(_BLOCK, 2)[:, :, :seqlen_q].repeat(_BLOCK, 3)[..., :seqlen_k]
        if sinks:
            arrays["sinks"] = rng.standard_normal(heads).astype(np.float32)
        if packed:
            arrays |= {f"cu_seqlens_{x}": np.array(s, dtype=np.int32) for x, s in (("q", _STARTS_Q), ("k", _STARTS_K))}
        forward = attention_varlen if packed else attention
        q, k, v = (made[name].astype(np.float64) for name in "qkv")
        o, lse = forward(q, k, v, **arrays, **options, compute_dtype=np.float64)
        made |= {"o": round_to(o.astype(np.float32), self.dtype), "lse": lse.astype(np.float32)}
        backward = reference.attention_varlen_backward if packed else reference.attention_backward
        wanted = ("dq", "dk", "dv", *(("dsinks",) if sinks else ()), *(("dmask",) if masked else ()))
        gradients = backward(
            made["do"].astype(np.float64), q, k, v, o, lse, **arrays, **options, wanted=wanted, compute_dtype=np.float64
        )
        if blocks:
            del arrays["mask"]
            options["block_size"] = _BLOCK
        return {**made, **arrays, **hidden}, {**options, "wanted": wanted}, gradients

    def check(
        self, framework: Framework, prepared: tuple[dict[str, Values], dict[str, Any], dict[str, Values]]
    ) -> tuple[float, str]:
        """Call the public function and compare."""
        numbers, options, expected = prepared
        own = dict.fromkeys(("lse", "mask", "sinks"), "float32") | dict.fromkeys(
            ("cu_seqlens_q", "cu_seqlens_k"), "int32"
        )
        own["block_mask"] = "bool"
        arrays = {name: framework.array(x, own.get(name, self.dtype)) for name, x in numbers.items()}
        if self.dq:
            options = {**options, "wanted": ("dq",)}
        elif self.ordered:  # a mask's own gradient, of a mask that is broadcast, comes in no fixed order
            options = {**options, "wanted": tuple(name for name in options["wanted"] if name != "dmask")}
        options = {**options, "deterministic": self.dq or self.ordered}
        packed = "cu_seqlens_q" in arrays
        function: Callable[..., Any] = omniattn.attention_backward
        if packed:
            function = omniattn.attention_varlen_backward
        if packed:
            longest = {f"max_seqlen_{x}": int(max(np.diff(s))) for x, s in (("q", _STARTS_Q), ("k", _STARTS_K))}
            options = {**options, **longest}
        positional = [arrays.pop(name) for name in ("do", "q", "k", "v", "o", "lse")]
        results = function(*positional, **arrays, **options)
        framework.synchronize()
        results = results if isinstance(results, tuple) else (results,)
        worst, notes = 0.0, []
        for name, result in zip(options["wanted"], results, strict=True):
            ratio = _ratio(framework.to_numpy(result), expected[name], self.dtype)
            worst = max(worst, ratio)
            if not ratio <= 1.0:
                notes.append(f"{name}: {ratio:.2f} of the tolerance")
        return worst, "; ".join(notes)


def _ratio(got: Values, expected: Values, dtype: str) -> float:
    """Error as a fraction of its tolerance; infinite if something is not finite."""
    if got.shape != expected.shape or not (np.isfinite(got).all() and np.isfinite(expected).all()):
        return float("inf")
    of_norm, of_largest = TOLERANCE[dtype]
    error = got.astype(np.float64) - expected
    norm, largest = float(np.linalg.norm(expected)), float(np.abs(expected).max(initial=0.0))
    if largest == 0.0:
        return float("inf") if error.any() else 0.0
    return max(float(np.linalg.norm(error)) / (norm * of_norm), float(np.abs(error).max()) / (largest * of_largest))


def gradient_cases(spec: KernelSpec) -> tuple[GradientCase, ...]:
    """The cases of a row; it need not take all of them."""
    head_dim = spec.head_dim if spec.op in BACKWARD_OPS[:2] else 64
    dq, ordered = spec.op == "attention_backward_dq", spec.ordered_dq
    return tuple(GradientCase(name, spec.dtype, head_dim, dq, ordered) for name in _OPTIONS)
