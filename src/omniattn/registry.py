"""The only place where a kernel is made known.

A row describes one cubin: which source, which compile-time constants, which GPUs, and what it can do. The ahead-of-time
build, the run-time compiler, selection, the support tables, the parametrized tests and the benchmarks all read these rows.
This module imports nothing but the standard library, so that build tools can load it without the package being built.
"""

from __future__ import annotations

from dataclasses import dataclass, field

#: Targets that a wheel carries. sm_86 and sm_87 load the sm_80 cubin (same major, lower minor).
PREBUILT_ARCHS: tuple[str, ...] = ("80", "89", "90a")

#: Targets that every generic kernel source must compile for (checked by the tests; JIT builds them on the GPU itself).
PORTABLE_ARCHS: tuple[str, ...] = ("80", "86", "89", "90a", "100a", "120a")


@dataclass(frozen=True)
class KernelSpec:
    """One kernel binary.

    Attributes
    ----------
    name : str
        Unique; the cubin's file stem and its key in the manifest.
    family : str
        Kernel family, ``<op>_<variant>_<arch>``.
    op : str
        The operation it serves: ``"attention"`` or ``"merge_states"``.
    source : str
        Path of the ``.cu`` file below the kernels root.
    symbol : str
        Name of its one ``extern "C"`` kernel.
    defines : tuple of (name, value)
        Compile-time constants.
    min_arch : (major, minor)
        Lowest compute capability it runs on.
    arch_specific : bool
        True if it uses instructions of one ``sm_XYa`` target only.
    prebuild : tuple of str
        Targets the wheel carries it for; elsewhere it is compiled at run time.
    dtype : str
        Element type of q, k, v.
    head_dim : int
        Largest head_dim it takes (the padded tile width).
    block_m, block_n, num_warps : int
        Tile of query rows and keys, and warps per CTA.
    smem_bytes : int
        Dynamic shared memory per CTA.
    features : frozenset of str
        Options beyond the common set that it was compiled with.
    allowed_spill_bytes : int
        Register spills that are known and measured to be harmless; the build fails above it.
    """

    name: str
    family: str
    op: str
    source: str
    symbol: str
    defines: tuple[tuple[str, str], ...]
    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    smem_bytes: int
    min_arch: tuple[int, int] = (8, 0)
    arch_specific: bool = False
    prebuild: tuple[str, ...] = PREBUILT_ARCHS
    features: frozenset[str] = field(default_factory=frozenset)
    allowed_spill_bytes: int = 0


REGISTRY: tuple[KernelSpec, ...] = ()


def by_name(name: str) -> KernelSpec:
    """Return the row called ``name``; KeyError lists near misses."""
    for spec in REGISTRY:
        if spec.name == name:
            return spec
    import difflib

    close = difflib.get_close_matches(name, [s.name for s in REGISTRY], n=3)
    raise KeyError(f"no kernel named {name!r}" + (f"; did you mean {', '.join(close)}?" if close else ""))
