"""FlashInfer's wrapper of packed keys of many requests; `compat.flashinfer` has it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from ..errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from ..ops import attention_varlen
from . import common
from . import flashinfer_plans as plans
from .flashinfer_plans import Shape
from .flashinfer_wrappers import Rows, Wrapper


class _Ragged(NamedTuple):
    """What plan() has settled for run(); longest_k is 0 of a CUDA graph, where k's rows say it."""

    shape: Shape
    rows: int
    longest: int
    longest_k: int
    starts: torch.Tensor
    starts_k: torch.Tensor


class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
    """Packed queries of many requests over packed keys (`omniattn.attention_varlen`).

    Parameters
    ----------
    float_workspace_buffer, use_cuda_graph, backend
        As of `BatchPrefillWithPagedKVCacheWrapper`.
    kv_layout : "NHD" or "HND"
        k and v are (rows, num_kv_heads, head_dim) or (num_kv_heads, rows, head_dim).
    qo_indptr_buf, kv_indptr_buf : tensor, (batch + 1,), int32
        With use_cuda_graph.
    custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask
        Their defaults.

    Raises
    ------
    ArgumentError, UnsupportedError
        Names the argument, what was expected and what came.
    """

    _name = "BatchPrefillWithRaggedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: Any = None,
        kv_indptr_buf: Any = None,
        custom_mask_buf: Any = None,
        mask_indptr_buf: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
        variant_owns_mask: bool = False,
    ) -> None:
        plans.refuse_masks(self._name, custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf)
        plans.refuse_jit(self._name, jit_args, jit_kwargs, variant_owns_mask)
        super().__init__(float_workspace_buffer, kv_layout, use_cuda_graph, backend)
        if self._use_cuda_graph:
            self._fixed_batch_size = self._check_buffers(qo_indptr_buf=qo_indptr_buf, kv_indptr_buf=kv_indptr_buf)
        self._qo_indptr_buf, self._kv_indptr_buf = qo_indptr_buf, kv_indptr_buf
        self._rows = Rows()

    def plan(
        self,
        qo_indptr: Any,
        kv_indptr: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        head_dim_vo: int | None = None,
        custom_mask: Any = None,
        packed_custom_mask: Any = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
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
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        seq_lens: Any = None,
        seq_lens_q: Any = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        v_indptr: Any = None,
        o_indptr: Any = None,
        qo_indptr_cpu: Any = None,
        kv_indptr_cpu: Any = None,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Keep both indptr for any number of calls of run().

        Both are read on the host: where they lie on a GPU, and their copies on the host are not given, that waits for
        it, as the original does.

        Parameters
        ----------
        qo_indptr, kv_indptr : tensor, (batch + 1,), int32, on the host or the device
            Row of q, and of k and v, that each request begins with, 0 first, and the end of the last one.
        head_dim_qk, head_dim_vo : int
            Multiples of 8 up to 512.
        num_qo_heads, num_kv_heads, causal, window_left, logits_soft_cap, sm_scale, q_data_type, kv_data_type,
        o_data_type, max_token_per_sequence, uniform_q_len, rope_scale, rope_theta, non_blocking
            As of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        qo_indptr_cpu, kv_indptr_cpu : tensor, (batch + 1,), int32, on the host, optional
            Copies of qo_indptr and kv_indptr, which are not compared with them.
        max_sequence_kv : int, optional
            At least the keys of a request.
        custom_mask, packed_custom_mask, pos_encoding_mode, use_fp16_qk_reduction, prefix_len_ptr,
        token_pos_in_items_ptr, token_pos_in_items_len, max_item_len_ptr, fixed_split_size, disable_split_kv, seq_lens,
        seq_lens_q, v_indptr, o_indptr, use_token_head_sf
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
        plans.refuse_cudnn(function, seq_lens=seq_lens, seq_lens_q=seq_lens_q, v_indptr=v_indptr, o_indptr=o_indptr)
        plans.refuse_token_scales(use_token_head_sf, function)
        if plans.asks_invariance(fixed_split_size, disable_split_kv, function):
            name = "fixed_split_size" if fixed_split_size is not None else "disable_split_kv"
            raise UnsupportedError(
                f"{function}(): {name}, results of packed requests that do not depend on the batch",
                instead="fixed_split_size=None and disable_split_kv=False: repeated calls give the same bits",
            )
        shape = plans.check_shape(
            function, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo, q_data_type, kv_data_type, o_data_type,
            ("head_dim_qk", "head_dim_vo"), paged=False,
        )  # fmt: skip
        score = self._score_of(function, causal, window_left, logits_soft_cap, sm_scale)
        starts = plans.check_starts(qo_indptr, "qo_indptr", function)
        batch = starts.shape[0] - 1
        keys = plans.check_starts(kv_indptr, "kv_indptr", function, batch + 1)
        self._check_batch(batch, "qo_indptr", function)
        graph, async_copy = self._use_cuda_graph, common.flag(non_blocking, "non_blocking", function)
        starts_host = plans.check_mirror(qo_indptr_cpu, "qo_indptr_cpu", function, starts)
        keys_host = plans.check_mirror(kv_indptr_cpu, "kv_indptr_cpu", function, keys)
        rows = self._rows.of(function, starts_host, graph, max_token_per_sequence, uniform_q_len)
        longest_k = int(plans.counts_on_host(keys_host, "kv_indptr", function).max(initial=0))
        plans.check_bound(max_sequence_kv, "max_sequence_kv", longest_k, "kv_indptr", function)
        if graph:
            for into, x in ((self._qo_indptr_buf, starts), (self._kv_indptr_buf, keys)):
                into.copy_(x, non_blocking=async_copy)
        else:
            self._qo_indptr_buf, self._kv_indptr_buf = (
                x.to(self.device, non_blocking=async_copy) for x in (starts, keys)
            )
        self._rows = rows
        self._settle(score)
        self._planned = _Ragged(
            shape, rows.rows, rows.longest, 0 if graph else longest_k, self._qo_indptr_buf, self._kv_indptr_buf
        )

    begin_forward = plan

    def run(
        self,
        q: Any,
        k: Any,
        v: Any,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        o_scale: float | None = None,
        out: Any = None,
        lse: Any = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of the rows that plan() was told of: one call of `omniattn.attention_varlen`.

        Parameters
        ----------
        q : tensor, (rows, num_qo_heads, head_dim_qk)
        k, v : tensor, (keys, num_kv_heads, head_dim_qk) and (keys, num_kv_heads, head_dim_vo), or heads first by
            kv_layout
        q_scale, k_scale, v_scale, o_scale : float, optional
            1: of 16-bit tensors the original takes them without effect.
        out, lse, return_lse, lse_base, lse_layout, enable_pdl, kv_cache_sf
            As of `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        out : tensor, (rows, num_qo_heads, head_dim_vo)
            0 where a row attends to nothing.
        lse : tensor, float32
            With return_lse: base 2 unless asked otherwise; -inf where a row attends to nothing.

        Raises
        ------
        ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
            As `omniattn.attention_varlen`.
        """
        function = f"{self._name}.run"
        if args or kv_cache_sf is not None:
            plans.refuse_run(function, args, kv_cache_sf=kv_cache_sf)
        for name, x in (("q_scale", q_scale), ("k_scale", k_scale), ("v_scale", v_scale), ("o_scale", o_scale)):
            if x is not None:
                common.refuse(function, "16-bit tensors have no scales", "a factor in sm_scale", **{name: (x, 1.0)})
        plan: _Ragged = self._planned_for(function)
        shape, rows = plan.shape, plan.rows
        q = plans.check_query(q, shape, rows, self.device, function)
        k, v = self._keys(function, shape, k, v)
        with_lse = common.flag(return_lse, "return_lse", function)
        asked = with_lse or lse is not None
        plans.check_lse(lse, rows, shape.heads, lse_base, lse_layout, self.device, function)
        scale = shape.head_dim**-0.5 if self._sm_scale is None else self._sm_scale
        made = attention_varlen(
            q, k, v, cu_seqlens_q=plan.starts, cu_seqlens_k=plan.starts_k, max_seqlen_q=plan.longest,
            max_seqlen_k=plan.longest_k or k.shape[0], causal=self._causal,
            window=(self._window_left, -1) if self._window_left >= 0 else None, softmax_scale=scale,
            softcap=self._logits_soft_cap, return_lse=asked, out=out,
        )  # fmt: skip
        o, natural = made if asked else (made, None)
        if natural is None:
            return o
        found = plans.lse_as_asked(natural, rows, shape.heads, lse, lse_base, lse_layout)
        return (o, found) if with_lse else o

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """run() with return_lse."""
        return self.run(*args, return_lse=True, **options)

    def _keys(self, function: str, shape: Shape, k: Any, v: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """k and v as (keys, heads, channels)."""
        common.check_tensors(function, k=k, v=v)
        made = []
        for name, x, dim in (("k", k, shape.head_dim), ("v", v, shape.head_dim_vo)):
            if x.dtype is not shape.dtype:
                raise DtypeError(name, f"{shape.dtype}, as plan() was told", x.dtype, function=function)
            if x.device != self.device:
                expected = f"a tensor on {self.device}, like the workspace"
                raise ArgumentError(name, expected, f"{x.device}", function=function)
            rows = x.transpose(0, 1) if self._kv_layout == "HND" and x.ndim == 3 else x
            if rows.ndim != 3 or rows.shape[1:] != (shape.kv_heads, dim):
                expected = f"{shape.kv_heads} heads of {dim} channels in {self._kv_layout}, as plan() was told"
                raise ShapeError(name, expected, f"shape {tuple(x.shape)}", function=function)
            made.append(plans.without_gradient(rows))
        return made[0], made[1]

    def forward(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v)

    def forward_return_lse(
        self,
        q: Any,
        k: Any,
        v: Any,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
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
        return self.run(q, k, v, return_lse=True)
