"""A failure as a program that somebody else can run."""

from __future__ import annotations

import pprint
import tempfile
from pathlib import Path

import omniattn
from omniattn.testing.soak import outcome
from omniattn.testing.soak.chosen import machine
from omniattn.testing.soak.machines import NotHereError
from omniattn.testing.soak.problem import Problem

_TEXT = '''\
"""{title}

Found by: {command}
omniattn {version}, {where}

{text}

Needs omniattn and {library}. Exit code: 1 it fails, 0 it passes, 2 it cannot run here.
Its numbers are made of seed and number; `facts` has shapes, types, strides (a view: how an array lies in a larger one),
kinds and scales of the numbers, and the options of the call.
"""

from omniattn.testing.soak.problem import Problem
from omniattn.testing.soak.program import reproduce

PROBLEM = Problem(
    operation={operation!r},
    seed={seed},
    number={number},
    facts={facts},
)

if __name__ == "__main__":
    raise SystemExit(reproduce(PROBLEM, {library!r}, cpu={cpu}))
'''


def text_of(problem: Problem, text: str, *, library: str, cpu: bool, where: str) -> str:
    """The program.

    Parameters
    ----------
    problem : Problem
    text : str
        What failed: error, tolerance, place.
    library : str
        The framework, as `chosen.machine` takes it.
    cpu : bool
    where : str
        Framework and device that it failed on.
    """
    facts = pprint.pformat(problem.facts, width=100, sort_dicts=False).replace("\n", "\n    ")
    said = text.replace("\\", "\\\\").replace('"""', "'''")
    command = f"omniattn verify --seed {problem.seed} --only {problem.number}{' --cpu' if cpu else ''}"
    return _TEXT.format(
        title=f"Problem {problem.number} of seed {problem.seed} fails: {problem.operation}, {problem.precision}.",
        command=f"{command} --framework {library}", version=omniattn.__version__, where=where, text=said,
        library=library, operation=problem.operation, seed=problem.seed, number=problem.number, facts=facts, cpu=cpu,
    )  # fmt: skip


def write(problem: Problem, text: str, *, library: str, cpu: bool, where: str, folder: Path | None = None) -> Path:
    """Write the program; into the folder for temporary files where ``folder``, the current one, cannot be written."""
    made = text_of(problem, text, library=library, cpu=cpu, where=where)
    name = f"omniattn_soak_{problem.seed}_{problem.number}.py"
    for place in (folder or Path.cwd(), Path(tempfile.gettempdir())):
        path = place / name
        try:
            path.write_text(made, encoding="utf-8")
        except OSError:
            continue
        return path
    raise OSError(f"{name} can be written neither here nor into {tempfile.gettempdir()}")


def reproduce(problem: Problem, library: str, *, cpu: bool) -> int:
    """Run a problem and print what is found; the exit code of its program."""
    try:
        m = machine(library, cpu=cpu)
    except (omniattn.errors.OmniattnError, NotHereError, ImportError) as error:
        print(f"cannot run here: {error}")
        return 2
    found = outcome.run(m, problem)
    print(f"omniattn {omniattn.__version__}, {m.name} on {m.device}: {found.operation}, {found.precision}")
    print(f"{found.status}: largest error {found.worst:.3g} of its tolerance")
    if found.text:
        print(found.text)
    return {outcome.PASSED: 0, outcome.FAILED: 1}.get(found.status, 2)
