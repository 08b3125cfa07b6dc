"""From a registry row to a cubin: options, NVRTC, and what its log says.

Used by the ahead-of-time build and by the run-time compiler alike, so that both give the same binary.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import CompileError
from . import env
from .arch import Arch
from .nvrtc import Compiler, get_compiler
from .sources import Sources
from .store import get_store

if TYPE_CHECKING:
    from ..registry import KernelSpec

_REGISTERS = re.compile(r"Used (\d+) registers")
_STATIC_SMEM = re.compile(r"(\d+) bytes smem")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
_LABEL = re.compile(r'^#line 1 "([^"]+)"$', re.MULTILINE)
_PTXAS_NOTE = re.compile(r"\(C\d{4}\)|[Pp]otential [Pp]erformance [Ll]oss|\bwarning\b", re.IGNORECASE)


@dataclass(frozen=True)
class CompileResult:
    """A compiled kernel, and what the compiler said.

    Attributes
    ----------
    cubin : bytes
        The binary; PTX text if ``ptx``.
    arch : str
        Its target, for example ``"sm_90a"``.
    log : str
        NVRTC's log, ptxas' included.
    registers, spill_bytes, smem_static_bytes : int
        Per thread; spill stores plus spill loads; per CTA. 0 for PTX, which has none of them yet.
    nvrtc_version : (major, minor)
        The compiler.
    options : tuple of str
        Its options.
    warnings : tuple of str
        Lines of the log that warn, such as ptxas' (C7510), "wgmma serialized".
    ptx : bool
        True if ``cubin`` is PTX.
    """

    cubin: bytes
    arch: str
    log: str
    registers: int
    spill_bytes: int
    smem_static_bytes: int
    nvrtc_version: tuple[int, int]
    options: tuple[str, ...]
    warnings: tuple[str, ...] = ()
    ptx: bool = False


def compile_options(spec: KernelSpec, arch: Arch | str, *, lineinfo: bool | None = None) -> tuple[str, ...]:
    """NVRTC options for a kernel and a target.

    Parameters
    ----------
    spec : KernelSpec
        The kernel.
    arch : Arch or str
        ``"90a"``, ``"sm_90a"``, or ``"compute_80"`` for PTX.
    lineinfo : bool, optional
        Add ``-lineinfo``; default: OMNIATTN_LINEINFO.
    """
    target = Arch.parse(arch) if isinstance(arch, str) else arch
    if lineinfo is None:
        lineinfo = env.get("OMNIATTN_LINEINFO")
    return (
        f"--gpu-architecture={target}",
        "-std=c++17",
        # PTX is not assembled here, so ptxas has nothing to report.
        *(() if target.virtual else ("--ptxas-options=-v",)),
        *(("-lineinfo",) if lineinfo else ()),
        *(f"-D{key}={value}" for key, value in spec.defines),
    )


def compile_spec(
    spec: KernelSpec,
    arch: Arch | str,
    sources: Sources | None = None,
    *,
    lineinfo: bool | None = None,
    compiler: Compiler | None = None,
    nvrtc_cache: bool = True,
) -> CompileResult:
    """Compile one kernel for one target.

    Parameters
    ----------
    spec : KernelSpec
        The kernel.
    arch : Arch or str
        ``"90a"`` or ``"sm_90a"`` gives a cubin; ``"compute_80"`` gives PTX.
    sources : Sources, optional
        Where its files are; default: this installation's.
    lineinfo : bool, optional
        Add ``-lineinfo``; default: OMNIATTN_LINEINFO.
    compiler : Compiler, optional
        NVRTC; default: the installed one.
    nvrtc_cache : bool
        Whether NVRTC may take the binary from the cache on disk that it keeps itself, from 12.9 on, where there is a
        CUDA driver.

    Returns
    -------
    CompileResult

    Raises
    ------
    CompileError
        NVRTC is missing, does not know the target, or rejects the source (with its log).
    """
    target = Arch.parse(arch) if isinstance(arch, str) else arch
    compiler = compiler or get_compiler()
    version = f"NVRTC {compiler.version[0]}.{compiler.version[1]}"
    if target.major * 10 + target.minor not in compiler.archs:
        raise CompileError(
            f"{version} does not know {target} (it knows {', '.join(map(str, compiler.archs))}). "
            "What to do: install a newer NVRTC"
        )
    options = compile_options(spec, target, lineinfo=lineinfo)
    files = (sources or get_store().sources).of(spec)
    headers = {name: text for name, text in files.items() if name != spec.source}
    # Not one of the options that name a binary, because it changes none; older versions have neither cache nor option.
    fresh = ("--no-cache",) if not nvrtc_cache and compiler.version >= (12, 9) else ()
    try:
        image, log = compiler.compile(files[spec.source], spec.source, headers, (*options, *fresh), target.virtual)
    except CompileError as error:
        raise CompileError(
            f"kernel {spec.name!r} does not compile for {target} with {version}: {error.message}", log=error.log
        ) from None
    return CompileResult(
        cubin=image,
        arch=str(target),
        log=log,
        registers=max((int(n) for n in _REGISTERS.findall(log)), default=0),
        spill_bytes=sum(int(stores) + int(loads) for stores, loads in _SPILLS.findall(log)),
        smem_static_bytes=max((int(n) for n in _STATIC_SMEM.findall(log)), default=0),
        nvrtc_version=compiler.version,
        options=options,
        warnings=tuple(line.strip() for line in log.splitlines() if _PTXAS_NOTE.search(line)),
        ptx=target.virtual,
    )


def user_errors(spec: KernelSpec, log: str) -> str:
    """What a compiler's log says about generated text that is a user's; empty if nothing.

    Such text is announced by ``#line`` with a label of its own; errors come as passages that name the place.
    """
    labels = {label for _, text in spec.generated for label in _LABEL.findall(text)} - dict(spec.generated).keys()
    passages = (passage.strip("\n") for passage in re.split(r"\n[ \t]*\n", log.replace("\r", "")))
    return "\n\n".join(x for x in passages if "error" in x and any(label in x for label in labels))


def jit_target(spec: KernelSpec, cc: tuple[int, int], compiler: Compiler) -> Arch:
    """What to compile for on a device: its own target, or PTX of the newest older one that NVRTC knows.

    Raises
    ------
    CompileError
        NVRTC knows neither.
    """
    own = Arch.of_device(cc)
    if cc[0] * 10 + cc[1] in compiler.archs:
        return own
    version = f"NVRTC {compiler.version[0]}.{compiler.version[1]}"
    if spec.arch_specific:
        raise CompileError(f"{version} does not know {own}, and this kernel cannot be compiled for an older target")
    lowest = spec.min_arch[0] * 10 + spec.min_arch[1]
    older = [a for a in compiler.archs if lowest <= a <= cc[0] * 10 + cc[1]]
    if not older:
        raise CompileError(f"{version} does not know {own}, nor an older target that this kernel can be compiled for")
    return Arch(max(older) // 10, max(older) % 10, virtual=True)
