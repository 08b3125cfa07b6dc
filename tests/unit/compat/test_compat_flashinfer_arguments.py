"""omniattn.compat.flashinfer: signatures of the original, and arguments that raise, by their names."""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest

from omniattn.errors import ArgumentError, DeviceError, UnsupportedError

torch = pytest.importorskip("torch")
from omniattn.compat import flashinfer as fi  # noqa: E402
from tests.unit.compat.compat_cases import randoms, starts  # noqa: E402
from tests.unit.compat.flashinfer_cases import (  # noqa: E402
    DIM,
    HEADS,
    KV,
    WORKSPACE,
    Requests,
    buffers,
    int32,
    plan_of,
)

pytestmark = pytest.mark.frameworks


# Errors name the argument


def prefill(**options: Any) -> Any:
    x = Requests([7, 33], 5)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    given = {
        "qo_indptr": starts([3, 5]), "paged_kv_indptr": x.indptr, "paged_kv_indices": x.indices,
        "paged_kv_last_page_len": x.last, "num_qo_heads": HEADS, "num_kv_heads": KV, "head_dim_qk": DIM,
        "page_size": 5,
    }  # fmt: skip
    wrapper.plan(**(given | options))


def decode(**options: Any) -> Any:
    x = Requests([7, 33], 5)
    given = {
        "indptr": x.indptr, "indices": x.indices, "last_page_len": x.last, "num_qo_heads": HEADS, "num_kv_heads": KV,
        "head_dim": DIM, "page_size": 5,
    }  # fmt: skip
    fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE).plan(**(given | options))


def ragged(**options: Any) -> Any:
    given = {
        "qo_indptr": starts([3, 5]), "kv_indptr": starts([7, 33]), "num_qo_heads": HEADS, "num_kv_heads": KV,
        "head_dim_qk": DIM,
    }  # fmt: skip
    fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE).plan(**(given | options))


def run_prefill(**options: Any) -> Any:
    x = Requests([7, 33], 5)
    wrapper = fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts([3, 5]), *x.tables, HEADS, KV, DIM, 5)
    more = options.pop("args", ())
    given = {"q": torch.zeros(8, HEADS, DIM, dtype=torch.float16), "paged_kv_cache": x.pool} | options
    return wrapper.run(given.pop("q"), given.pop("paged_kv_cache"), *more, **given)


def run_decode(**options: Any) -> Any:
    x = Requests([7, 33], 5)
    wrapper = fi.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    wrapper.plan(*x.tables, HEADS, KV, DIM, 5)
    return wrapper.run(torch.zeros(2, HEADS, DIM, dtype=torch.float16), x.pool, **options)


def run_ragged(**options: Any) -> Any:
    wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
    wrapper.plan(starts([3, 5]), starts([7, 33]), HEADS, KV, DIM)
    given = {name: torch.zeros(n, h, DIM, dtype=torch.float16) for name, n, h in (("q", 8, HEADS), ("k", 40, KV),
                                                                                  ("v", 40, KV))}  # fmt: skip
    return wrapper.run(**(given | options))


def single(**options: Any) -> Any:
    k = torch.zeros(9, KV, DIM, dtype=torch.float16)
    return fi.single_prefill_with_kv_cache(torch.zeros(3, HEADS, DIM, dtype=torch.float16), k, k, **options)


def single_decode(**options: Any) -> Any:
    k = torch.zeros(9, KV, DIM, dtype=torch.float16)
    return fi.single_decode_with_kv_cache(torch.zeros(HEADS, DIM, dtype=torch.float16), k, k, **options)


def made(wrapper: str) -> Any:
    return lambda **options: getattr(fi, wrapper)(**({"float_workspace_buffer": WORKSPACE} | options))


X = torch.zeros(4)
E4M3 = torch.float8_e4m3fn
PAGED, DECODE, RAGGED = (
    "BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithRaggedKVCacheWrapper"
)  # fmt: skip
MASKS = ("custom_mask", "packed_custom_mask", "prefix_len_ptr", "token_pos_in_items_ptr", "max_item_len_ptr")
OF_PLANS: list[tuple[str, Any]] = [
    ("pos_encoding_mode", "ROPE_LLAMA"), ("pos_encoding_mode", "ALIBI"), ("q_data_type", E4M3),
    ("kv_data_type", torch.int8), ("kv_data_type", "float8_e5m2"), ("o_data_type", torch.float32), ("num_qo_heads", 3),
    ("num_kv_heads", 0), ("window_left", -2), ("logits_soft_cap", math.nan), ("sm_scale", math.inf),
    ("q_data_type", "half16"),
]  # fmt: skip
OF_ROWS: list[tuple[str, Any]] = [
    *((name, X) for name in MASKS), ("token_pos_in_items_len", 3), ("use_fp16_qk_reduction", True), ("seq_lens_q", X),
    ("qo_indptr", starts([3, 5]).long()), ("qo_indptr", int32(1, 3, 8)), ("qo_indptr", int32(0, 5, 3)),
    ("head_dim_qk", 60), ("head_dim_qk", 520),
    ("max_token_per_sequence", 4), ("uniform_q_len", 4), ("causal", 2),
]  # fmt: skip
REFUSED: list[tuple[Any, str, Any]] = [
    *((f, name, value) for f in (prefill, decode, ragged) for name, value in OF_PLANS),
    *((f, name, value) for f in (prefill, ragged) for name, value in OF_ROWS),
    (prefill, "head_dim_vo", 32), (prefill, "paged_kv_indptr", int32(0, 2)),
    (prefill, "paged_kv_indptr", int32(0, 9, 8)),
    (prefill, "paged_kv_indptr", int32(0, 2, 99)), (prefill, "paged_kv_last_page_len", int32(1)),
    (prefill, "paged_kv_indices", int32(1)[None]), (prefill, "page_size", 0), (prefill, "seq_lens", int32(1)),
    (prefill, "block_tables", int32(1)), (decode, "head_dim", 60), (decode, "window_right", 1),
    (decode, "q_len_per_req", 0), (decode, "indptr", int32(0, 9, 8)), (decode, "last_page_len", X[:2]),
    (ragged, "kv_indptr", int32(0, 3)), (ragged, "kv_indptr", int32(0, 9, 8)), (ragged, "head_dim_vo", 60),
    (ragged, "fixed_split_size", 4), (ragged, "disable_split_kv", True), (ragged, "max_sequence_kv", 32),
    (ragged, "kv_data_type", E4M3), (prefill, "kv_data_type", "float8_e5m2"),
    *((ragged, name, X) for name in ("seq_lens", "v_indptr", "o_indptr")),
    *((made(name), "backend", "trtllm-gen") for name in (PAGED, DECODE, RAGGED)),
    *((made(name), "kv_layout", "BHSD") for name in (PAGED, DECODE, RAGGED)),
    *((made(name), "jit_args", []) for name in (PAGED, DECODE, RAGGED)),
    *((made(name), "float_workspace_buffer", None) for name in (PAGED, DECODE, RAGGED)),
    *((made(name), what, X) for name in (PAGED, RAGGED) for what in ("custom_mask_buf", "mask_indptr_buf")),
    *((made(name), "jit_kwargs", {}) for name in (PAGED, DECODE, RAGGED)),
    *((made(name), "variant_owns_mask", True) for name in (PAGED, RAGGED)),
    (made(PAGED), "max_total_num_rows", 8),  # without use_cuda_graph
    *((f, "use_token_head_sf", True) for f in (prefill, ragged)),
    *((ragged, name, value) for name in ("qo_indptr_cpu", "kv_indptr_cpu") for value in (
        X, int32(0, 1), torch.zeros(3, dtype=torch.int32, device="meta"),
    )),
    *((f, "kv_cache_sf", X) for f in (run_prefill, run_decode, run_ragged, single)),
    *((f, "skip_softmax_threshold_scale_factor", 1.0) for f in (run_prefill, run_decode)),
    *((f, name, X) for f in (run_prefill, run_decode) for name in ("q_scale", "k_scale", "v_scale")),
    *((f, "window_left", 5) for f in (run_prefill, run_decode)),
    *((f, "out", X) for f in (run_prefill, run_decode, run_ragged)),
    *((f, "lse", X) for f in (run_prefill, run_decode, run_ragged)),
    *((f, "lse", torch.zeros(8, HEADS).half()) for f in (run_prefill, run_ragged)),
    *((f, "lse_base", "e") for f in (run_prefill, run_ragged)), (run_decode, "q_len_per_req", 2),
    (run_prefill, "use_fp16_softmax", True), (run_prefill, "uses_spcompress", True), (run_prefill, "sinks", X[:2]),
    (run_prefill, "q", torch.zeros(7, HEADS, DIM).half()), (run_prefill, "q", torch.zeros(8, HEADS, DIM)),
    (run_prefill, "paged_kv_cache", torch.zeros(4, 5, KV, DIM).half()), (run_prefill, "paged_kv_cache", None),
    (run_prefill, "paged_kv_cache", torch.zeros(9, 2, 5, KV, DIM).bfloat16()),
    (run_prefill, "paged_kv_cache", torch.zeros(9, 2, 4, KV, DIM).half()),
    *((run_ragged, name, 2.0) for name in ("q_scale", "k_scale", "v_scale", "o_scale")),
    (run_ragged, "k", torch.zeros(40, KV, 32).half()), (run_ragged, "v", torch.zeros(40, KV, DIM)),
    *((single, name, X) for name in ("scale_q", "scale_k", "scale_v", "k_scale", "v_scale", "custom_mask")),
    (single, "o_dtype", torch.float32), (single, "packed_custom_mask", X), (single, "use_fp16_qk_reduction", True),
    (single, "custom_mask", torch.ones(3, 8, dtype=torch.bool)), (single, "backend", "cudnn"),
    (single, "packed_custom_mask", torch.ones(3, dtype=torch.uint8)), (single, "kv_layout", "HDN"),
    *((single_decode, name, X) for name in ("q_scale", "k_scale", "v_scale")),
    *((f, "pos_encoding_mode", "ALIBI") for f in (single, single_decode)),
    *((f, "window_left", -3) for f in (single, single_decode)),
]  # fmt: skip


@pytest.mark.parametrize(("function", "name", "value"), REFUSED)
def test_refused_by_name(function: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"\b{name}\b"):
        function(**{name: value})


def test_errors_name_the_function_and_its_own_arguments() -> None:
    """Those of functions of omniattn too, which call some otherwise."""
    v, s = torch.zeros(3, HEADS, DIM), torch.zeros(3, HEADS)
    k = torch.zeros(5, KV, DIM)
    for function, arguments, named in (
        (fi.single_decode_with_kv_cache, (v[0].int(), k, k), "q"),
        (fi.single_prefill_with_kv_cache, (v, k, k.double()), "v"),
        (fi.merge_state, (v, s, v[:2], s), "v_b"),
        (fi.merge_state_in_place, (v, s, v[:2], s), "v_other"),
        (fi.merge_state_in_place, (v, s, v, s[:2]), "s_other"),
        (fi.merge_state_in_place, (v[0], s, v, s), "v"),
        (fi.get_seq_lens, (starts([1, 2]), int32(1, 2, 3), 4), "kv_last_page_len"),
        (fi.get_seq_lens, (int32(1)[0], int32(1), 4), "kv_indptr"),
        (fi.get_seq_lens, (starts([1, 2]), int32(1, 2), 2**70), "page_size"),
    ):
        with pytest.raises(ArgumentError) as caught:
            function(*arguments)
        assert (caught.value.function, caught.value.argument) == (function.__name__, named), str(caught.value)


@pytest.mark.parametrize(
    "function", [prefill, decode, ragged, run_prefill, run_decode, run_ragged, single, single_decode]
)
def test_defaults_are_taken(function: Any) -> None:
    function()
    if "run" in function.__name__:
        function(enable_pdl=False)


def test_more_positional_arguments() -> None:
    with pytest.raises(ValueError, match="1 more positional"):
        run_prefill(args=(X,))


def test_errors_of_functions_that_call_others() -> None:
    q, cache, at = torch.zeros(3, 2, 64).half(), torch.zeros(2, 2, 4, 2, 64).half(), int32(0, 0, 1)
    states, sums = torch.zeros(3, 2, 2, 64), torch.zeros(3, 2, 2)

    def append(paged_kv_cache: Any, positions: Any) -> None:
        fi.append_paged_kv_cache(q, q, at, positions, paged_kv_cache, int32(0, 1), int32(0, 1, 2), int32(2, 1))

    append(cache, at)
    for function, arguments, name, named in (
        (append, (cache.double(), at), "append_paged_kv_cache", "paged_kv_cache"),
        (append, (cache[..., :63], at), "append_paged_kv_cache", "paged_kv_cache"),
        (append, (cache, at.to("meta")), "append_paged_kv_cache", "positions"),
        (fi.merge_states, (states[..., :63], sums), "merge_states", "v"),
        (fi.merge_states, (states, sums.to("meta")), "merge_states", "s"),
    ):
        with pytest.raises(ArgumentError) as caught:
            function(*arguments)
        assert (caught.value.function, caught.value.argument) == (name, named), str(caught.value)
    with pytest.raises(UnsupportedError, match="pos_encoding_mode"):
        fi.single_decode_with_kv_cache(q[0], q, q, pos_encoding_mode=torch.ones(2))


def test_run_before_plan() -> None:
    for wrapper in (PAGED, DECODE):
        with pytest.raises(ValueError, match=r"before plan\(\)"):
            made(wrapper)().run(X, X)
    with pytest.raises(ValueError, match=r"before plan\(\)"):
        made(RAGGED)().run(X, X, X)


@pytest.mark.parametrize("missing", ["qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf",
                                     "paged_kv_last_page_len_buf"])  # fmt: skip
def test_buffers_of_a_graph(missing: str) -> None:
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    given = dict(zip(names, buffers(3, 40), strict=True)) | {"qo_indptr_buf": torch.zeros(4, dtype=torch.int32)}
    fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, **given)
    wrong = [None, torch.zeros(4)] + ([torch.zeros(6, dtype=torch.int32)] if "indices" not in missing else [])
    for value in wrong:
        with pytest.raises(ValueError, match="_buf"):
            fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, **(given | {missing: value}))


# Arguments of version 0.7.4 that have an effect


def test_a_graph_of_as_many_rows_as_are_said() -> None:
    names = ("paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
    given = dict(zip(names, buffers(3, 40), strict=True)) | {"qo_indptr_buf": torch.zeros(4, dtype=torch.int32)}
    x = Requests([7, 9, 33], 5)
    shape, options = plan_of(x, causal=True)

    def made() -> Any:
        return fi.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, use_cuda_graph=True, max_total_num_rows=12, **given)

    wrapper = made()
    for rows in ([1, 1, 1], [2, 5, 5]):
        (q,) = randoms((sum(rows), HEADS, DIM), seed=3, dtype=torch.float16)
        wrapper.plan(starts(rows), *x.tables, *shape, **options)
        assert wrapper._planned.longest == 12
        x.check(wrapper.run(q, x.pool, return_lse=True), q, rows, causal=True)
    for one in (wrapper, made()):
        with pytest.raises(ValueError, match=r"'qo_indptr': expected at most (max_total_num_rows=)?12 rows"):
            one.plan(starts([2, 5, 6]), *x.tables, *shape, **options)


def test_packed_requests_with_copies_on_the_host() -> None:
    """Counts come from the copies, which the caller says are those of the arrays."""
    rows, lengths = [3, 5], [7, 33]
    q, k, v = randoms((8, HEADS, DIM), (40, KV, DIM), (40, KV, DIM), seed=3, dtype=torch.float16)
    made = []
    for copies in ({}, {"qo_indptr_cpu": starts(rows), "kv_indptr_cpu": starts(lengths)}):
        wrapper = fi.BatchPrefillWithRaggedKVCacheWrapper(WORKSPACE)
        wrapper.plan(starts(rows), starts(lengths), HEADS, KV, DIM, causal=True, **copies)
        made.append(wrapper.run(q, k, v))
    assert torch.equal(*made)
    wrapper.plan(starts(rows), starts(lengths), HEADS, KV, DIM, qo_indptr_cpu=int32(0, 2, 8))
    assert wrapper._planned.longest == 6


# Signatures, as the original has them (0.7.4)

SCORE = "pos_encoding_mode='NONE', use_fp16_qk_reduction=False"
ROPE = "rope_scale=None, rope_theta=None"
TYPES = "q_data_type='float16', kv_data_type=None, o_data_type=None"
ITEMS = "prefix_len_ptr=None, token_pos_in_items_ptr=None, token_pos_in_items_len=0, max_item_len_ptr=None"
OUTPUTS = "out=None, lse=None, return_lse=False"
OLD = "window_left=-1, logits_soft_cap=None, sm_scale=None"
SIGNATURES = {
    f"{PAGED}.__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None, "
    "mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, variant_owns_mask=False, "
    "max_total_num_rows=None",
    f"{PAGED}.plan": "self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads, "
    "num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False, "
    f"{SCORE}, sm_scale=None, window_left=-1, logits_soft_cap=None, {ROPE}, {TYPES}, non_blocking=True, {ITEMS}, "
    "seq_lens=None, seq_lens_q=None, block_tables=None, max_token_per_sequence=None, max_sequence_kv=None, "
    "fixed_split_size=None, disable_split_kv=False, uniform_q_len=None, use_token_head_sf=False",
    f"{PAGED}.run": f"self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, {OUTPUTS}, "
    "lse_base='log2', lse_layout='NH', enable_pdl=None, window_left=None, sinks=None, kv_cache_sf=None, "
    "skip_softmax_threshold_scale_factor=None, use_fp16_softmax=None, uses_spcompress=None",
    f"{PAGED}.forward": f"self, q, paged_kv_cache, causal=False, {SCORE}, k_scale=None, v_scale=None, {OLD}, {ROPE}",
    f"{DECODE}.__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False,"
    " paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend='auto', "
    "jit_args=None, jit_kwargs=None",
    f"{DECODE}.plan": "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
    f"pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, {TYPES}, data_type=None, sm_scale=None, {ROPE}, "
    "non_blocking=True, block_tables=None, seq_lens=None, fixed_split_size=None, disable_split_kv=False, "
    "q_len_per_req=1, *, window_right=0",
    f"{DECODE}.run": f"self, q, paged_kv_cache, *args, q_scale=None, k_scale=None, v_scale=None, {OUTPUTS}, "
    "enable_pdl=None, window_left=None, sinks=None, q_len_per_req=None, skip_softmax_threshold_scale_factor=None, "
    "kv_cache_sf=None",
    f"{DECODE}.forward": "self, q, paged_kv_cache, pos_encoding_mode='NONE', q_scale=None, k_scale=None, v_scale=None, "
    f"{OLD}, {ROPE}",
    f"CUDAGraph{DECODE}.__init__": "self, workspace_buffer, indptr_buffer, indices_buffer, last_page_len_buffer, "
    "kv_layout='NHD', use_tensor_cores=False",
    f"{RAGGED}.__init__": "self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None, "
    "kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None, "
    "variant_owns_mask=False",
    f"{RAGGED}.plan": "self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, "
    f"custom_mask=None, packed_custom_mask=None, causal=False, {SCORE}, {OLD}, {ROPE}, {TYPES}, non_blocking=True, "
    f"{ITEMS}, fixed_split_size=None, disable_split_kv=False, seq_lens=None, seq_lens_q=None, "
    "max_token_per_sequence=None, max_sequence_kv=None, v_indptr=None, o_indptr=None, qo_indptr_cpu=None, "
    "kv_indptr_cpu=None, uniform_q_len=None, use_token_head_sf=False",
    f"{RAGGED}.run": "self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, "
    f"{OUTPUTS}, lse_base='log2', lse_layout='NH', enable_pdl=None, kv_cache_sf=None",
    f"{RAGGED}.forward": f"self, q, k, v, causal=False, {SCORE}, {OLD}, {ROPE}",
    "fast_decode_plan": "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, "
    "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None, q_data_type=None, kv_data_type=None, "
    f"data_type=None, sm_scale=None, {ROPE}, non_blocking=True, fixed_split_size=None, disable_split_kv=False, "
    "q_len_per_req=1, global_override_indptr_cpu=None",
    "single_decode_with_kv_cache": "q, k, v, kv_layout='NHD', pos_encoding_mode='NONE', use_tensor_cores=False, "
    "q_scale=None, k_scale=None, v_scale=None, window_left=-1, logits_soft_cap=None, sm_scale=None, "
    f"{ROPE}, return_lse=False",
    "single_prefill_with_kv_cache": "q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, "
    f"custom_mask=None, packed_custom_mask=None, causal=False, kv_layout='NHD', {SCORE}, sm_scale=None, "
    f"window_left=-1, logits_soft_cap=None, {ROPE}, backend='auto', return_lse=False, kv_cache_sf=None, k_scale=None, "
    "v_scale=None",
    "merge_state": "v_a, s_a, v_b, s_b",
    "merge_state_in_place": "v, s, v_other, s_other, mask=None",
    "merge_states": "v, s",
    "get_seq_lens": "kv_indptr, kv_last_page_len, page_size",
    "get_batch_indices_positions": "append_indptr, seq_lens, nnz, batch_indices=None, positions=None",
    "append_paged_kv_cache": "append_key, append_value, batch_indices, positions, paged_kv_cache, kv_indices, "
    "kv_indptr, kv_last_page_len, kv_layout='NHD'",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name: str) -> None:
    names: dict[str, Any] = {}
    exec(f"def original({SIGNATURES[name]}): ...", names)
    found: Any = fi
    for part in name.split("."):
        found = getattr(found, part)

    def shown(function: Any) -> list[Any]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shown(found) == shown(names["original"])


def test_every_public_name_is_held_to_a_signature() -> None:
    held = {name.partition(".")[0] for name in SIGNATURES} | {"single_prefill_with_kv_cache_return_lse"}
    assert set(fi.__all__) == held
    for name in fi.__all__:
        assert getattr(fi, name).__doc__
    for name in (PAGED, DECODE, RAGGED):
        wrapper = getattr(fi, name)
        assert wrapper.begin_forward is wrapper.plan
        old, new = (inspect.signature(getattr(wrapper, f"forward{end}")) for end in ("", "_return_lse"))
        assert str(old) == str(new)


PLACED: dict[str, dict[str, Any]] = {
    "get_batch_indices_positions": {
        "append_indptr": int32(0, 2, 3), "seq_lens": int32(3, 4), "nnz": 3, "batch_indices": int32(0, 0, 0),
        "positions": int32(0, 0, 0),
    },
    "get_seq_lens": {"kv_indptr": int32(0, 2, 3), "kv_last_page_len": int32(3, 4), "page_size": 4},
    "merge_states": {"v": torch.zeros(3, 1, 2, 64), "s": torch.zeros(3, 1, 2)},
    "merge_state_in_place": {
        "v": torch.zeros(3, 2, 64), "s": torch.zeros(3, 2), "v_other": torch.zeros(3, 2, 64),
        "s_other": torch.zeros(3, 2), "mask": torch.ones(3, dtype=torch.bool),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", PLACED)
def test_tensors_on_several_devices(name: str) -> None:
    given = PLACED[name]
    like, *others = (x for x in given if isinstance(given[x], torch.Tensor))
    for other in [x for x in others if name != "merge_state_in_place" or x == "mask"]:
        with pytest.raises(DeviceError) as caught:
            getattr(fi, name)(**given | {other: given[other].to("meta")})
        text = f"{name}(): argument {other!r}: expected cpu, like {like}, received meta"
        assert str(caught.value).startswith(text)


@pytest.mark.parametrize("nnz", [2**31, 2**60, 2**70, -1])
def test_tokens_beyond_32_bits(nnz: int) -> None:
    with pytest.raises(ArgumentError, match=r"argument 'nnz': expected an integer from 0 to 2147483136"):
        fi.get_batch_indices_positions(int32(0, 2), int32(3), nnz)
