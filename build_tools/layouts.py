"""Constants of device code as its compiler works them out, read from a cubin, no GPU needed: layouts of structs."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

from build_tools import sass
from build_tools.jobs import ROOT, preload_compiler
from omniattn.runtime.compile import Sources
from omniattn.runtime.nvrtc import get_compiler

#: Comes before the numbers in the cubin, so that they are found among a header's other constants.
_MARKER = (0x6C61796F, 0x7574206F, 0x66207374, 0x72756374)
#: What a field is, by its number in the probe: codes of the `struct` module, pointers and opaque bytes.
_KINDS = ("bytes", "P", "f", "i", "I", "q", "Q", "h", "H", "B")

# A template names the fields' types without naming one of them, arrays by their elements.
_PROBE = """
template <typename T> struct Kind {{ static constexpr uint32 kIs = 0; }};
template <typename T> struct Kind<T*> {{ static constexpr uint32 kIs = 1; }};
template <typename T, int kCount> struct Kind<T[kCount]> {{ static constexpr uint32 kIs = Kind<T>::kIs; }};
template <> struct Kind<float> {{ static constexpr uint32 kIs = 2; }};
template <> struct Kind<int32> {{ static constexpr uint32 kIs = 3; }};
template <> struct Kind<uint32> {{ static constexpr uint32 kIs = 4; }};
template <> struct Kind<int64> {{ static constexpr uint32 kIs = 5; }};
template <> struct Kind<uint64> {{ static constexpr uint32 kIs = 6; }};
template <> struct Kind<short> {{ static constexpr uint32 kIs = 7; }};
template <> struct Kind<uint16> {{ static constexpr uint32 kIs = 8; }};
template <> struct Kind<uint8> {{ static constexpr uint32 kIs = 9; }};
extern "C" __device__ const uint32 layout_of_struct[] = {{
    {marker},
    {numbers}
}};
"""


def device_constants(
    header: str,
    numbers: Sequence[str],
    root: Path = ROOT / "kernels_cu",
    *,
    defines: Sequence[tuple[str, str]] = (),
) -> list[int]:
    """Values of constant expressions of 32 bits over what ``header`` (below ``root``) declares, as unsigned numbers.

    Raises
    ------
    CompileError
        An expression is wrong, or no constant.
    """
    preload_compiler()
    (root / header).stat()  # a missing header is an error of this call, not of the compiler
    source = f'#include "ptx/types.cuh"\n#include "{header}"\n' + _PROBE.format(
        marker=", ".join(map(str, _MARKER)), numbers=",\n    ".join(f"uint32({number})" for number in numbers)
    )
    headers = dict(Sources(root).closure(header))
    headers |= Sources(root).closure("ptx/types.cuh")
    options = (
        "--gpu-architecture=sm_90a", "-std=c++17", "--relocatable-device-code=true",
        *(f"-D{name}={value}" for name, value in defines),
    )  # fmt: skip
    cubin, _ = get_compiler().compile(source, "constants.cu", headers, options, False)
    marker = struct.pack("<4I", *_MARKER)
    (data,) = (data for section, data in sass.sections(cubin) if section == ".nv.global.init" and marker in data)
    return list(struct.unpack_from(f"<{len(numbers)}I", data, data.index(marker) + len(marker)))


def device_layout(
    header: str, name: str, fields: Sequence[str], root: Path = ROOT / "kernels_cu"
) -> tuple[int, dict[str, tuple[int, int]]]:
    """Size of a struct of device code, and (offset, size) of its fields, bytes.

    Parameters
    ----------
    header : str
        Where it is declared, below ``root``.
    name : str
        Of the struct.
    fields : sequence of str
        Fields; ``"member.field"`` for those of a member that is a struct.
    root : Path
        The kernels root.

    Raises
    ------
    CompileError
        There is no such struct or field.
    """
    numbers = [f"sizeof({name})"]
    for field in fields:
        # __INTADDR__ is what offsetof stands for in compilers with EDG's front end; NVRTC has no header that says so.
        numbers += [f"__INTADDR__(&(({name}*)0)->{field})", f"sizeof((({name}*)0)->{field})"]
    size, *rest = device_constants(header, numbers, root)
    return size, {field: (rest[2 * i], rest[2 * i + 1]) for i, field in enumerate(fields)}


def device_kinds(header: str, name: str, fields: Sequence[str], root: Path = ROOT / "kernels_cu") -> dict[str, str]:
    """What the fields are: a code of the `struct` module (of an array: of its elements), ``"P"`` for pointers.

    ``"bytes"`` stands for everything else. Parameters as in `device_layout`.
    """
    numbers = [f"Kind<decltype((({name}*)0)->{field})>::kIs" for field in fields]
    return {field: _KINDS[i] for field, i in zip(fields, device_constants(header, numbers, root), strict=True)}
