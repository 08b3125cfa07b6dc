"""``omniattn compile``: compile kernels for a GPU that is not here, into the cache or a folder."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import multiprocessing
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from omniattn import runtime
from omniattn.cli import console, kernels, score_mods
from omniattn.errors import CacheError, CompileError
from omniattn.registry import KernelSpec
from omniattn.runtime.arch import Arch

_DESCRIPTION = """\
Compiles with NVRTC; needs no GPU. Without --out the results go into the kernel cache (OMNIATTN_CACHE_DIR), where a
process on a GPU of that kind finds them, even without NVRTC. With --out: <folder>/<arch>/<kernel>.cubin.
Without --all, kernels that this installation holds prebuilt for the target are left out.
With --score-mod: the kernels of calls with this score modification, for example
  omniattn compile --arch sm_90a --score-mod mymodule:near --dtype bf16 --head-dim 128
"""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One compilation.

    Attributes
    ----------
    kernel : str
    file : str
        Empty if it failed.
    registers, spill_bytes, size : int
        Per thread, per thread, of the binary in bytes.
    seconds : float
    error : str
        Empty if it succeeded.
    """

    kernel: str
    file: str = ""
    registers: int = 0
    spill_bytes: int = 0
    size: int = 0
    seconds: float = 0.0
    error: str = ""


def add_parser(commands: Any) -> None:
    """Add ``compile`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "compile", help="compile kernels for a GPU that is not here", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--arch", required=True, help="target, e.g. sm_100a; with --out also compute_80 (PTX)")
    parser.add_argument("--all", action="store_true", help="also kernels that are prebuilt for the target")
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this registry row; may be repeated"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write binaries here instead of into the cache")
    parser.add_argument("--json", action="store_true", help="print JSON")
    score_mods.add_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    target = Arch.parse(arguments.arch, argument="--arch")
    if not arguments.json:
        console.require_rich()
    wanted, no_calls = _wanted(arguments, target)
    specs, left_out = choose(wanted, target, keep_prebuilt=arguments.all or bool(arguments.kernel))
    left_out |= no_calls
    if not specs and not any(reason == _PREBUILT for reason in left_out.values()):
        reasons = "; ".join(dict.fromkeys(left_out.values())) or "the registry is empty"
        raise console.CannotRunError(f"no kernel can be compiled for {target}: {reasons}")
    with console.progress(len(specs), enabled=not arguments.json) as bar:
        outcomes = compile_all(specs, str(target), arguments.out, bar.step)
    if arguments.json:
        console.print_json({
            "arch": str(target),
            "compiled": [dataclasses.asdict(outcome) for outcome in outcomes],
            "left_out": left_out,
        })  # fmt: skip
    else:
        _show(target, outcomes, left_out, no_calls)
    return 1 if any(outcome.error for outcome in outcomes) else 0


def _wanted(arguments: argparse.Namespace, target: Arch) -> tuple[Sequence[KernelSpec], dict[str, str]]:
    """Rows to choose from, and kinds of calls that have none, with reasons."""
    named = kernels.named(arguments.kernel)
    if arguments.score_mod is None:
        score_mods.check_unused(arguments)
        return named, {}
    found = score_mods.rows(arguments, target)
    found = score_mods.only(found, named) if arguments.kernel else found
    return found.specs, found.left_out


_PREBUILT = "prebuilt for this target (--all compiles it too)"


def choose(
    specs: Sequence[KernelSpec], target: Arch, *, keep_prebuilt: bool
) -> tuple[list[KernelSpec], dict[str, str]]:
    """Split rows into those to compile and those left out, with reasons."""
    chosen, left_out = [], {}
    for spec in specs:
        never = spec.unfit(target.cc, where=str(target))
        if never:
            left_out[spec.name] = never
        elif not keep_prebuilt and runtime.resolve(spec, target.cc).kind == "prebuilt":
            left_out[spec.name] = _PREBUILT
        else:
            chosen.append(spec)
    return chosen, left_out


def compile_one(spec: KernelSpec, arch: str, folder: Path | None) -> Outcome:
    """Compile one row; failures of the compiler and of the file system are part of the result."""
    start = time.perf_counter()
    try:
        compiled = runtime.compile_to(spec, arch, folder)
    except (CompileError, CacheError) as error:
        return Outcome(spec.name, seconds=time.perf_counter() - start, error=str(error))
    result = compiled.result
    seconds = time.perf_counter() - start
    path = str(compiled.path)
    return Outcome(spec.name, path, result.registers, result.spill_bytes, len(result.cubin), seconds)


def compile_all(
    specs: Sequence[KernelSpec], arch: str, folder: Path | None, step: Callable[[str], None] = lambda _: None
) -> list[Outcome]:
    """Compile all rows, in the order of ``specs``. Several go into processes: NVRTC serializes the threads of one."""
    workers = min(len(specs), os.cpu_count() or 1)
    if workers < 2:
        return [compile_one(spec, arch, folder) for spec in specs]
    outcomes = []
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        repeated = (itertools.repeat(arch), itertools.repeat(folder))
        for spec, outcome in zip(specs, pool.map(compile_one, specs, *repeated), strict=True):
            outcomes.append(outcome)
            step(spec.name)
    return outcomes


def _show(target: Arch, outcomes: Sequence[Outcome], left_out: dict[str, str], no_calls: Mapping[str, str]) -> None:
    done = [outcome for outcome in outcomes if not outcome.error]
    if done:
        header = ["kernel", "registers", "spill bytes", "size", "s"]
        rows = [[o.kernel, str(o.registers), str(o.spill_bytes), str(o.size), f"{o.seconds:.2f}"] for o in done]
        console.print_table(f"Compiled for {target}", header, rows, numeric=(1, 2, 3, 4))
        folder = os.path.commonpath([str(Path(o.file).parent) for o in done])
        console.print_line(f"{len(done)} kernel{'s' if len(done) > 1 else ''} written to {folder}")
    failed: dict[str, list[str]] = {}  # a missing compiler fails them all alike
    for outcome in outcomes:
        if outcome.error:
            failed.setdefault(outcome.error, []).append(outcome.kernel)
    for error, names in failed.items():
        console.print_line(f"FAILED {', '.join(names)}: {error}")
    for reason in dict.fromkeys(left_out.values()):
        those = [name for name, value in left_out.items() if value == reason]
        count = "1 kernel" if len(those) == 1 else f"{len(those)} kernels"
        console.print_line(f"{', '.join(those) if those[0] in no_calls else count} left out: {reason}")
