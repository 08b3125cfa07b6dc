"""The generator of launch/structs.py: what it makes of headers, and which ones it refuses."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools.host_structs import HeaderError, Headers, host_name, text
from omniattn.launch.host_struct import HostStruct

#: Every form that a header may have, a little of each.
FORMS = """\
// A comment: struct None {
#pragma once
#include "params/base.cuh"
#include "ptx/types.cuh"

enum Kind : int32 { kOne = 1, kTwo };
enum Form : int32 {
    kSquare = 1,  // };
};
constexpr int32 kMaxRows = 3, kMaxColumns = 4, kUnused = 1 << 4;
static_assert(sizeof(Base) == 8, "no struct X { here");

struct CallParams : Base {
    static constexpr bool kPresent = true;
    int64 a_stride, b_stride;  // int32 none;

    // int32 none_either;
    const void* p;
    struct Later* later;
    uint8* planes[kMaxRows];
    float table[2 * kMaxRows * kMaxColumns];
    uint16 x[2], y;
    uint8 z[2];
    Base inner;
};
OA_DEVICE int32 first(const CallParams& p) { return p.x[0]; }
OA_DEVICE int32 second(const CallParams& p) {
    if (p.y) {
        return 1;
    }
    return 2;
}
struct alignas(16) WithMaps {
    TensorMap map_a, map_b;
    Base one, two;
};
"""
BASE = """\
#pragma once
struct Base {
    int32 low;
    uint32 high;
};
"""
EXPECTED = """\
MAX_ROWS = 3
MAX_COLUMNS = 4

# params/base.cuh

BASE = HostStruct(
    "Base", ("i", "low"), ("I", "high"),
)

# params/forms.cuh

CALL = HostStruct(
    "CallParams", ("i", "low"), ("I", "high"), ("q", "a_stride b_stride"), ("P", "p later"), ("3P", "planes"),
    ("24f", "table"), ("2H", "x"), ("H", "y"), ("2B", "z"), (BASE, "inner"),
)

WITH_MAPS = HostStruct(
    "WithMaps", ("M", "map_a map_b"), (BASE, "one two"),
)
"""


def headers(root: Path, **texts: str) -> Headers:
    (root / "params").mkdir(exist_ok=True)
    for name, content in texts.items():
        (root / f"params/{name}.cuh").write_text(content, encoding="utf-8")
    return Headers(root)


def test_forms(tmp_path: Path) -> None:
    # Alphabetical order is not the one of declarations.
    written = text(headers(tmp_path, forms=FORMS, base=BASE))
    assert written.endswith("import HostStruct\n\n" + EXPECTED)
    renamed = FORMS.replace("base.cuh", "zero.cuh")
    (tmp_path / "params/base.cuh").unlink()
    assert text(headers(tmp_path, forms=renamed, zero=BASE)).endswith(EXPECTED.replace("base.cuh", "zero.cuh"))


def test_what_is_written_is_what_was_read(tmp_path: Path) -> None:
    found = headers(tmp_path, forms=FORMS, base=BASE)
    module: dict[str, object] = {"__package__": "omniattn.launch"}
    exec(compile(text(found), "structs.py", "exec"), module)
    for name, struct in found.structs.items():
        host = module[host_name(name)]
        assert isinstance(host, HostStruct)
        assert (host.name, host.size) == (name, struct.end + struct.tail)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        # Types
        ("    long c;", "long: neither a type of fixed width nor a struct declared above"),
        ("    unsigned int c;", "unsigned: neither"),
        ("    Later c;", "Later: neither"),
        ("    Small c;", "Small: neither"),
        ("    Padded c;", "Padded is padded at its end"),
        ("    float** c;", "not understood"),
        ("    float& c;", "not understood"),
        # One declaration a line, and nothing but fields
        ("    float *c;", "not understood"),
        ("    const float* c, d;", "a pointer has a line of its own"),
        ("    int32 c; int32 d;", "not understood"),
        ("    int32 c,", "not understood"),
        ("    int32 c : 3;", "not understood"),
        ("    int32 c = 0;", "not understood"),
        ("    int32 c() const;", "not understood"),
        ("    struct {", "not understood"),
        ("#if LARGE", "not understood"),
        ("    int32 c; /* of one line */", "not understood"),
        ("    int32 a;", "there is another field a"),
        # Extents
        ("    int32 c[kMany];", "extent kMany: neither a decimal number nor a constant that is one"),
        ("    int32 c[kShifted];", "extent kShifted: neither"),
        ("    int32 c[010];", "extent 010: neither"),
        ("    int32 c[kTwo + 2];", r"extent kTwo \+ 2: neither"),
        ("    int32 c[2][2];", "extent 2.*: neither"),
        ("    Pair c[2];", "c: arrays are of numbers or pointers"),
        # Bytes without a name
        ("    int32 c;\n    float* d;", "4 byte.s. of padding before d: fields of more bytes come first"),
        ("    uint8 c;\n    uint16 d;", "1 byte.s. of padding before d"),
        ("    int32 c;\n    Pair d;", "4 byte.s. of padding before d"),
        ("    TensorMap c;", "56 byte.s. of padding before c"),
    ],
)
def test_a_field_that_no_header_may_have(tmp_path: Path, line: str, message: str) -> None:
    begin = (
        "constexpr int kTwo = 2, kShifted = 1 << 2;\nstruct Pair {\n    int64 a;\n    float* b;\n};\n"
        "struct Padded {\n    TensorMap a;\n    int32 b;\n};\nstruct Small {\n    int32 a, b;\n"
    )
    number = f"{begin}{line}".count("\n") + 1
    assert "SMALL" in text(headers(tmp_path, small=begin + "    Pair pair;\n};\n"))
    with pytest.raises(HeaderError, match=f"^kernels_cu/params/small.cuh:{number}: {message}"):
        headers(tmp_path, small=f"{begin}{line}\n}};\n")


@pytest.mark.parametrize(
    ("content", "line", "message"),
    [
        ("struct A {\n    float* p;\n    int32 a;\n};\n", 4, "A has 4 byte.s. of padding at its end: give them a name"),
        ("struct alignas(64) A {\n    int32 a;\n};\n", 3, "A has 60 byte.s. of padding"),
        ("struct alignas(128) A {\n    TensorMap m;\n    int64 a;\n};\n", 4, "A has 120 byte.s. of padding"),
        ("struct A {\n};\n", 2, "A has no fields"),
        ("struct A : B {\n    int32 a;\n};\n", 1, "B: neither"),
        ("struct A {\n    TensorMap m;\n    int32 a;\n};\nstruct B : A {\n};\n", 5, "A is padded at its end"),
        ("struct A {\n    int32 a;\n};\nstruct A {\n", 4, "there is another struct A"),
        ("constexpr int kA = 1;\nconstexpr int kB = 1, kA = 2;\n", 2, "there is another constant kA"),
        ("struct A {\n    int32 a;\n", 2, "the last declaration has no end"),
        ("OA_DEVICE int32 f() {\n    return 1;\n", 2, "the last declaration has no end"),
        ("struct A\n{\n", 1, "not understood"),
        ("struct A { int32 a; };\n", 1, "not understood"),
        ("template <int N>\nstruct A {\n", 1, "not understood"),
        ("class A {\n", 1, "not understood"),
        ("union A {\n", 1, "not understood"),
        ("enum E : int32 { kA }; struct A { int32 a; };\n", 1, "not understood"),
        ("enum E : int32 {\n    kA,\n} kE;\nstruct A {\n    int32 a;\n};\n", 3, "not understood"),
        ("struct A {\n    static constexpr int kA = 1; int32 a;\n};\n", 2, "not understood"),
        ("constexpr int kA = 1 << 2;\nconstexpr int kA = 2;\n", 2, "there is another constant kA"),
        ("#pragma pack(1)\n", 1, "not understood"),
        ("#include <cstdint>\n", 1, "not understood"),
        ("using real = float;\n", 1, "not understood"),
        ("/* struct A {\n", 1, "not understood"),
        ("enum Kind { kOne };\n", 1, "not understood"),
    ],
)
def test_a_declaration_that_no_header_may_have(tmp_path: Path, content: str, line: int, message: str) -> None:
    with pytest.raises(HeaderError, match=f"^kernels_cu/params/a.cuh:{line}: {message}"):
        headers(tmp_path, a=content)


def test_an_error_is_of_the_header_that_has_it(tmp_path: Path) -> None:
    with pytest.raises(HeaderError, match=r"^kernels_cu/params/base.cuh:6: not understood"):
        headers(tmp_path, a='#include "params/base.cuh"\n', base=BASE + "int32 odd;\n")


def test_two_names_that_are_one_to_the_host(tmp_path: Path) -> None:
    twice = BASE + BASE.replace("Base", "BaseParams")
    with pytest.raises(HeaderError, match="more than one declaration is BASE to the host"):
        text(headers(tmp_path, base=twice))


def test_names() -> None:
    assert [host_name(x) for x in ("AttnInt8SplitModsSm90Params", "RowsToFp8", "kMaxModDims", "KvCopyParams")] == [
        "ATTN_INT8_SPLIT_MODS_SM90", "ROWS_TO_FP8", "MAX_MOD_DIMS", "KV_COPY",
    ]  # fmt: skip
