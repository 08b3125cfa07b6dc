"""Problems of the backward: torch's autograd in float64 and in the kernels' dtype, and bounds between the two.

Everything here is torch on `DEVICE`. The yardstick is attention written out, differentiated by autograd, everything
that a framework stores between two operations in the kernel's dtype; its own error against float64 is the bound.
"""

from __future__ import annotations

import itertools
import math
import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

import omniattn as oa
from omniattn import testing
from omniattn.plan.engine import PLANS
from omniattn.registry import REGISTRY
from omniattn.testing.rounding import rounding_bound

from .kernel_cases import poisoned_outputs

DEVICE = "cuda"
NAMES = ("dq", "dk", "dv", "dsinks", "dmask")
Arrays = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Problem:
    """A call of the backward.

    Attributes
    ----------
    arrays : dict
        q, k, v and do in the caller's layout, and dlse, sinks, mask where they are there; on `DEVICE`.
    options : dict
        layout, causal, window, softmax_scale, softcap of the forward.
    packed : dict
        cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k; empty for a batch.
    mod : tuple, optional
        The `ScoreMod`, and a function of torch tensors that autograd can differentiate.
    blocks : tuple, optional
        A block mask (batch, heads, blocks of queries, blocks of keys), and (queries, keys) of a block.
    """

    arrays: Arrays
    options: dict[str, Any] = field(default_factory=dict)
    packed: dict[str, Any] = field(default_factory=dict)
    mod: tuple[Any, Any] | None = None
    blocks: tuple[torch.Tensor, tuple[int, int]] | None = None

    @property
    def dtype(self) -> str:
        return str(self.arrays["q"].dtype).removeprefix("torch.")

    @property
    def wanted(self) -> tuple[str, ...]:
        """Everything that this call has a gradient of."""
        mask = self.arrays.get("mask")
        additive = mask is not None and mask.dtype != torch.bool
        return ("dq", "dk", "dv", *(["dsinks"] if "sinks" in self.arrays else []), *(["dmask"] if additive else []))

    @property
    def forward_options(self) -> dict[str, Any]:
        """What forward and backward take alike."""
        given = {name: self.arrays[name] for name in ("mask", "sinks") if name in self.arrays}
        if self.blocks is not None:
            given |= dict(zip(("block_mask", "block_size"), self.blocks, strict=True))
        return {**self.options, **self.packed, **given, **({} if self.mod is None else {"score_mod": self.mod[0]})}


def make(
    *,
    batch: int = 1,
    seqlen_q: int = 130,
    seqlen_k: int | None = None,
    heads_q: int = 2,
    heads_kv: int | None = None,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    layout: str = "NHD",
    lengths: tuple[list[int], list[int]] | None = None,
    rest: int = 0,
    kind: str = "normal",
    mask: np.ndarray[Any, Any] | None = None,
    mask_dtype: str | None = None,
    sinks: Any = None,
    dlse: bool = False,
    mod: tuple[Any, Any] | None = None,
    blocks: tuple[np.ndarray[Any, Any], tuple[int, int]] | None = None,
    seed: int = 0,
    **options: Any,
) -> Problem:
    """A problem. lengths: of packed sequences, behind which there are ``rest`` rows that belong to none."""
    packed: dict[str, Any] = {}
    if lengths is not None:
        seqlen_q, seqlen_k = sum(lengths[0]) + rest, sum(lengths[1]) + rest
        for name, of in zip(("q", "k"), lengths, strict=True):
            packed[f"cu_seqlens_{name}"] = torch.tensor(
                [0, *itertools.accumulate(of)], dtype=torch.int32, device=DEVICE
            )
            packed[f"max_seqlen_{name}"] = max(of, default=0)
    sizes = {"batch": None if packed else batch, "heads_q": heads_q, "head_dim": head_dim, "layout": layout}
    q, k, v = testing.make_qkv(
        kind, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_kv=heads_kv, dtype=dtype, seed=seed, **sizes
    )
    do, _, _ = testing.make_qkv(seqlen_q=seqlen_q, dtype=dtype, seed=seed + 1000, **sizes)
    arrays = {name: put(x, dtype) for name, x in (("q", q), ("k", k), ("v", v), ("do", do))}
    rng = np.random.default_rng(seed)
    if dlse:
        shape = (heads_q, seqlen_q) if packed else (batch, heads_q, seqlen_q)
        arrays["dlse"] = put(rng.standard_normal(shape), "float32")
    if sinks is not None:
        arrays["sinks"] = put(np.asarray(sinks), "float32")
    if mask is not None:
        arrays["mask"] = put(mask, "bool" if mask.dtype == np.bool_ else mask_dtype or "float32")
    placed = None if blocks is None else (put(blocks[0], "bool"), blocks[1])
    return Problem(arrays, {"layout": layout, **options}, packed, mod, placed)


def put(x: Any, dtype: str) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(x)).to(DEVICE, getattr(torch, dtype))


# The yardstick


def naive(problem: Problem, dtype: torch.dtype) -> Arrays:
    """Gradients by autograd of attention written out, everything stored in ``dtype``; float64 is the reference."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = problem.arrays
    leaves = {name: x[name].detach().to(dtype).requires_grad_() for name in ("q", "k", "v")}
    if "dsinks" in problem.wanted:
        leaves["sinks"] = x["sinks"].detach().to(wide).requires_grad_()
    if "dmask" in problem.wanted:
        leaves["mask"] = x["mask"].detach().to(wide).requires_grad_()
    nhd = problem.options.get("layout", "NHD") == "NHD"
    head = -2 if nhd else -3

    def heads_first(t: torch.Tensor) -> torch.Tensor:
        return t.movedim(head, -3) if nhd else t

    q, k, v, do = (heads_first(t) for t in (leaves["q"], leaves["k"], leaves["v"], x["do"].to(dtype)))
    dlse = x.get("dlse")
    loss = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for b, rows, keys in _sequences(problem, q.shape[-2], k.shape[-2], q.shape[0]):
        at = () if problem.packed else (b,)
        o, lse = _attend(
            problem, b, *(t[(*at, slice(None), part)] for t, part in ((q, rows), (k, keys), (v, keys))), leaves, wide
        )
        here = (*at, slice(None), rows)
        loss = loss + (o.double() * do[here].double()).sum()
        if dlse is not None:
            finite = ~torch.isneginf(lse)
            loss = loss + (torch.where(finite, lse, 0).double() * torch.where(finite, dlse[here], 0).double()).sum()
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return {
        f"d{name}": torch.zeros_like(leaf) if gradient is None else gradient
        for (name, leaf), gradient in zip(leaves.items(), found, strict=True)
    }


def _sequences(problem: Problem, rows_q: int, rows_k: int, batch: int) -> list[tuple[int, slice, slice]]:
    if not problem.packed:
        return [(b, slice(0, rows_q), slice(0, rows_k)) for b in range(batch)]
    of_q, of_k = (problem.packed[f"cu_seqlens_{n}"].tolist() for n in ("q", "k"))
    pairs = zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True)
    return [(b, slice(*rows), slice(*keys)) for b, (rows, keys) in enumerate(pairs)]


def _attend(
    problem: Problem, b: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, leaves: Arrays, wide: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """o and LSE of one sequence, (heads, rows, dim)."""
    heads, sq, dim = q.shape
    sk, dtype, options = k.shape[-2], q.dtype, problem.options
    group = heads // max(k.shape[0], 1)
    k, v = (t.repeat_interleave(group, dim=0) for t in (k, v))
    scale = options.get("softmax_scale")
    s = (q @ k.mT) * (dim**-0.5 if scale is None else scale)
    if cap := options.get("softcap", 0.0):
        s = torch.tanh(s / cap) * cap
    at_q, at_k = (torch.arange(n, device=q.device) for n in (sq, sk))
    hidden = torch.zeros(heads, sq, sk, dtype=torch.bool, device=q.device)
    if problem.mod is not None:
        head = torch.arange(heads, device=q.device)[:, None, None]
        s, seen = problem.mod[1](s, b, head, at_q[:, None], at_k[None, :])
        hidden = hidden | ~seen
    left, right = options.get("window") or (-1, -1)
    right = 0 if options.get("causal") else right
    far = at_k[None, :] - at_q[:, None] - (sk - sq)
    if left >= 0:
        hidden = hidden | (far < -left)
    if right >= 0:
        hidden = hidden | (far > right)
    if problem.blocks is not None:
        shown, (per_q, per_k) = problem.blocks
        shown = shown[min(b, shown.shape[0] - 1)].repeat_interleave(per_q, -2).repeat_interleave(per_k, -1)
        hidden = hidden | ~shown[:, :sq, :sk]
    mask = problem.arrays.get("mask")
    if mask is not None:
        own = leaves.get("mask", mask)
        own = own.reshape((1,) * (4 - own.ndim) + tuple(own.shape))
        own = own[min(b, own.shape[0] - 1)]
        own = own[:, : sq if own.shape[1] > 1 else 1, : sk if own.shape[2] > 1 else 1]
        if own.dtype == torch.bool:
            hidden = hidden | ~own
        else:
            never = torch.isneginf(own)
            hidden = hidden | never
            s = s + torch.where(never, 0, own).to(dtype)
    sinks = leaves.get("sinks")
    row_sees = ~hidden.all(-1, keepdim=True)
    s = s.to(wide).masked_fill(hidden, -torch.inf)
    # Without any score a row has no softmax; 0 in its place, and nothing of what comes of it.
    s = torch.where(row_sees, s, 0)
    if sinks is not None:
        s = torch.cat([s, sinks[:, None, None].expand(heads, sq, 1)], dim=-1)
        s = torch.where(row_sees, s, torch.where(torch.arange(sk + 1, device=s.device) < sk, -torch.inf, s))
        lse = s.logsumexp(-1)
        p = s.softmax(-1)[..., :sk]
    else:
        lse = torch.where(row_sees[..., 0], s.logsumexp(-1) if sk else 0, -torch.inf)
        p = s.softmax(-1)
    p = torch.where(row_sees, p, 0).to(dtype)
    return p @ v, lse


# The kernels


def choose_from(monkeypatch: pytest.MonkeyPatch, family: str) -> None:
    """Forward and backward have the kernels of this GPU ("selected"), or those of every GPU ("generic")."""
    rows = tuple(spec for spec in REGISTRY if family == "selected" or not spec.arch_specific)
    for name in ("select.candidates", "select.backward", "plan.attention", "plan.backward"):
        module = sys.modules.get(f"omniattn.{name}")
        if hasattr(module, "REGISTRY"):
            monkeypatch.setattr(module, "REGISTRY", rows)
    PLANS.clear()


def mask_of(form: str, shape: tuple[int, ...], seed: int = 3) -> np.ndarray[Any, Any]:
    """A mask: bool, float, or -inf (added, and some of it -inf)."""
    rng = np.random.default_rng(seed)
    if form == "bool":
        return rng.random(shape) < 0.7
    mask = rng.standard_normal(shape).astype(np.float32)
    return np.where(rng.random(shape) < 0.7, mask, -np.inf).astype(np.float32) if form == "-inf" else mask


def run(
    problem: Problem, wanted: tuple[str, ...] | None = None, *, given: bool = True, poison: bool = True, **more: Any
) -> Arrays:
    """Forward and backward of the library; results and workspaces begin as NaN."""
    x = problem.arrays
    packed = bool(problem.packed)
    forward, backward = (
        (oa.attention_varlen, oa.attention_varlen_backward) if packed else (oa.attention, oa.attention_backward)
    )
    wanted = problem.wanted if wanted is None else wanted
    options = {**problem.forward_options, **more}
    with poisoned_outputs() if poison and DEVICE == "cuda" else nullcontext():
        deterministic = options.pop("deterministic", False)
        o, lse = forward(x["q"], x["k"], x["v"], return_lse=True, **options)
        into = {}
        if given:
            into = {f"d{n}": torch.full_like(x[n], math.nan) for n in ("q", "k", "v") if f"d{n}" in wanted}
        made = backward(
            x["do"], x["q"], x["k"], x["v"], o, lse, dlse=x.get("dlse"), wanted=wanted, deterministic=deterministic,
            **into, **options,
        )  # fmt: skip
    for name, result in zip(wanted, made, strict=True):
        if name in into:
            assert result is into[name]
    return dict(zip(wanted, made, strict=True))


def check(problem: Problem, label: str = "", wanted: tuple[str, ...] | None = None, **more: Any) -> Arrays:
    """Run a problem, and compare every gradient with float64."""
    made = run(problem, wanted, **more)
    exact, plain = naive(problem, torch.float64), naive(problem, problem.arrays["q"].dtype)
    softcap = problem.options.get("softcap", 0.0) > 0
    for name, gradient in made.items():
        slack = slack_of(problem, name)
        if name == "dv" and problem.options.get("softmax_scale") == 0.0 and gradient.numel():
            # All probabilities of a row are the same number, and so are the errors of rounding it.
            slack += 3 * unit_of(problem.dtype) * float(exact[name].double().square().mean().sqrt())
        compare(
            name, gradient, exact[name], plain[name], problem.dtype, f"{name} {label}", 3.0 if softcap else 2.0, slack
        )
    return made


def slack_of(problem: Problem, name: str) -> float:
    """Errors that the yardstick does not have.

    fp32 sums where exact gradients cancel: a row with one key has do.v = do.o, summed in two ways. And kernels take
    rowsum(do * o) of the o that the forward rounded, which moves the scores' gradients of a row together.
    """
    x = problem.arrays
    if name == "dv" or not x["q"].numel() or not x["k"].numel():
        return 1e-6
    dim = x["q"].shape[-1]
    do, k, v = (x[n].float().nan_to_num(0, 0, 0) for n in ("do", "k", "v"))
    sums = 2.0**-18 * 5 * math.sqrt(dim) * float(do.square().mean().sqrt()) * float(v.square().mean().sqrt())
    with torch.no_grad():
        o = _everything(problem, v)
        # Four standard deviations of a sum of rounding errors, which are 0.4 units in the mean square.
        of_row = float((do * o).square().sum(-1).max().sqrt()) * 4 * 0.4 * unit_of(problem.dtype)
        head = -2 if problem.options.get("layout", "NHD") == "NHD" else -3
        group, rows = x["q"].shape[head] // x["k"].shape[head], x["q"].numel() // dim
        scale = problem.options.get("softmax_scale")
        scale = dim**-0.5 if scale is None else abs(scale)
        if name == "dq":
            return 1e-6 + scale * (sums * float(k.abs().max()) + of_row * float(_everything(problem, k).abs().max()))
        if name == "dk":  # several rows can give a key most of their weight
            usual = float(x["q"].float().abs().max()) * (sums + 2 * of_row * math.sqrt(group))
            return 1e-6 + scale * max(usual, 1.5 * _shifted_keys(problem, (do * o).square().sum(-1).sqrt()))
    if name == "dsinks":
        return 1e-6 + sums + of_row * math.sqrt(rows / x["sinks"].numel())
    mask = x["mask"]
    one_for_all_keys = not mask.ndim or mask.shape[-1] == 1
    return 1e-6 + sums + of_row * (math.sqrt(max(1, rows / mask.numel())) if one_for_all_keys else 1)


def unit_of(dtype: str) -> float:
    """Largest relative rounding error."""
    return 2.0**-8 if dtype == "bfloat16" else 2.0**-11


def _shifted_keys(problem: Problem, of_rows: torch.Tensor) -> float:
    """Largest element of what errors of D make of dk, of which one with random signs is taken; ``of_rows`` units each.

    Channels with a bias make most rows attend to the same few keys: over a hundred such errors meet in one row of dk.
    An error is that of rounding o and that of rounding the probabilities that o is made of, which are no less.
    """
    x = problem.arrays
    sign = torch.randint(0, 2, x["q"].shape, generator=torch.Generator().manual_seed(0)).to(DEVICE) * 2 - 1
    errors = math.sqrt(2) * 0.4 * unit_of(problem.dtype) * of_rows[..., None] * x["q"].float().nan_to_num(0, 0, 0)
    v = torch.zeros_like(x["v"], dtype=torch.float32).requires_grad_()
    with torch.enable_grad():
        (found,) = torch.autograd.grad((_everything(problem, v) * errors * sign).sum(), v)
    return float(found.abs().max())


def _everything(problem: Problem, v: torch.Tensor) -> torch.Tensor:
    """What attention makes of other values, in fp32 and in the layout of q."""
    x = problem.arrays
    nhd = problem.options.get("layout", "NHD") == "NHD"
    q, k, v = (t.float().nan_to_num(0, 0, 0).movedim(-2, -3) if nhd else t.float() for t in (x["q"], x["k"], v))
    o = torch.zeros_like(q)
    extra = {name: x[name].float() for name in ("sinks",) if name in x}
    for b, rows, keys in _sequences(problem, q.shape[-2], k.shape[-2], q.shape[0]):
        at = () if problem.packed else (b,)
        parts = (t[(*at, slice(None), part)] for t, part in ((q, rows), (k, keys), (v, keys)))
        o[(*at, slice(None), rows)] = _attend(problem, b, *parts, extra, torch.float32)[0]
    return o.movedim(-3, -2) if nhd else o


def compare(
    name: str,
    gradient: torch.Tensor,
    exact: torch.Tensor,
    plain: torch.Tensor,
    dtype: str,
    label: str,
    factor: float,
    slack: float,
) -> None:
    """Largest error, relative L2 and mean signed error, each against that of the same computation in the dtype."""
    assert gradient.shape == exact.shape, label
    sums = name in ("dsinks", "dmask")
    assert str(gradient.dtype) == f"torch.{'float32' if sums else dtype}", label
    got, ref, base = (t.detach().double().cpu().numpy() for t in (gradient, exact, plain))
    assert np.isfinite(got).all(), f"{label}: {np.count_nonzero(~np.isfinite(got))} of {got.size} are not finite"
    if not got.size:
        return
    error, allowed = got - ref, np.nan_to_num(base - ref)
    # What the sums of a kernel cannot avoid: a rounding of the result, and fp32 sums of rounded products.
    unit = unit_of(dtype)
    rounding = rounding_bound(ref, dtype) + slack
    worst = np.abs(error).max()
    bound = factor * np.abs(allowed).max() + rounding
    assert worst <= bound, f"{label}: max |error| {worst:.3e} > {bound:.3e}"
    # `slack` is about the worst element; of many, the others are smaller.
    slack = slack if got.size < 4096 else slack / 6
    size, l2, l2_allowed = (float(np.sqrt(np.square(t).sum())) for t in (ref, error, allowed))
    bound = factor * l2_allowed + unit * size + slack * math.sqrt(got.size)
    assert l2 <= bound, f"{label}: L2 of the error {l2:.3e} > {bound:.3e}"
    # A tile that is left out, or counted twice, moves results in one direction. Errors of a row go together (that of
    # its rowsum(do * o)): rows, not elements, are independent.
    independent = max(1, got.size // got.shape[-1] if got.ndim > 1 else got.size)
    spread = 6 * max(l2_allowed, unit * size) / math.sqrt(got.size)
    mean, mean_allowed = abs(float(error.mean())), abs(float(allowed.mean()))
    bound = factor * mean_allowed + spread / math.sqrt(independent) + slack
    assert mean <= bound, f"{label}: mean error {mean:.3e} > {bound:.3e}"
    if size > 0:
        along, along_allowed = (abs(float((t * ref).sum())) / size**2 for t in (error, allowed))
        bound = (
            slack * math.sqrt(got.size) / size
            + factor * along_allowed
            + 6 * max(l2_allowed / size, unit) / math.sqrt(independent)
        )
        assert along <= bound, f"{label}: {along:.3e} of the result too much or too little > {bound:.3e}"


def equal_bits(a: Arrays, b: Arrays) -> bool:
    """Whether all gradients have the same bits; NaN equals nothing."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
