"""``omniattn verify``: registered kernels on this machine's GPU against the reference."""

from __future__ import annotations

import argparse
import dataclasses
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from omniattn import runtime
from omniattn.cli import console, kernels
from omniattn.cli.support import is_held
from omniattn.errors import ArgumentError, OmniattnError
from omniattn.registry import KernelSpec
from omniattn.testing.ahead import Ahead, default_jobs, in_order
from omniattn.testing.cases import CallCase, cases_for, problem
from omniattn.testing.frameworks import Framework, NumpyFramework, gpu_framework
from omniattn.testing.rows import run_row

_DESCRIPTION = """\
Runs kernels of the registry on GPU 0 over small problems with odd sizes, masks, windows, grouped heads, empty rows and
variable lengths: by default those that a released wheel has prebuilt for this GPU, with --all also those that no call
takes there, which are compiled first. Exact kernels are compared with the fp64 reference on the CPU:
max|o - ref| <= 2 max|same-dtype baseline - ref| + rounding;
low-precision attention with its emulation on the CPU (cosine, relative L1, LSE); quantizers and appended bytes with the
CPU bit for bit; decode with the CPU within tolerances. Exit code: 0 all passed; 1 a kernel failed; 2 there is no GPU to
test (--cpu tests the CPU backend).

With --soak MINUTES it runs random problems of every operation instead, through the public functions, beside float64 on
the same device, each element with a tolerance of its own; NaN, a write outside of an array, other bits in a repeated
call, an error and a hang are failures too. The first failure is written as a small program that reproduces it. Every
problem is made of the seed and its number: --seed N --only NUMBER runs it again.
"""

#: Operations that ``--cpu`` tests. What the quantizers must give is what they give on the CPU, so they have nothing to
#: be compared with there; quantized_attention goes through them.
_CPU_OPS = ("attention", "quantized_attention", "merge_states")

PASSED, FAILED, NOT_HERE = "passed", "FAILED", "not for this GPU"


@dataclasses.dataclass(frozen=True)
class Outcome:
    """One kernel.

    Attributes
    ----------
    kernel, origin : str
        Name; ``"prebuilt sm_90a"``, ``"cache"``, ``"jit"``, or empty if it was not loaded.
    status : str
        ``"passed"``, ``"FAILED"`` or ``"not for this GPU"``.
    cases : int
        Problems that ran.
    worst : float
        Largest error as a fraction of its tolerance; above 1 is a failure.
    seconds : float
    notes : tuple of str
        What failed, with figures; which problems the kernel does not take.
    """

    kernel: str
    origin: str
    status: str
    cases: int
    worst: float
    seconds: float
    notes: tuple[str, ...]


def add_parser(commands: Any) -> None:
    """Add ``verify`` to the commands."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "verify", help="self-test of this installation on this GPU", description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="test the CPU backend instead; needs no GPU")
    parser.add_argument("--all", action="store_true", help="also kernels that no call takes on this GPU")
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this registry row; may be repeated"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N",
        help="processes that compute references and compile (default: a core each, 16 at most; 1: this one only)",
    )  # fmt: skip
    parser.add_argument(
        "--soak", type=float, metavar="MINUTES", help="random problems of every operation beside float64, for so long"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="of random problems (default: another one every time)")
    parser.add_argument(
        "--op", action="append", default=[], metavar="NAME", help="only these of the operations; may be repeated"
    )
    parser.add_argument("--only", type=int, metavar="NUMBER", help="the one random problem of this number and --seed")
    parser.add_argument(
        "--framework", default="", metavar="NAME",
        help="arrays of random problems: torch, cupy, jax; with --cpu numpy (default), torch, jax",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if arguments.soak is not None or arguments.only is not None:
        return _soak(arguments)
    for option in ("seed", "framework", "op"):
        if getattr(arguments, option) not in (None, "", []):
            raise ArgumentError(f"--{option}", "to be used with --soak or --only", "neither")
    for option in ("kernel", "all", "jobs"):
        if arguments.cpu and getattr(arguments, option):
            raise ArgumentError(f"--{option}", "to be used without --cpu, which runs no kernel", "both")
    if arguments.all and arguments.kernel:
        raise ArgumentError("--all", "to be used without --kernel", "both")
    if arguments.jobs is not None and arguments.jobs < 1:
        raise ArgumentError("--jobs", "an integer >= 1", arguments.jobs)
    if not arguments.json:
        console.require_rich()
    start = time.perf_counter()
    left_out = 0
    if arguments.cpu:
        framework: Framework = NumpyFramework()
        with console.progress(2 * len(_CPU_OPS), enabled=not arguments.json) as bar:
            outcomes = verify_cpu(bar.step)
    else:
        specs = kernels.named(arguments.kernel)
        framework = gpu_framework()
        if not (arguments.all or arguments.kernel):
            # A GPU that the wheel holds nothing for has all kernels compiled.
            everything, specs = specs, prebuilt(specs, runtime.device_info(0).cc) or specs
            left_out = len(everything) - len(specs)
        with console.progress(len(specs), enabled=not arguments.json) as bar:
            outcomes = verify_kernels(framework, specs, arguments.jobs or default_jobs(), bar.step)
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    # A GPU on which nothing can run has not passed.
    code = 1 if failed or not any(outcome.status == PASSED for outcome in outcomes) else 0
    seconds = time.perf_counter() - start
    if arguments.json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        facts = {"framework": framework.name, "device": framework.device, "ok": code == 0, "seconds": seconds}
        console.print_json({**facts, "left_out": left_out, "kernels": rows})
    else:
        _show(outcomes, framework, seconds, left_out)
    return code


def _check_soak(arguments: argparse.Namespace) -> None:
    for option in ("kernel", "all", "jobs"):
        if getattr(arguments, option):
            raise ArgumentError(f"--{option}", "to be used without --soak and --only", "both")
    # Written so that NaN fails.
    if arguments.soak is not None and not 0 < arguments.soak < float("inf"):
        raise ArgumentError("--soak", "a number of minutes > 0", arguments.soak)
    for option in ("seed", "only"):
        value = getattr(arguments, option)
        if value is not None and value < 0:
            raise ArgumentError(f"--{option}", "an integer >= 0", value)
    from omniattn.testing.soak.operations import OPERATIONS

    if unknown := [name for name in arguments.op if name not in OPERATIONS]:
        raise ArgumentError("--op", f"of {', '.join(OPERATIONS)}", ", ".join(unknown))
    if arguments.op and arguments.only is not None:
        raise ArgumentError("--op", "to be used without --only, which names a problem", "both")
    if arguments.only is not None and arguments.seed is None:
        raise ArgumentError("--only", "a number beside --seed N, both as a soak has printed them", "--only alone")


def _soak(arguments: argparse.Namespace) -> int:
    """Random problems; the exit code."""
    from omniattn.testing.soak import watch

    _check_soak(arguments)
    if not arguments.json:
        console.require_rich()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    start = time.perf_counter()
    shown = _Shown(enabled=not arguments.json)
    try:
        result = watch.run(
            watch.Soak(
                60 * (arguments.soak or 0.0),
                seed,
                only=arguments.only,
                library=arguments.framework,
                cpu=arguments.cpu,
                ops=tuple(arguments.op),
            ),
            lambda tally: shown.step(tally.line(time.perf_counter() - start)),
        )
    except watch.CannotSoakError as error:
        print(f"omniattn verify: {error}", file=sys.stderr)
        return error.code
    finally:
        shown.end()
    tally, seconds = result.tally, time.perf_counter() - start
    # Where everything was refused nothing has passed.
    code = 1 if tally.failures or not tally.passed else 0
    if arguments.json:
        facts = {"seed": seed, "ok": code == 0, "seconds": seconds, "program": str(result.program or "") or None}
        console.print_json({**facts, **result.machine, **tally.as_json()})
        return code
    header = ["operation", "precision", "problems", "refused", "failed", "worst error / tolerance"]
    console.print_table(result.machine.get("where", ""), header, tally.rows(), numeric=(2, 3, 4, 5))
    for reason, count in tally.reasons.most_common():
        console.print_line(f"refused, {count}: {reason}")
    for failure in tally.failures:
        console.print_line(f"FAILED, problem {failure.number}, {failure.operation}, {failure.precision}:")
        console.print_line(failure.text)
    if result.program is not None:
        console.print_line(f"the first failure as a program: {result.program}")
    if not tally.passed and not tally.failures:
        console.print_line("nothing passed: every problem was refused, which the exit code 1 says")
    counts = f"{tally.passed} passed, {tally.total('failed')} failed, {tally.total('refused')} refused"
    console.print_line(f"seed {seed}: {tally.total('problems')} problems in {seconds:.0f} s, {counts}")
    return code


class _Shown:
    """Counts while they grow: one line that is rewritten, or in a pipe a line every half minute."""

    def __init__(self, *, enabled: bool) -> None:
        self._enabled, self._tty = enabled, enabled and sys.stdout.isatty()
        self._last, self._width = -float("inf"), 0

    def step(self, text: str) -> None:
        """Show a line, if it is time for one."""
        now = time.perf_counter()
        if not self._enabled or now - self._last < (0.2 if self._tty else 30.0):
            return
        self._last = now
        if self._tty:
            text = text[: console.width() - 1]
            print("\r" + text.ljust(self._width), end="", flush=True)
            self._width = len(text)
        else:
            print(text, flush=True)

    def end(self) -> None:
        """Clear the line."""
        if self._tty and self._width:
            print("\r" + " " * self._width + "\r", end="", flush=True)


def prebuilt(specs: Sequence[KernelSpec], cc: tuple[int, int]) -> list[KernelSpec]:
    """Rows that a released wheel holds for a GPU of this compute capability."""
    return [spec for spec in specs if not spec.unfit(cc) and is_held(spec, cc)]


def verify_kernels(
    framework: Framework, specs: Sequence[KernelSpec], jobs: int, step: Callable[[str], None] = lambda _: None
) -> list[Outcome]:
    """Run registry rows on GPU 0; outcomes in the order of ``specs``."""
    info = runtime.device_info(0)
    never = {spec.name: spec.unfit(info.cc, info.max_smem_optin) for spec in specs}
    able = in_order(spec for spec in specs if not never[spec.name])
    outcomes = {name: Outcome(name, "", NOT_HERE, 0, 0.0, 0.0, (reason,)) for name, reason in never.items() if reason}
    with Ahead(able, min(jobs, max(len(able), 1))) as ahead:
        ahead.compile(able, info.cc)
        for spec in able:
            step(spec.name)
            outcomes[spec.name] = verify_row(framework, spec, ahead)
    return [outcomes[spec.name] for spec in specs]


def verify_row(framework: Framework, spec: KernelSpec, ahead: Ahead) -> Outcome:
    """Run one registry row that this GPU can run, with numbers and a binary made ahead."""
    ahead.wait_for(spec)
    start = time.perf_counter()
    try:
        origin = runtime.load(spec, 0).origin
    except OmniattnError as error:
        ahead.drop(spec)
        return Outcome(spec.name, "", FAILED, 0, 0.0, time.perf_counter() - start, (str(error),))
    result = run_row(framework, spec, ahead.prepared)
    status = FAILED if result.failures else PASSED
    notes = result.failures + result.not_taken
    return Outcome(spec.name, origin, status, result.cases, result.worst, time.perf_counter() - start, notes)


def verify_cpu(step: Callable[[str], None] = lambda _: None) -> list[Outcome]:
    """Run all problems on NumPy arrays, in float16 and float32."""
    outcomes = []
    framework = NumpyFramework()
    for op in _CPU_OPS:
        for dtype in ("float16", "float32"):
            step(f"{op}, {dtype}")
            start = time.perf_counter()
            notes: list[str] = []
            worst = 0.0
            cases = [CallCase(op, index, dtype, 64) for index in range(len(cases_for(op)))]
            for case in cases:
                ratio, note = case.check(framework, problem(case.case, op, dtype, case.head_dim))
                worst = max(worst, ratio)
                if note:
                    notes.append(f"{case.name}: {note}")
            outcomes.append(
                Outcome(
                    f"{op}, NumPy {dtype}", "reference", FAILED if notes else PASSED, len(cases), worst,
                    time.perf_counter() - start, tuple(notes),
                )
            )  # fmt: skip
    return outcomes


def _show(outcomes: Sequence[Outcome], framework: Framework, seconds: float, left_out: int) -> None:
    rows = [
        [o.kernel, o.origin, o.status, str(o.cases), f"{o.worst:.2f}" if o.cases else "–", f"{o.seconds:.2f}"]
        for o in outcomes
    ]
    header = ["kernel", "binary", "result", "problems", "worst error / tolerance", "s"]
    console.print_table(f"{framework.name} on {framework.device}", header, rows, numeric=(3, 4, 5))
    for outcome in outcomes:
        if outcome.status != PASSED:
            for note in outcome.notes:
                console.print_line(f"{outcome.kernel}: {note}")
    count = sum(outcome.status == PASSED for outcome in outcomes)
    total = sum(outcome.status != NOT_HERE for outcome in outcomes)
    console.print_line(f"{count} of {total} passed in {seconds:.1f} s")
    if left_out:
        console.print_line(f"{left_out} kernels that are not prebuilt for this GPU were left out; --all runs them too")
