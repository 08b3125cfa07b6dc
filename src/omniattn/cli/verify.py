"""``omniattn verify``: every registered kernel on this machine's GPU against the reference."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import omniattn
from omniattn import runtime
from omniattn.cli import console, kernels
from omniattn.cli.cases import Case, Problem, call, cases_for, flavour_of, problem
from omniattn.cli.expected import outputs_of
from omniattn.cli.frameworks import Framework, NumpyFramework, gpu_framework
from omniattn.cli.verify_decode import DECODE_OPS, verify_row
from omniattn.cli.verify_quantizer import verify_common
from omniattn.errors import ArgumentError, OmniattnError
from omniattn.quantizer import select_quantizer
from omniattn.registry import KernelSpec
from omniattn.runtime.loader import unsupported_reason
from omniattn.select import select_merge_states

_DESCRIPTION = """\
Runs every kernel of the registry on GPU 0 over small problems with odd sizes, masks, windows, grouped heads, empty rows
and variable lengths. Exact kernels are compared with the fp64 reference:
max|o - ref| <= 2 max|same-dtype baseline - ref| + rounding;
low-precision attention with its emulation on the CPU (cosine, relative L1, LSE); quantizers with the CPU bit for bit.
Exit code: 0 all passed; 1 a kernel failed; 2 there is no GPU to test (--cpu tests the CPU backend).
"""

#: Added to the tolerance of the baseline: fp32 sums and a base-2 exponential of a few units in the last place.
_LSE_ATOL = 1e-3

#: Operations that ``--cpu`` tests. What the quantizers must give is what they give on the CPU, so they have nothing to
#: be compared with there; attention_int8 goes through them.
_CPU_OPS = ("attention", "attention_int8", "merge_states")

_FORCE = "OMNIATTN_FORCE_KERNEL"

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
    parser.add_argument(
        "--kernel", action="append", default=[], metavar="NAME", help="only this registry row; may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the command; returns the exit code."""
    if arguments.cpu and arguments.kernel:
        raise ArgumentError("--kernel", "to be used without --cpu, which runs no kernel", ", ".join(arguments.kernel))
    if not arguments.json:
        console.require_rich()
    if arguments.cpu:
        framework: Framework = NumpyFramework()
        outcomes = verify_cpu()
    else:
        specs = kernels.named(arguments.kernel)
        if not specs:
            raise console.CannotRunError("the registry holds no kernel")
        framework = gpu_framework()
        with console.progress(len(specs), enabled=not arguments.json) as bar:
            outcomes = []
            for spec in specs:
                bar.step(spec.name)
                outcomes.append(verify_kernel(framework, spec))
    failed = [outcome for outcome in outcomes if outcome.status == FAILED]
    # A GPU on which nothing can run has not passed.
    code = 1 if failed or not any(outcome.status == PASSED for outcome in outcomes) else 0
    if arguments.json:
        rows = [dataclasses.asdict(outcome) for outcome in outcomes]
        console.print_json({"framework": framework.name, "device": framework.device, "ok": code == 0, "kernels": rows})
    else:
        _show(outcomes, framework)
    return code


def verify_kernel(framework: Framework, spec: KernelSpec) -> Outcome:
    """Run one registry row over all problems of its operation, on GPU 0."""
    info = runtime.device_info(0)
    never = unsupported_reason(spec, info.cc, info.max_smem_optin)
    if never:
        return Outcome(spec.name, "", NOT_HERE, 0, 0.0, 0.0, (never,))
    if spec.op in DECODE_OPS:
        return _verify_with(verify_row, framework, spec)
    if "common" in spec.features:
        return _verify_with(verify_common, framework, spec)
    # The environment variable does not concern these: what is chosen is what is tested.
    chosen = spec
    if spec.op == "merge_states":
        chosen = select_merge_states(spec.dtype).spec
    elif spec.op in ("quantize", "quantize_delta"):
        chosen = select_quantizer(spec.op, spec.dtype, spec.head_dim, info.cc)
    if chosen != spec:
        return Outcome(spec.name, "", FAILED, 0, 0.0, 0.0, (f"{spec.op} never chooses this row",))
    start = time.perf_counter()
    notes: list[str] = []
    ran, worst, failed = 0, 0.0, False
    origin = ""
    with forced(spec.name):
        try:
            origin = runtime.load(spec, 0).origin
        except OmniattnError as error:
            return Outcome(spec.name, "", FAILED, 0, 0.0, time.perf_counter() - start, (str(error),))
        for case in cases_for(spec.op):
            try:
                numbers = problem(case, spec.op, spec.dtype, spec.head_dim, flavour_of(spec))
                if "lse" in spec.lacks:
                    numbers = dataclasses.replace(numbers, options={**numbers.options, "return_lse": False})
                share, note = check(framework, case, numbers, spec.dtype)
            except OmniattnError as error:
                if isinstance(error, ArgumentError) and error.argument == _FORCE:
                    # The row was compiled without this feature; another row serves it and is tested with it.
                    notes.append(f"{case.name}: not taken: {error}")
                    continue
                share, note = float("inf"), str(error)
            ran += 1
            worst = max(worst, share)
            if note:
                failed = True
                notes.append(f"{case.name}: {note}")
    if ran == 0:
        failed = True
        notes.append("no problem could be run")
    return Outcome(
        spec.name, origin, FAILED if failed else PASSED, ran, worst, time.perf_counter() - start, tuple(notes)
    )


def _verify_with(
    run_problems: Callable[[Framework, KernelSpec], tuple[int, float, list[str]]],
    framework: Framework,
    spec: KernelSpec,
) -> Outcome:
    """A row that brings problems of its own."""
    start = time.perf_counter()
    try:
        origin = runtime.load(spec, 0).origin
        ran, worst, notes = run_problems(framework, spec)
    except OmniattnError as error:
        return Outcome(spec.name, "", FAILED, 0, 0.0, time.perf_counter() - start, (str(error),))
    status = FAILED if notes else PASSED
    return Outcome(spec.name, origin, status, ran, worst, time.perf_counter() - start, tuple(notes))


def verify_cpu() -> list[Outcome]:
    """Run all problems on NumPy arrays, in float16 and float32."""
    outcomes = []
    framework = NumpyFramework()
    for op in _CPU_OPS:
        cases = cases_for(op)
        for dtype in ("float16", "float32"):
            start = time.perf_counter()
            notes: list[str] = []
            worst = 0.0
            for case in cases:
                share, note = check(framework, case, problem(case, op, dtype, 64), dtype)
                worst = max(worst, share)
                if note:
                    notes.append(f"{case.name}: {note}")
            outcomes.append(
                Outcome(
                    f"{op}, NumPy {dtype}", "reference", FAILED if notes else PASSED, len(cases), worst,
                    time.perf_counter() - start, tuple(notes),
                )
            )  # fmt: skip
    return outcomes


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Have selection use the registry row ``name`` inside the block."""
    before = os.environ.get(_FORCE)
    os.environ[_FORCE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_FORCE]
        else:
            os.environ[_FORCE] = before


def check(framework: Framework, case: Case, numbers: Problem, dtype: str) -> tuple[float, str]:
    """Call the public function and compare.

    Returns
    -------
    (float, str)
        Largest error as a fraction of its tolerance (inf if NaN or infinities differ); what is wrong, empty if nothing.
    """
    result = call(getattr(omniattn, case.function), numbers, framework.array, dtype)
    framework.synchronize()
    got = {name: framework.to_numpy(array) for name, array in outputs_of(result).items()}
    grades = numbers.expected.grade(got, dtype, _LSE_ATOL)
    return max(grade.share for grade in grades), "; ".join(str(grade) for grade in grades if not grade.ok)


def _show(outcomes: Sequence[Outcome], framework: Framework) -> None:
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
    console.print_line(f"{count} of {total} passed in {sum(outcome.seconds for outcome in outcomes):.1f} s")
