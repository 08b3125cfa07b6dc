"""Keys are split only where the kernels for it are there or can be compiled, or nothing else is; without a GPU."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from build_tools import packs
from omniattn import arrays, runtime
from omniattn.errors import KernelNotFoundError
from omniattn.plan.attention import plan_attention
from omniattn.plan.engine import Launches
from omniattn.problems import AttentionProblem, Descales, Fp8, Int8, Target
from omniattn.problems.score_mod import ScoreModProblem
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver import set_driver
from omniattn.runtime.sources import Sources
from omniattn.runtime.store import ManifestEntry, Pack, Store, set_store
from tests.unit.launch.launch_fakes import KERNELS
from tests.unit.launch.test_launch_split import problem_of
from tests.unit.launch.test_launch_split_int8 import FP8_ARRAYS
from tests.unit.runtime.runtime_fakes import FakeDriver, World, isolated, no_nvrtc
from tests.unit.select.shape_plans import GPUS

B200, RTX5090, HOPPER = GPUS["B200"], GPUS["RTX 5090"], GPUS["H200"]
NEWER = pytest.mark.parametrize("target", [B200, RTX5090], ids=["B200", "RTX 5090"])
#: Calls whose split rows an incomplete wheel lacks for newer GPUs, by what they are.
CALLS: dict[str, dict[str, Any]] = {
    "softcap": {"softcap": 30.0},
    "mask": {"mask": "bool"},
    "bias": {"mask": "float32"},
    "packed, softcap": {"softcap": 30.0, "varlen": True},
    "d256": {"d": 256},
    "d256, packed": {"d": 256, "varlen": True},
    "one query, mask": {"mask": "bool", "sq": 1},
}
DOES_NOT_COMPILE = ["not installed", "OMNIATTN_DISABLE_JIT", "too old"]


def few(**changes: Any) -> AttentionProblem:
    return problem_of(1, **{"sq": 16, "sk": 32768, "hq": 32, "hk": 8, "d": 128, "dtype": "bfloat16", **changes})


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[World]:
    with isolated(monkeypatch, tmp_path) as world:
        install(world)
        yield world


def is_lacking(spec: KernelSpec, arch: str) -> bool:
    """Whether an incomplete wheel lacks the row for a target: splits with scores, or of many channels."""
    wide = spec.score_mods or spec.head_dim > 128
    return spec.op == "attention_split" and wide and arch in ("100", "120")


def install(world: World, holds: Callable[[KernelSpec], bool] = lambda spec: True, *, complete: bool = False) -> None:
    """A wheel of the real rows that ``holds`` keeps, each for its targets; incomplete unless asked for."""
    image = b"\x7fELF prebuilt"
    (world.cubins / "one.xz").write_bytes(packs.compress(image))
    digest = hashlib.sha256(image).hexdigest()
    entries = {
        spec.name: tuple(
            ManifestEntry(spec.name, Pack("one.xz", arch, digest, len(image)), 0, len(image), digest, "")
            for arch in spec.prebuild
            if complete or not is_lacking(spec, arch)
        )
        for spec in REGISTRY
        if holds(spec)
    }
    set_store(Store("wheel", Sources(KERNELS), world.cubins, entries, "NVRTC", ""))
    set_driver(world.driver)


def no_compiler(monkeypatch: pytest.MonkeyPatch, world: World, why: str = "not installed") -> None:
    """Also forgets what was known before, as a new process does."""
    if why == "OMNIATTN_DISABLE_JIT":
        monkeypatch.setenv(why, "1")
    elif why == "too old":
        world.compiler.archs = (70, 75)
    else:
        no_nvrtc(monkeypatch)
    set_driver(world.driver)


def ops(launches: Launches) -> list[str]:
    return [record.spec.op for record in launches.records]


def is_split(launches: Launches) -> bool:
    assert ("attention_split" in ops(launches)) != ("attention" in ops(launches))
    return "attention_split" in ops(launches)


def reasons(launches: Launches) -> list[str]:
    return [reason for reason in launches.selection.why if "not the fastest way" in reason]


def loads(world: World, launches: Launches, target: Target) -> None:
    """All kernels, as the call does it; a KernelNotFoundError otherwise."""
    set_driver(FakeDriver(target.cc))
    for record in launches.records:
        runtime.load(record.spec, 0)


@NEWER
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("why", DOES_NOT_COMPILE)
def test_without_a_compiler_keys_are_not_split(
    why: str, call: str, target: Target, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = few(**CALLS[call])
    split = plan_attention(p, target, None)
    assert is_split(split)
    assert not reasons(split)
    no_compiler(monkeypatch, world, why)
    launches = plan_attention(p, target, None)
    assert not is_split(launches)
    # As where the user asks for the kernel without a split.
    forced = plan_attention(p, target, launches.selection.spec.name)
    assert (launches.records, launches.workspace_bytes) == (forced.records, forced.workspace_bytes)
    assert launches.others == forced.others
    (main,) = (record.spec.name for record in split.records if record.spec.op == "attention_split")
    assert reasons(launches) == [f"not the fastest way: {main} is not prebuilt and cannot be compiled here"]
    assert launches.selection.why[-1].startswith("not the fastest way")
    assert {runtime.resolve(record.spec, target.cc).kind for record in launches.records} == {"prebuilt"}
    loads(world, launches, target)
    with pytest.raises(KernelNotFoundError, match=main):
        loads(world, split, target)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_wheels_serve_few_queries_without_a_compiler(
    dtype: str, gpu: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of them are split."""
    no_compiler(monkeypatch, world)
    install(world, complete=True)
    for head_dim in (64, 80, 128, 160, 256):
        plain: dict[str, Any] = {}
        for changes in (plain, *CALLS.values()):
            launches = plan_attention(few(**{"dtype": dtype, "d": head_dim, **changes}), GPUS[gpu], None)
            assert {runtime.resolve(record.spec, GPUS[gpu].cc).kind for record in launches.records} == {"prebuilt"}
            assert is_split(launches)


@NEWER
@pytest.mark.parametrize("call", CALLS)
def test_with_a_compiler_they_are(call: str, target: Target, world: World) -> None:
    launches = plan_attention(few(**CALLS[call]), target, None)
    assert is_split(launches)
    loads(world, launches, target)
    assert world.compiler.compiled


@NEWER
def test_a_split_that_is_prebuilt_needs_no_compiler(
    target: Target, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch, world)
    for head_dim in (64, 96, 128):
        launches = plan_attention(few(d=head_dim), target, None)
        assert is_split(launches)
        loads(world, launches, target)


def test_nor_one_that_was_compiled_before(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p = few(softcap=30.0)
    loads(world, plan_attention(p, B200, None), B200)
    no_compiler(monkeypatch, world)
    launches = plan_attention(p, B200, None)
    assert is_split(launches)
    assert {runtime.resolve(r.spec, B200.cc).kind for r in launches.records} == {"prebuilt", "cache"}
    # For that GPU.
    assert not is_split(plan_attention(p, RTX5090, None))


def test_every_kernel_of_the_split_counts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    no_compiler(monkeypatch, world)
    install(world, lambda spec: spec.op != "attention_combine")
    launches = plan_attention(few(), B200, None)
    assert not is_split(launches)
    assert reasons(launches)[0].startswith("not the fastest way: attn_combine_sm80_bf16 is not prebuilt")


@pytest.mark.parametrize(
    ("changes", "before"),
    [
        ({}, []),
        ({"mask": "bool"}, ["mask_pack"]),
        ({"precision": Int8().precision}, ["quantize_kv_sums", "quantize_kv"]),
        ({"precision": Fp8().precision}, ["quantize_fp8_sums", "quantize_values"]),
        ({"precision": FP8_ARRAYS}, ["layout_fp8"]),
    ],
    ids=str,
)
def test_all_ways_of_splitting(
    changes: dict[str, Any], before: list[str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On Hopper, whose wheels have them all: without their rows."""
    p = few(lse=False, **changes)
    if p.precision == FP8_ARRAYS:
        p = dataclasses.replace(p, descales=Descales())
    no_compiler(monkeypatch, world)
    assert is_split(plan_attention(p, HOPPER, None))
    install(world, lambda spec: spec.op != "attention_split")
    launches = plan_attention(p, HOPPER, None)
    others = [op for op in ops(launches) if op != "mask_list"]  # small tiles pass over nothing
    assert list(dict.fromkeys(others)) == [*before, "attention"]
    assert len(reasons(launches)) == 1
    loads(world, launches, HOPPER)


def test_operands(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p = few(lse=False, precision=Int8().precision)
    whole = p.quantization(grouping="sm90", pv="fp8", pv_accumulator="fp32", unpacked=True)
    given = dataclasses.replace(p, operands=whole)
    no_compiler(monkeypatch, world)
    assert is_split(plan_attention(given, HOPPER, None))
    install(world, lambda spec: spec.op != "attention_split")
    assert ops(plan_attention(given, HOPPER, None)) == ["attention"]


@pytest.mark.parametrize(
    ("force", "falls_back"),
    [
        ("attn_fwd_sm80_bf16_d128_split_mods", False),
        ("attn_combine_sm80_bf16", False),
        ("merge_states_sm80, attn_combine_sm80_bf16", False),
        ("quantize_sm80_bf16_d128", True),  # of another operation
    ],
)
def test_forced_kernels(force: str, falls_back: bool, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {spec.name for spec in REGISTRY}
    force = ",".join(name for part in force.split(",") for name in sorted(names) if name.startswith(part.strip()))
    p = few(mask="bool")
    no_compiler(monkeypatch, world)
    launches = plan_attention(p, B200, force)
    assert is_split(launches) != falls_back
    if not falls_back:
        with pytest.raises(KernelNotFoundError, match="attn_fwd_sm80_bf16_d128_split_mods"):
            loads(world, launches, B200)


@pytest.mark.parametrize("variable", ["", "OMNIATTN_FORCE_JIT"])
def test_where_nothing_serves_the_split_is_what_raises(
    variable: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    no_compiler(monkeypatch, world)
    if variable:
        monkeypatch.setenv(variable, "1")
    else:
        install(world, lambda spec: not spec.op.startswith("attention"))
    launches = plan_attention(few(softcap=30.0), B200, None)
    assert is_split(launches)
    assert not reasons(launches)
    with pytest.raises(KernelNotFoundError, match="attn_fwd_sm80_bf16_d128_split_mods"):
        loads(world, launches, B200)


def test_a_score_mod_has_to_be_compiled_either_way(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p = few(score_mod=ScoreModProblem("score + h", None, ()))
    split = plan_attention(p, B200, None)
    assert is_split(split)
    no_compiler(monkeypatch, world)
    launches = plan_attention(p, B200, None)
    assert launches.records == split.records
    assert not reasons(launches)
    with pytest.raises(KernelNotFoundError, match="_split_mods_mod_"):
        loads(world, launches, B200)


def test_a_score_mod_that_was_compiled_without_a_split(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    p = few(score_mod=ScoreModProblem("score + h", None, ()))
    whole = plan_attention(p, B200, "attn_fwd_sm80_bf16_d128_mods")
    loads(world, whole, B200)
    no_compiler(monkeypatch, world)
    assert plan_attention(p, B200, None).records == whole.records


# What it costs


@pytest.fixture
def resolved(world: World, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that were looked for."""
    names: list[str] = []
    resolve = runtime.resolve

    def counted(spec: KernelSpec, cc: tuple[int, int]) -> runtime.Resolution:
        names.append(spec.name)
        return resolve(spec, cc)

    monkeypatch.setattr(runtime, "resolve", counted)
    return names


@pytest.mark.parametrize("compiler", [True, False])
def test_a_kernel_is_looked_for_once(
    compiler: bool, resolved: list[str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not compiler:
        no_compiler(monkeypatch, world)
    for n in range(8):
        assert is_split(plan_attention(few(sk=32768 + n, softcap=30.0), B200, None)) == compiler
    assert len(resolved) == len(set(resolved)) <= 3
    # What the environment permits may change, and so may the driver.
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    assert not is_split(plan_attention(few(softcap=30.0), B200, None))
    set_driver(world.driver)
    seen = len(resolved)
    plan_attention(few(softcap=30.0), B200, None)
    assert len(resolved) > seen


# explain


def test_explain_says_so(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    info = DeviceInfo(0, "Fake Blackwell", B200.cc, B200.sm_count, B200.max_smem, 50 << 20, (13, 0))
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device, t.ptr = "cuda", 0x1000
        return t

    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    monkeypatch.setattr(arrays, "describe", on_gpu)
    # Zeros take no memory before they are written.
    q, k = np.zeros((1, 16, 32, 128), np.float16), np.zeros((1, 32768, 8, 128), np.float16)
    sentence = "not the fastest way: attn_fwd_sm80_fp16_d128_split_mods is not prebuilt and cannot be compiled here"
    with_compiler = oa.explain(q, k, k, softcap=30.0)
    assert with_compiler.kernel == "attn_fwd_sm80_fp16_d128_split_mods"
    assert sentence not in with_compiler.why
    no_compiler(monkeypatch, world)
    said = oa.explain(q, k, k, softcap=30.0)
    assert (said.kernel, said.origin) == ("attn_fwd_sm80_fp16_d128_mods", "prebuilt")
    assert said.why[-1] == sentence
    assert f"- {sentence}\n" in str(said)


def test_tails_need_their_kernels(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """All tiles go to the one kernel where those that split the last ones are missing."""
    p = problem_of(1, 4608, 4608, 24, 24, d=128, dtype="bfloat16")
    install(world)
    no_compiler(monkeypatch, world)
    assert ops(plan_attention(p, HOPPER, None)) == ["attention", "attention_split", "attention_combine"]
    for missing in ("attention_split", "attention_combine"):
        install(world, lambda spec, op=missing: spec.op != op)
        launches = plan_attention(p, HOPPER, None)
        assert ops(launches) == ["attention"]
        assert not any("last " in reason for reason in launches.selection.why if "the fastest of" in reason)
