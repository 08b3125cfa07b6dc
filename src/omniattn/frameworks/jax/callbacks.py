"""What runs inside of a compiled program: the NumPy reference on the CPU, the launches of a plan on a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ... import arrays
from ...arrays import capsule as dlpack
from ...errors import AlignmentError, OmniattnError
from ...plan.engine import Launches, call_text, operand_names
from ...plan.tuning import target_of
from ...problems.memory import WORKSPACE_ALIGNMENT
from ...runtime import device_info, load
from ...runtime.record import Program
from .signature import Facts, Signature, problem_of


def on_cpu(signature: Signature, facts: tuple[Facts, ...]) -> Callable[..., None]:
    """The callback of a call on the CPU."""
    problem = problem_of(signature, facts, "cpu", 0)
    labels = signature.operation.labels
    writes = () if signature.operation.name != "append" else signature.cache.planes  # type: ignore[union-attr]

    def callback(context: Any, out: Sequence[Any], *operands: Any) -> None:
        values = dict(zip(signature.arrays, map(np.asarray, operands), strict=True))
        results = [np.asarray(x) for x in out]
        for name, result in zip(writes, results, strict=False):
            # The same memory, unless the compiler saw fit to copy.
            if result.ctypes.data != values[f"cache.{name}"].ctypes.data:
                result[...] = values[f"cache.{name}"]
            values[f"cache.{name}"] = result
        tensors = {name: arrays.describe(x, labels.get(name, name)) for name, x in values.items()}
        call, _ = signature.check(tensors)
        own = {name: t for name, t in tensors.items() if not name.startswith("cache.")}
        made = signature.operation.reference(call, problem, own)
        for result, x in zip(results, made, strict=False):
            if x.nbytes:
                ctypes.memmove(result.ctypes.data, np.ascontiguousarray(x).ctypes.data, x.nbytes)

    return callback


class Launcher:
    """The callback of a call on GPUs.

    Kernels are chosen and loaded when it is made, for all GPUs that the program may run on: while XLA records a CUDA
    graph nothing can be loaded.

    Parameters
    ----------
    signature : Signature
    facts : tuple
        Of all operands.
    ordinals : sequence of int
        The GPUs.

    Attributes
    ----------
    plans : dict
        Launches by GPU.
    failed : dict
        Why there are none, by GPU.
    workspace_bytes : int
        Scratch memory that the last result is; 0 for none.
    written : int
        Results that are planes of a cache, the first ones.

    Raises
    ------
    OmniattnError
        As the public function, where no GPU can run the call.
    """

    def __init__(self, signature: Signature, facts: tuple[Facts, ...], ordinals: Sequence[int]) -> None:
        self.plans: dict[int, Planned] = {}
        self.failed: dict[int, OmniattnError] = {}
        for ordinal in ordinals:
            try:
                self.plans[ordinal] = Planned(signature, facts, ordinal)
            except OmniattnError as error:
                self.failed[ordinal] = error
        if not self.plans:
            raise next(iter(self.failed.values()))
        self.workspace_bytes = max(planned.workspace_bytes for planned in self.plans.values())
        self.written = 0
        if signature.operation.name == "append":
            assert signature.cache is not None
            self.written = len(signature.cache.planes)

    def __call__(self, context: Any, out: Sequence[Any], *operands: Any) -> None:
        """Queue the launches on the stream of the program."""
        ordinal = int(out[0].__dlpack_device__()[1])
        planned = self.plans.get(ordinal)
        if planned is None:
            raise self.failed[ordinal]
        # Planes that are written are results: the same memory as the operands, unless the compiler had to copy.
        seen = [address(x) for x in operands]
        made = [address(x) for x in out]
        written, first = self.written, len(seen) - planned.cache_arrays
        seen[first : first + written] = made[:written]
        planned.launch(context.stream, seen, made[written:])


class Planned:
    """The launches of a call on one GPU.

    Attributes
    ----------
    launches : Launches
    program : Program
    outputs : int
        Results that the call has, without planes and scratch memory.
    workspace_bytes : int
        With room to begin at a multiple of `WORKSPACE_ALIGNMENT`.
    places : list of int
        Where the address of each operand of the program stands among those of a call, but for outputs and workspace;
        -1: it is absent.
    aligned : tuple of (int, str)
        Operands of a call whose address is a multiple of 16, and their names.
    cache_arrays : int
        Operands that are arrays of a cache, the last ones.
    """

    def __init__(self, signature: Signature, facts: tuple[Facts, ...], ordinal: int) -> None:
        problem = problem_of(signature, facts, "cuda", ordinal)
        device, operation = device_info(ordinal), signature.operation
        target = target_of(device)
        self.launches: Launches = operation.plan(problem, target, signature.forced)
        size = self.launches.workspace_bytes
        self.workspace_bytes = size + WORKSPACE_ALIGNMENT if size else 0
        names = operand_names(operation, signature.cache is not None, problem)
        text = call_text(operation.name, ((n, dtype, s) for n, (s, dtype) in zip(signature.arrays, facts, strict=True)))
        self.program = Program(self.launches.records, names, lambda spec: load(spec, ordinal), f"{text} under JAX")
        self.cache_arrays = 0 if signature.cache is None else len(signature.cache.arrays)
        self.outputs = len(problem.outputs)
        places = {name: i for i, name in enumerate(signature.arrays)}
        self.places = [places.get(name, -1) for name in names[: len(names) - self.outputs - 1]]
        aligned = {*operation.aligned, *(name for name in signature.arrays if name.startswith("cache."))}
        self.aligned = tuple((i, name) for name, i in places.items() if name in aligned)

    def launch(self, stream: int, operands: list[int], results: list[int]) -> None:
        """Queue everything on ``stream``; ``results``: outputs, and the workspace if there is one."""
        for i, name in self.aligned:
            if operands[i] % 16:
                raise AlignmentError(name, "an address that is a multiple of 16 bytes", hex(operands[i]))
        found = [0 if i < 0 else operands[i] for i in self.places]
        found += results[: self.outputs]
        # A GPU of another kind may need a workspace where this one does not.
        found.append(-(-results[-1] // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT if self.workspace_bytes else 0)
        self.program.launch(stream, found)


def address(buffer: Any) -> int:
    """Address of a buffer of a callback on a GPU."""
    try:
        return int(buffer.__cuda_array_interface__["data"][0])
    except (AttributeError, RuntimeError, TypeError, ValueError):  # an element type that NumPy has no name for
        taken = dlpack.Capsule(buffer.__dlpack__(), "buffer")
    try:
        return taken.ptr
    finally:
        taken.release()
