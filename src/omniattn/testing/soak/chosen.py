"""The machine that problems run on."""

from __future__ import annotations

from omniattn.errors import ArgumentError
from omniattn.testing.frameworks import TorchFramework, gpu_framework
from omniattn.testing.soak.machines import CupyMachine, JaxMachine, Machine


def machine(library: str = "", *, cpu: bool = False) -> Machine:
    """The arrays that problems are run on.

    Parameters
    ----------
    library : str
        ``"numpy"``, ``"torch"``, ``"cupy"``, ``"jax"``; empty: NumPy on the CPU, else the first that finds a GPU.
    cpu : bool
        CPU arrays: the NumPy reference of each operation.

    Raises
    ------
    omniattn.testing.frameworks.NoGpuError
        A GPU is wanted and there is none.
    """
    if not cpu and not library:
        found = type(gpu_framework()).__name__
        library = {"TorchFramework": "torch", "CupyFramework": "cupy"}.get(found, "jax")
    if library in ("", "numpy") and cpu:
        return Machine()
    if library == "torch":
        from omniattn.testing.soak.torch_machine import TorchMachine

        if not cpu:
            TorchFramework()  # raises NoGpuError
        return TorchMachine("cpu" if cpu else "cuda")
    if library == "cupy" and not cpu:
        return CupyMachine()
    if library == "jax":
        return JaxMachine("cpu" if cpu else "cuda")
    raise ArgumentError("--framework", "torch, jax, or with --cpu numpy, without it cupy", repr(library))
