"""The implementation "omniattn" in torch's registry of flash-attention implementations."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from ..errors import ArgumentError, UnsupportedError
from .context_parallel import MergePatch
from .operators import HAS_IMPLEMENTATIONS, Handlers

NAME = "omniattn"


class Active:
    """Kernels in the dispatcher, and the merge of context_parallel, until `remove` puts those of before back.

    Parameters
    ----------
    key : str
        Dispatch key.
    """

    def __init__(self, key: str = "CUDA") -> None:
        self.handlers = Handlers(key)
        library = torch.library.Library("aten", "IMPL")
        self.library: Any = library
        for name, function in self.handlers.functions.items():
            self.handlers.before[name] = _kernel(name, key)
            with warnings.catch_warnings():
                # That a kernel of torch's is replaced is what activation means.
                warnings.filterwarnings("ignore", message=r"(?s).*Overriding a previously registered kernel")
                library.impl(name, function, key, with_keyset=True)
        self.merge = MergePatch()

    def remove(self) -> None:
        """Put the kernels of before back."""
        if self.library is not None:
            self.library._destroy()
            self.library = None
            self.merge.remove()


def register_flash_impl(name: str = NAME) -> None:
    """Register this package's kernels as a flash-attention implementation of torch; importing this module does it.

    Parameters
    ----------
    name : str
        What ``torch.nn.attention.activate_flash_attention_impl`` takes; not empty.

    Raises
    ------
    ArgumentError
        A name that is no str, or an empty one.
    UnsupportedError
        torch before 2.11, which has no registry of implementations.

    Notes
    -----
    Registered is not active. After ``torch.nn.attention.activate_flash_attention_impl("omniattn")``, aten's operators
    of flash attention and cuDNN's attention run this package's kernels on CUDA tensors, forward and backward:
    ``scaled_dot_product_attention``, ``torch.nn.attention.varlen.varlen_attn``, and ``context_parallel``. cuDNN's are
    among them because SDPA asks cuDNN first on GPUs of compute capability 9.0 and 10.0. ``context_parallel`` merges the
    results of its steps by `merge_states`. The kernels that were there before run what these lack: dropout,
    ``alibi_slopes``, block tables, ``seqused_k`` without packed sequences, other dtypes, head dimensions.
    ``torch.nn.attention.restore_flash_attention_impl()`` undoes it.
    """
    if not isinstance(name, str) or not name:
        raise ArgumentError("name", "a str that is not empty", repr(name), function="register_flash_impl")
    if not HAS_IMPLEMENTATIONS:
        raise UnsupportedError(
            f"torch {torch.__version__} has no registry of flash-attention implementations, which came with 2.11",
            instead="omniattn.torch.use_sdpa(), or a newer torch",
        )
    torch.nn.attention.register_flash_attention_impl(name, register_fn=Active)


def _kernel(name: str, key: str) -> Any:
    """The operator's kernel for a dispatch key; None if it has none."""
    operator = getattr(torch.ops.aten, name).default
    if not torch._C._dispatch_has_computed_kernel_for_dispatch_key(operator.name(), key):
        return None
    return torch.library.get_kernel(operator, key)
