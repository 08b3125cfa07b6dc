"""FlashInfer's wrappers of single tokens of many requests over their pages; `compat.flashinfer` has them."""

from __future__ import annotations

import warnings
from typing import Any

from .. import arguments
from ..errors import ArgumentError, ShapeError
from . import common
from . import flashinfer_plans as plans
from .flashinfer_wrappers import Paged, PagedWrapper

_NAMES = ("indptr", "indices", "last_page_len")
_DIMS = ("head_dim", "head_dim")


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """The newest token of many requests, or the same few of each, over their pages.

    Parameters
    ----------
    float_workspace_buffer, kv_layout, use_cuda_graph, backend
        As of `BatchPrefillWithPagedKVCacheWrapper`.
    use_tensor_cores : bool
        Without effect.
    paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer : tensor, int32
        With use_cuda_graph: (batch + 1,), (pages,) and (batch,).
    jit_args, jit_kwargs
        None.

    Raises
    ------
    ArgumentError, UnsupportedError
        Names the argument, what was expected and what came.
    """

    _name = "BatchDecodeWithPagedKVCacheWrapper"

    def __init__(
        self,
        float_workspace_buffer: Any,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: Any = None,
        paged_kv_indices_buffer: Any = None,
        paged_kv_last_page_len_buffer: Any = None,
        backend: str = "auto",
        jit_args: Any = None,
        jit_kwargs: Any = None,
    ) -> None:
        plans.refuse_jit(self._name, jit_args, jit_kwargs)
        self._q_len = 1
        self._use_tensor_cores = common.flag(use_tensor_cores, "use_tensor_cores", self._name)
        super().__init__(
            float_workspace_buffer, kv_layout, use_cuda_graph, backend, paged_kv_indptr_buffer=paged_kv_indptr_buffer,
            paged_kv_indices_buffer=paged_kv_indices_buffer,
            paged_kv_last_page_len_buffer=paged_kv_last_page_len_buffer,
        )  # fmt: skip

    @property
    def use_tensor_cores(self) -> bool:
        """What the constructor was told."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: Any,
        indices: Any,
        last_page_len: Any,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Any = "float16",
        kv_data_type: Any = None,
        o_data_type: Any = None,
        data_type: Any = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: Any = None,
        seq_lens: Any = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
    ) -> None:
        """Make block table and lengths of the pages, for any number of calls of run().

        Reads indptr on the host: where it lies on a GPU that waits for it, once. (The original reads last_page_len
        besides.) Nothing waits where it lies on the host, or with block_tables.

        Parameters
        ----------
        indptr, indices, last_page_len : tensor, (batch + 1,), (pages,), (batch,), int32, on the host or the device
            Where each request's pages begin in indices, and the tokens in its last page. A request without pages has no
            tokens.
        num_qo_heads, num_kv_heads, head_dim, page_size, window_left, logits_soft_cap, sm_scale, q_data_type,
        kv_data_type, o_data_type, seq_lens, block_tables, rope_scale, rope_theta, non_blocking
            As of `BatchPrefillWithPagedKVCacheWrapper.plan`.
        data_type : torch.dtype or its name, optional
            kv_data_type, where that is not given, and q_data_type where that is None.
        fixed_split_size, disable_split_kv
            Given: results that do not depend on the batch (``deterministic`` of `attention_with_kvcache`).
        q_len_per_req : int
            Rows of q of each request, its last tokens: the last row sees all tokens, each one before it one less. Of a
            CUDA graph the same in all plans.
        pos_encoding_mode, window_right
            Their defaults.

        Raises
        ------
        ArgumentError, UnsupportedError
            Before anything is written.
        """
        common.refuse(
            f"{self._name}.plan", "no row sees a token behind its own", "window_right=0", window_right=(window_right, 0)
        )
        self._plan(
            f"{self._name}.plan", indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size,
            pos_encoding_mode, window_left, logits_soft_cap, q_data_type, kv_data_type, o_data_type, data_type,
            sm_scale, non_blocking, block_tables, seq_lens, fixed_split_size, disable_split_kv, q_len_per_req, None,
        )  # fmt: skip

    begin_forward = plan

    def _plan(
        self, function: str, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: Any, num_kv_heads: Any,
        head_dim: Any, page_size: Any, pos_encoding_mode: Any, window_left: Any, logits_soft_cap: Any, q_data_type: Any,
        kv_data_type: Any, o_data_type: Any, data_type: Any, sm_scale: Any, non_blocking: Any, block_tables: Any,
        seq_lens: Any, fixed_split_size: Any, disable_split_kv: Any, q_len: Any, indptr_on_host: Any,
    ) -> None:  # fmt: skip
        plans.check_encoding(pos_encoding_mode, function)
        if data_type is not None:
            q_data_type = data_type if q_data_type is None else q_data_type
            kv_data_type = data_type if kv_data_type is None else kv_data_type
        shape = plans.check_shape(
            function, num_qo_heads, num_kv_heads, head_dim, None, q_data_type, kv_data_type, o_data_type, _DIMS
        )
        q_len = arguments.check_int(q_len, "q_len_per_req", function, least=1)
        if self._use_cuda_graph and self._planned is not None and q_len != self._q_len:
            expected = f"{self._q_len}, as the first plan of the CUDA graph"
            raise ArgumentError("q_len_per_req", expected, f"{q_len}", function=function)
        score = self._score_of(function, q_len > 1, window_left, logits_soft_cap, sm_scale)
        invariant = plans.asks_invariance(fixed_split_size, disable_split_kv, function)
        table, lengths = self._pages(
            function, _NAMES, (indptr, indices, last_page_len), page_size, seq_lens, block_tables, None, invariant,
            non_blocking, indptr_on_host,
        )  # fmt: skip
        self._q_len = q_len
        self._settle(score)
        batch = lengths.shape[0]
        self._planned = Paged(shape, page_size, batch * q_len, q_len, None, None, lengths, table, invariant)

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
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: Any = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Any:
        """Attention of one token of each request, or q_len_per_req: one call of `omniattn.attention_with_kvcache`.

        Parameters
        ----------
        q : tensor, (batch * q_len_per_req, num_qo_heads, head_dim)
        q_len_per_req : int, optional
            What plan() was told. Deprecated, as in the original.
        paged_kv_cache, q_scale, k_scale, v_scale, out, lse, return_lse, enable_pdl, window_left, sinks,
        skip_softmax_threshold_scale_factor, kv_cache_sf
            As of `BatchPrefillWithPagedKVCacheWrapper.run`.

        Returns
        -------
        out : tensor, (batch * q_len_per_req, num_qo_heads, head_dim)
            0 of a request without tokens.
        lse : tensor, (batch * q_len_per_req, num_qo_heads), float32
            With return_lse: base 2; -inf of a request without tokens.

        Raises
        ------
        ArgumentError, UnsupportedError, KernelNotFoundError, CompileError, DriverError
            As `omniattn.attention_with_kvcache`.
        """
        function = f"{self._name}.run"
        if args or skip_softmax_threshold_scale_factor is not None or kv_cache_sf is not None:
            plans.refuse_run(
                function, args, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
                kv_cache_sf=kv_cache_sf,
            )  # fmt: skip
        if q_len_per_req is not None:
            self._planned_for(function)
            if q_len_per_req != self._q_len:
                expected = f"{self._q_len}, as plan() was told"
                raise ArgumentError("q_len_per_req", expected, repr(q_len_per_req), function=function)
            warnings.warn("q_len_per_req belongs to plan()", DeprecationWarning, stacklevel=2)
        return self._attend(
            function, q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, sinks, window_left
        )

    def run_return_lse(self, *args: Any, **options: Any) -> Any:
        """run() with return_lse."""
        return self.run(*args, return_lse=True, **options)

    def forward(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._settle(self._score_of(function, self._causal, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale)

    def forward_return_lse(
        self,
        q: Any,
        paged_kv_cache: Any,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._settle(self._score_of(function, self._causal, window_left, logits_soft_cap, sm_scale))
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=True)


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """`BatchDecodeWithPagedKVCacheWrapper` with use_cuda_graph.

    Parameters
    ----------
    workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, kv_layout, use_tensor_cores
        As there.
    """

    def __init__(
        self,
        workspace_buffer: Any,
        indptr_buffer: Any,
        indices_buffer: Any,
        last_page_len_buffer: Any,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )


def fast_decode_plan(
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: Any,
    indices: Any,
    last_page_len: Any,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: Any = None,
    kv_data_type: Any = None,
    data_type: Any = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: Any = None,
) -> None:
    """`BatchDecodeWithPagedKVCacheWrapper.plan` of ``self``; nothing waits with indptr on the host besides.

    Parameters
    ----------
    self : BatchDecodeWithPagedKVCacheWrapper
    global_override_indptr_cpu : tensor, (batch + 1,), int32, optional
        What indptr holds, on the host.
    indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode, window_left,
    logits_soft_cap, q_data_type, kv_data_type, data_type, sm_scale, rope_scale, rope_theta, non_blocking,
    fixed_split_size, disable_split_kv, q_len_per_req
        As of that method; q_data_type is float16 unless it or data_type is given.

    Raises
    ------
    ArgumentError, UnsupportedError
        Before anything is written.
    """
    function = "fast_decode_plan"
    if not isinstance(self, BatchDecodeWithPagedKVCacheWrapper):
        raise ArgumentError(
            "self", "a BatchDecodeWithPagedKVCacheWrapper of this package", type(self).__name__, function=function
        )
    host = global_override_indptr_cpu
    if host is not None:
        plans.check_starts(host, "global_override_indptr_cpu", function)
        if host.device.type != "cpu" or host.shape != indptr.shape:
            expected = f"shape {tuple(indptr.shape)} on the host, like indptr"
            received = f"{tuple(host.shape)} on {host.device}"
            raise ShapeError("global_override_indptr_cpu", expected, received, function=function)
    if q_data_type is None and data_type is None:
        q_data_type = "float16"
    self._plan(
        function, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, pos_encoding_mode,
        window_left, logits_soft_cap, q_data_type, kv_data_type, None, data_type, sm_scale, non_blocking,
        None, None,        fixed_split_size, disable_split_kv, q_len_per_req, host,
    )  # fmt: skip
