"""Attention backend for vLLM's engine v1, chosen by ``--attention-backend CUSTOM``.

pip installs an entry point of the group ``vllm.general_plugins``, so vLLM finds the backend in each of its processes.
`register` does the same by hand. Neither imports vLLM's attention: that happens when vLLM asks for the backend, and
then its interface is looked at. This package itself needs no vLLM (`calls`).
"""

from __future__ import annotations

import importlib
import logging

from ...errors import UnsupportedError
from .versions import TRIED

__all__ = ["plugin", "register"]

#: What vLLM imports when the backend is chosen.
BACKEND = "omniattn.integrations.vllm.backend.ChosenBackend"
#: What it imports for prompts of latent attention, where they are chosen by name.
PREFILL = "omniattn.integrations.vllm.latent.OmniattnMLAPrefill"


def register() -> None:
    """Register the backend as vLLM's ``CUSTOM``.

    Afterwards ``--attention-backend CUSTOM`` or ``LLM(attention_backend="CUSTOM")`` choose it. Registering again is
    fine. It is for one process: vLLM's others find it by the entry point.

    Raises
    ------
    UnsupportedError
        This version of vLLM has no registry of backends as the versions that this was made for, or another package has
        registered a backend as ``CUSTOM``.

    Notes
    -----
    A version whose attention differs from those that were tried raises an UnsupportedError where vLLM imports the
    backend: when it is chosen, and not before. docs/integrations/vllm.md says what is served. Tested with vLLM 0.31,
    0.32 and 0.33.
    """
    try:
        # Not a static import: vllm is no requirement, and must not be imported with this package.
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
        custom, register_backend = registry.AttentionBackendEnum.CUSTOM, registry.register_backend
        taken = custom.get_path() if custom.is_overridden() else BACKEND
    except (ImportError, AttributeError) as error:
        raise UnsupportedError(
            f"vLLM without vllm.v1.attention.backends.registry as it is in the versions that were tried ({error})",
            instead=f"vllm {', '.join(TRIED)}",
        ) from error
    if taken != BACKEND:
        raise UnsupportedError(
            f"vLLM's CUSTOM attention backend is {taken}, of another package",
            instead="VLLM_PLUGINS=omniattn, which leaves other plugins out",
        )
    register_backend(backend=custom, class_path=BACKEND)
    _register_prefill()


def _register_prefill() -> None:
    """Prompts of latent attention by name, ``mla_prefill_backend``; the backend uses them without, too."""
    try:
        prefill = importlib.import_module("vllm.v1.attention.backends.mla.prefill.registry")
        custom = prefill.MLAPrefillBackendEnum.CUSTOM
        if not custom.is_overridden():  # another package's stays
            prefill.register_mla_prefill_backend(backend=custom, class_path=PREFILL)
    except (ImportError, AttributeError):
        return  # `versions` says so where a model has latent attention


def plugin() -> None:
    """`register` for vLLM's plugins: a version that is not served warns, because who does not choose us needs vLLM."""
    try:
        register()
    except UnsupportedError as error:
        logging.getLogger(__name__).warning("omniattn is not registered as an attention backend: %s", error)
