"""The kernels of a user's score modification, for ``omniattn compile --score-mod``."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from types import ModuleType

from omniattn import ScoreMod, arrays
from omniattn.arguments import MAX_HEAD_DIM
from omniattn.checks.extras import mod_arrays
from omniattn.cli import support
from omniattn.errors import ArgumentError, UnsupportedError
from omniattn.launch.score_mod import PREFIX, row_of
from omniattn.plan.ahead import OPTIONS, ModCalls, rows_of_calls
from omniattn.problems import Target
from omniattn.problems.score_mod import ScoreModProblem
from omniattn.registry import REGISTRY, KernelSpec
from omniattn.runtime import env
from omniattn.runtime.arch import Arch

#: Kinds of calls.
CALLS = ("dense", "packed")
DIRECTIONS = ("forward", "backward")
DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16"}
#: What says more about ``--score-mod``, and nothing without it.
_DETAILS = ("dtype", "head_dim", "head_dim_v", "calls", "direction", "options")


@dataclass(frozen=True)
class ModRows:
    """What is to be compiled.

    Attributes
    ----------
    specs : tuple of KernelSpec
        Rows, in a fixed order.
    left_out : dict
        Kinds of calls without kernels, with reasons.
    """

    specs: tuple[KernelSpec, ...]
    left_out: dict[str, str]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add ``--score-mod`` and what goes with it."""
    group = parser.add_argument_group(
        "score modifications",
        "--score-mod compiles the kernels that calls with this score modification take. Its arrays may be on the CPU: "
        "their element types and numbers of dimensions count. By default every kernel that a call can take with these "
        "element types and head_dims.",
    )
    group.add_argument(
        "--score-mod", metavar="WHERE:NAME",
        help="an omniattn.ScoreMod: a module that can be imported, or a .py file, and what it is called there",
    )  # fmt: skip
    group.add_argument("--dtype", nargs="+", choices=tuple(DTYPES), help="of q, k and v")
    group.add_argument("--head-dim", nargs="+", type=int, metavar="N", help="of q and k, and of v")
    group.add_argument("--head-dim-v", type=int, metavar="N", help="of v, where it is another one")
    group.add_argument("--calls", nargs="+", choices=tuple(CALLS), help="attention, attention_varlen")
    group.add_argument("--direction", nargs="+", choices=DIRECTIONS, help="the calls, their gradients (needs grad=)")
    group.add_argument(
        "--options", nargs="*", choices=OPTIONS,
        help="that the calls may have besides: a boolean mask, one that is added (bias); without a word none",
    )  # fmt: skip


def check_unused(arguments: argparse.Namespace) -> None:
    """Raise for what says more about a score modification that is not given."""
    for name in _DETAILS:
        if getattr(arguments, name) is not None:
            option = f"--{name.replace('_', '-')}"
            raise ArgumentError(option, "nothing, without --score-mod", repr(getattr(arguments, name)))


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    """Modules in ``folder`` can be imported, as those beside a program can."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _module(where: str) -> ModuleType:
    path = Path(where)
    if path.suffix != ".py":
        with _importable(Path.cwd()):
            return importlib.import_module(where)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with _importable(path.resolve().parent):
        spec.loader.exec_module(module)
    return module


def load(reference: str) -> ScoreMod:
    """The object that ``WHERE:NAME`` names.

    Raises
    ------
    ArgumentError
        There is no such module, file or name, it cannot be imported, or it is no `ScoreMod`.
    """
    where, _, name = reference.rpartition(":")
    if not where or not name:
        expected = "MODULE:NAME or FILE.py:NAME, such as mymodule:near"
        raise ArgumentError("--score-mod", expected, repr(reference))
    try:
        found: object = _module(where)
    except Exception as error:  # a user's program may raise anything
        what = "a file that runs" if where.endswith(".py") else "a module that can be imported"
        raise ArgumentError("--score-mod", what, f"{where!r} ({type(error).__name__}: {error})") from error
    names = ", ".join(n for n, x in vars(found).items() if isinstance(x, ScoreMod)) or "none"
    for part in name.split("."):
        if not hasattr(found, part):
            raise ArgumentError("--score-mod", f"a name in {where} (its ScoreMods: {names})", repr(name))
        found = getattr(found, part)
    if not isinstance(found, ScoreMod):
        received = f"{name!r}, of type {type(found).__name__}"
        raise ArgumentError("--score-mod", f"an omniattn.ScoreMod (those in {where}: {names})", received)
    return found


def problem_of(mod: ScoreMod) -> ScoreModProblem:
    """A score modification as calls have it."""
    tensors = {PREFIX + name: arrays.describe(x, PREFIX + name) for name, x in mod.arrays.items()}
    checked = env.get("OMNIATTN_CHECK_SCORE_MOD")
    return ScoreModProblem(mod.expression, mod.mask, mod_arrays(tensors, "ScoreMod"), checked, mod.grad)


def _head_dims(arguments: argparse.Namespace) -> list[int]:
    given = {"--head-dim": arguments.head_dim, "--head-dim-v": [arguments.head_dim_v] * bool(arguments.head_dim_v)}
    for option, values in given.items():
        for value in values:
            if not 8 <= value <= MAX_HEAD_DIM or value % 8:
                raise ArgumentError(option, f"multiples of 8 up to {MAX_HEAD_DIM}", str(value))
    return list(arguments.head_dim)


def _calls(arguments: argparse.Namespace, mod: ScoreMod) -> Iterator[ModCalls]:
    options = frozenset(OPTIONS if arguments.options is None else arguments.options)
    for head_dim in _head_dims(arguments):
        of_v = 0 if arguments.head_dim_v in (None, head_dim) else arguments.head_dim_v
        for dtype, name in product(arguments.dtype, arguments.calls or CALLS):
            yield ModCalls(problem_of(mod), DTYPES[dtype], head_dim, of_v, name != "dense", options)


def rows(arguments: argparse.Namespace, target: Arch) -> ModRows:
    """The rows that the arguments ask for.

    Raises
    ------
    ArgumentError
        See `load`; or an argument is missing, or names what the score modification does not have.
    UnsupportedError
        No call has a kernel.
    """
    mod = load(arguments.score_mod)
    for name in ("dtype", "head_dim"):
        if getattr(arguments, name) is None:
            raise ArgumentError(f"--{name.replace('_', '-')}", "what the calls have, with --score-mod", "nothing")
    directions = arguments.direction or (DIRECTIONS if mod.grad is not None else DIRECTIONS[:1])
    left_out = {"gradients": "the ScoreMod has no grad="} if len(directions) == 1 and not arguments.direction else {}
    if mod.grad is None and "backward" in directions:
        raise ArgumentError("--direction", "no backward without grad= in the ScoreMod", "'backward'")
    gpu = Target(target.cc, support.shared_memory(target.cc))
    specs: dict[str, KernelSpec] = {}
    for direction, calls in product(dict.fromkeys(directions), dict.fromkeys(_calls(arguments, mod))):
        try:
            found = rows_of_calls(calls, gpu, backward=direction == "backward")
        except UnsupportedError as error:
            if arguments.direction is not None or direction == "forward":
                raise
            left_out[f"gradients, head_dim {calls.head_dim}"] = str(error)
            continue
        specs.update((spec.name, spec) for spec in found)
    if "packed" in (arguments.calls or CALLS):  # rows that seqused_q and seqused_k leave unused
        specs.update((spec.name, spec) for spec in REGISTRY if spec.op == "clear_unused")
    return ModRows(tuple(specs.values()), left_out)


def only(found: ModRows, wanted: Sequence[KernelSpec]) -> ModRows:
    """Those that are made of ``wanted``.

    Raises
    ------
    ArgumentError
        A row that such calls never take.
    """
    by_row: dict[str, list[KernelSpec]] = {}
    for spec in found.specs:
        by_row.setdefault(row_of(spec), []).append(spec)
    for row in wanted:
        if row.name not in by_row:
            raise ArgumentError("--kernel", f"a row that these calls take: {', '.join(by_row)}", repr(row.name))
    return replace(found, specs=tuple(spec for row in wanted for spec in by_row[row.name]))
