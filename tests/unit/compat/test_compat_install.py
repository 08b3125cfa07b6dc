"""omniattn.compat: signatures of the originals, modules under their names, and bert_padding."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from omniattn import compat
from omniattn.errors import ArgumentError, DeviceError

torch = pytest.importorskip("torch")
from omniattn.compat import bert_padding  # noqa: E402
from tests.unit.compat.compat_cases import randoms  # noqa: E402

pytestmark = pytest.mark.frameworks

# Signatures, as the originals have them (flash-attn 2.8, FlashAttention-3 of 2025, SageAttention 2.2, FlashMLA 1.0)

SCORE = (
    "dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, "
    "deterministic=False, return_attn_probs=False"
)
STARTS = "cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k"
TENSORS = "dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes"
KNOBS = (
    "qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
    "num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False"
)
STARTS_MLA = "cu_seqlens_qo, cu_seqlens_kv, max_seqlen_qo, max_seqlen_kv"
SCORE_MLA = "dropout_p=0.0, softmax_scale=None, causal=False, deterministic=False, is_varlen=True"
MASK = "attn_mask=None, dropout_p=0.0"  # in place of **kwargs, as smooth_k of SageAttention 1
SPARGE = "attn_mask=None, dropout_p=0.0, is_causal=False, scale=None"
SPARGE_MORE = (
    'pvthreshd=50, attention_sink=False, tensor_layout="HND", output_dtype=torch.float16, return_sparsity=False, '
    "return_lse=False"
)
SIGNATURES: dict[str, dict[str, str]] = {
    "flash_attn": {
        "flash_attn_func": f"q, k, v, {SCORE}",
        "flash_attn_qkvpacked_func": f"qkv, {SCORE}",
        "flash_attn_kvpacked_func": f"q, kv, {SCORE}",
        "flash_attn_varlen_func": f"q, k, v, {STARTS}, {SCORE}, block_table=None",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, {SCORE}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {STARTS}, {SCORE}",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, block_table=None, softmax_scale=None, "
        "causal=False, window_size=(-1, -1), softcap=0.0, rotary_interleaved=True, alibi_slopes=None, num_splits=0, "
        "return_softmax_lse=False",
        "_flash_attn_forward": f"q, k, v, {TENSORS}, return_softmax",
        "_flash_attn_varlen_forward": f"q, k, v, {STARTS}, dropout_p, softmax_scale, causal, window_size_left=-1, "
        "window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, "
        "seqused_k=None, zero_tensors=False, num_splits=0",
        "_flash_attn_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {TENSORS}, deterministic, "
        "rng_state=None",
        "_flash_attn_varlen_backward": f"dout, q, k, v, out, softmax_lse, dq, dk, dv, {STARTS}, {TENSORS}, "
        "deterministic, rng_state=None, zero_tensors=False",
    },
    "flash_attn_interface": {
        "flash_attn_func": f"q, k, v, softmax_scale=None, causal=False, {KNOBS}",
        "flash_attn_varlen_func": f"q, k, v, {STARTS}, seqused_q=None, seqused_k=None, softmax_scale=None, "
        f"causal=False, {KNOBS}",
        "flash_attn_qkvpacked_func": "qkv, softmax_scale=None, causal=False, q_descale=None, k_descale=None, "
        "v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, deterministic=False, num_heads_q=None, "
        "sm_margin=0, return_attn_probs=False",
        "flash_attn_combine": "out_partial, lse_partial, out=None, out_dtype=None",
        "flash_attn_with_kvcache": "q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, "
        "cache_seqlens=None, cache_batch_idx=None, cache_leftpad=None, page_table=None, cu_seqlens_q=None, "
        "cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None, q_descale=None, k_descale=None, "
        "v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0, softcap=0.0, "
        "rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0, "
        "return_softmax_lse=False",
        "get_scheduler_metadata": "batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, "
        "cache_seqlens, qkv_dtype=torch.bfloat16, headdim_v=None, cu_seqlens_q=None, cu_seqlens_k_new=None, "
        "cache_leftpad=None, page_size=None, max_seqlen_k_new=0, causal=False, window_size=(-1, -1), "
        "attention_chunk=0, has_softcap=False, num_splits=0, pack_gqa=None, sm_margin=0",
    },
    "sageattention": {
        "sageattn": f'q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, return_lse=False, {MASK}, '
        "smooth_k=True",
        "sageattn_varlen": f"q, k, v, {STARTS}, is_causal=False, sm_scale=None, smooth_k=True",
        "sageattn_qk_int8_pv_fp16_triton": 'q, k, v, tensor_layout="HND", quantization_backend="triton", '
        f"is_causal=False, sm_scale=None, smooth_k=True, return_lse=False, {MASK}",
        "sageattn_qk_int8_pv_fp16_cuda": 'q, k, v, tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread", '
        f'sm_scale=None, pv_accum_dtype="fp32", smooth_k=True, smooth_v=False, return_lse=False, {MASK}',
        "sageattn_qk_int8_pv_fp8_cuda": 'q, k, v, tensor_layout="HND", is_causal=False, qk_quant_gran="per_thread", '
        f'sm_scale=None, pv_accum_dtype="fp32+fp16", smooth_k=True, smooth_v=False, return_lse=False, {MASK}',
        "sageattn_qk_int8_pv_fp8_cuda_sm90": 'q, k, v, tensor_layout="HND", is_causal=False, '
        'qk_quant_gran="per_thread", sm_scale=None, pv_accum_dtype="fp32+fp32", smooth_k=True, return_lse=False, '
        f"{MASK}",
    },
    "flash_mla": {
        "get_mla_metadata": "*args, **kwargs",
        "flash_mla_with_kvcache": "q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, "
        "num_splits=None, softmax_scale=None, causal=False, is_fp8_kvcache=False, indices=None, attn_sink=None, "
        "extra_k_cache=None, extra_indices_in_kvcache=None, topk_length=None, extra_topk_length=None",
        "flash_mla_sparse_fwd": "q, kv, indices, sm_scale, d_v=512, attn_sink=None, topk_length=None",
        "flash_attn_varlen_func": f"q, k, v, {STARTS_MLA}, {SCORE_MLA}",
        "flash_attn_varlen_qkvpacked_func": f"qkv, cu_seqlens, max_seqlen, head_dim_qk, {SCORE_MLA}",
        "flash_attn_varlen_kvpacked_func": f"q, kv, {STARTS_MLA}, head_dim_qk, {SCORE_MLA}",
    },
    "spas_sage_attn": {
        "spas_sage2_attn_meansim_topk_cuda": f"q, k, v, {SPARGE}, smooth_k=True, simthreshd1=-0.1, cdfthreshd=None, "
        f"topk=0.35, {SPARGE_MORE}",
        "spas_sage2_attn_meansim_cuda": f"q, k, v, {SPARGE}, smooth_k=True, simthreshd1=0.6, cdfthreshd=0.98, "
        f"{SPARGE_MORE}",
        "block_sparse_sage2_attn_cuda": f"q, k, v, mask_id=None, dropout_p=0.0, scale=None, smooth_k=True, "
        f"{SPARGE_MORE}",
    },
    "bert_padding": {
        "unpad_input": "hidden_states, attention_mask, unused_mask=None",
        "unpad_input_for_concatenated_sequences": "hidden_states, attention_mask_in_length",
        "pad_input": "hidden_states, indices, batch, seqlen",
    },
}


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in SIGNATURES.items() for name in names])
def test_signatures(module: str, name: str) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(f"def original({SIGNATURES[module][name]}): ...", names)
    function = getattr(importlib.import_module(f"omniattn.compat.{module}"), name)

    def shown(function: Any) -> list[Any]:
        return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]

    assert shown(function) == shown(names["original"])
    assert function.__doc__


@pytest.mark.parametrize("module", SIGNATURES)
def test_every_public_function_is_held_to_a_signature(module: str) -> None:
    source = importlib.import_module(f"omniattn.compat.{module}")
    functions = {name for name in source.__all__ if inspect.isfunction(getattr(source, name))}
    assert functions <= set(SIGNATURES[module])


# install


@pytest.fixture
def clean() -> Iterator[None]:
    """Nothing is installed before and after."""
    originals = [
        name
        for name in sys.modules
        if name.split(".")[0]
        in ("flash_attn", "flash_attn_interface", "sageattention", "flashinfer", "flash_mla", "spas_sage_attn")
    ]
    assert originals == []
    yield
    compat.uninstall()
    names = ("flash_attn", "flash_attn_3", "sageattention", "flashinfer", "flash_mla", "spas_sage_attn")
    assert not [name for name in sys.modules if name.split(".")[0] in names]


@pytest.mark.usefixtures("clean")
def test_install() -> None:
    assert importlib.util.find_spec("flash_attn") is None
    compat.install()
    compat.install("flash_attn")  # it is there already
    import flash_attn
    import flash_attn.flash_attn_interface as interface
    import flash_attn_interface
    import sageattention
    from flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache  # noqa: F401
    from flash_attn.bert_padding import index_first_axis, pad_input, unpad_input  # noqa: F401
    from flash_attn.flash_attn_interface import _flash_attn_backward, _wrapped_flash_attn_varlen_forward  # noqa: F401
    from sageattention.core import sageattn

    from omniattn.compat import flash_attn as ours

    assert flash_attn_func is ours.flash_attn_func
    assert flash_attn.flash_attn_interface is interface
    assert flash_attn.bert_padding.pad_input is bert_padding.pad_input
    assert flash_attn_interface.flash_attn_func is not flash_attn_func
    assert "attn_mask" in inspect.signature(sageattn).parameters
    assert sageattention.sageattn is sageattn
    q, k, v = randoms((1, 3, 2, 8), (1, 3, 2, 8), (1, 3, 2, 8))
    assert torch.equal(flash_attn.flash_attn_func(q, k, v), ours.flash_attn_func(q, k, v))
    by_module = importlib.metadata.packages_distributions()
    for name, version, distribution in (
        ("flash_attn", "2.8.3", "flash-attn"), ("flash_attn_interface", "3.0.0", "flash_attn_3"),
        ("sageattention", "2.2.0", "sageattention"),
    ):  # fmt: skip
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.name == name
        assert sys.modules[name].__version__ == version
        assert importlib.metadata.version(distribution) == version
        assert distribution.replace("_", "-") in by_module[name]
    assert importlib.util.find_spec("flash_attn.bert_padding").name == "flash_attn.bert_padding"
    with pytest.raises(ModuleNotFoundError, match=r"flash_attn\.layers"):
        importlib.import_module("flash_attn.layers.rotary")
    compat.uninstall("flash_attn", "flash_attn_interface")
    assert importlib.util.find_spec("flash_attn") is None
    assert importlib.import_module("sageattention") is sageattention
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash-attn")
    compat.uninstall()
    assert importlib.util.find_spec("sageattention") is None


@pytest.mark.usefixtures("clean")
def test_flashinfer_is_installed_by_its_name_only() -> None:
    compat.install()
    assert importlib.util.find_spec("flashinfer") is None
    compat.install("flashinfer")
    import flashinfer
    from flashinfer.decode import BatchDecodeWithPagedKVCacheWrapper
    from flashinfer.page import append_paged_kv_cache  # noqa: F401
    from flashinfer.prefill import BatchPrefillWithPagedKVCacheWrapper  # noqa: F401

    assert flashinfer.BatchDecodeWithPagedKVCacheWrapper is BatchDecodeWithPagedKVCacheWrapper
    assert flashinfer.cascade.merge_state is flashinfer.merge_state
    assert flashinfer.__version__ == importlib.metadata.version("flashinfer-python") == "0.6.18"
    with pytest.raises(AttributeError, match="sampling"):
        _ = flashinfer.sampling
    compat.uninstall()
    assert importlib.util.find_spec("flashinfer") is None


@pytest.mark.usefixtures("clean")
def test_sparge_is_installed_by_its_name_only() -> None:
    compat.install()
    assert importlib.util.find_spec("spas_sage_attn") is None
    compat.install("spas_sage_attn")
    from spas_sage_attn import block_sparse_sage2_attn_cuda
    from spas_sage_attn.core import spas_sage2_attn_meansim_topk_cuda

    from omniattn.compat import spas_sage_attn as ours

    assert block_sparse_sage2_attn_cuda is ours.block_sparse_sage2_attn_cuda
    assert spas_sage2_attn_meansim_topk_cuda is ours.spas_sage2_attn_meansim_topk_cuda
    assert importlib.metadata.version("spas-sage-attn") == ours.__version__


@pytest.mark.usefixtures("clean")
def test_flash_mla_is_installed_by_its_name_only() -> None:
    compat.install()
    assert importlib.util.find_spec("flash_mla") is None
    compat.install("flash_mla")
    from flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
    from flash_mla.flash_mla_interface import FlashMLASchedMeta

    from omniattn.compat import flash_mla as ours

    assert flash_mla_with_kvcache is ours.flash_mla_with_kvcache
    assert isinstance(get_mla_metadata(1, heads=2)[0], FlashMLASchedMeta)
    assert importlib.metadata.version("flash-mla") == ours.__version__
    assert flash_mla_sparse_fwd is ours.flash_mla_sparse_fwd
    with pytest.raises(ImportError, match="get_mla_decoding_metadata"):
        from flash_mla import get_mla_decoding_metadata  # noqa: F401


@pytest.mark.usefixtures("clean")
def test_originals_that_are_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    original, child = ModuleType("flash_attn"), ModuleType("flash_attn.layers")
    monkeypatch.setitem(sys.modules, "flash_attn", original)
    monkeypatch.setitem(sys.modules, "flash_attn.layers", child)
    with pytest.raises(ArgumentError, match="replace=True"):
        compat.install("sageattention", "flash_attn")
    assert "sageattention" not in sys.modules
    assert sys.modules["flash_attn"] is original
    compat.install("flash_attn", replace=True)
    assert sys.modules["flash_attn"].__version__ == "2.8.3"
    assert "flash_attn.layers" not in sys.modules
    compat.uninstall("flash_attn")
    assert sys.modules["flash_attn"] is original
    assert sys.modules["flash_attn.layers"] is child
    assert "flash_attn.bert_padding" not in sys.modules
    for call in (compat.install, compat.uninstall):
        with pytest.raises(ArgumentError, match="'xformers'"):
            call("xformers")
    monkeypatch.undo()


@pytest.mark.usefixtures("clean")
def test_einops_comes_with_bert_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    einops: Any = ModuleType("einops")
    einops.rearrange = object()
    monkeypatch.setitem(sys.modules, "einops", einops)
    compat.install("flash_attn")
    from flash_attn.bert_padding import rearrange

    assert rearrange is einops.rearrange
    with pytest.raises(AttributeError, match="other"):
        _ = bert_padding.other


def test_importing_installs_nothing() -> None:
    code = (
        "import sys, omniattn.compat\n"
        "assert not {'torch', 'flash_attn', 'sageattention'} & sys.modules.keys()\n"
        "assert not [f for f in sys.meta_path if 'omniattn' in type(f).__module__]\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


# bert_padding


def test_padding_there_and_back() -> None:
    (x,) = randoms((3, 5, 2, 4), grad=True)
    mask = torch.tensor([[1, 1, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 1, 0, 0]])
    hidden, indices, starts, longest, used = bert_padding.unpad_input(x, mask)
    assert torch.equal(hidden, x.detach().flatten(0, 1)[[0, 1, 5, 6, 7, 8, 12]])
    assert indices.tolist() == [0, 1, 5, 6, 7, 8, 12]
    assert (starts.tolist(), starts.dtype, longest, used.tolist()) == ([0, 2, 6, 7], torch.int32, 4, [2, 4, 1])
    back = bert_padding.pad_input(hidden * 2, indices, 3, 5)
    assert torch.equal(back, 2 * x * mask[..., None, None])
    (gradient,) = torch.autograd.grad(back.square().sum(), [x])
    assert torch.equal(gradient, 8 * x * mask[..., None, None])
    same = bert_padding.unpad_input(x, mask.bool())
    assert all(torch.equal(a, b) for a, b in zip(same[:3], (hidden, indices, starts), strict=True))


def test_places_that_are_kept_without_a_token() -> None:
    (x,) = randoms((2, 4, 3))
    mask = torch.tensor([[1, 1, 0, 0], [1, 0, 0, 0]])
    unused = torch.tensor([[0, 0, 1, 0], [0, 1, 1, 0]])
    hidden, indices, starts, longest, used = bert_padding.unpad_input(x, mask, unused)
    assert indices.tolist() == [0, 1, 2, 4, 5, 6]
    assert torch.equal(hidden, x.flatten(0, 1)[indices])
    assert (starts.tolist(), longest, used.tolist(), used.dtype) == ([0, 3, 6], 3, [2, 1], torch.int32)


def test_several_sequences_in_a_row() -> None:
    (x,) = randoms((3, 6, 4))
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]])
    hidden, indices, starts, longest = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 17]
    assert torch.equal(hidden, x.flatten(0, 1)[indices])
    assert (starts.tolist(), starts.dtype, longest) == ([0, 2, 5, 8, 10, 16], torch.int32, 6)


def test_rows_and_their_gradients() -> None:
    x, values = randoms((5, 2, 3), (3, 2, 3), grad=True)
    at = torch.tensor([4, 0, 2])
    functions = {
        "first": (lambda: bert_padding.index_first_axis(x, at), lambda: x[at]),
        "put": (
            lambda: bert_padding.index_put_first_axis(values, at, 6),
            lambda: torch.zeros(6, 2, 3, dtype=x.dtype).index_put((at,), values),
        ),
        "residual": (
            lambda: torch.cat([(t**2).flatten() for t in bert_padding.index_first_axis_residual(x, at)]),
            lambda: torch.cat([(x[at] ** 2).flatten(), (x**2).flatten()]),
        ),
    }  # fmt: skip
    for made, expected in functions.values():
        assert torch.equal(made(), expected())
        got, want = (torch.autograd.grad(f().square().sum(), [x, values], allow_unused=True) for f in (made, expected))
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("unpad_input", (torch.zeros(2, 4, 8), torch.ones(2, 3)), "attention_mask"),
        ("unpad_input", (torch.zeros(2, 4, 8), torch.ones(2, 4), torch.ones(1, 4)), "unused_mask"),
        ("unpad_input", (torch.zeros(2, 4, 8), None), "attention_mask"),
        ("unpad_input", (None, torch.ones(2, 4)), "hidden_states"),
        (
            "unpad_input_for_concatenated_sequences", (torch.zeros(2, 4, 8), torch.ones(2, 2).int()),
            "attention_mask_in_length",
        ),
        ("pad_input", (torch.zeros(3, 8), torch.tensor([0, 1]), 2, 4), "indices"),
        ("pad_input", (torch.zeros(3, 8), torch.tensor([0, 1, 2]), 2, "4"), "seqlen"),
    ],
)  # fmt: skip
def test_masks_of_another_batch_are_refused(name: str, arguments: tuple[Any, ...], named: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        getattr(bert_padding, name)(*arguments)
    assert (caught.value.function, caught.value.argument) == (name, named)


@pytest.mark.parametrize(
    ("name", "arguments", "named"),
    [
        ("unpad_input", (torch.ones(2, 3),), "attention_mask"),
        ("unpad_input", (torch.ones(2, 3), torch.zeros(2, 3)), "unused_mask"),
        ("unpad_input_for_concatenated_sequences", (torch.ones(2, 3),), "attention_mask_in_length"),
    ],
)
def test_masks_on_another_device_are_refused(name: str, arguments: tuple[Any, ...], named: str) -> None:
    *others, last = arguments
    with pytest.raises(DeviceError, match=rf"{name}\(\): argument '{named}': expected cpu, like hidden_states.*meta"):
        getattr(bert_padding, name)(torch.ones(2, 3, 4), *others, last.to("meta"))


def test_places_on_another_device_and_huge_batches_are_refused() -> None:
    rows, places = torch.ones(2, 4), torch.tensor([0, 1])
    with pytest.raises(DeviceError, match=r"pad_input\(\): argument 'indices': expected cpu, like hidden_states.*meta"):
        bert_padding.pad_input(rows, places.to("meta"), 2, 3)
    for batch, seqlen, named in ((2**60, 3, "batch"), (2, 2**60, "seqlen")):
        with pytest.raises(ArgumentError, match=rf"argument '{named}': expected an integer from 0 to 2147483136"):
            bert_padding.pad_input(rows, places, batch, seqlen)
