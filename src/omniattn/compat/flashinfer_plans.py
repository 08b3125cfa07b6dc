"""What `compat.flashinfer` is made of: options that are served, index arrays as block tables, LSE in base 2."""

from __future__ import annotations

import math
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch

from .. import arguments
from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from . import common

LOG2E = math.log2(math.e)
LN2 = math.log(2)
LAYOUTS = ("NHD", "HND")
#: Kernels of the original whose arguments and results are those of the default.
BACKENDS = ("auto", "fa2", "fa3")
_DTYPES = (torch.float16, torch.bfloat16)
#: Pages in 8 bits, for q in 16.
E4M3 = torch.float8_e4m3fn
#: Entries of the memory of a CUDA graph's tables, at least: half of the 8 MiB that each wrapper of the original has.
_ENTRIES = 2**20


#: What functions of pages, and of states, call arguments of those that they call.
OF_CACHE = {"k": "paged_kv_cache", "v": "paged_kv_cache"}
OF_STATES = {"v_a": "v", "v_b": "v", "s_a": "s", "s_b": "s"}


class Shape(NamedTuple):
    """What plan() says of the tensors of run()."""

    heads: int
    kv_heads: int
    head_dim: int
    head_dim_vo: int
    dtype: torch.dtype
    kv_dtype: torch.dtype


def check_layout(kv_layout: Any, function: str) -> str:
    if not isinstance(kv_layout, str) or kv_layout not in LAYOUTS:
        raise ArgumentError("kv_layout", " or ".join(map(repr, LAYOUTS)), repr(kv_layout), function=function)
    return kv_layout


def check_backend(backend: Any, function: str) -> None:
    """Those of the original that take the same arguments; which kernels run is chosen here by the call."""
    if not isinstance(backend, str) or backend not in BACKENDS:
        raise UnsupportedError(
            f"{function}(): backend={backend!r}; the kernels are those of this package",
            instead=" or ".join(f"backend={name!r}" for name in BACKENDS),
        )


def check_encoding(pos_encoding_mode: Any, function: str) -> None:
    """Positions are not encoded here. rope_scale and rope_theta mean nothing then, as in the original."""
    if not isinstance(pos_encoding_mode, str) or pos_encoding_mode != "NONE":
        raise UnsupportedError(
            f"{function}(): pos_encoding_mode={pos_encoding_mode!r}; the kernels take q and k as they are",
            instead="omniattn.append(cos=, sin=), which rotates k; for ALiBi a ScoreMod of omniattn",
        )


def refuse_reduction(use_fp16_qk_reduction: Any, function: str) -> None:
    common.refuse(
        function, "scores are summed up in fp32", "use_fp16_qk_reduction=False",
        use_fp16_qk_reduction=(use_fp16_qk_reduction, False),
    )  # fmt: skip


def refuse_jit(function: str, jit_args: Any, jit_kwargs: Any = None, variant_owns_mask: Any = False) -> None:
    common.refuse(
        function, "there are no modules of the original", "a ScoreMod of omniattn.attention_with_kvcache",
        jit_args=(jit_args, None), jit_kwargs=(jit_kwargs, None), variant_owns_mask=(variant_owns_mask, False),
    )  # fmt: skip


def refuse_token_scales(use_token_head_sf: Any, function: str) -> None:
    common.refuse(
        function, "pages of 8 bits have one k_scale and one v_scale", "use_token_head_sf=False",
        use_token_head_sf=(use_token_head_sf, False),
    )  # fmt: skip


def refuse_masks(function: str, **given: Any) -> None:
    """Masks and scoring of items, by wrappers."""
    common.refuse(
        function, "keys are hidden by causal and window_left only",
        "a ScoreMod with mask= for omniattn.attention_with_kvcache; single_prefill_with_kv_cache takes a custom_mask",
        **{name: (value, 0 if name == "token_pos_in_items_len" else None) for name, value in given.items()},
    )  # fmt: skip


def refuse_cudnn(function: str, **given: Any) -> None:
    common.refuse(
        function, "an argument of the original's cuDNN backend", "qo_indptr and kv_indptr",
        **{name: (value, None) for name, value in given.items()},
    )  # fmt: skip


def refuse_run(function: str, more: tuple[Any, ...], **given: Any) -> None:
    """What run() has for other kernels of the original."""
    if more:
        raise UnsupportedError(f"{function}(): {len(more)} more positional arguments; there are no modules of the "
                               "original that take them", instead="keyword arguments")  # fmt: skip
    common.refuse(
        function, "16-bit K and V are read as they are, and no probability is left out", None,
        **{name: (value, None) for name, value in given.items()},
    )  # fmt: skip


def asks_invariance(fixed_split_size: Any, disable_split_kv: Any, function: str) -> bool:
    """Whether results are not to depend on the batch. 0 and -1 are no size, as in the original."""
    size = (
        -1
        if fixed_split_size is None
        else arguments.check_int(fixed_split_size, "fixed_split_size", function, least=-1)
    )
    return common.flag(disable_split_kv, "disable_split_kv", function) or size > 0


def dtype_of(value: Any, name: str, function: str) -> torch.dtype:
    """A torch dtype, or the name of one."""
    made = getattr(torch, value, None) if isinstance(value, str) else value
    if not isinstance(made, torch.dtype):
        raise DtypeError(name, "a torch.dtype, or its name", repr(value), function=function)
    return made


def check_shape(
    function: str, heads: Any, kv_heads: Any, head_dim: Any, head_dim_vo: Any, q: Any, kv: Any, o: Any,
    names: tuple[str, str], paged: bool = True,
) -> Shape:  # fmt: skip
    """Heads, channels and element types of a plan; ``names``: what the caller knows both head dims as."""
    dtype = dtype_of(q, "q_data_type", function)
    if dtype not in _DTYPES:
        raise UnsupportedError(f"{function}(): q_data_type={dtype}", instead=" or ".join(map(str, _DTYPES)))
    kv_dtype = dtype if kv is None else dtype_of(kv, "kv_data_type", function)
    for name, given, own in (
        ("kv_data_type", kv_dtype, (dtype, E4M3) if paged else (dtype,)),
        ("o_data_type", dtype if o is None else dtype_of(o, "o_data_type", function), (dtype,)),
    ):
        if given not in own:
            raise UnsupportedError(
                f"{function}(): {name}={given} with q_data_type={dtype}", instead=" or ".join(map(str, own))
            )
    heads = arguments.check_int(heads, "num_qo_heads", function, least=1)
    kv_heads = arguments.check_int(kv_heads, "num_kv_heads", function, least=1)
    if heads % kv_heads:
        raise ArgumentError("num_qo_heads", f"a multiple of num_kv_heads, {kv_heads}", f"{heads}", function=function)
    dims = []
    for name, given in zip(names, (head_dim, head_dim if head_dim_vo is None else head_dim_vo), strict=True):
        dim = arguments.check_int(given, name, function, least=1)
        step = 16 // kv_dtype.itemsize
        most = arguments.MAX_HEAD_DIM if step == 8 else arguments.MAX_QUANTIZED_HEAD_DIM
        if dim % step or dim > most:
            instead = f"a multiple of {step} from {step} to {most}"
            raise UnsupportedError(f"{function}(): {name}={dim} of {kv_dtype}", instead=instead)
        dims.append(dim)
    return Shape(heads, kv_heads, dims[0], dims[1], dtype, kv_dtype)


def without_gradient(x: torch.Tensor) -> torch.Tensor:
    """The tensor as the original takes it, whose results have no gradients."""
    return x.detach() if x.requires_grad else x


def check_query(q: Any, shape: Shape, rows: int, device: torch.device, function: str) -> torch.Tensor:
    """q of run(), which is what plan() was told, without gradients."""
    if not isinstance(q, torch.Tensor) or q.dtype is not shape.dtype or q.device != device:
        common.check_tensors(function, q=q)
        if q.dtype is not shape.dtype:
            raise DtypeError("q", f"{shape.dtype}, as plan() was told", q.dtype, function=function)
        raise ArgumentError("q", f"a tensor on {device}, like the workspace", f"{q.device}", function=function)
    if q.shape != (rows, shape.heads, shape.head_dim):
        expected = f"shape {(rows, shape.heads, shape.head_dim)}, as plan() was told"
        raise ShapeError("q", expected, f"{tuple(q.shape)}", function=function)
    return without_gradient(q)


def planes(pool: Any, layout: str, function: str) -> tuple[torch.Tensor, torch.Tensor]:
    """K's and V's pages; of one token, their dimension may be left out."""
    if isinstance(pool, torch.Tensor):
        if pool.ndim not in (4, 5) or pool.shape[1] != 2:
            raise ShapeError("paged_kv_cache", "(pages, 2, ...) of 5 dimensions, or 4 where a page is one token",
                             f"shape {tuple(pool.shape)}", function=function)  # fmt: skip
        k, v = pool.unbind(1)
    else:
        if not isinstance(pool, (tuple, list)) or len(pool) != 2:
            expected = "a tensor (pages, 2, ...), or two of them, (k, v)"
            raise ArgumentError("paged_kv_cache", expected, type(pool).__name__, function=function)
        k, v = pool
        common.check_tensors(function, paged_kv_cache=k)
        common.check_tensors(function, paged_kv_cache=v)
    if k.ndim == v.ndim == 3:
        at = -3 if layout == "NHD" else -2
        k, v = k.unsqueeze(at), v.unsqueeze(at)
    return without_gradient(k), without_gradient(v)


def check_pages(k: torch.Tensor, layout: str, shape: Shape, page: int, function: str) -> None:
    """The pages of run() are those that plan() counted."""
    if k.dtype is not shape.kv_dtype:
        raise DtypeError("paged_kv_cache", f"{shape.kv_dtype}, as plan() was told", k.dtype, function=function)
    own = (page, shape.kv_heads) if layout == "NHD" else (shape.kv_heads, page)
    if k.ndim != 4 or k.shape[1:] != (*own, shape.head_dim):
        expected = f"shape {('pages', *own, shape.head_dim)} of K and of V in {layout}, as plan() was told"
        raise ShapeError("paged_kv_cache", expected, f"{tuple(k.shape)} of K", function=function)


# Scales and LSE


def softcap_of(value: Any, function: str) -> float:
    """0 for none, which None and numbers up to 0 are too."""
    return 0.0 if value is None else max(arguments.check_number(value, "logits_soft_cap", function), 0.0)


def factor(value: Any, name: str, function: str) -> float:
    """A scale of run() that is one number, 1 for None."""
    if value is None:
        return 1.0
    if isinstance(value, torch.Tensor):
        raise UnsupportedError(
            f"{function}(): {name} in a tensor, which only K and V in e4m3 pages have",
            instead="one number",
        )
    return arguments.check_number(value, name, function)


def scales_of_pages(shape: Shape, given: dict[str, Any], function: str) -> tuple[Any, Any]:
    """k_scale and v_scale of run() that are tensors, as `from_arrays` takes them; None and None without any.

    Those that are numbers are none here: `factor` has them.
    """
    found = {name: x for name, x in given.items() if isinstance(x, torch.Tensor)}
    if not found or shape.kv_dtype != E4M3:
        return None, None
    heads = shape.kv_heads
    for name, x in found.items():
        if tuple(x.shape) not in ((), (1,), (heads,)):
            expected = f"shape (1,) or ({heads},), one for all or one of each kv head"
            raise ShapeError(name, expected, f"{tuple(x.shape)}", function=function)
        if x.dtype != torch.float32:
            raise DtypeError(name, "torch.float32", x.dtype, function=function)
    k, v = (found.get(name) for name in given)
    if k is None or v is None:
        there = k if v is None else v
        assert there is not None
        ones = torch.ones_like(there)
        k, v = (ones if x is None else x for x in (k, v))
    if k.shape != v.shape or k.stride() != v.stride():
        k, v = (x.expand(heads).contiguous() for x in (k, v))
    return k, v


def scaled(out: torch.Tensor, v_scale: float) -> torch.Tensor:
    """The output times v's scale, in place, as the original has it."""
    return out if v_scale == 1.0 else out.mul_(v_scale)


def lse_as_asked(
    lse: torch.Tensor, rows: int, heads: int, given: Any, base: Any = "log2", layout: Any = "NH"
) -> torch.Tensor:
    """LSE in the original's base and order from ours: (heads, rows), or (batch, heads, queries) of as many rows.

    -inf stays -inf.
    """
    lse = lse.transpose(0, 1) if lse.ndim == 2 else lse.transpose(1, 2).reshape(rows, heads)
    if layout == "HN":
        lse = lse.transpose(0, 1)
    into = lse.new_empty(lse.shape) if given is None else given
    return torch.mul(lse, LOG2E if base == "log2" else 1.0, out=into)


def check_lse(given: Any, rows: int, heads: int, base: Any, layout: Any, device: torch.device, function: str) -> None:
    """Before anything is launched."""
    for name, value, choices in (("lse_base", base, ("log2", "ln")), ("lse_layout", layout, ("NH", "HN"))):
        if value not in choices:
            raise ArgumentError(name, " or ".join(map(repr, choices)), repr(value), function=function)
    if given is None:
        return
    common.check_tensors(function, lse=given)
    shape = (rows, heads) if layout == "NH" else (heads, rows)
    if tuple(given.shape) != shape:
        raise ShapeError("lse", f"shape {shape}", f"{tuple(given.shape)}", function=function)
    if given.dtype != torch.float32:
        raise DtypeError("lse", "torch.float32", given.dtype, function=function)
    if given.device != device:
        raise ArgumentError("lse", f"a tensor on {device}, like q", f"{given.device}", function=function)


# Index arrays


def check_numbers(x: Any, name: str, extent: int | None, function: str) -> torch.Tensor:
    """An int32 tensor of one dimension, on the host or on a device."""
    common.check_tensors(function, **{name: x})
    if x.dtype != torch.int32:
        raise DtypeError(name, "torch.int32", x.dtype, function=function)
    if x.ndim != 1 or (extent is not None and x.shape[0] != extent):
        expected = "one dimension" if extent is None else f"shape ({extent},)"
        raise ShapeError(name, expected, f"{tuple(x.shape)}", function=function)
    return x


def check_integers(x: Any, name: str, function: str) -> None:
    """Numbers of any integer type, which are copied."""
    common.check_tensors(function, **{name: x})
    if x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool:
        raise DtypeError(name, "integers", x.dtype, function=function)


def check_starts(x: Any, name: str, function: str, extent: int | None = None) -> torch.Tensor:
    """Where each request begins, and the end of the last one."""
    if extent is None and isinstance(x, torch.Tensor) and x.ndim == 1 and x.shape[0] < 1:
        raise ShapeError(name, "shape (batch + 1,)", "(0,)", function=function)
    return check_numbers(x, name, extent, function)


def check_mirror(mirror: Any, name: str, function: str, device: torch.Tensor) -> torch.Tensor:
    """What plan() reads on the host: the tensor itself, or the copy of it that the caller has there."""
    if mirror is None:
        return device
    made = check_starts(mirror, name, function, device.shape[0])
    if made.device.type != "cpu":
        raise ArgumentError(name, "a tensor on the host", f"one on {made.device}", function=function)
    return made


def counts_on_host(starts: torch.Tensor, name: str, function: str, end: int | None = None) -> np.ndarray[Any, Any]:
    """How many each request has. Waits for the device where ``starts`` lies on one.

    end: pages that there are, of which those of the first request need not be the first; None of rows, which begin at
    0.
    """
    numbers = starts.detach().to("cpu").numpy()
    counts: np.ndarray[Any, Any] = numbers[1:] - numbers[:-1]
    if (end is None and numbers[0] != 0) or numbers[0] < 0 or (counts.size and counts.min() < 0):
        raise ArgumentError(name, "0, and never less than before", f"{numbers.tolist()}", function=function)
    if end is not None and numbers[-1] > end:
        raise ArgumentError(name, f"at most the {end} pages that are named", f"{numbers[-1]}", function=function)
    return counts


def check_bound(given: Any, name: str, longest: int, of: str, function: str) -> None:
    """An integer, where one is given, that nothing on the host exceeds."""
    if given is not None and longest > arguments.check_int(given, name, function):
        raise ArgumentError(name, f"at least {longest}, as {of} says", repr(given), function=function)


def lengths_of(starts: torch.Tensor, last_page_len: torch.Tensor, page: int) -> torch.Tensor:
    """Tokens of each request, 0 of one without pages, whatever its last_page_len says."""
    pages = starts.diff()
    return torch.where(pages > 0, (pages - 1) * page + last_page_len, 0).int()


def rounded(columns: int) -> int:
    """A few columns more, so that a step with one page more has a table of the same shape, and the same plan."""
    step = 1 << max((columns - 1).bit_length() - 3, 0)
    return max(-(-columns // step) * step, 1)


def table_of_graph(indices: torch.Tensor, batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A table of captured graphs, and its memory, which all wrappers on one buffer of ``indices`` share.

    Each plan() writes that buffer anew, so that only the last one of them is in use. A request can have as many pages
    as the buffer, or an even part of the memory.
    """
    entries = max(indices.shape[0], _ENTRIES)
    key = indices.device, indices.data_ptr(), indices.shape[0]
    memory = _memory.get(key)
    if memory is None:
        memory = _memory[key] = torch.zeros((entries,), dtype=torch.int32, device=indices.device)
    columns = max(min(indices.shape[0], entries // max(batch, 1)), 1)
    return memory[: batch * columns].view(batch, columns), memory


#: Memory of tables, by the place of the buffer of indices. Wrappers keep both.
_memory: WeakValueDictionary[tuple[torch.device, int, int], torch.Tensor] = WeakValueDictionary()


def fill_table(table: torch.Tensor, columns: int, starts: torch.Tensor, indices: torch.Tensor) -> None:
    """The first ``columns`` pages of each request into its row; what is behind its last one may be any page."""
    if not indices.shape[0] or not columns or not table.shape[0]:
        return
    at = starts[:-1, None] + torch.arange(columns, dtype=torch.int32, device=table.device)
    table[:, :columns] = indices[at.clamp_(0, indices.shape[0] - 1)]
