"""A kernel that is loaded on one GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .arch import Arch
from .driver import device_context
from .driver_base import Driver, LaunchAttributes, Launcher

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
    can_overlap : bool
        Whether launches that ask for it overlap the end of the kernel before: its code waits for that one by itself,
        and the driver knows how.
    function : int or None
        The driver's handle, for whoever launches without Python; None where the driver is not called directly.
    """

    __slots__ = (
        "_current_device",
        "_driver",
        "_launch",
        "arch",
        "can_overlap",
        "function",
        "ordinal",
        "origin",
        "spec",
        "tried",
    )

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
        self.function: int | None = getattr(launch, "function", None)
        self._current_device = driver.current_device
        # Code for older GPUs has no griddepcontrol.wait; such launches are part of captured graphs from CUDA 12.3 on.
        waits = bool(arch) and Arch.parse(arch).cc >= (9, 0)
        self.can_overlap = waits and driver_version >= (12, 4)

    def __repr__(self) -> str:
        return f"<LoadedKernel {self.spec.name} on device {self.ordinal}, {self.origin}>"

    def attributes(self, cluster: tuple[int, int, int] | None, overlap: bool) -> LaunchAttributes | None:
        """What a launch that wants this is launched with; None for a plain launch."""
        overlap = overlap and self.can_overlap
        return LaunchAttributes(cluster, overlap) if cluster is not None or overlap else None

    def launch(
        self,
        grid: tuple[int, int, int],
        threads: int,
        stream: int,
        params_address: int,
        attributes: LaunchAttributes | None = None,
    ) -> None:
        """Launch; returns without waiting for the GPU. For `Program`; everybody else makes records.

        Parameters
        ----------
        grid : (int, int, int)
            CTAs in x, y, z.
        threads : int
            Of a CTA.
        stream : int
            ``CUstream`` handle of this GPU; 0 is the legacy default stream.
        params_address : int
            Host address of the one struct that the kernel takes by value. The driver copies it before this returns.
        attributes : LaunchAttributes, optional
            From `attributes`.

        Raises
        ------
        DriverError
            The driver rejected the launch.
        UnsupportedError
            A cluster was asked for through CuPy.
        """
        if self._current_device() == self.ordinal:
            self._launch(grid, threads, stream, params_address, attributes)
            return
        with device_context(self._driver, self.ordinal):
            self._launch(grid, threads, stream, params_address, attributes)

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
