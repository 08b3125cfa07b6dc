"""NVRTC, through cuda-bindings or, where those are missing, through CuPy."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import Any, Protocol

from ..errors import CompileError
from . import log

#: Where libnvrtc comes from, by CUDA major version (the extras are called the same).
_WHEELS = {12: "nvidia-cuda-nvrtc-cu12", 13: "nvidia-cuda-nvrtc"}


class Compiler(Protocol):
    """NVRTC, whoever binds it."""

    #: Binding, ``"cuda-bindings"`` or ``"CuPy"``.
    binding: str
    #: NVRTC's version.
    version: tuple[int, int]
    #: Compute capabilities it knows, as ``major * 10 + minor``.
    archs: tuple[int, ...]

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: tuple[str, ...], ptx: bool
    ) -> tuple[bytes, str]:
        """Compile to a cubin (or PTX); returns it with the log. Raises `CompileError` with the log."""


class CudaBindingsCompiler:
    """NVRTC through cuda-bindings."""

    binding = "cuda-bindings"

    def __init__(self) -> None:
        from cuda.bindings import nvrtc

        self._nvrtc = nvrtc
        major, minor = self._check("nvrtcVersion", nvrtc.nvrtcVersion())
        self.version: tuple[int, int] = (int(major), int(minor))
        self.archs: tuple[int, ...] = tuple(
            int(a) for a in self._check("nvrtcGetSupportedArchs", nvrtc.nvrtcGetSupportedArchs())
        )

    def _check(self, call: str, result: tuple[Any, ...]) -> Any:
        if result[0]:
            status, text = self._nvrtc.nvrtcGetErrorString(result[0])
            what = text.decode() if not status and isinstance(text, bytes) else str(text if not status else result[0])
            raise CompileError(f"{call} failed: {what}")
        return result[1] if len(result) == 2 else result[1:]

    def _text(self, program: Any, what: str) -> bytes:
        size = self._check(f"nvrtcGet{what}Size", getattr(self._nvrtc, f"nvrtcGet{what}Size")(program))
        # The binding writes into the object that it is given.
        buffer = bytearray(size)
        self._check(f"nvrtcGet{what}", getattr(self._nvrtc, f"nvrtcGet{what}")(program, buffer))
        return bytes(buffer)

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: tuple[str, ...], ptx: bool
    ) -> tuple[bytes, str]:
        """Compile; see `Compiler.compile`."""
        nvrtc = self._nvrtc
        program = self._check(
            "nvrtcCreateProgram",
            nvrtc.nvrtcCreateProgram(
                source.encode(),
                name.encode(),
                len(headers),
                [text.encode() for text in headers.values()],
                [key.encode() for key in headers],
            ),
        )
        try:
            status = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            text = self._text(program, "ProgramLog").rstrip(b"\0").decode("utf-8", "replace")
            try:
                self._check("nvrtcCompileProgram", status)
            except CompileError as error:
                raise CompileError(error.message, log=text) from None
            return self._text(program, "PTX" if ptx else "CUBIN"), text
        finally:
            nvrtc.nvrtcDestroyProgram(program)


class CupyCompiler:
    """NVRTC through CuPy."""

    binding = "CuPy"

    def __init__(self) -> None:
        from cupy.cuda import nvrtc

        self._nvrtc = nvrtc
        major, minor = nvrtc.getVersion()
        self.version: tuple[int, int] = (int(major), int(minor))
        self.archs: tuple[int, ...] = tuple(int(a) for a in nvrtc.getSupportedArchs())

    def compile(
        self, source: str, name: str, headers: Mapping[str, str], options: tuple[str, ...], ptx: bool
    ) -> tuple[bytes, str]:
        """Compile; see `Compiler.compile`."""
        nvrtc = self._nvrtc
        # Source and name as text, headers as bytes: so CuPy's binding has it.
        program = nvrtc.createProgram(
            source, name, [text.encode() for text in headers.values()], [key.encode() for key in headers]
        )
        try:
            try:
                nvrtc.compileProgram(program, options)
            except nvrtc.NVRTCError as error:
                raise CompileError(f"nvrtcCompileProgram failed: {error}", log=nvrtc.getProgramLog(program)) from None
            image = nvrtc.getPTX(program) if ptx else nvrtc.getCUBIN(program)
            text = nvrtc.getProgramLog(program)
            data = image.encode() if isinstance(image, str) else bytes(image)
            # CuPy takes the last byte of either for a terminating NUL; a cubin's last byte belongs to it (and is zero).
            return (data if ptx else data + b"\0"), text
        finally:
            nvrtc.destroyProgram(program)


_lock = threading.Lock()
_compiler: Compiler | None = None


def get_compiler() -> Compiler:
    """NVRTC, loaded on the first call.

    Raises
    ------
    CompileError
        There is no libnvrtc; says what to install.
    """
    global _compiler
    with _lock:
        if _compiler is None:
            _compiler = _find()
            log.get().info("NVRTC %d.%d through %s", *_compiler.version, _compiler.binding)
        return _compiler


def set_compiler(compiler: Compiler | None) -> None:
    """Use ``compiler`` from now on (tests); None: look again at the next use."""
    global _compiler
    _compiler = compiler


def _after_fork_in_child() -> None:
    global _lock
    # Another thread of the parent may have held the lock when it forked. The library itself survives a fork.
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _find() -> Compiler:
    failures: list[str] = []
    for cls in (CudaBindingsCompiler, CupyCompiler):
        try:
            return cls()
        except ImportError as error:
            log.get().debug("NVRTC through %s: %s", cls.binding, error)
        except (RuntimeError, OSError) as error:
            # Both bindings load libnvrtc at the first call, and raise one of these when there is none.
            failures.append(f"{cls.binding}: {str(error).strip().splitlines()[0] if str(error).strip() else error!r}")
    raise CompileError(_missing(failures))


def cuda_major() -> int:
    """CUDA major version that NVRTC has to match: that of cuda-bindings, else of CuPy; 13 when there is neither."""
    for package in ("cuda-bindings", "cupy-cuda12x", "cupy-cuda13x"):
        version = _installed(package)
        if version:
            return int(version.split(".")[0]) if package == "cuda-bindings" else int(package[9:11])
    return 13


def install_hint() -> str:
    """The command that brings the right NVRTC."""
    return f'pip install "omniattn[jit{cuda_major()}]"'


def _installed(package: str) -> str | None:
    # Imported here because it takes a third of the time that importing this package takes.
    import importlib.metadata

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _missing(failures: list[str]) -> str:
    major = cuda_major()
    message = "NVRTC, the run-time compiler, cannot be loaded"
    if failures:
        message += f" ({'; '.join(failures)})"
    bindings = _installed("cuda-bindings")
    for other, wheel in _WHEELS.items():
        version = _installed(wheel)
        if version and other != major and version.split(".")[0] == str(other):
            holder = f"cuda-bindings {bindings}" if bindings else "CuPy"
            message += f". {wheel} {version} is installed, but {holder} looks for the library of CUDA {major}"
    return f"{message}. What to do: {install_hint()}"
