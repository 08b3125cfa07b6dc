"""FlashInfer's wrappers of a batch over pages: `compat.flashinfer` has them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .. import arguments
from ..errors import ArgumentError, ShapeError, UnsupportedError
from ..frameworks import FUNCTIONS, compiling
from ..kv.cache import PagedKVCache
from ..ops import attention_with_kvcache
from . import common
from . import flashinfer_plans as plans
from .flashinfer_plans import Shape


class Rows(NamedTuple):
    """Rows of q by requests.

    Attributes
    ----------
    rows, longest : int
        Of all, and at least those of the longest request.
    most : int
        That later plans of a CUDA graph may have; 0 of none.
    uniform : bool
        Each request of a CUDA graph has ``longest``.
    """

    rows: int = 0
    longest: int = 0
    most: int = 0
    uniform: bool = False

    def of(
        self, function: str, starts: torch.Tensor, graph: bool, bound: Any, uniform: Any, limit: int | None = None
    ) -> Rows:
        """Those of the next plan. ``limit``, or the first one of a CUDA graph, decides what later ones may have."""
        counts = plans.counts_on_host(starts, "qo_indptr", function)
        rows, longest = int(counts.sum()), int(counts.max(initial=0))
        alike = longest if counts.size and bool((counts == longest).all()) else 0
        plans.check_bound(bound, "max_token_per_sequence", longest, "qo_indptr", function)
        if uniform is not None and arguments.check_int(uniform, "uniform_q_len", function, least=1) != alike:
            expected = f"the rows of each request, {counts.tolist()}"
            raise ArgumentError("uniform_q_len", expected, repr(uniform), function=function)
        if not graph:
            return Rows(rows, longest)
        if not self.most:
            if limit is not None and rows > limit:
                raise ArgumentError(
                    "qo_indptr", f"at most max_total_num_rows={limit} rows", f"{rows}", function=function
                )
            most = max(rows if limit is None else limit, 1)
            if uniform is not None:
                return Rows(rows, longest, most, uniform=True)
            return Rows(rows, most if bound is None else int(bound), most)
        if rows > self.most:
            expected = f"at most {self.most} rows, as the first plan of the CUDA graph"
            raise ArgumentError("qo_indptr", expected, f"{rows}", function=function)
        if longest > self.longest or (self.uniform and alike != self.longest):
            expected = f"{'' if self.uniform else 'at most '}{self.longest} rows of each request, as the first plan"
            raise ArgumentError("qo_indptr", expected, f"{counts.tolist()}", function=function)
        return self._replace(rows=rows)


class Paged(NamedTuple):
    """What plan() has settled for run().

    Attributes
    ----------
    shape : Shape
    page, rows : int
        Tokens of a page; rows of q.
    q_len : int
        Rows of each request, which run as a batch; 0: packed ones.
    longest : int or None
        At least those of the longest request, where they are packed.
    starts, seq_lens, table : tensor
        As `attention_with_kvcache` takes them; starts None with q_len.
    invariant : bool
        Results do not depend on the batch.
    """

    shape: Shape
    page: int
    rows: int
    q_len: int
    longest: int | None
    starts: torch.Tensor | None
    seq_lens: torch.Tensor
    table: torch.Tensor
    invariant: bool


def _attend_pages(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_scale: Any, v_scale: Any, layout: str, seq_lens: torch.Tensor,
    table: torch.Tensor, starts: torch.Tensor | None, sinks: Any, longest: int | None, causal: bool, left: int,
    scale: float, softcap: float, invariant: bool, return_lse: bool, out: Any = None,
) -> Any:  # fmt: skip
    """out, or (out, lse) as ours, over the caller's pages."""
    cache = PagedKVCache.from_arrays(k, v, layout=layout, k_scale=k_scale, v_scale=v_scale)
    return attention_with_kvcache(
        q, cache, seq_lens=seq_lens, block_table=table, cu_seqlens_q=starts,
        max_seqlen_q=longest, causal=causal, window=(left, -1) if left >= 0 else None, softmax_scale=scale,
        softcap=softcap, sinks=sinks, return_lse=return_lse, out=out, deterministic=invariant,
    )  # fmt: skip


FUNCTIONS["attend_pages"] = _attend_pages


def _traced(q: Any, *given: Any) -> Any:
    """The same for torch.compile, by an operator."""
    from ..frameworks.torch import foreign_caches

    *options, return_lse, out = given
    with torch.no_grad():
        o, lse = foreign_caches.run_pages(q, *options, return_lse)
        if out is not None:
            o = out.copy_(o)
    return (o, lse) if return_lse else o


class Wrapper:
    """What all wrappers have: a layout, a device, options of the scores, buffers of a CUDA graph."""

    _name = ""

    def __init__(self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: Any, backend: Any) -> None:
        function = self._name
        common.check_tensors(function, float_workspace_buffer=float_workspace_buffer)
        plans.check_backend(backend, function)
        self._kv_layout = plans.check_layout(kv_layout, function)
        self._use_cuda_graph = arguments.check_bool(use_cuda_graph, "use_cuda_graph", function)
        # The workspace itself is not needed, nor kept alive.
        self.device: torch.device = float_workspace_buffer.device
        self._backend = backend
        self._planned: Any = None
        self._causal, self._window_left, self._logits_soft_cap = False, -1, 0.0
        self._sm_scale: float | None = None
        self._fixed_batch_size = 0

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether plan() writes into buffers, for captured calls of run()."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Another workspace, of which no more is needed than that it is on the same device."""
        function = f"{self._name}.reset_workspace_buffer"
        given = {"float_workspace_buffer": float_workspace_buffer, "int_workspace_buffer": int_workspace_buffer}
        common.check_tensors(function, **given)
        for name, x in given.items():
            if x.device != self.device:
                raise ArgumentError(name, f"a tensor on {self.device}, as before", f"{x.device}", function=function)

    def end_forward(self) -> None:
        """Nothing, as in the original."""

    def _score_of(
        self, function: str, causal: Any, window_left: Any, logits_soft_cap: Any, sm_scale: Any
    ) -> tuple[bool, int, float, float | None]:
        """Options of the scores, checked."""
        return (
            common.flag(causal, "causal", function),
            arguments.check_int(window_left, "window_left", function, least=-1),
            plans.softcap_of(logits_soft_cap, function),
            None if sm_scale is None else arguments.check_number(sm_scale, "sm_scale", function),
        )  # fmt: skip

    def _settle(self, score: tuple[bool, int, float, float | None]) -> None:
        self._causal, self._window_left, self._logits_soft_cap, self._sm_scale = score

    def _check_buffers(self, **given: Any) -> int:
        """The batch of a CUDA graph, whose buffers these are: `starts` and then those of each request."""
        function = self._name
        batch: int | None = None
        for name, x in given.items():
            if x is None:
                raise ArgumentError(name, "a tensor, with use_cuda_graph", "None", function=function)
            plans.check_numbers(x, name, None, function)
            if x.device != self.device or not x.is_contiguous():
                raise ArgumentError(name, f"a contiguous tensor on {self.device}", f"{x.device}", function=function)
            if "indices" in name:
                continue
            have = x.shape[0] - ("indptr" in name)
            if have < 0 or (batch is not None and have != batch):
                expected = f"batch_size{' + 1' if 'indptr' in name else ''} elements, of {max(batch or 0, 0)} requests"
                raise ShapeError(name, expected, f"{tuple(x.shape)}", function=function)
            batch = have
        return batch or 0

    def _planned_for(self, function: str) -> Any:
        if self._planned is None:
            raise UnsupportedError(f"{function}(): before plan()", instead="plan() first")
        return self._planned

    def _check_batch(self, batch: int, name: str, function: str) -> None:
        if self._use_cuda_graph and batch != self._fixed_batch_size:
            expected = f"{self._fixed_batch_size} requests, as the CUDA graph's buffers"
            raise ShapeError(name, expected, f"{batch}", function=function)


class PagedWrapper(Wrapper):
    """Pages as tables, and the call of `attention_with_kvcache`."""

    def __init__(
        self, float_workspace_buffer: Any, kv_layout: Any, use_cuda_graph: Any, backend: Any, **buffers: Any
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        if self._use_cuda_graph:
            self._fixed_batch_size = self._check_buffers(**buffers)
        self._buffers = buffers if self._use_cuda_graph else {}
        self._table: torch.Tensor | None = None
        self._memory: torch.Tensor | None = None
        self._lengths: torch.Tensor | None = None

    def _pages(
        self, function: str, names: tuple[str, str, str], given: tuple[Any, Any, Any], page: Any, seq_lens: Any,
        block_tables: Any, most_keys: Any, invariant: bool, non_blocking: Any, host: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Table and lengths of ``given``: indptr, indices, last_page_len.

        Of a CUDA graph they are written into fixed tensors. host: indptr on the host, where the caller has it.
        """
        page = arguments.check_int(page, "page_size", function, least=1)
        starts = plans.check_starts(given[0], names[0], function)
        batch = starts.shape[0] - 1
        indices, last = (plans.check_numbers(x, name, n, function) for x, name, n in zip(
            given[1:], names[1:], (None, batch), strict=True))  # fmt: skip
        self._check_batch(batch, names[0], function)
        non_blocking = common.flag(non_blocking, "non_blocking", function)
        for name, x in (("block_tables", block_tables), ("seq_lens", seq_lens)):
            if x is not None:
                plans.check_integers(x, name, function)
        if block_tables is not None:
            if block_tables.ndim != 2 or block_tables.shape[0] != batch or not block_tables.shape[1]:
                expected = f"shape ({batch}, max_blocks)"
                raise ShapeError("block_tables", expected, f"{tuple(block_tables.shape)}", function=function)
            columns = block_tables.shape[1]
        elif most_keys is not None:
            columns = -(-arguments.check_int(most_keys, "max_sequence_kv", function) // page)
        else:
            counts = plans.counts_on_host(starts if host is None else host, names[0], function, indices.shape[0])
            columns = int(counts.max(initial=0))
        if seq_lens is not None and seq_lens.numel() != batch:
            raise ShapeError("seq_lens", f"{batch} elements", f"{tuple(seq_lens.shape)}", function=function)
        is_bound = block_tables is not None or most_keys is not None
        table, lengths = self._fixed(function, names[1], indices, batch, columns, is_bound, invariant)
        # Nothing is written before this line, and nothing is refused behind it.
        if self._use_cuda_graph:
            starts, indices, last = self._copied(names, (starts, indices, last), non_blocking)
        else:
            starts, indices, last = (x.to(self.device, non_blocking=non_blocking) for x in (starts, indices, last))
        if seq_lens is not None:
            made = seq_lens.reshape(batch).to(device=self.device, dtype=torch.int32)
        else:
            made = plans.lengths_of(starts, last, page)
        if table is None:
            if block_tables is not None:
                return block_tables.to(device=self.device, dtype=torch.int32).contiguous(), made
            table = torch.zeros((batch, plans.rounded(columns)), dtype=torch.int32, device=self.device)
        if block_tables is not None:
            table[:, :columns] = block_tables
        else:
            plans.fill_table(table, columns, starts, indices)
        if lengths is None:
            return table, made
        self._table, self._lengths = table, lengths.copy_(made)
        return table, lengths

    def _fixed(
        self, function: str, name: str, indices: torch.Tensor, batch: int, columns: int, is_bound: bool, invariant: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Table and lengths of a CUDA graph, made by the first plan; neither without one.

        is_bound: the caller says that no request will have more than ``columns`` pages.
        """
        if not self._use_cuda_graph:
            return None, None
        buffer = next(x for key, x in self._buffers.items() if "indices" in key)
        if indices.shape[0] > buffer.shape[0]:
            expected = f"at most {buffer.shape[0]} pages, as the CUDA graph's buffer"
            raise ShapeError(name, expected, f"{indices.shape[0]}", function=function)
        table, lengths = self._table, self._lengths
        if table is None or lengths is None:
            if invariant and not is_bound:
                raise UnsupportedError(
                    f"{function}(): results that do not depend on the batch (fixed_split_size, disable_split_kv), in a "
                    "CUDA graph without a bound of the pages, which the memory that they take grows with",
                    instead="block_tables with the most columns, or max_sequence_kv, in the first plan()",
                )
            if is_bound:
                table = self._memory = torch.zeros((batch, max(columns, 1)), dtype=torch.int32, device=self.device)
            else:
                table, self._memory = plans.table_of_graph(buffer, batch)
            lengths = torch.zeros((batch,), dtype=torch.int32, device=self.device)
        if columns > table.shape[1]:
            expected = f"at most {table.shape[1]} pages of a request, as the CUDA graph's table has"
            raise ArgumentError(name, expected, f"{columns}", function=function,
                                hint="A larger buffer of indices makes a larger table")  # fmt: skip
        return table, lengths

    def _copied(
        self, names: tuple[str, str, str], given: tuple[torch.Tensor, ...], non_blocking: bool
    ) -> list[torch.Tensor]:
        """The caller's buffers, written as the original writes them: others may read them."""
        made = []
        for name, x in zip(names, given, strict=True):
            kind = next(kind for kind in ("indptr", "indices", "last_page_len") if kind in name)
            into = next(b for key, b in self._buffers.items() if kind in key and not key.startswith("qo"))[: x.shape[0]]
            made.append(into.copy_(x, non_blocking=non_blocking and (kind != "indices" or x.device == self.device)))
        return made

    def _attend(
        self, function: str, q: Any, pool: Any, scales: tuple[Any, Any, Any], out: Any, lse: Any, return_lse: Any,
        sinks: Any, window_left: Any, base: Any = "log2", layout: Any = "NH",
    ) -> Any:  # fmt: skip
        """One call of `attention_with_kvcache`."""
        plan: Paged = self._planned_for(function)
        shape, rows = plan.shape, plan.rows
        q = plans.check_query(q, shape, rows, self.device, function)
        k, v = plans.planes(pool, self._kv_layout, function)
        plans.check_pages(k, self._kv_layout, shape, plan.page, function)
        if window_left is not None and window_left != self._window_left:
            raise ArgumentError("window_left", f"None or {self._window_left}, as plan() was told", repr(window_left),
                                function=function)  # fmt: skip
        with_lse = common.flag(return_lse, "return_lse", function)
        asked = with_lse or lse is not None
        plans.check_lse(lse, rows, shape.heads, base, layout, self.device, function)
        scale, v_scale = self._scales(function, shape, scales)
        of_pages = plans.scales_of_pages(shape, {"k_scale": scales[1], "v_scale": scales[2]}, function)
        if out is not None and (not isinstance(out, torch.Tensor) or out.shape != q.shape):
            common.check_tensors(function, out=out)
            raise ShapeError("out", f"shape {tuple(q.shape)}, like q", f"{tuple(out.shape)}", function=function)
        into = out
        if plan.q_len:
            batch = (plan.seq_lens.shape[0], plan.q_len, shape.heads, shape.head_dim)
            q, into = q.view(batch), None if out is None else out.view(batch)
        run = _traced if compiling() else _attend_pages
        made = run(
            q, k, v, *of_pages, self._kv_layout, plan.seq_lens, plan.table, plan.starts, sinks, plan.longest,
            self._causal, self._window_left, scale, self._logits_soft_cap, plan.invariant, asked, into,
        )  # fmt: skip
        o, natural = made if asked else (made, None)
        result = o.view(rows, shape.heads, shape.head_dim) if out is None else out
        plans.scaled(result, v_scale)
        if not asked:
            return result
        assert natural is not None
        found = plans.lse_as_asked(natural, rows, shape.heads, lse, base, layout)
        return (result, found) if with_lse else result

    def _scales(self, function: str, shape: Shape, scales: tuple[Any, Any, Any]) -> tuple[float, float]:
        """Scale of the scores with those of q and k in it, and that of v."""
        scale = shape.head_dim**-0.5 if self._sm_scale is None else self._sm_scale
        if scales == (None, None, None):
            return scale, 1.0
        q_scale, k_scale, v_scale = (
            1.0 if name != "q_scale" and shape.kv_dtype == plans.E4M3 and isinstance(x, torch.Tensor)
            else plans.factor(x, name, function)
            for x, name in zip(scales, ("q_scale", "k_scale", "v_scale"), strict=True)
        )  # fmt: skip
        return scale * q_scale * k_scale, v_scale
