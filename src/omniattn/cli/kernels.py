"""Registry rows as the commands pick them."""

from __future__ import annotations

import time
from collections.abc import Sequence

from omniattn.cli.console import CannotRunError
from omniattn.errors import ArgumentError, DriverError
from omniattn.registry import REGISTRY, KernelSpec, by_name
from omniattn.runtime.arch import Arch


def named(names: Sequence[str]) -> list[KernelSpec]:
    """Rows called ``names``; all rows if there are no names.

    Raises
    ------
    ArgumentError
        A name is not in the registry; suggests close ones.
    """
    rows = []
    for name in names:
        try:
            rows.append(by_name(name))
        except KeyError as error:
            raise ArgumentError("--kernel", "the name of a registry row", f"{name!r} ({error.args[0]})") from None
    return rows or list(REGISTRY)


def jit_sample() -> KernelSpec:
    """The kernel whose compilation time is quoted: bf16 attention at head_dim 128, or what comes closest."""
    attention = [spec for spec in REGISTRY if spec.op == "attention"]
    if not attention:
        raise CannotRunError("the registry holds no attention kernel")
    return min(attention, key=lambda spec: (spec.dtype != "bfloat16", abs(spec.head_dim - 128), spec.name))


def local_target(default: str = "sm_90a") -> Arch:
    """The target of GPU 0, or ``default`` on a machine without a usable GPU."""
    from omniattn import runtime

    try:
        return Arch.of_device(runtime.device_info(0).cc)
    except (DriverError, ArgumentError):
        return Arch.parse(default)


def compile_uncached(spec: KernelSpec) -> float:
    """Seconds that NVRTC takes for one kernel, its loading included when it was not loaded yet.

    Past this package's cache and past NVRTC's own, which would give a fraction of the time on a machine that has
    compiled the kernel before.

    Raises
    ------
    CompileError
        NVRTC is missing or rejects the source.
    """
    from omniattn.runtime.compile import compile_spec

    target = local_target()
    start = time.perf_counter()
    compile_spec(spec, target, nvrtc_cache=False)
    return time.perf_counter() - start
