"""Attention for SGLang: ``--attention-backend omniattn``. SGLang finds the plugin by itself where both are installed.

What SGLang calls is `sglang_backend`, which is imported when a model is loaded with this backend, and not before: each
of SGLang's processes loads its plugins.
"""

from __future__ import annotations

from typing import Any

import sglang  # noqa: F401 - says what is missing

from .sglang_versions import unknown_version

__all__ = ["NAME", "plugin", "register"]

#: What ``--attention-backend`` is given.
NAME = "omniattn"


def register() -> None:
    """Register the attention backend ``"omniattn"`` with SGLang, and look whether this version is one that it knows.

    Needed only where SGLang does not load its plugins (entry-point group ``sglang.srt.plugins``), before
    ``sglang.srt.server_args.ServerArgs`` is made. Registering again is fine.

    Raises
    ------
    UnsupportedError
        This version of SGLang has another interface than the versions that this was made for; the message names what
        is missing.

    Notes
    -----
    Served: decoding, prompts, chunks of prompts and mixtures of them; pools in 16 bits and in e4m3 with k_scale and
    v_scale, in SGLang's layout by tokens and by heads, of any page size; grouped-query attention; sliding windows, with
    and without a pool of their own; softcap; sinks; LSE; bidirectional attention over whole prompts; chains of guessed
    tokens; CUDA graphs of decoding and of verification, breakable graphs of prompts; deterministic inference; latent
    attention (MLA) on pools of 512 and 64 channels. What is not (docs/integrations/sglang.md) raises when the model is
    loaded, or at its first step.
    """
    from .sglang_backend import check_version

    check_version()
    plugin()


def plugin() -> None:
    """What SGLang calls in each of its processes: adds the name to its registry and to the choices of its options.

    Raises
    ------
    UnsupportedError
        This version of SGLang has no registry of attention backends where those that this was made for have it.
    """
    try:
        from sglang.srt.arg_groups import choices
        from sglang.srt.layers.attention import attention_registry

        backends = attention_registry.ATTENTION_BACKENDS
        extensible = (
            (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
            (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
        )
        of_prefixes = (
            choices.CHUNKED_PREFIX_CACHE_SUPPORTED_ATTENTION_BACKENDS,
            choices.add_chunked_prefix_cache_attention_backend,
        )
        decorator = attention_registry.register_attention_backend
    except (ImportError, AttributeError) as error:
        raise unknown_version(str(error)) from error
    for there, add in extensible:
        if NAME not in there:
            add([NAME])
    if NAME not in of_prefixes[0]:
        of_prefixes[1](NAME)
    if NAME not in backends:
        decorator(NAME)(_create)


def _create(runner: Any) -> Any:
    """The backend of one model."""
    from .sglang_backend import backend_of, check_version

    check_version()
    return backend_of(runner)
