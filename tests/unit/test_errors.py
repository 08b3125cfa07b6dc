"""The text of every error class, and that errors survive the way between processes."""

from __future__ import annotations

import inspect
import pickle
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import omniattn
from omniattn import errors
from omniattn.errors import (
    AlignmentError,
    ArgumentError,
    CacheError,
    CommunicationError,
    CompileError,
    DeviceError,
    DriverError,
    DriverMissingError,
    DtypeError,
    KernelNotFoundError,
    OmniattnError,
    OutOfBlocksError,
    OutOfHostBlocksError,
    OutOfSlotsError,
    ShapeError,
    StrideError,
    UnsupportedError,
)

ROOT = Path(__file__).resolve().parents[2]
ARGUMENT_CLASSES = (ArgumentError, DtypeError, ShapeError, StrideError, AlignmentError, DeviceError)

SAMPLES: dict[type[OmniattnError], tuple[OmniattnError, str]] = {
    OmniattnError: (OmniattnError("plain"), "plain"),
    **{
        cls: (
            cls("k", "float16", "float32", function="attention", hint="Cast it"),
            "attention(): argument 'k': expected float16, received float32. Cast it",
        )
        for cls in ARGUMENT_CLASSES
    },
    UnsupportedError: (
        UnsupportedError("precision 'int8' is not in this version", instead="precision='exact'"),
        "precision 'int8' is not in this version. What works: precision='exact'",
    ),
    CommunicationError: (
        CommunicationError("ring_attention(): step 1 of 3 failed (timed out)", "see whether another rank raised"),
        "ring_attention(): step 1 of 3 failed (timed out). What to do: see whether another rank raised",
    ),
    OutOfBlocksError: (
        OutOfBlocksError(3, 1, 8, 16),
        "3 more blocks of 16 tokens are needed, 1 of 8 are free. What to do: free(), swap_out() or truncate() "
        "sequences, let some wait, or make the cache larger",
    ),
    OutOfHostBlocksError: (
        OutOfHostBlocksError(3, 1, 8),
        "3 more blocks of the swap space are needed, 1 of 8 are free. What to do: free() the sequence and compute it "
        "again later, swap_in() or free() others, or make the space larger",
    ),
    OutOfSlotsError: (
        OutOfSlotsError(4),
        "all 4 slots of the recent window belong to sequences. What to do: free() sequences, let some wait, or make a "
        "cache with more recent_slots",
    ),
    KernelNotFoundError: (
        KernelNotFoundError("toy", "sm_90a", [("disk cache", "not there"), ("NVRTC", "missing")], "install it"),
        "no usable binary of kernel 'toy' for sm_90a. Tried, in this order:\n  - disk cache: not there\n"
        "  - NVRTC: missing\nWhat to do: install it",
    ),
    CompileError: (
        CompileError("it does not compile", log="toy.cu(1): error\n"),
        "it does not compile\ntoy.cu(1): error",
    ),
    DriverError: (
        DriverError("cuInit", "CUDA_ERROR_NO_DEVICE", "no GPU", "look for one"),
        "cuInit failed with CUDA_ERROR_NO_DEVICE: no GPU. What to do: look for one",
    ),
    DriverMissingError: (
        DriverMissingError("cuInit", "LIBRARY_NOT_FOUND", "no libcuda", "install the driver"),
        "cuInit failed with LIBRARY_NOT_FOUND: no libcuda. What to do: install the driver",
    ),
    CacheError: (
        CacheError("/cache", "cannot be removed", "check its owner"),
        "kernel cache /cache: cannot be removed. What to do: check its owner",
    ),
}


def test_every_class_has_a_sample() -> None:
    classes = {cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)}
    assert classes == set(SAMPLES)
    assert {cls.__name__ for cls in classes} == set(errors.__all__)


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda cls: cls.__name__)
def test_text(cls: type[OmniattnError]) -> None:
    error, text = SAMPLES[cls]
    assert type(error) is cls
    assert str(error) == text


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda cls: cls.__name__)
def test_pickling_keeps_text_and_attributes(cls: type[OmniattnError]) -> None:
    error, text = SAMPLES[cls]
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == text
    assert copy.__dict__ == error.__dict__


@pytest.mark.parametrize("cls", SAMPLES, ids=lambda cls: cls.__name__)
def test_every_error_names_its_heading_in_the_documents(cls: type[OmniattnError]) -> None:
    error, text = SAMPLES[cls]
    page, _, anchor = error.page.partition("#")
    headings = re.findall(r"^#+ (.+)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert anchor in {heading.strip("`").lower().replace(" ", "-") for heading in headings}
    assert str(error) == text

    class Own(cls):  # type: ignore[valid-type, misc]
        pass

    own = pickle.loads(pickle.dumps(error))
    own.__class__ = Own
    assert own.page == error.page


def test_a_traceback_says_the_page_and_keeps_other_notes() -> None:
    error = ShapeError("k", "(2, 8)", (2, 9))
    before = dict(error.__dict__)
    assert pickle.loads(pickle.dumps(error)).__dict__ == before
    if sys.version_info >= (3, 11):
        error.add_note("of a test")
        lines = traceback.format_exception(error)
        assert "About this error: docs/troubleshooting.md#shapeerror\n" in lines
        assert "of a test\n" in lines
        assert pickle.loads(pickle.dumps(error)).__notes__ == error.__notes__
    assert not hasattr(ShapeError, "__notes__")


def test_builtin_bases() -> None:
    """Callers who catch the built-in exceptions keep working."""
    assert all(issubclass(cls, ValueError) for cls in (*ARGUMENT_CLASSES, UnsupportedError))
    assert issubclass(DtypeError, TypeError)
    assert all(issubclass(cls, RuntimeError) for cls in SAMPLES)
    assert issubclass(CacheError, OSError)


def test_argument_attributes_and_short_form() -> None:
    error = ShapeError("k", "(2, 8)", (2, 9))
    assert (error.argument, error.expected, error.received) == ("k", "(2, 8)", (2, 9))
    assert str(error) == "argument 'k': expected (2, 8), received (2, 9)"


def test_received_objects_are_kept_as_text() -> None:
    """An error must not keep a caller's array alive."""
    assert ArgumentError("k", "an array", object).received == "<class 'object'>"


def test_short_forms() -> None:
    assert str(UnsupportedError("no")) == "no"
    assert str(CompileError("no log", log="  \n")) == "no log"
    assert str(DriverError("cuX", "CODE", "text")) == "cuX failed with CODE: text"
    assert "  - nothing\n" in str(KernelNotFoundError("toy", "sm_80", [], "x"))


@pytest.mark.parametrize("precision", ["exact", "int8"])
@pytest.mark.parametrize(
    ("starts", "longest", "argument"),
    [([0, 2, 9], 4, "cu_seqlens_k"), ([0, 3, 2], 4, "cu_seqlens_k"), ([1, 2, 4], 4, "cu_seqlens_k"),
     ([0, 1, 4], 2, "max_seqlen_k")],
)  # fmt: skip
def test_errors_in_the_contents_of_arrays_name_the_public_function(
    starts: list[int], longest: int, argument: str, precision: str
) -> None:
    """The CPU finds them behind the public function, in the reference."""
    x = np.zeros((4, 2, 64), np.float16)
    with pytest.raises(ArgumentError) as caught:
        omniattn.attention_varlen(
            x, x, x, cu_seqlens_q=np.array([0, 2, 4], np.int32), cu_seqlens_k=np.array(starts, np.int32),
            max_seqlen_q=2, max_seqlen_k=longest, precision=precision,
        )  # fmt: skip
    assert str(caught.value).startswith(f"attention_varlen(): argument '{argument}': expected ")


X, INTS = np.zeros((1, 2, 2, 8), np.float16), np.ones(1, np.int32)
CACHE = omniattn.KVCache(1, 2, 2, 8, like=X)
STARTS = {"cu_seqlens_q": INTS, "cu_seqlens_k": INTS, "max_seqlen_q": 1, "max_seqlen_k": 1}
ROWS = np.zeros((4, 24), np.float16)
NO_ARRAYS: dict[str, tuple[str, Callable[[object], object]]] = {
    "attention": ("q", lambda x: omniattn.attention(x, X, X)),
    "attention mask": ("mask", lambda x: omniattn.attention(X, X, X, mask=x)),
    "attention_varlen": ("k", lambda x: omniattn.attention_varlen(X[0], x, X[0], **STARTS)),
    "attention_backward": ("lse", lambda x: omniattn.attention_backward(X, X, X, X, X, x)),
    "decode": ("seq_lens", lambda x: omniattn.decode(X, CACHE, seq_lens=x)),
    "attention_with_kvcache": ("q", lambda x: omniattn.attention_with_kvcache(x, CACHE, seq_lens=INTS)),
    "append": ("v", lambda x: omniattn.append(CACHE, X, x, seq_lens=INTS)),
    "merge_states": ("lse_a", lambda x: omniattn.merge_states(X, x, X, X)),
    "quantize_v": ("v", omniattn.quantize_v),
    "quantize_qk": ("k", lambda x: omniattn.quantize_qk(X, x)),
    "attention_sparse": ("kv", lambda x: omniattn.attention_sparse(X[0], x, indices=INTS[None])),
    "attention_sparse sinks": (
        "sinks", lambda x: omniattn.attention_sparse(ROWS[:, None], ROWS, indices=INTS[None], head_dim_v=16, sinks=x),
    ),
    "index_logits": ("weights", lambda x: omniattn.index_logits(X[0], ROWS, x)),
    "top_k": ("logits", lambda x: omniattn.top_k(x, 3)),
    "KVCache": ("like", lambda x: omniattn.KVCache(1, 2, 2, 8, like=x)),
    "PagedKVCache.from_arrays": ("v", lambda x: omniattn.PagedKVCache.from_arrays(X, x)),
    "KVCache.from_arrays": ("k", lambda x: omniattn.KVCache.from_arrays(x, None)),
    "KVCache.from_arrays scales": (
        "k_scale", lambda x: omniattn.KVCache.from_arrays(X.view(np.int8), X.view(np.int8), k_scale=x, v_scale=x),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_ARRAYS)
@pytest.mark.parametrize("given", ["text", [1.0], np.array(["text"])], ids=["str", "list", "array of str"])
def test_what_is_no_array_is_named_with_its_function(name: str, given: object) -> None:
    argument, call = NO_ARRAYS[name]
    with pytest.raises(ArgumentError) as raised:
        call(given)
    assert raised.value.argument == argument
    assert raised.value.function == name.split()[0]
