"""examples/serve with a tiny random model, for the tests of the example."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.unit.examples.smollm2_fakes import tiny_weights

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "serve"
SMOLLM2 = FOLDER.parent / "smollm2"
MODULES = ("array_backend", "model", "weights", "tokenizer", "text", "network", "scheduler", "engine")
VOCABULARY = 50


def load(*more: str) -> Any:
    """The example's modules, which import each other by bare names: these must not leak into other tests."""
    names = (*MODULES, *more)
    before, kept = list(sys.path), {name: sys.modules.pop(name, None) for name in names}
    sys.path[:0] = [str(FOLDER), str(SMOLLM2)]
    try:
        found = SimpleNamespace(**{name: importlib.import_module(name) for name in names})
        spec = importlib.util.spec_from_file_location("smollm2_generate", SMOLLM2 / "generate.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.greedy = module.greedy
        return found
    finally:
        sys.path[:] = before
        for name in names:
            sys.modules.pop(name, None)
            if kept[name] is not None:
                sys.modules[name] = kept[name]


def tiny(ex: Any) -> Any:
    """A network of two layers in float32 on the CPU; ``alone`` is the other example's model on the same weights."""
    config = ex.model.Config(2, 24, 40, 6, 2, 16, VOCABULARY, 10000.0, 1e-5)
    backend = ex.array_backend.TorchBackend("cpu", "float32")
    weights = tiny_weights(ex, config, backend)
    network = ex.network.Network(config, weights, 256)
    network.alone = ex.model.Model(config, weights, backend, ex.model.plain_attention(backend))
    return network


def prompts(count: int, *, common: int = 21, seed: int = 3) -> list[list[int]]:
    """Random prompts of 1 to 40 tokens behind as many common ones as is said."""
    rng = np.random.default_rng(seed)
    prefix = rng.integers(0, VOCABULARY, common).tolist()
    return [prefix + rng.integers(0, VOCABULARY, n).tolist() for n in rng.integers(1, 41, count)]


def options(ex: Any, **changes: Any) -> Any:
    """Small sizes, without padding."""
    sizes = {"num_blocks": 640, "block_size": 4, "max_tokens": 128, "max_requests": 64, "max_rows": 96,
             "kv": "fp16", "graphs": False, "buckets": ()}  # fmt: skip
    return ex.engine.Options(**{**sizes, **changes})


def run(engine: Any, requests: Sequence[Any]) -> list[list[int]]:
    """All requests to their ends; their answers."""
    for request in requests:
        engine.scheduler.submit(request)
    for _ in range(10_000):
        if not (engine.scheduler.running or engine.scheduler.waiting):
            return [request.answer for request in requests]
        engine.step()
    raise AssertionError("the engine does not come to an end")
