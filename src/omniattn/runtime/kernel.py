"""A kernel that is loaded on one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arch import Arch
from .driver import device_context
from .driver_base import OVERLAP, Driver, Launcher

if TYPE_CHECKING:
    from ..registry import KernelSpec


class LoadedKernel:
    """A kernel on one GPU, ready to launch from any thread.

    Attributes
    ----------
    spec : KernelSpec
        The registry row.
    ordinal : int
        The GPU.
    origin : str
        Where the binary came from: ``"prebuilt sm_90a"``, ``"cache"`` or ``"jit"``.
    arch : str
        Target of the binary, for example ``"sm_90a"``.
    tried : tuple of (what, reason)
        Better candidates that did not serve, and why.
    overlap : (int, int, int) or None
        What a kernel that waits for the one before it by itself is launched with, as ``cluster``, in order to begin
        before that one has ended: `driver_base.OVERLAP`, or None where its code or the driver does not know how.
    """

    __slots__ = ("_current_device", "_driver", "_launch", "arch", "ordinal", "origin", "overlap", "spec", "tried")

    def __init__(
        self,
        spec: KernelSpec,
        ordinal: int,
        origin: str,
        arch: str,
        tried: tuple[tuple[str, str], ...],
        driver: Driver,
        launch: Launcher,
        driver_version: tuple[int, int] = (0, 0),
    ) -> None:
        self.spec = spec
        self.ordinal = ordinal
        self.origin = origin
        self.arch = arch
        self.tried = tried
        self._driver = driver
        self._launch = launch
        self._current_device = driver.current_device
        # Code for older GPUs has no griddepcontrol.wait; such launches are part of captured graphs from CUDA 12.3 on.
        waits = bool(arch) and Arch.parse(arch).cc >= (9, 0)
        self.overlap = OVERLAP if waits and driver_version >= (12, 4) else None

    def __repr__(self) -> str:
        return f"<LoadedKernel {self.spec.name} on device {self.ordinal}, {self.origin}>"

    def launch(
        self,
        grid: tuple[int, int, int],
        block_x: int,
        stream: int,
        params_address: int,
        cluster: tuple[int, int, int] | None = None,
    ) -> None:
        """Launch; returns without waiting for the GPU.

        Parameters
        ----------
        grid : (int, int, int)
            CTAs in x, y, z.
        block_x : int
            Threads per CTA.
        stream : int
            ``CUstream`` handle of this GPU; 0 is the legacy default stream.
        params_address : int
            Host address of the one struct that the kernel takes by value. The driver copies it before this returns.
        cluster : (int, int, int), optional
            CTAs per cluster; or this kernel's `overlap`.

        Raises
        ------
        DriverError
            The driver rejected the launch.
        UnsupportedError
            A cluster was asked for through CuPy.
        """
        if self._current_device() == self.ordinal:
            self._launch(grid, block_x, stream, params_address, cluster)
            return
        with device_context(self._driver, self.ordinal):
            self._launch(grid, block_x, stream, params_address, cluster)

    def encode_tensor_map(
        self,
        dtype: str,
        address: int,
        dims: tuple[int, ...],
        strides_bytes: tuple[int, ...],
        box: tuple[int, ...],
    ) -> bytes:
        """A tensor map for this kernel's GPU, see `Driver.encode_tensor_map`; takes about a microsecond.

        Raises
        ------
        DriverError
            The driver rejected the description.
        UnsupportedError
            The driver in use is CuPy.
        """
        with device_context(self._driver, self.ordinal):
            return self._driver.encode_tensor_map(dtype, address, dims, strides_bytes, box)
