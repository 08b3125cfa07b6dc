"""``omniattn compile --score-mod``: the kernels that it compiles are those that calls ask for."""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays, runtime
from omniattn.cli import main, score_mods, support
from omniattn.errors import UnsupportedError
from omniattn.launch.score_mod import with_score_mod
from omniattn.plan.ahead import OPTIONS, ModCalls, rows_of_calls
from omniattn.plan.attention import plan_attention
from omniattn.plan.backward import plan_backward
from omniattn.problems import AttentionProblem, AttentionStrides, BackwardProblem, BackwardStrides, Target
from omniattn.problems.score_mod import BlockMaskProblem, ModArray, ScoreModProblem
from omniattn.registry import by_name
from omniattn.runtime import nvrtc
from omniattn.runtime.driver import set_driver
from omniattn.select import candidates
from tests.unit.runtime.runtime_fakes import FakeCompiler, FakeDriver, no_nvrtc

MODULE = """
import numpy as np
import omniattn as oa

near = oa.ScoreMod("score - 0.1f * fabsf(k - q)")
documents = oa.ScoreMod(
    "score + table(h, k)", "doc(b, q) == doc(b, k)", grad="1.0f", doc=np.zeros((1, 1), np.int32),
    table=np.zeros((1, 1), np.float16),
)
class Of:
    wrong = oa.ScoreMod("score + slops[h]", "k <= q")
number = 3
"""


@pytest.fixture
def mods(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a program, the working directory, and an empty cache."""
    (tmp_path / "user_score_mods.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMNIATTN_CACHE_DIR", str(tmp_path / "cache"))
    yield tmp_path
    sys.modules.pop("user_score_mods", None)


class Driver(FakeDriver):
    """One that can make tensor maps."""

    has_tensor_maps = True


@pytest.fixture
def gpu(mods: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCompiler]:
    """A fast compiler, and arrays that pass for those of an H100."""
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device = "cuda"
        return t

    compiler = FakeCompiler()
    monkeypatch.setattr(arrays, "describe", on_gpu)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)  # processes would not have this compiler
    nvrtc.set_compiler(compiler)
    set_driver(Driver((9, 0)))
    yield compiler
    nvrtc.set_compiler(None)
    set_driver(None)


def command(name: str, *more: str, head_dim: int = 64, dtype: str = "fp16") -> list[str]:
    chosen = ["--score-mod", name, "--dtype", dtype, "--head-dim", str(head_dim)]
    return ["compile", "--arch", "sm_90a", "--json", *chosen, *more]


def origins(function: Any, *arguments: Any, **options: Any) -> dict[str, str]:
    """Where the kernels of a call come from."""
    return {launch.kernel: launch.origin for launch in oa.explain(function, *arguments, **options).launches}


def inputs(rows: int, keys: int, heads: int = 4, kv_heads: int = 4, batch: int = 2, **options: Any) -> tuple[Any, ...]:
    q, k = (batch, rows, heads, 64), (batch, keys, kv_heads, 64)
    return tuple(np.zeros(shape, np.float16) for shape in (q, k, k))


def test_calls_find_what_was_compiled(
    gpu: FakeCompiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the public functions on, on a machine that can compile nothing."""
    assert main(command("user_score_mods:documents")) == 0
    done = json.loads(capsys.readouterr().out)
    assert all(entry["error"] == "" for entry in done["compiled"])
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    set_driver(Driver((9, 0)))
    mod = score_mods.load("user_score_mods:documents")
    mask, bias = np.ones((300, 200), bool), np.zeros((2, 4, 300, 200), np.float16)
    blocks = np.ones((3, 2), bool)
    found: dict[str, str] = {}
    for options in ({}, {"softcap": 30.0}, {"mask": mask}, {"mask": bias}, {"block_mask": blocks}, {"causal": True}):
        found |= origins(oa.attention, *inputs(300, 200), score_mod=mod, return_lse=True, **options)
    found |= origins(oa.attention, *inputs(4, 20000, 8, 2, 1), score_mod=mod)
    starts = np.array([0, 100, 300], np.int32)
    packed = [x.reshape(-1, 4, 64) for x in inputs(150, 150)]
    varlen = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 200, "max_seqlen_k": 200}
    found |= origins(oa.attention_varlen, *packed, score_mod=mod, **varlen)
    used = np.array([50, 200], np.int32)
    found |= origins(oa.attention_varlen, *packed, score_mod=mod, seqused_q=used, seqused_k=used, **varlen)
    q, k, v = inputs(300, 200)
    lse = np.zeros((2, 4, 300), np.float32)
    for deterministic in (False, True):
        found |= origins(oa.attention_backward, q, q, k, v, q, lse, score_mod=mod, deterministic=deterministic)
    found |= origins(oa.attention_backward, q, q, k, v, q, lse, mask=bias, wanted=("dq", "dmask"), score_mod=mod)
    assert {name.rpartition("_mod_")[0] for name in found} >= {
        "tile_kinds_sm80",
        "attn_fwd_sm90_fp16_d64_m256n64_masks",
    }
    missing = {
        name for name, origin in found.items() if origin != "cache" and ("_mod_" in name or origin != "prebuilt")
    }
    assert not missing
    assert {name for name, origin in found.items() if origin == "cache"} <= {x["kernel"] for x in done["compiled"]}
    # What nobody asked for is not there.
    assert "unsupported" in origins(oa.attention, *inputs(300, 200), score_mod=oa.ScoreMod("score + 1")).values()


def test_by_default_everything_and_by_name_less(gpu: FakeCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    kernels: dict[str, set[str]] = {}
    for name, more in {
        "all": (), "plain": ("--options",), "dense": ("--options", "--calls", "dense"),
        "forward": ("--options", "--calls", "dense", "--direction", "forward"),
        "softcap": ("--options", "softcap", "--calls", "dense", "--direction", "forward"),
    }.items():  # fmt: skip
        assert main(command("user_score_mods:documents", *more)) == 0
        kernels[name] = {entry["kernel"] for entry in json.loads(capsys.readouterr().out)["compiled"]}
    assert kernels["forward"] < kernels["dense"] < kernels["plain"] < kernels["all"]
    rows = {"_".join(x.rpartition("_mod_")[0].split("_")[5:]) for x in kernels["softcap"] - kernels["forward"]}
    assert rows == {"m256n64_softcap", "m256n64_split_softcap"}
    assert not any("attn_bwd" in x for x in kernels["forward"])


def test_several_dtypes_and_head_dims(gpu: FakeCompiler, capsys: pytest.CaptureFixture[str]) -> None:
    more = ("--options", "--calls", "dense")
    line = [
        "compile",
        "--arch",
        "sm_80",
        "--json",
        "--score-mod",
        "user_score_mods.py:near",
        "--dtype",
        "bf16",
        "float16",
    ]
    assert main([*line, "--head-dim", "64", "128", *more]) == 0
    done = json.loads(capsys.readouterr().out)
    kernels = [entry["kernel"] for entry in done["compiled"]]
    for row in ("attn_fwd_sm80_bf16_d64_mods", "attn_fwd_sm80_bf16_d128_mods", "attn_fwd_sm80_fp16_d128_split_mods"):
        assert any(name.startswith(f"{row}_mod_") for name in kernels)
    assert not any("sm90" in name for name in kernels)
    # What merges parts of keys has no score in it.
    left_out = done["left_out"]
    assert left_out.pop("gradients") == "the ScoreMod has no grad="
    assert all(name.startswith("attn_combine_") and why.startswith("prebuilt") for name, why in left_out.items())
    assert main([*line, "--head-dim", "64", "--head-dim-v", "32", *more]) == 0
    assert "attn_fwd_sm80_bf16_d64_v_mods_mod_" in capsys.readouterr().out


def test_indices_that_are_checked(
    gpu: FakeCompiler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """OMNIATTN_CHECK_SCORE_MOD means another text, here as in a call."""
    monkeypatch.setenv("OMNIATTN_CHECK_SCORE_MOD", "1")
    assert main(command("user_score_mods:documents", "--options", "--calls", "dense", "--direction", "forward")) == 0
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    mod = score_mods.load("user_score_mods:documents")
    assert set(origins(oa.attention, *inputs(300, 200), score_mod=mod).values()) <= {"cache", "prebuilt"}
    monkeypatch.setenv("OMNIATTN_CHECK_SCORE_MOD", "0")
    assert "unsupported" in origins(oa.attention, *inputs(300, 200), score_mod=mod).values()


def test_real_nvrtc(mods: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A process without NVRTC loads what the command has left."""
    row = "tile_kinds_sm80"
    assert main(command("user_score_mods:documents", "--kernel", row, "--calls", "dense")) == 0
    compiled = {entry["kernel"]: entry for entry in json.loads(capsys.readouterr().out)["compiled"]}
    spec = with_score_mod(by_name(row), score_mods.problem_of(score_mods.load("user_score_mods:documents")))
    # The backward's lists are of a block mask alone.
    assert set(compiled) == {spec.name, row}
    assert compiled[spec.name]["registers"] > 0
    no_nvrtc(monkeypatch)
    driver = FakeDriver((9, 0))
    set_driver(driver)
    try:
        assert runtime.resolve(spec, (9, 0)).kind == "cache"
        assert runtime.load(spec, 0).origin == "cache"
        assert driver.images[-1].startswith(b"\x7fELF")
    finally:
        set_driver(None)
        nvrtc.set_compiler(None)


def test_text_that_does_not_compile(mods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(command("user_score_mods.py:Of.wrong", "--kernel", "tile_kinds_sm80", "--calls", "dense")) == 1
    (entry,) = json.loads(capsys.readouterr().out)["compiled"]
    assert entry["error"].startswith(
        "score_mod does not compile; the compiler says of its text:\nscore_mod expression(1)"
    )
    assert 'identifier "slops" is undefined' in entry["error"]


@pytest.mark.parametrize(
    ("name", "more", "said"),
    [
        ("user_score_mods:far", (), "its ScoreMods: near, documents), received 'far'"),
        ("user_score_mods:Of.far", (), "received 'Of.far'"),
        ("user_score_mods:number", (), "expected an omniattn.ScoreMod"),
        ("user_score_mods:number", (), "received 'number', of type int"),
        ("no_such_module:near", (), "'no_such_module' (ModuleNotFoundError"),
        ("no_such_file.py:near", (), "'no_such_file.py' (FileNotFoundError"),
        ("broken.py:near", (), "'broken.py' (ZeroDivisionError"),
        ("user_score_mods", (), "MODULE:NAME or FILE.py:NAME"),
        (":near", (), "MODULE:NAME or FILE.py:NAME"),
        ("user_score_mods:near", ("--direction", "backward"), "'--direction': expected no backward without grad="),
        ("user_score_mods:near", ("--head-dim", "12"), "'--head-dim': expected multiples of 8 up to 512, received 12"),
        ("user_score_mods:near", ("--head-dim-v", "520"), "'--head-dim-v': expected multiples of 8 up to 512"),
        ("user_score_mods:near", ("--kernel", "attn_fwd_sm80_fp16_d96_mods"), "'--kernel': expected a row that these"),
    ],
)  # fmt: skip
def test_wrong_arguments(
    mods: Path, capsys: pytest.CaptureFixture[str], name: str, more: tuple[str, ...], said: str
) -> None:
    Path("broken.py").write_text("1 / 0")
    assert main(command(name, *more)) == 2
    assert said in capsys.readouterr().err


def test_gradients_of_another_head_dim_of_v(mods: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """There are none: asked for they raise, else they are left out."""
    more = ("--head-dim-v", "32", "--calls", "dense", "--options")
    assert main(command("user_score_mods:documents", "--direction", "backward", *more)) == 1
    assert "v of q's head_dim only" in capsys.readouterr().err
    arguments = oa_arguments(command("user_score_mods:documents", *more))
    left_out = score_mods.rows(arguments, score_mods.Arch.parse("sm_90a")).left_out
    assert "v of q's head_dim only" in left_out["gradients, head_dim 64"]


def oa_arguments(line: list[str]) -> Any:
    from omniattn.cli import build_parser

    return build_parser().parse_args(line)


@pytest.mark.parametrize("missing", ["--dtype", "--head-dim"])
def test_what_has_to_be_said(mods: Path, capsys: pytest.CaptureFixture[str], missing: str) -> None:
    line = command("user_score_mods:near")
    at = line.index(missing)
    assert main(line[:at] + line[at + 2 :]) == 2
    assert f"argument '{missing}'" in capsys.readouterr().err


@pytest.mark.parametrize(
    "more",
    [("--dtype", "bf16"), ("--head-dim", "64"), ("--head-dim-v", "64"), ("--calls", "dense"), ("--options",),
     ("--direction", "forward")],
)  # fmt: skip
def test_nothing_is_ignored_without_score_mod(capsys: pytest.CaptureFixture[str], more: tuple[str, ...]) -> None:
    assert main(["compile", "--arch", "sm_90a", "--kernel", "tile_kinds_sm80", *more]) == 2
    assert f"argument '{more[0]}': expected nothing, without --score-mod" in capsys.readouterr().err


def test_shared_memory_by_compute_capability() -> None:
    known = {(8, 6): 99, (8, 7): 163, (9, 0): 227, (10, 3): 227, (11, 0): 227, (12, 1): 99, (13, 0): 99}
    assert {cc: support.shared_memory(cc) >> 10 for cc in known} == known


# Rows that are compiled, and calls of every length

MODS = (
    ScoreModProblem("score + table(h, k)", "k <= q", (ModArray("table", "float16", (2, 9), (9, 1)),), grad="1.0f"),
    ScoreModProblem("score", None, (), grad="1.0f"),
)
TARGETS = {(9, 0): 227, (8, 0): 163, (8, 6): 99, (12, 0): 99}


def call_of(rng: random.Random, calls: ModCalls) -> AttentionProblem:
    """A call of any lengths and numbers of heads."""
    kv_heads = rng.choice((1, 2, 8))
    heads = kv_heads * rng.choice((1, 1, 4, 7))
    rows, keys = (rng.choice((1, 2, 16, 60, 64, 65, 129, 1000, 5000, 40000)) for _ in range(2))
    batch, d, of_v = rng.choice((1, 1, 3, 32)), calls.head_dim, calls.own_head_dim_v or calls.head_dim
    maps = rng.random() < 0.8
    full = (heads * rows * keys, rows * keys, keys, 1)
    kinds = rng.choice((full, (0, 0, keys, 1), (keys, 0, 0, 1), (0, keys, 0, 1), (0, 0, 1, 0)))
    block_mask = None
    mask = rng.choice(("none", "bool", "float32", "io"))
    if not calls.varlen and rng.random() < 0.3:
        block_mask, mask = BlockMaskProblem((2, 2), (0, 0, 1, 1)), rng.choice(("none", "float32", "io"))
    if calls.varlen:
        kinds, block_mask = rng.choice((full, (0, 0, keys, 1))), None
    strides = AttentionStrides(
        (rows * heads * d, heads * d, d), (keys * kv_heads * d, kv_heads * d, d),
        (keys * kv_heads * of_v, kv_heads * of_v, of_v), (rows * heads * of_v, heads * of_v, of_v),
        (heads * rows, rows), kinds if mask != "none" else (0, 0, 0, 0),
    )  # fmt: skip
    left, right = rng.choice(((-1, -1), (-1, 0), (100, 0), (64, 64)))
    known = calls.varlen and (mask != "none" or rng.random() < 0.8)
    return AttentionProblem(
        calls.dtype, batch, rows, keys, heads, kv_heads, d, left, right, rng.choice((0.1, -1.0)),
        rng.choice((0.0, 20.0)), mask, rng.choice(("none", "float32")), calls.varlen, lse=rng.random() < 0.5,
        tensor_maps=maps, mask_map=maps and rng.random() < 0.7, keys_map=maps and rng.random() < 0.7,
        max_seqlen_q=rows if known else 0, max_seqlen_k=keys if known else 0, score_mod=calls.mod,
        block_mask=block_mask, own_head_dim_v=calls.own_head_dim_v, strides=strides,
    )  # fmt: skip


@pytest.mark.parametrize("mod", MODS, ids=["mask", "no mask"])
@pytest.mark.parametrize("cc", TARGETS)
def test_every_call_takes_rows_that_are_compiled(cc: tuple[int, int], mod: ScoreModProblem) -> None:
    rng = random.Random(1)
    gpu = Target(cc, TARGETS[cc] << 10)
    for varlen, head_dim, of_v in ((False, 64, 0), (False, 80, 0), (True, 128, 0), (False, 128, 64), (True, 256, 0)):
        calls = ModCalls(mod, "bfloat16", head_dim, of_v, varlen)
        compiled = {spec.name for spec in rows_of_calls(calls, gpu)}
        own = {name for name in compiled if "_mod_" in name}
        taken, ways = set[str](), set[str]()
        for _ in range(100):
            problem = call_of(rng, calls)
            target = replace(gpu, sm_count=rng.choice((8, 58, 108, 132, 188)))
            taken |= {record.spec.name for record in plan_attention(problem, target, None).records}
            ways |= {way.row.name for way in candidates(problem, target)}
            ways |= {"tile_kinds_sm80"} if problem.finds_tiles else set()
        assert taken <= compiled
        assert {name.rpartition("_mod_")[0] for name in own} <= ways, "nothing is compiled that no call may take"


@pytest.mark.parametrize("cc", TARGETS)
def test_every_backward_takes_rows_that_are_compiled(cc: tuple[int, int]) -> None:
    rng = random.Random(7)
    gpu = Target(cc, TARGETS[cc] << 10, 132)
    for varlen, head_dim in ((False, 64), (True, 96), (False, 200)):
        calls = ModCalls(MODS[0], "float16", head_dim, 0, varlen)
        compiled = {spec.name for spec in rows_of_calls(calls, gpu, backward=True)}
        taken: set[str] = set()
        for _ in range(100):
            p = replace(call_of(rng, calls), lse=True, deterministic=rng.random() < 0.5)
            s = p.strides
            assert s is not None
            dmask = p.mask in ("io", "float32") and rng.random() < 0.5
            wanted = rng.choice((("dq",), ("dq", "dk", "dv"), ("dk", "dv"))) + ("dmask",) * dmask
            own = BackwardStrides(s.o, s.q, s.k, s.v, (0, 0), s.mask if dmask else (0, 0, 0, 0))
            problem = BackwardProblem(p, wanted, deterministic=p.deterministic, strides=own)
            try:
                taken |= {record.spec.name for record in plan_backward(problem, gpu, None).records}
            except UnsupportedError:
                assert dmask
                assert p.deterministic
        assert {name.replace("_dmask", "_mods") for name in taken}
        assert taken <= compiled


def test_a_gpu_without_kernels() -> None:
    with pytest.raises(UnsupportedError, match="no attention kernel serves"):
        rows_of_calls(ModCalls(MODS[0], "bfloat16", 64, options=frozenset(OPTIONS)), Target((7, 5), 64 << 10))
