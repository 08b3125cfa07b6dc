"""Numbers of cases, and binaries of kernels, made in other processes before they are asked for."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

from omniattn import runtime
from omniattn.registry import KernelSpec
from omniattn.runtime.arch import Arch
from omniattn.runtime.loader import compile_to
from omniattn.testing.rows import RowCase, cases_of

#: Variables that say how many threads a BLAS takes; with a process for each core more of them only wait.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
#: Tasks that are waiting or done and not asked for yet, per process: it bounds the memory.
_AHEAD = 3
_MOST_JOBS = 16


def default_jobs() -> int:
    """Processes for :class:`Ahead`: a core each, 16 at most; 1 is no other process at all."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(_MOST_JOBS, cores)


def in_order(specs: Iterable[KernelSpec]) -> list[KernelSpec]:
    """Rows such that those which share numbers stand together."""
    return sorted(specs, key=lambda spec: (spec.op, spec.dtype, spec.head_dim, spec.family))


class Ahead:
    """Prepares cases of rows in the order in which they will be asked for.

    Parameters
    ----------
    specs : sequence of KernelSpec
        Rows in the order in which they will run; see `in_order`.
    jobs : int
        Processes; 1: everything is computed when it is asked for, in this one.
    """

    def __init__(self, specs: Sequence[KernelSpec], jobs: int) -> None:
        cases = [case for spec in specs for case in cases_of(spec)]
        self._uses = Counter(cases)
        self._waiting: Iterator[RowCase] = iter(dict.fromkeys(cases))
        self._limit = _AHEAD * jobs
        self._pending: dict[RowCase, Future[Any]] = {}
        self._kept: dict[RowCase, Any] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._stack = contextlib.ExitStack()
        self._jobs = jobs
        self._compiling: dict[str, Future[None]] = {}

    def __enter__(self) -> Ahead:
        if self._jobs > 1:
            self._stack.enter_context(one_thread_each())
            # Spawned: this process uses CUDA, which does not survive a fork.
            self._pool = ProcessPoolExecutor(self._jobs, mp_context=get_context("spawn"))
            self._stack.callback(self._pool.shutdown, wait=True, cancel_futures=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()
        self._pool = None

    def compile(self, specs: Iterable[KernelSpec], cc: tuple[int, int]) -> None:
        """Start to compile into the disk cache what this GPU has no binary of."""
        if self._pool is None:
            return
        for spec in specs:
            if runtime.resolve(spec, cc).kind == "jit":
                self._compiling[spec.name] = self._pool.submit(_compile, spec, Arch.of_device(cc).number)

    def wait_for(self, spec: KernelSpec) -> None:
        """Wait until a row's binary is there. What went wrong is met again, and said, when the row is loaded."""
        compiling = self._compiling.pop(spec.name, None)
        if compiling is not None:
            compiling.exception()

    def prepared(self, case: RowCase) -> Any:
        """The numbers of a case; forgotten after as many calls as rows need them."""
        if case not in self._kept:
            self._submit()
            pending = self._pending.pop(case, None)
            self._kept[case] = case.prepare() if pending is None else pending.result()
        self._uses[case] -= 1
        return self._kept.pop(case) if self._uses[case] <= 0 else self._kept[case]

    def drop(self, spec: KernelSpec) -> None:
        """The cases of a row will not be asked for."""
        for case in cases_of(spec):
            self._uses[case] -= 1
            if self._uses[case] <= 0:
                self._kept.pop(case, None)
                pending = self._pending.pop(case, None)
                if pending is not None:
                    pending.cancel()

    def _submit(self) -> None:
        while self._pool is not None and len(self._pending) < self._limit:
            case = next(self._waiting, None)
            if case is None:
                return
            if self._uses[case] > 0:
                self._pending[case] = self._pool.submit(_prepare, case)


def _prepare(case: RowCase) -> Any:
    return case.prepare()


def _compile(spec: KernelSpec, arch: str) -> None:
    compile_to(spec, arch)


@contextlib.contextmanager
def one_thread_each() -> Iterator[None]:
    """Processes that are started inside the block have one BLAS thread each."""
    before = {name: os.environ.get(name) for name in _THREADS}
    os.environ.update(dict.fromkeys(_THREADS, "1"))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
