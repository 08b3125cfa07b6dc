"""The process that runs problems: ``python -m omniattn.testing.soak.worker``, started by `watch`.

It writes a line of JSON before each problem and one after it, so that whoever reads them knows which problem a process
has died or hung in.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from omniattn.errors import ArgumentError, OmniattnError
from omniattn.testing.frameworks import NoGpuError
from omniattn.testing.soak import operations, outcome
from omniattn.testing.soak.chosen import machine
from omniattn.testing.soak.machines import Machine


def facts_of(m: Machine) -> dict[str, Any]:
    """Where problems run, for reports."""
    where = f"{m.name} on {m.device}"
    if not m.on_cpu:
        from omniattn import runtime

        info = runtime.device_info(0)
        where += f", compute capability {info.cc[0]}.{info.cc[1]}, CUDA {info.driver_version}"
    return {"library": m.library, "where": where}


def work(
    m: Machine, seed: int, first: int, send: Callable[[dict[str, Any]], None], *, only: bool, ops: Sequence[str] = ()
) -> None:
    """Run problems from ``first`` on, without end unless ``only``; of these operations, or of all."""
    send({"machine": facts_of(m)})
    for number in [first] if only else itertools.count(first):
        problem = operations.problem(seed, number, cpu=m.on_cpu)
        if ops and problem.operation not in ops:
            continue
        send({"begin": number})
        send({"outcome": outcome.as_json(outcome.run(m, problem))})


def main() -> int:
    """Arguments: a JSON object of library, cpu, seed, first, only, ops."""
    options = json.loads(sys.argv[1])
    # What anything prints goes to standard error; the lines have standard output for themselves.
    out = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def send(message: dict[str, Any]) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    try:
        m = machine(options["library"], cpu=options["cpu"])
    except (NoGpuError, ArgumentError) as error:
        send({"error": str(error), "code": 2})
        return 2
    except ImportError as error:
        send({"error": f"{error}: install it, or name another --framework", "code": 2})
        return 2
    except OmniattnError as error:
        send({"error": str(error), "code": 1})
        return 1
    try:
        work(m, options["seed"], options["first"], send, only=options["only"], ops=options["ops"])
    except BrokenPipeError:
        return 0
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
