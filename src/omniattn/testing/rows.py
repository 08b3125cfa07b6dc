"""Rows of the registry through their cases, on a GPU: what ``omniattn verify`` and the GPU tests run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omniattn.errors import ArgumentError, OmniattnError
from omniattn.registry import KernelSpec
from omniattn.testing.align_cases import align_cases
from omniattn.testing.block_cases import BLOCK_OPS, block_cases
from omniattn.testing.cache_cases import CACHE_OPS, cache_cases
from omniattn.testing.cases import call_cases
from omniattn.testing.clear_cases import clear_cases
from omniattn.testing.factor_cases import factor_cases
from omniattn.testing.frameworks import Framework
from omniattn.testing.gradient_cases import BACKWARD_OPS, gradient_cases
from omniattn.testing.indexer_cases import INDEXER_OPS, indexer_cases
from omniattn.testing.latent_append_cases import latent_append_cases
from omniattn.testing.latent_cases import LATENT_OPS, latent_cases
from omniattn.testing.layout_cases import layout_cases
from omniattn.testing.mask_cases import PACK_OPS, mask_cases
from omniattn.testing.quantizer_cases import VALUES_OPS, fused_cases
from omniattn.testing.tile_cases import tile_cases

#: The variable that says which row a call has to use.
FORCE = "OMNIATTN_FORCE_KERNEL"


class RowCase(Protocol):
    """A call with its reference. Hashable and picklable; equal ones have the same numbers."""

    @property
    def name(self) -> str:
        """What messages call it."""

    def prepare(self) -> Any:
        """Inputs and reference, computed on the CPU; picklable."""

    def check(self, framework: Framework, prepared: Any) -> tuple[float, str]:
        """Call and compare.

        Returns
        -------
        (float, str)
            Largest error as a fraction of its tolerance; what is wrong, empty if nothing.
        """


def cases_of(spec: KernelSpec) -> Sequence[RowCase]:
    """The cases of a row. It need not take all of them: rows of one operation differ in what they were compiled for."""
    if spec.op in CACHE_OPS:
        return cache_cases(spec)
    if spec.op == "latent_append":
        return latent_append_cases(spec)
    if spec.op in LATENT_OPS:
        return latent_cases(spec)
    if spec.op in INDEXER_OPS:
        return indexer_cases(spec)
    if spec.op in BLOCK_OPS:
        return block_cases(spec)
    if spec.op in PACK_OPS:
        return mask_cases(spec)
    if spec.op == "mask_align":
        return align_cases(spec)
    if spec.op in BACKWARD_OPS:
        return gradient_cases(spec)
    if spec.value_factors:
        return factor_cases(spec)
    if spec.op == "layout_fp8":
        return layout_cases(spec)
    if spec.op == "tile_kinds":
        return tile_cases(spec)
    if spec.op == "clear_unused":
        return clear_cases(spec)
    if spec.specialization is not None or spec.op in VALUES_OPS:
        return fused_cases(spec)
    return call_cases(spec)


@dataclass(frozen=True)
class RowResult:
    """What a row gave.

    Attributes
    ----------
    cases : int
        Cases that ran.
    worst : float
        Largest error as a fraction of its tolerance.
    failures : tuple of str
        What is wrong, with figures.
    not_taken : tuple of str
        Cases that the row does not serve, and why.
    """

    cases: int
    worst: float
    failures: tuple[str, ...]
    not_taken: tuple[str, ...]


def run_row(
    framework: Framework, spec: KernelSpec, prepared: Callable[[RowCase], Any] = lambda case: case.prepare()
) -> RowResult:
    """Run a row over its cases, forced.

    Parameters
    ----------
    framework : Framework
    spec : KernelSpec
    prepared : callable
        Gives the numbers of a case; by default they are computed here.
    """
    ran, worst = 0, 0.0
    failures: list[str] = []
    not_taken: list[str] = []
    for case in cases_of(spec):
        numbers = prepared(case)
        try:
            with forced(spec.name):
                ratio, note = case.check(framework, numbers)
        except OmniattnError as error:
            if isinstance(error, ArgumentError) and error.argument == FORCE:
                # The row was compiled without this feature; another row serves it and is tested with it.
                not_taken.append(f"{case.name}: not taken: {error}")
                continue
            ratio, note = float("inf"), str(error)
        ran += 1
        worst = max(worst, ratio)
        if note:
            failures.append(f"{case.name}: {note}")
    if ran == 0:
        failures.append("no problem could be run")
    return RowResult(ran, worst, tuple(failures), tuple(not_taken))


@contextlib.contextmanager
def forced(name: str) -> Iterator[None]:
    """Have selection use the registry row ``name`` inside the block."""
    before = os.environ.get(FORCE)
    os.environ[FORCE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[FORCE]
        else:
            os.environ[FORCE] = before
