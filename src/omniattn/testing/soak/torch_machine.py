"""torch, on a GPU or the CPU: see `omniattn.testing.soak.machines`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from omniattn.testing.soak import views
from omniattn.testing.soak.machines import Machine, Placed
from omniattn.testing.soak.views import View


class TorchMachine(Machine):
    """torch."""

    library, flips, writable = "torch", False, True

    def __init__(self, place: str) -> None:
        super().__init__()
        self._place = torch.device(place)
        self.on_cpu = place == "cpu"
        self.name = f"torch {torch.__version__}"
        self.device = "CPU" if self.on_cpu else str(torch.cuda.get_device_name())
        self.scores = 1 << 20 if self.on_cpu else 1 << 24

    def dtype(self, name: str) -> Any:
        return getattr(torch, name)

    def _filled(self, shape: Sequence[int], dtype: str, byte: int) -> Any:
        base = torch.empty(tuple(shape), dtype=self.dtype(dtype), device=self._place)
        if dtype == "bool":
            base.fill_(True)
        elif base.numel():
            self.bytes_of(base).fill_(byte)
        return base

    def _convert(self, values: npt.NDArray[Any], dtype: str) -> Any:
        # torch makes no tensor of a broadcast array, nor of an unsigned one wider than a byte.
        host = torch.from_numpy(np.array(values, order="C", copy=True))
        return host.to(device=self._place).to(self.dtype(dtype))

    def place(self, values: npt.NDArray[Any], dtype: str, view: View, shape: Sequence[int] | None = None) -> Placed:
        shape = tuple(values.shape if shape is None else shape)
        base = self._filled(views.base_shape(shape, view), dtype, 0xFF)
        inner = self._inner(base, shape, view)
        inner.copy_(self._convert(values, dtype).reshape(inner.shape))
        return Placed(inner.expand(shape), base, shape, view)

    def _inner(self, base: Any, shape: Sequence[int], view: View) -> Any:
        return base[views.slices(shape, view, False)].permute(views.inverse(view, len(shape))) if shape else base

    def bytes_of(self, array: Any) -> Any:
        return array.detach().reshape(-1).view(torch.uint8)

    def codes(self, array: Any) -> Any:
        return array.view(torch.uint8)

    def bits(self, array: Any) -> Any:
        return self.bytes_of(array.detach().clone(memory_format=torch.contiguous_format))

    def same(self, a: Any, b: Any) -> bool:
        return bool(torch.equal(a, b))

    def host(self, array: Any) -> npt.NDArray[Any]:
        array = array.detach().cpu()
        return np.asarray((array.float() if array.dtype == torch.bfloat16 else array).numpy())

    def dirty(self, like: Sequence[Any]) -> None:
        for x in like:
            torch.full((x.numel() * x.element_size(),), 0xFF, dtype=torch.uint8, device=self._place)

    def dtype_name(self, array: Any) -> str:
        return str(array.dtype).removeprefix("torch.")

    def synchronize(self) -> None:
        if not self.on_cpu:
            torch.cuda.synchronize()

    def f64(self, array: Any) -> Any:
        return array.detach().to(torch.float64)

    def number(self, values: Any) -> Any:
        return torch.as_tensor(np.array(values, dtype=np.float64), device=self._place)

    def ints(self, values: Any) -> Any:
        return torch.as_tensor(np.array(values, dtype=np.int64), device=self._place)

    def int64(self, array: Any) -> Any:
        return array.detach().to(torch.int64)

    def zeros(self, *shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.float64, device=self._place)

    def full(self, shape: Sequence[int], value: float) -> Any:
        return torch.full(tuple(shape), value, dtype=torch.float64, device=self._place)

    def arange(self, first: int, end: int) -> Any:
        return torch.arange(first, end, dtype=torch.float64, device=self._place)

    def exp(self, x: Any) -> Any:
        return torch.exp(x)

    def log(self, x: Any) -> Any:
        return torch.log(x)

    def tanh(self, x: Any) -> Any:
        return torch.tanh(x)

    def where(self, condition: Any, a: Any, b: Any) -> Any:
        return torch.where(condition, self._tensor(a), self._tensor(b))

    def _tensor(self, x: Any) -> Any:
        return x if isinstance(x, torch.Tensor) else torch.tensor(x, dtype=torch.float64, device=self._place)

    def top(self, x: Any) -> Any:
        if x.shape[-1] == 0:
            return self.full((*x.shape[:-1], 1), -math.inf)
        return torch.amax(x, dim=-1, keepdim=True)

    def amax(self, x: Any, *dims: int) -> Any:
        return torch.amax(x, dim=dims, keepdim=True)

    def maximum(self, a: Any, b: Any) -> Any:
        return torch.maximum(self._tensor(a), self._tensor(b))

    def sum(self, x: Any, dim: int) -> Any:
        return torch.sum(x, dim=dim, keepdim=True)

    def cat(self, parts: Sequence[Any], dim: int) -> Any:
        return torch.cat(list(parts), dim=dim)

    def isnan(self, x: Any) -> Any:
        return torch.isnan(x)

    def isfinite(self, x: Any) -> Any:
        return torch.isfinite(x)

    def broadcast(self, x: Any, shape: Sequence[int]) -> Any:
        return x.expand(tuple(shape))

    def words_to_float(self, words: Any) -> Any:
        # int64 to int32 keeps the low 32 bits.
        return words.to(torch.int32).view(torch.float32).to(torch.float64)

    def halves_to_float(self, words: Any) -> Any:
        return words.to(torch.int16).view(torch.float16).to(torch.float64)
