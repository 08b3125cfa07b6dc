"""What all backends for vLLM have in common; nothing of vLLM is imported here."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch

from ...errors import ArgumentError, DtypeError, UnsupportedError

__all__ = ["EXACT", "FUNCTION", "Common", "check_format", "dtype_of", "refused"]

#: What errors call what raises them.
FUNCTION = "omniattn.integrations.vllm"
#: Element types of caches in 16 bits, by vLLM's names.
EXACT = {"float16": torch.float16, "bfloat16": torch.bfloat16}


def refused(what: str, of: str = "") -> UnsupportedError:
    """The error for what is not served; ``of``: " for MLA" or nothing."""
    return UnsupportedError(f"omniattn's attention backend{of}: {what}", instead="another --attention-backend")


def check_format(kv_cache: Any, kv_cache_dtype: Any, formats: tuple[str, ...], of_bytes: tuple[str, ...]) -> None:
    """Refuse a cache that is no tensor, a format that is not known, and wider elements where rows are bytes."""
    if not isinstance(kv_cache, torch.Tensor):
        raise ArgumentError("kv_cache", "a tensor", repr(kv_cache), function=FUNCTION)
    if kv_cache_dtype not in formats:
        raise ArgumentError("kv_cache_dtype", f"one of {', '.join(formats)}", repr(kv_cache_dtype), function=FUNCTION)
    if kv_cache_dtype in of_bytes and kv_cache.element_size() != 1:
        expected = f"elements of one byte with kv_cache_dtype {kv_cache_dtype!r}"
        raise DtypeError("kv_cache", expected, kv_cache.dtype, function=FUNCTION)


def dtype_of(kv_cache_dtype: str) -> torch.dtype:
    """The model's element type, as far as its cache says it; vLLM has asked whether it is served before."""
    return EXACT.get(kv_cache_dtype, torch.bfloat16)


class Common:
    """What vLLM may ask of each backend; among a backend's base classes it stands before vLLM's."""

    @staticmethod
    @abstractmethod
    def why_not(head_size: int, dtype: torch.dtype, kv_cache_dtype: str | None) -> str | None:
        """Why a layer is not served, by its rows and formats; None if it is."""

    @staticmethod
    def get_name() -> str:
        """The member of vLLM's enumeration; it has one for all backends of others."""
        return "CUSTOM"

    @classmethod
    def supports_compute_capability(cls, capability: Any) -> bool:
        """Ampere and newer."""
        return bool(capability.major >= 8)

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """By ``deterministic``."""
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """Why formats do not go together."""
        return cls.why_not(head_size, dtype, kv_cache_dtype)
