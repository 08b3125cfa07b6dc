"""Calls on DTensors: each rank runs the call on its part, or `ring_attention` where the sequence is divided.

The placements of q decide, one for each dimension of the mesh. Those of k and v have to be the same; where they are
replicated, and q's batch or heads are divided, a rank takes its part of them, which needs no communication. Nothing is
ever redistributed that needs one: that is for the caller to say.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ...checks import values
from ...errors import ArgumentError, ShapeError, UnsupportedError
from ...plan.engine import Call
from .. import FUNCTIONS

#: What a dimension of q, and of k and v, is.
_DIMS = {
    ("attention", "NHD"): ("batch", "sequence", "heads", "head_dim"),
    ("attention", "HND"): ("batch", "heads", "sequence", "head_dim"),
    ("attention_varlen", "NHD"): ("rows", "heads", "head_dim"),
    ("attention_varlen", "HND"): ("heads", "rows", "head_dim"),
}
#: Of the LSE.
_LSE_DIMS = {"attention": ("batch", "heads", "sequence"), "attention_varlen": ("heads", "rows")}
#: The right dimensions of a mask.
_MASK_DIMS = ("batch", "heads", "sequence", "keys")
#: Arrays that a call on DTensors takes.
_TAKEN = ("q", "k", "v", "mask", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k")
_DIVIDED = ("batch", "heads", "sequence")
#: The module that puts `ring_attention` into FUNCTIONS. It stands above this one, and is loaded by its name where a
#: sequence is divided, like a plugin: nobody else pays for it.
_RING = "omniattn.distributed.ring"


@dataclass(frozen=True)
class _Mesh:
    """A mesh, and what q's placements divide on each of its dimensions.

    Attributes
    ----------
    function : str
    mesh : DeviceMesh
    roles : tuple of str
        "batch", "heads", "sequence" or "" for nothing, by dimension of the mesh.
    """

    function: str
    mesh: Any
    roles: tuple[str, ...]

    def ranks(self, role: str) -> int:
        """Ranks that divide it."""
        return math.prod(int(self.mesh.size(i)) for i, found in enumerate(self.roles) if found == role)

    def placements(self, dims: Sequence[str]) -> tuple[Any, ...]:
        """Of a tensor with these dimensions, divided as q."""
        return tuple(Shard(dims.index(role)) if role and role in dims else Replicate() for role in self.roles)


def run_sharded(call: Call) -> list[Any]:
    """Results of a call one of whose tensors is a DTensor: DTensors placed as q."""
    function, options = call.operation.name, call.options
    if function not in _LSE_DIMS:
        raise UnsupportedError(
            f"{function}() of DTensors", instead="each rank's call on to_local() of its tensors; attention() takes them"
        )
    values.check_layout(options.layout, function)
    names = call.operation.arrays
    given = {name: x for name, x in zip(names, call.objects, strict=True) if x is not None}
    if call.subject is not None:
        raise UnsupportedError(
            f"{function}(): a ScoreMod, which counts tokens and heads of the whole, with DTensors",
            instead="each rank's call on to_local() of its tensors",
        )
    _check_kinds(function, given)
    dims = _DIMS[function, options.layout]
    q, k, v = given["q"], given["k"], given["v"]
    for name in "qkv":
        if given[name].dim() != len(dims):
            expected = f"{len(dims)} dimensions ({', '.join(dims)})"
            raise ShapeError(name, expected, f"shape {tuple(given[name].shape)}", function=function)
    where = _Mesh(function, q.device_mesh, tuple(_role(function, q, dims, i) for i in range(q.device_mesh.ndim)))
    _check_extents(where, dims, q, k)
    local = {"q": _local(where, "q", q, q.placements, q.placements)}
    chosen = _kv_heads(where, dims, q, k)
    for name in "kv":
        local[name] = _keys(where, name, given[name], dims, chosen)
    for name in ("mask", "sinks", "cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"):
        if name in given:
            found = ("heads",) if name == "sinks" else _mask_dims(given[name], q, dims) if name == "mask" else ()
            local[name] = _spread(where, name, given[name], found)
    o, lse = _run(where, call, local, q, k, dims)
    results = [_whole(where, o, dims, (*q.shape[:-1], v.shape[-1]))]
    if options.return_lse:
        lse_dims = _LSE_DIMS[function]
        results.append(_whole(where, lse, lse_dims, tuple(q.shape[dims.index(dim)] for dim in lse_dims)))
    return results


def _check_kinds(function: str, given: dict[str, Any]) -> None:
    """DTensors alone, on one mesh, and nothing that the ranks' parts cannot serve."""
    first = next((x for x in (given.get(name) for name in "qkv") if isinstance(x, DTensor)), None)
    mesh = None if first is None else first.device_mesh
    for name, x in given.items():
        if name not in _TAKEN:
            raise UnsupportedError(
                f"{function}(): {name} with DTensors", instead="each rank's call on to_local() of its tensors"
            )
        if not isinstance(x, DTensor):
            expected = "a DTensor, as the others are; DTensor.from_local() or distribute_tensor() makes one"
            raise ArgumentError(name, expected, f"a {type(x).__name__}", function=function)
        if mesh is None or x.device_mesh != mesh:
            raise ArgumentError(name, f"a DTensor on {mesh}", f"one on {x.device_mesh}", function=function)
        for number, placement in enumerate(x.placements):
            if type(placement) not in (Shard, Replicate):
                expected = "Shard() or Replicate() on every dimension of the mesh"
                received = f"{placement!r} on dimension {number}"
                hint = "redistribute() makes such a one"
                raise ArgumentError(name, expected, received, function=function, hint=hint)
    for name in "qkv":
        if name not in given:
            raise ArgumentError(name, "a DTensor", "None", function=function)


def _role(function: str, q: Any, dims: tuple[str, ...], number: int) -> str:
    """What a dimension of the mesh divides of q."""
    placement = q.placements[number]
    if not placement.is_shard():
        return ""
    role = dims[placement.dim]
    if role in _DIVIDED:
        return role
    hint = "omniattn.distributed.ring_attention_varlen takes packed rows that are divided" if role == "rows" else None
    raise ArgumentError(
        "q", f"{' or '.join(dim for dim in dims if dim in _DIVIDED)} divided, or nothing",
        f"{placement!r}, its {role}, on dimension {number} of the mesh", function=function, hint=hint,
    )  # fmt: skip


def _check_extents(where: _Mesh, dims: tuple[str, ...], q: Any, k: Any) -> None:
    """Heads and sequences that divide evenly."""
    heads, at = where.ranks("heads"), dims.index("heads")
    if q.shape[at] % heads:
        expected = f"a multiple of {heads} heads, the ranks that divide them"
        raise ShapeError("q", expected, f"{q.shape[at]}", function=where.function)
    if "sequence" not in where.roles:
        return
    if where.roles.count("sequence") > 1:
        expected = "one dimension of the mesh that divides the sequence"
        received = f"{where.roles.count('sequence')}: {tuple(q.placements)}"
        raise ArgumentError("q", expected, received, function=where.function)
    ranks, at = where.ranks("sequence"), dims.index("sequence")
    for name, x in (("q", q), ("k", k)):
        if x.shape[at] % ranks:
            hint = "omniattn.distributed.ring_attention takes parts of any length"
            expected = f"a length that {ranks} ranks divide"
            raise ShapeError(name, expected, f"{x.shape[at]}", function=where.function, hint=hint)


def _kv_heads(where: _Mesh, dims: tuple[str, ...], q: Any, k: Any) -> tuple[int, int] | None:
    """The kv heads that this rank's query heads read, where ranks share them; None where the heads divide evenly."""
    ranks, at = where.ranks("heads"), dims.index("heads")
    heads_q, heads_kv = q.shape[at], k.shape[at]
    if heads_kv % ranks == 0:
        return None
    number = where.roles.index("heads")
    if where.roles.count("heads") > 1:
        expected = f"a multiple of {ranks} heads, the ranks that divide q's on several dimensions of the mesh"
        raise ShapeError("k", expected, f"{heads_kv}", function=where.function)
    if ranks % heads_kv or heads_q % heads_kv:
        expected = f"a multiple or a divisor of {ranks} heads, the ranks that divide q's {heads_q}"
        raise ShapeError("k", expected, f"{heads_kv}", function=where.function)
    begin = where.mesh.get_local_rank(number) * heads_kv // ranks
    return begin, begin + 1


def _keys(where: _Mesh, name: str, x: Any, dims: tuple[str, ...], chosen: tuple[int, int] | None) -> Any:
    """This rank's part of k or v."""
    placements, grads = list(where.placements(dims)), list(where.placements(dims))
    for number, role in enumerate(where.roles):
        have, wanted = x.placements[number], placements[number]
        if role == "heads" and chosen is not None:
            # Every rank has all kv heads, and a gradient of those that it reads.
            placements[number], grads[number] = Replicate(), Partial()
            if have.is_replicate():
                continue
            wanted = Replicate()
        elif have == wanted or (have.is_replicate() and role in ("batch", "heads")):
            continue
        expected = f"{wanted!r} on dimension {number} of the mesh, as q has {role or 'nothing'} divided there"
        if role in ("batch", "heads") and chosen is None:
            expected += ", or Replicate()"
        hint = f"{name}.redistribute() makes it so"
        raise ArgumentError(name, expected, f"{have!r}", function=where.function, hint=hint)
    found = _local(where, name, x, placements, grads)
    return found if chosen is None else found.narrow(dims.index("heads"), chosen[0], chosen[1] - chosen[0])


def _mask_dims(mask: Any, q: Any, dims: tuple[str, ...]) -> tuple[str, ...]:
    """What the dimensions of a mask are; "" for one that is broadcast."""
    names = _MASK_DIMS[max(4 - mask.dim(), 0) :]
    whole = dict(zip(dims, q.shape, strict=True))
    return tuple(
        name if name in whole and size == whole[name] and (size != 1 or whole[name] == 1) else ""
        for name, size in zip(names, mask.shape, strict=False)
    )


def _spread(where: _Mesh, name: str, x: Any, dims: tuple[str, ...]) -> Any:
    """This rank's part of a mask, sinks or numbers of sequences."""
    if name == "mask" and "sequence" in where.roles:
        raise UnsupportedError(
            f"{where.function}(): a mask over a sequence that ranks divide",
            instead="causal or window, or q, k and v with their heads divided",
        )
    placements = where.placements(dims)
    # Where it is the same for parts of q that differ, each rank has a summand of its gradient.
    grads = [
        Partial() if role and placement.is_replicate() else placement
        for role, placement in zip(where.roles, placements, strict=True)
    ]
    for number, (have, wanted) in enumerate(zip(x.placements, placements, strict=True)):
        if have != wanted and not have.is_replicate():
            expected = f"{wanted!r} or Replicate() on dimension {number} of the mesh"
            hint = f"{name}.redistribute() makes it so"
            raise ArgumentError(name, expected, f"{have!r}", function=where.function, hint=hint)
    return _local(where, name, x, placements, grads)


def _local(where: _Mesh, name: str, x: Any, placements: Sequence[Any], grads: Sequence[Any]) -> Any:
    """This rank's tensor of x in these placements, which are x's own or parts of what is replicated."""
    if tuple(x.placements) != tuple(placements):
        x = x.redistribute(placements=tuple(placements))
    found = x.to_local(grad_placements=tuple(grads))
    # Tensor parallel layers redistribute asynchronously: their tensors wait when an operator of torch reads them.
    return _Waited.apply(found) if hasattr(found, "trigger_wait") else found


class _Waited(torch.autograd.Function):
    """The tensor that an asynchronous collective operation writes, once it has."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.trigger_wait()

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


def _run(where: _Mesh, call: Call, local: dict[str, Any], q: Any, k: Any, dims: tuple[str, ...]) -> tuple[Any, Any]:
    """o, and LSE if it is asked for, of this rank's tensors."""
    said = {name: x for name, x in call.options._asdict().items() if x is not None}
    if "sequence" not in where.roles:
        found = FUNCTIONS[where.function](**local, **said, stream=call.stream)
        return found if call.options.return_lse else (found, None)
    for name, value in (("stream", call.stream), ("out_dtype", call.options.out_dtype)):
        if value is not None:
            expected = "None with a sequence that ranks divide"
            raise ArgumentError(name, expected, f"{value!r}", function=where.function)
    if "ring_attention" not in FUNCTIONS:
        import_module(_RING)
    at = dims.index("sequence")
    ring: Callable[..., Any] = FUNCTIONS["ring_attention"]
    found = ring(
        **local, **said, group=where.mesh.get_group(where.roles.index("sequence")), schedule="contiguous",
        seqlen_q=q.shape[at], seqlen_k=k.shape[at],
    )  # fmt: skip
    return found if call.options.return_lse else (found, None)


def _whole(where: _Mesh, x: Any, dims: tuple[str, ...], shape: tuple[int, ...]) -> Any:
    """The DTensor whose part on this rank is x, with the order of x's dimensions in memory."""
    order = sorted(range(x.dim()), key=lambda i: (-x.stride(i), i)) if x.numel() else list(range(x.dim()))
    stride, step = [0] * x.dim(), 1
    for i in reversed(order):
        stride[i], step = step, step * max(shape[i], 1)
    return DTensor.from_local(
        x, where.mesh, where.placements(dims), run_check=False, shape=torch.Size(shape), stride=tuple(stride)
    )
