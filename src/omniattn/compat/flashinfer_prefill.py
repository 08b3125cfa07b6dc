"""FlashInfer's wrapper of any rows of many requests over their pages; `compat.flashinfer` has it."""

from __future__ import annotations

from typing import Any

from .. import arguments
from ..errors import ArgumentError, UnsupportedError
from . import flashinfer_plans as plans
from .flashinfer_wrappers import Paged, PagedWrapper, Rows

_VO = ("head_dim_qk", "head_dim_vo")


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """New tokens of many requests over their pages: prompts, chunks, single tokens.

    Parameters
    ----------
    float_workspace_buffer : tensor
        Says the device. No memory of it is needed, and it is not kept.
    kv_layout : "NHD" or "HND"
        Pages are (tokens, num_kv_heads, head_dim) or (num_kv_heads, tokens, head_dim).
    use_cuda_graph : bool
        plan() writes into the buffers, which are needed then, and into a table of its own, so that a captured run() may
        be replayed after another plan(). The batch stays the same. The first plan() makes the table: of as many pages a
        request as max_sequence_kv or block_tables say, if it has one of them. Else a request may have as many pages as
        the buffer of indices, or its even part of that buffer's entries, at least of 2**20; wrappers on one such buffer
        share the memory of the table.
    qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf : tensor, int32
        (batch + 1,), (batch + 1,), (pages,) and (batch,).
    max_total_num_rows : int, optional
        With use_cuda_graph: at least the rows of q of each plan(), in place of those of the first one.
    custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask
        Their defaults.
    backend : "auto", "fa2" or "fa3"
        All the same: the kernels are this package's, chosen by the call.

    Raises
    ------
    ArgumentError, UnsupportedError
        Names the argument, what was expected and what came.
    """

    _name = "BatchPrefillWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        paged_kv_indptr_buf: Any = None,
        paged_kv_indices_buf: Any = None,
        paged_kv_last_page_len_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        plans.refuse_masks(self._name, custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        plans.refuse_jit(self._name, jit_args, jit_kwargs, variant_owns_mask)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, qo_indptr_buf=qo_indptr_buf,
            paged_kv_indptr_buf=paged_kv_indptr_buf, paged_kv_indices_buf=paged_kv_indices_buf,
            paged_kv_last_page_len_buf=paged_kv_last_page_len_buf,
        )  # fmt: skip
        self._rows = Rows()
        self._most_rows: int | None = None
        if max_total_num_rows is not None:
            name = "max_total_num_rows"
            if not self._use_cuda_graph:
                raise ArgumentError(name, "None without use_cuda_graph", max_total_num_rows, function=self._name)
            self._most_rows = arguments.check_int(max_total_num_rows, name, self._name, least=0)

    def plan(
        self,
        qo_indptr: Any,
        paged_kv_indptr: Any,
        paged_kv_indices: Any,
        paged_kv_last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        non_blocking: bool = True,
        prefix_len_ptr: Any = None,
        token_pos_in_items_ptr: Any = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: Any = None,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        block_tables: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Make block table and lengths of the pages, for any number of calls of run().

        Reads qo_indptr and paged_kv_indptr on the host: where they lie on a GPU that waits for it, once each, as the
        original does, which reads last_page_len besides. Nothing waits where they lie on the host; paged_kv_indptr is
        not read with block_tables or max_sequence_kv.

        Parameters
        ----------
        qo_indptr : tensor, (batch + 1,), int32, on the host or the device
            Row of q that each request begins with, 0 first, and the end of the last one.
        paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len : tensor, (batch + 1,), (pages,), (batch,), int32
            Where each request's pages begin in paged_kv_indices, and the tokens in its last page. A request without
            pages has no tokens.
        num_qo_heads, num_kv_heads, head_dim_qk, page_size : int
            head_dim_qk is a multiple of 8 up to 512, pages have any size.
        causal : bool
            A request's last row sees all of its tokens, each one before it one token less.
        window_left : int
            A row sees at most so many tokens before its own; -1: all.
        sm_scale, logits_soft_cap : float, optional
            1 / sqrt(head_dim_qk) and no softcap unless given.
        q_data_type, kv_data_type, o_data_type : torch.dtype or its name
            float16 or bfloat16, all the same; or kv_data_type float8_e4m3fn: head_dim_qk is a multiple of 16 then.
        seq_lens : tensor, (batch,), optional
            Tokens of each request, in place of what indptr and last_page_len say.
        block_tables : tensor, (batch, max_blocks), optional
            Pages of each request, in place of paged_kv_indices.
        max_token_per_sequence : int, optional
            At least the rows of a request: of a CUDA graph those of all plans, in place of the rows of the first one.
        max_sequence_kv : int, optional
            At least the tokens of a request.
        fixed_split_size, disable_split_kv
            Given: results that do not depend on the batch (``deterministic`` of `attention_with_kvcache`).
        uniform_q_len : int, optional
            Rows of each request in all plans of a CUDA graph.
        head_dim_vo : int, optional
            head_dim_qk.
        non_blocking : bool
            Index arrays are copied to the device without waiting.
        rope_scale, rope_theta
            Without effect.
        custom_mask, packed_custom_mask, pos_encoding_mode, use_fp16_qk_reduction, prefix_len_ptr,
        token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, seq_lens_q, use_token_head_sf
            Their defaults.

        Raises
        ------
        ArgumentError, UnsupportedError
            Before anything is written.
        """
        function = f"{self._name}.plan"
        plans.refuse_masks(
            function, custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, token_pos_in_items_len=token_pos_in_items_len,
            max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        plans.check_encoding(pos_encoding_mode, function)
        plans.refuse_reduction(use_fp16_qk_reduction, function)
        plans.refuse_cudnn(function, seq_lens_q=seq_lens_q)
        plans.refuse_token_scales(use_token_head_sf, function)
        shape = plans.check_shape(
            function, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type, _VO
        )
        if shape.head_dim_vo != shape.head_dim:
            raise UnsupportedError(f"{function}(): head_dim_vo={head_dim_vo} of pages", instead=f"{head_dim_qk}")
        score = self._score_of(function, causal, window_left, logits_soft_cap, sm_scale)
        qo = plans.check_starts(qo_indptr, "qo_indptr", function)
        batch = qo.shape[0] - 1
        graph, limit = self._use_cuda_graph, self._most_rows
        rows = self._rows.of(function, qo, graph, max_token_per_sequence, uniform_q_len, limit)
        invariant = plans.asks_invariance(fixed_split_size, disable_split_kv, function)
        names = ("paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
        plans.check_starts(paged_kv_indptr, names[0], function, batch + 1)
        table, lengths = self._pages(
            function, names, (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len), page_size, seq_lens,
            block_tables, max_sequence_kv, invariant, non_blocking,
        )  # fmt: skip
        self._rows = rows
        if self._use_cuda_graph:
            starts = self._buffers["qo_indptr_buf"].copy_(qo, non_blocking=bool(non_blocking))
        else:
            starts = qo.to(self.device, non_blocking=bool(non_blocking))
        self._settle(score)
        self._planned = Paged(shape, page_size, rows.rows, 0, rows.longest, starts, lengths, table, invariant)

    begin_forward = plan

    def run(
        self,
        q: Any,
        paged_kv_cache: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Any:
        """Attention of the rows that plan() was told of: one call of `omniattn.attention_with_kvcache`.

        Parameters
        ----------
        q : tensor, (rows, num_qo_heads, head_dim_qk)
        paged_kv_cache : tensor, (pages, 2, ...), or two tensors (k, v)
            Pages by kv_layout, of any strides that K and V share. The tokens of q are appended already. Pages of one
            token may lack that dimension.
        q_scale, k_scale, v_scale : float, optional
            Factors of the scores (q, k) and of the output. Of pages in e4m3 k_scale and v_scale may be tensors of
            float32, (1,) or (num_kv_heads,), which are read when the kernels run.
        out : tensor, optional
            Where the output goes.
        lse : tensor, (rows, num_qo_heads), float32, optional
            Where the LSE goes, also without return_lse.
        return_lse : bool
        lse_base, lse_layout : "log2" or "ln", "NH" or "HN"
            Base of the LSE, and its order: (rows, num_qo_heads) or (num_qo_heads, rows).
        enable_pdl : bool, optional
            Without effect.
        window_left : int, optional
            What plan() was told.
        sinks : tensor, (num_qo_heads,), float32 or q's dtype, optional
        kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress
            None.

        Returns
        -------
        out : tensor, (rows, num_qo_heads, head_dim_qk)
            0 where a row attends to nothing.
        lse : tensor, float32
            With return_lse: base 2 unless asked otherwise; -inf where a row attends to nothing.

        Raises
        ------
        ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
            As `omniattn.attention_with_kvcache`.
        """
        others = (kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress)
        if args or any(x is not None for x in others):
            plans.refuse_run(
                f"{self._name}.run", args, kv_cache_sf=kv_cache_sf,
                skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                use_fp16_softmax=use_fp16_softmax, uses_spcompress=uses_spcompress,
            )  # fmt: skip
        return self._attend(
            f"{self._name}.run", q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, sinks,
            window_left, lse_base, lse_layout,
        )  # fmt: skip

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """run() with return_lse."""
        return self.run(*args, return_lse=True, **options)

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """run() with options of the scores in place of those of plan(), as the original has it."""
        function = f"{self._name}.forward"
        plans.check_encoding(pos_encoding_mode, function)
        plans.refuse_reduction(use_fp16_qk_reduction, function)
        self._settle(self._score_of(function, causal, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: Any,
        paged_kv_cache: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
    ) -> Any:
        """`forward` with the LSE."""
        function = f"{self._name}.forward_return_lse"
        plans.check_encoding(pos_encoding_mode, function)
        plans.refuse_reduction(use_fp16_qk_reduction, function)
        self._settle(self._score_of(function, causal, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=True)
