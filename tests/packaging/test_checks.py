"""The build's complaints: each is provoked, so that none can rot into silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from build_tools import checks
from omniattn.registry import KernelSpec

CLEAN_LOG = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'k' for 'sm_90a'
ptxas info    : Function properties for k
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers
"""


def row(name: str = "k", source: str = "entry/k.cu") -> KernelSpec:
    return KernelSpec(
        name=name,
        family="k",
        op="attention",
        source=source,
        symbol="k",
        defines=(),
        dtype="float16",
        head_dim=64,
        block_m=64,
        block_n=64,
        num_warps=4,
        smem_bytes=0,
    )


def test_a_clean_log_gives_no_complaint() -> None:
    assert checks.log_complaints(row(), "90a", CLEAN_LOG) == []
    assert checks.warnings(CLEAN_LOG) == []


@pytest.mark.parametrize(
    ("line", "meaning"),
    [
        (
            "ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
            "insufficient register resources for the wgmma pipeline in the function 'k'",
            "serialized",
        ),
        (
            "ptxas info    : (C7517) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
            "ill formed pipeline stage in the function 'k'",
            "serialized",
        ),
        ("ptxas warning : (C7508) setmaxnreg ignored; unable to determine register count at entry", "setmaxnreg"),
        ("ptxas info    : setmaxnreg ignored to maintain minimum register requirements", "setmaxnreg"),
    ],
)
def test_silent_slowdowns_are_complaints(line: str, meaning: str) -> None:
    (text,) = checks.log_complaints(row(), "90a", CLEAN_LOG + line + "\n")
    assert meaning in text
    assert "k (sm_90a)" in text


# LDGSTS.E.BYPASS.LTC128B.128 of decode_sm80 with an L2 policy, for sm_90a: [R97], [R94.64], and [R59+UR], [R46.64].
COPY, UNIFORM_COPY = 0x000FE2000E901D46_0000000038517FAE, 0x0003E4000B901D40_000000002E3B7DAE


@pytest.mark.parametrize(("word", "source", "arch", "count"), [
    (COPY, "entry/decode_sm80.cu", "90a", 0),
    (UNIFORM_COPY, "entry/decode_sm80.cu", "90a", 2),
    (UNIFORM_COPY, "entry/decode_sm80.cu", "120", 0),  # other machine code
    (UNIFORM_COPY, "entry/attn_fwd_sm80.cu", "90a", 0),  # no policy
])  # fmt: skip
def test_copies_that_would_be_illegal(
    word: int, source: str, arch: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    instructions = b"".join(x.to_bytes(16, "little") for x in (COPY, word, COPY, word))
    monkeypatch.setattr(checks.sass, "code", lambda cubin: instructions)
    found = checks.code_complaints(row(source=source), arch, b"")
    assert found == ([f"k (sm_{arch}): {count} copies with a policy and a uniform address"] if count else [])


def test_warnings_are_shown() -> None:
    line = 'k.cu(3): warning #177-D: variable "x" was declared but never referenced'
    assert checks.warnings(CLEAN_LOG + line) == [line]


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root


def test_registry_and_sources_must_match(tmp_path: Path) -> None:
    root = tree(tmp_path, {"entry/k.cu": "", "entry/lonely.cu": ""})
    assert checks.registry_complaints([row(), row("j")], tree(tmp_path / "good", {"entry/k.cu": ""})) == []
    complaints = checks.registry_complaints([row(), row(), row("gone", "entry/gone.cu")], root)
    assert [text.split(":")[0] for text in complaints] == ["k", "gone", "entry/lonely.cu"]
    assert "unique" in complaints[0]
    assert "does not exist" in complaints[1]
    assert "orphan" in complaints[2]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("#include <cuda_fp16.h>\n", "no system or CUDA header"),
        ("  #  include   <stdint.h>\n", "no system or CUDA header"),
        ('#include "ptx/gone.cuh"\n', "does not exist"),
        ('#include "entry/k.cu"\n', "layer above"),
    ],
)
def test_includes_that_cannot_be(tmp_path: Path, text: str, complaint: str) -> None:
    root = tree(tmp_path, {"entry/k.cu": '#include "tile/a.cuh"\n', "tile/a.cuh": text})
    (found,) = checks.include_complaints(root)
    assert found.startswith("tile/a.cuh: ")
    assert complaint in found


def test_includes_that_can_be(tmp_path: Path) -> None:
    files = {
        "entry/k.cu": '/* #include <vector> */\n// #include <vector>\n#include "tile/a.cuh"\n',
        "tile/a.cuh": '#include "ptx/b.cuh"\n',
        "ptx/b.cuh": "",
    }
    assert checks.include_complaints(tree(tmp_path, files)) == []
