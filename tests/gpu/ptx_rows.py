"""Rows of the registry as PTX for other GPUs, which the driver translates for the one that is here."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

from omniattn import runtime
from omniattn.registry import by_name
from omniattn.runtime import LoadedKernel
from omniattn.runtime.compile import compile_spec

from .memory_turns import in_background

#: Name of a row, and target.
Key = tuple[str, str]


def compile_rows(rows: Iterable[Key]) -> dict[Key, str]:
    """PTX of every (row, target)."""
    context = multiprocessing.get_context("spawn")  # this process has used CUDA
    with ProcessPoolExecutor(max(8, (os.cpu_count() or 1) // 3), mp_context=context) as pool:
        jobs = {key: pool.submit(compile_spec, by_name(key[0]), key[1]) for key in rows}
        results = {key: job.result() for key, job in jobs.items()}
    assert all(result.ptx for result in results.values())
    return {key: result.cubin.decode().rstrip("\0") for key, result in results.items()}


def _without_target(text: str) -> str:
    """PTX without the line that names its target; equal texts are the same code."""
    body, count = re.subn(r"^\.target .*$", "", text, flags=re.MULTILINE)
    assert count == 1
    return body


def load_rows(ptx: dict[Key, str]) -> dict[Key, LoadedKernel]:
    """Every row loaded; translation takes about a second each, so a text that comes twice is loaded once."""
    first_with: dict[tuple[str, str], Key] = {}
    same_as = {key: first_with.setdefault((key[0], _without_target(text)), key) for key, text in ptx.items()}

    def load(key: Key) -> LoadedKernel:
        return runtime.load_image(by_name(key[0]), 0, ptx[key].encode(), origin=f"{key[1]} PTX")

    unique = sorted(set(same_as.values()))
    with in_background(), ThreadPoolExecutor(8) as pool:
        loaded = dict(zip(unique, pool.map(load, unique), strict=True))
    return {key: loaded[same] for key, same in same_as.items()}


def is_for(text: str, target: str) -> bool:
    """Whether PTX names a target, such as ``compute_80``."""
    return f".target {target.replace('compute', 'sm')}" in text
