"""Which binary of a kernel a GPU gets.

Order: environment override, prebuilt cubins (exact ``a`` target, family, nearest lower minor), the disk cache's entries
(the newest NVRTC's first), NVRTC for the GPU's own target, error. A binary that does not serve is passed over, and the
reason kept: in `LoadedKernel.tried`, or in the error.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ArgumentError, CacheError, CompileError, DriverError, KernelNotFoundError
from . import cache, env, log
from .arch import Arch
from .cache import CacheEntry, cache_key, get_cache
from .compile import CompileResult, compile_options, compile_spec, jit_target, user_errors
from .driver import device_context, device_info, get_driver, on_reset
from .driver_base import IMAGE_ERRORS
from .dump import dump
from .kernel import LoadedKernel
from .nvrtc import get_compiler, install_hint
from .once import once
from .store import CubinRejectedError, get_store

if TYPE_CHECKING:
    from ..registry import KernelSpec

Tried = list[tuple[str, str]]
#: Target and NVRTC's version of cached binaries.
Given = set[tuple[str, tuple[int, int]]]


@dataclass(frozen=True)
class Resolution:
    """What `load` would do on a GPU that need not be here.

    Attributes
    ----------
    kind : str
        ``"prebuilt"``, ``"cache"``, ``"jit"`` or ``"unsupported"``.
    arch : str
        Target of the binary; the GPU's own if unsupported.
    reason : str
        Why, in one sentence.
    """

    kind: str
    arch: str
    reason: str


@dataclass(frozen=True)
class Candidate:
    """A binary to try.

    Attributes
    ----------
    origin : str
        ``"prebuilt sm_90a"``, ``"cache"`` or ``"jit"``.
    arch : str
        Its target.
    image : bytes
        The binary.
    options : tuple of str
        Compiler options.
    log : str
        Compiler log.
    label : str
        What it is called where it is refused.
    """

    origin: str
    arch: str
    image: bytes
    options: tuple[str, ...]
    log: str
    label: str

    @classmethod
    def cached(cls, entry: CacheEntry) -> Candidate:
        """An entry of the disk cache."""
        label = f"cache ({entry.arch}, NVRTC {entry.nvrtc_version[0]}.{entry.nvrtc_version[1]})"
        return cls("cache", entry.arch, entry.image, entry.options, entry.log, label)


def _prebuilt(spec: KernelSpec, cc: tuple[int, int], tried: Tried) -> Iterator[Candidate]:
    if not env.jit_policy()[0]:
        tried.append(("prebuilt kernels", "passed over because of OMNIATTN_FORCE_JIT=1"))
        return
    store = get_store()
    entries = store.prebuilt(spec.name, cc)
    if not entries:
        tried.append(("prebuilt kernels", store.why_none(spec.name, cc)))
    for entry in entries:
        origin = f"prebuilt sm_{entry.arch}"
        try:
            image = store.read(entry, spec)
        except CubinRejectedError as error:
            tried.append((origin, str(error)))
            continue
        note = f"compiled ahead of time by {store.compiler}\n"
        options = compile_options(spec, entry.arch, lineinfo=False)
        yield Candidate(origin, f"sm_{entry.arch}", image, options, note, f"{origin} (sm_{entry.arch})")


def _cached(
    spec: KernelSpec, cc: tuple[int, int], tried: Tried, postponed: list[Candidate], given: Given
) -> Iterator[Candidate]:
    """Every entry of the disk cache, noted in ``given``; PTX that NVRTC can better goes to ``postponed``."""
    try:
        key = cache_key(spec, Arch.of_device(cc), get_store().sources)
    except CompileError as error:
        tried.append(("disk cache", error.message))
        return
    for entry, reason in get_cache().find(key, spec.name):
        if entry is None:
            tried.append(("disk cache", reason))
            continue
        candidate = Candidate.cached(entry)
        better = _better_than(entry, spec, cc) if entry.ptx else None
        # Where the better one is in the cache too, it has been given, and refused: compiling it again is no use.
        if better is None or better in given:
            given.add((entry.arch, entry.nvrtc_version))
            yield candidate
        else:
            reason = f"it holds {entry.arch} PTX, and the installed NVRTC can compile for {better[0]}"
            tried.append(("disk cache", reason))
            postponed.append(candidate)


def _better_than(entry: CacheEntry, spec: KernelSpec, cc: tuple[int, int]) -> tuple[str, tuple[int, int]] | None:
    """What the installed NVRTC could make in place of PTX: target and NVRTC's version; None for nothing better."""
    if not env.jit_policy()[1]:
        return None
    try:
        compiler = get_compiler()
        target = str(jit_target(spec, cc, compiler))
    except CompileError:
        return None
    return None if target == entry.arch else (target, compiler.version)


def _compiled(spec: KernelSpec, cc: tuple[int, int], tried: Tried, given: Given) -> Iterator[Candidate]:
    """What NVRTC makes, or has just made for another process."""
    if not env.jit_policy()[1]:
        tried.append(("NVRTC", "forbidden by OMNIATTN_DISABLE_JIT=1"))
        return
    sources, kept = get_store().sources, get_cache()
    target = Arch.of_device(cc)
    made: list[CompileResult] = []
    try:
        compiler = get_compiler()
        target = jit_target(spec, cc, compiler)
        key = cache_key(spec, Arch.of_device(cc), sources)
        this = str(target), compiler.version

        def find() -> CacheEntry | None:
            # One that was there before has been given, and refused by the driver.
            if this in given:
                return None
            entries = (entry for entry, _ in kept.find(key, spec.name))
            return next((e for e in entries if e is not None and (e.arch, e.nvrtc_version) == this), None)

        def make() -> CacheEntry:
            made.append(compile_spec(spec, target, sources))
            entry = CacheEntry.of(spec, made[0])
            kept.put(key, entry)
            return entry

        entry = once(kept.lock_file(key), find, make, f"compiling {spec.name} for {target}")
    except CompileError as error:
        tried.append((f"NVRTC for {target}", str(error)))
        if error.log:
            dump(spec, str(target), "failed", b"", (), error.log)
        if (of_user := _of_user(spec, error)) is not None:
            raise of_user from None
        return
    if target.virtual:
        tried.append(
            (
                f"NVRTC for {Arch.of_device(cc)}",
                f"NVRTC {entry.nvrtc_version[0]}.{entry.nvrtc_version[1]} does not know it: {target} PTX was "
                "compiled instead, for the driver to translate",
            )
        )
    if not made:
        yield Candidate.cached(entry)
        return
    log.get().info("compiled %s for %s: %d registers", spec.name, target, made[0].registers)
    yield Candidate("jit", entry.arch, entry.image, entry.options, entry.log, f"jit ({entry.arch})")


def _of_user(spec: KernelSpec, error: CompileError) -> CompileError | None:
    """What the compiler says of a user's text; None where the error is not in it."""
    found = user_errors(spec, error.log)
    return CompileError("score_mod does not compile; the compiler says of its text:", log=found) if found else None


def _candidates(spec: KernelSpec, cc: tuple[int, int], tried: Tried) -> Iterator[Candidate]:
    """All binaries that could serve, the best first."""
    postponed: list[Candidate] = []
    given: Given = set()
    yield from _prebuilt(spec, cc, tried)
    yield from _cached(spec, cc, tried, postponed, given)
    yield from _compiled(spec, cc, tried, given)
    yield from postponed


_lock = threading.RLock()
_loaded: dict[tuple[str, int], LoadedKernel] = {}


def load(spec: KernelSpec, ordinal: int) -> LoadedKernel:
    """The kernel, loaded on a GPU; a dictionary look-up from the second call on.

    Parameters
    ----------
    spec : KernelSpec
        The registry row.
    ordinal : int
        CUDA device number.

    Raises
    ------
    KernelNotFoundError
        No binary serves; lists everything that was tried, why not, and what to install.
    DriverError
        CUDA cannot be used (`DriverMissingError`), or fails for a reason that is not the binary's.
    """
    loaded = _loaded.get((spec.name, ordinal))
    if loaded is not None:
        return loaded
    # One compilation at a time: a second thread, or GPU, that wants the same kernel finds it in the cache. Between
    # processes `once` sees to it.
    with _lock:
        return _loaded.get((spec.name, ordinal)) or _load(spec, ordinal)


def _load(spec: KernelSpec, ordinal: int) -> LoadedKernel:
    driver = get_driver()
    info = device_info(ordinal)
    target = Arch.of_device(info.cc)
    never = spec.unfit(info.cc, info.max_smem_optin)
    if never:
        raise KernelNotFoundError(
            spec.name, str(target), [("this GPU", f"{info.name}: {never}")], "choose another kernel, or another GPU"
        )
    tried: Tried = []
    with device_context(driver, ordinal):
        for candidate in _candidates(spec, info.cc, tried):
            dump(spec, candidate.arch, candidate.origin, candidate.image, candidate.options, candidate.log)
            try:
                launcher = driver.load(candidate.image, spec.symbol, ordinal, spec.smem_bytes)
            except DriverError as error:
                if error.code not in IMAGE_ERRORS:
                    raise
                tried.append((candidate.label, str(error)))
                log.get().warning("%s %s does not load: %s", spec.name, candidate.label, error)
                continue
            kernel = LoadedKernel(
                spec, ordinal, candidate.origin, candidate.arch, tuple(tried), driver, launcher, info.driver_version
            )
            _loaded[spec.name, ordinal] = kernel
            log.get().info("loaded %s on device %d (%s): %s", spec.name, ordinal, info.name, candidate.origin)
            for what, reason in tried:
                log.get().debug("%s passed over: %s: %s", spec.name, what, reason)
            return kernel
    raise KernelNotFoundError(spec.name, str(target), tried, _advice())


def _advice() -> str:
    if not env.jit_policy()[1]:
        return "unset OMNIATTN_DISABLE_JIT, so that the kernel can be compiled on this machine"
    try:
        compiler = get_compiler()
    except CompileError:
        return f"{install_hint()}, so that the kernel can be compiled on this machine"
    return (
        f"update the NVIDIA driver, or install an NVRTC that fits it (this one is {compiler.version[0]}."
        f"{compiler.version[1]}); 'omniattn info' shows what is installed"
    )


def resolve(spec: KernelSpec, cc: tuple[int, int]) -> Resolution:
    """What `load` would do on a GPU of compute capability ``cc``, without one.

    Parameters
    ----------
    spec : KernelSpec
        The registry row.
    cc : (major, minor)
        Compute capability.
    """
    own = str(Arch.of_device(cc))
    never = spec.unfit(cc, where=own)
    if never:
        return Resolution("unsupported", own, never)
    tried: Tried = []
    if env.jit_policy()[0]:
        store = get_store()
        for entry in store.prebuilt(spec.name, cc):
            if not store.refusal(entry, spec):
                return Resolution("prebuilt", f"sm_{entry.arch}", f"{store.kind} holds sm_{entry.arch}")
    for candidate in _cached(spec, cc, tried, [], set()):
        return Resolution("cache", candidate.arch, f"compiled on this machine before, for {candidate.arch}")
    if not env.jit_policy()[1]:
        return Resolution("unsupported", own, "not prebuilt, and OMNIATTN_DISABLE_JIT=1 forbids to compile it")
    try:
        compiler = get_compiler()
        target = jit_target(spec, cc, compiler)
    except CompileError as error:
        return Resolution("unsupported", own, f"not prebuilt, and cannot be compiled: {error.message}")
    return Resolution(
        "jit", str(target), f"compiled at first use by NVRTC {compiler.version[0]}.{compiler.version[1]} for {target}"
    )


@dataclass(frozen=True)
class CompiledFile:
    """What `compile_to` wrote.

    Attributes
    ----------
    path : Path
        The file.
    result : CompileResult
        The compilation.
    """

    path: Path
    result: CompileResult


def compile_to(spec: KernelSpec, arch: str, folder: Path | None = None) -> CompiledFile:
    """Compile a kernel for a GPU that need not be here.

    Parameters
    ----------
    spec : KernelSpec
        The registry row.
    arch : str
        Target: ``"sm_100a"``, ``"90a"``; into a folder also ``"compute_80"`` (PTX).
    folder : Path, optional
        Write ``<folder>/<arch>/<name>.cubin`` (``.ptx``). Default: the disk cache, for the target that a GPU of that
        compute capability looks up (``sm_100`` fills ``sm_100a``).

    Raises
    ------
    CompileError
        NVRTC is missing, does not know the target, or rejects the source, of a user's text with what it says of that;
        or the kernel cannot run on the target.
    CacheError
        The file cannot be written.
    """
    target = Arch.parse(arch)
    if folder is None:
        if target.virtual:
            raise ArgumentError("arch", "a binary target such as 'sm_100a' (PTX can only go into a folder)", repr(arch))
        target = Arch.of_device(target.cc)
    never = spec.unfit(target.cc, where=str(target))
    if never:
        raise CompileError(f"kernel {spec.name!r} is not for {target}: {never}")
    try:
        return _compile_to(spec, target, folder)
    except CompileError as error:
        raise _of_user(spec, error) or error from None


def _compile_to(spec: KernelSpec, target: Arch, folder: Path | None) -> CompiledFile:
    if folder is None:
        store = get_cache()
        key = cache_key(spec, target, get_store().sources)
        written: list[Path | None] = []

        def make() -> CompileResult:
            result = compile_spec(spec, target)
            written.append(store.put(key, CacheEntry.of(spec, result)))
            return result

        # It compiles in any case, and waits for nobody; whoever needs the kernel meanwhile waits for it.
        result = once(store.lock_file(key), lambda: None, make, f"compiling {spec.name} for {target}", seconds=0)
        path = written[0]
        if path is None:
            raise CacheError(
                str(store.folder),
                store.refusal(key) or "cannot be written",
                "set OMNIATTN_CACHE_DIR to a folder that can be written, by you alone, with free space",
            )
        return CompiledFile(path, result)
    result = compile_spec(spec, target)
    path = folder / target.number / f"{spec.name}.{'ptx' if result.ptx else 'cubin'}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(result.cubin)
    except OSError as error:
        raise CacheError(
            str(path), f"cannot be written ({error.strerror or error})", "choose a folder that can be written"
        ) from error
    return CompiledFile(path, result)


def load_image(spec: KernelSpec, ordinal: int, image: bytes, origin: str = "image") -> LoadedKernel:
    """Load a given binary or PTX as a kernel, past all caches (tests of other targets' code, experiments).

    Parameters
    ----------
    spec : KernelSpec
        Gives the symbol and the dynamic shared memory.
    ordinal : int
        CUDA device number.
    image : bytes
        Cubin or PTX.
    origin : str
        What `LoadedKernel.origin` shall say.

    Raises
    ------
    DriverError
        The binary does not load.
    """
    driver = get_driver()
    with device_context(driver, ordinal):
        launcher = driver.load(image, spec.symbol, ordinal, spec.smem_bytes)
    return LoadedKernel(spec, ordinal, origin, "", (), driver, launcher)


def reset() -> None:
    """Forget everything that is loaded or known (tests, and the child of a fork). Files of the cache stay."""
    global _lock
    # Another thread of the parent may have held the lock when it forked.
    _lock = threading.RLock()
    _loaded.clear()
    cache.reset()


on_reset(reset)
