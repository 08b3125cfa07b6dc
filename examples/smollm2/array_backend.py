"""The two array backends of the example: NumPy on the CPU, torch on a GPU (or on the CPU).

The model is written once, against the part of the array interface that NumPy and torch share (`@`, `reshape`, `xp.exp`,
`xp.where`, `mean(axis=, keepdims=)`, ...). What they do not share is here.
"""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any  # numpy.ndarray or torch.Tensor


class NumpyBackend:
    """float32 everywhere: the CPU has no fast half precision, and the result serves as the baseline."""

    name = "NumPy float32, CPU"
    xp: Any = np

    def array(self, values: np.ndarray) -> Array:
        """Weights and activations: a C-contiguous float32 array."""
        return np.ascontiguousarray(values, dtype=np.float32)

    def table(self, values: np.ndarray) -> Array:
        """Constants that stay in float32 (rotary angles)."""
        return np.ascontiguousarray(values, dtype=np.float32)

    def indices(self, values: np.ndarray) -> Array:
        """Integers used to index."""
        return np.asarray(values, dtype=np.int64)

    def to_float32(self, x: Array) -> Array:
        """`x` in float32 (no copy if it is already)."""
        return x.astype(np.float32, copy=False)

    def cast_like(self, x: Array, ref: Array) -> Array:
        """`x` in the dtype of `ref`."""
        return x.astype(ref.dtype, copy=False)

    def to_numpy(self, x: Array) -> np.ndarray:
        """A float32 NumPy array with the values of `x`."""
        return np.asarray(x, dtype=np.float32)

    def synchronize(self) -> None:
        """Nothing runs asynchronously here."""


class TorchBackend:
    """torch tensors of one floating-point dtype on one device."""

    def __init__(self, device: str = "cuda", dtype: str = "bfloat16") -> None:
        import torch  # the NumPy backend must work without torch

        self.xp: Any = torch
        self.device = torch.device(device)
        self.dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[dtype]
        where = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"
        self.name = f"torch {dtype}, {where}"

    def array(self, values: np.ndarray) -> Array:
        """Weights and activations: a tensor of the backend's dtype on its device."""
        return self.xp.tensor(values, dtype=self.dtype, device=self.device)

    def table(self, values: np.ndarray) -> Array:
        """Constants that stay in float32 (rotary angles)."""
        return self.xp.tensor(values, dtype=self.xp.float32, device=self.device)

    def indices(self, values: np.ndarray) -> Array:
        """Integers used to index."""
        return self.xp.tensor(values, dtype=self.xp.int64, device=self.device)

    def to_float32(self, x: Array) -> Array:
        """`x` in float32 (no copy if it is already)."""
        return x.to(self.xp.float32)

    def cast_like(self, x: Array, ref: Array) -> Array:
        """`x` in the dtype of `ref`."""
        return x.to(ref.dtype)

    def to_numpy(self, x: Array) -> np.ndarray:
        """A float32 NumPy array with the values of `x`."""
        return x.detach().to(self.xp.float32).cpu().numpy()

    def synchronize(self) -> None:
        """Wait for the device, so that a wall clock measures finished work."""
        if self.device.type == "cuda":
            self.xp.cuda.synchronize(self.device)


Backend = NumpyBackend | TorchBackend


def make_backend(name: str, dtype: str = "bfloat16") -> Backend:
    """Backend for a command-line name: "numpy", "torch" (first CUDA device) or "torch-cpu" (always float32)."""
    if name == "numpy":
        return NumpyBackend()
    if name == "torch":
        return TorchBackend("cuda", dtype)
    if name == "torch-cpu":
        return TorchBackend("cpu", "float32")
    raise ValueError(f"backend: expected 'numpy', 'torch' or 'torch-cpu', received {name!r}")
