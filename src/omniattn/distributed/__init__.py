"""Attention over several GPUs, on torch.distributed. Names are loaded when they are first used.

docs/distributed.md says what travels when.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .parts import shard, unshard
    from .places import LocalTokens, local_seqlen, local_tokens
    from .ring import ring_attention, ring_attention_varlen
    from .ring_plan import RankStep, RingPlan, plan
    from .sharded_cache import append_sharded, decode_sharded
    from .ulysses import ulysses_attention

#: Module that each public name comes from.
_MODULES = {
    "LocalTokens": "places",
    "RankStep": "ring_plan",
    "RingPlan": "ring_plan",
    "append_sharded": "sharded_cache",
    "decode_sharded": "sharded_cache",
    "local_seqlen": "places",
    "local_tokens": "places",
    "plan": "ring_plan",
    "ring_attention": "ring",
    "ring_attention_varlen": "ring",
    "shard": "parts",
    "ulysses_attention": "ulysses",
    "unshard": "parts",
}

__all__ = [
    "LocalTokens",
    "RankStep",
    "RingPlan",
    "append_sharded",
    "decode_sharded",
    "local_seqlen",
    "local_tokens",
    "plan",
    "ring_attention",
    "ring_attention_varlen",
    "shard",
    "ulysses_attention",
    "unshard",
]


def __getattr__(name: str) -> object:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{module}"), name)
    globals()[name] = value
    return value
