"""Several continuations of one prompt: parallel sampling and beam search by ``fork``, against each one alone."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from omniattn.kv.runs import SharedPrefixes

SIZE, HEADS, KV, DIM = 4, 4, 2, 16


class Continuations:
    """Sequences of one cache, and what each would have in a cache of its own.

    Keys and values of a token are what all tokens up to it make them, as in a model of several layers.
    """

    def __init__(self, seed: int, num_blocks: int = 60) -> None:
        self.draw, self.random = random.Random(seed), np.random.default_rng(seed)
        self.cache = oa.PagedKVCache(num_blocks, SIZE, KV, DIM, like=np.zeros(1, np.float32), k_dtype="fp16")
        self.blocks = oa.BlockManager(num_blocks, SIZE)
        self.own: dict[Any, list[tuple[Any, Any]]] = {}
        self.copied = 0

    def grow(self, new: dict[Any, int]) -> None:
        copies = self.blocks.extend(new)
        self.copied += len(copies)
        oa.copy_blocks(self.cache, copies)
        names, rows = list(new), []
        for name, count in new.items():
            for _ in range(count):
                k, v = (self.random.standard_normal((KV, DIM)).astype(np.float16).astype(np.float32) for _ in "kv")
                self.own[name].append((k, v))
                rows.append((k, v))
        starts = np.cumsum([0, *new.values()]).astype(np.int32)
        k, v = (np.stack([row[i] for row in rows]) for i in (0, 1))
        places = {"seq_lens": self.blocks.seq_lens(names), "block_table": self.blocks.block_table(names)}
        oa.append(self.cache, k, v, cu_seqlens=starts, **places)

    def fork(self, parent: Any, child: Any) -> None:
        self.blocks.fork(parent, child)
        self.own[child] = list(self.own[parent])

    def free(self, name: Any) -> None:
        self.blocks.free(name)
        del self.own[name]

    def check(self, names: list[Any]) -> int:
        """A step of single tokens, plain and in levels, against attention of each sequence alone."""
        names = self.blocks.sharing_order(names)
        q = self.random.standard_normal((len(names), 1, HEADS, DIM)).astype(np.float32)
        places = {"seq_lens": self.blocks.seq_lens(names), "block_table": self.blocks.block_table(names)}
        runs = self.blocks.shared_runs(dict.fromkeys(names, 1))
        prefix = self.blocks.common_prefix(names)
        shared: tuple[int | SharedPrefixes, ...] = (0, runs.arrays(), prefix - SIZE if prefix else 0)
        for each in shared:
            o = oa.attention_with_kvcache(q, self.cache, **places, shared_prefix=each)
            for b, name in enumerate(names):
                k, v = (np.stack([pair[i] for pair in self.own[name]])[None] for i in (0, 1))
                np.testing.assert_allclose(o[b], oa.attention(q[b : b + 1], k, v)[0], rtol=0, atol=3e-6)
        return runs.num_levels


@pytest.mark.parametrize("seed", range(4))
def test_parallel_samples_of_a_prompt(seed: int) -> None:
    """The prompt is computed and kept once; the samples go their own ways from the middle of a block."""
    run = Continuations(seed)
    run.blocks.add("prompt")
    run.own["prompt"] = []
    run.grow({"prompt": 18})
    samples = [("sample", i) for i in range(5)]
    for name in samples:
        run.fork("prompt", name)
    run.free("prompt")
    assert run.blocks.num_free == 60 - 5
    for _ in range(9):
        run.grow(dict.fromkeys(samples, 1))
        assert run.check(samples) == 1
    assert run.copied == 4, "the last of the five writes where the prompt ended"
    assert run.blocks.num_free == 60 - 4 - 5 * 3
    for name in samples:
        run.free(name)
    assert run.blocks.num_free == 60


@pytest.mark.parametrize("seed", range(6))
def test_beam_search(seed: int) -> None:
    """At each step the best continuations of all beams go on: of one beam several, of others none."""
    run = Continuations(seed)
    run.blocks.add(("beam", 0, 0))
    run.own["beam", 0, 0] = []
    run.grow({("beam", 0, 0): 10})
    beams: list[Any] = [("beam", 0, 0)]
    levels = 0
    for step in range(1, 25):
        parents = [run.draw.choice(beams) for _ in range(4)]
        after = [("beam", step, i) for i in range(4)]
        for parent, child in zip(parents, after, strict=True):
            run.fork(parent, child)
        for name in beams:
            run.free(name)
        beams = after
        run.grow(dict.fromkeys(beams, 1))
        levels = max(levels, run.check(beams))
    assert levels >= 2, "beams that have parted late share more than the prompt"
    held = {block for name in beams for block in run.blocks.blocks(name)}
    assert run.blocks.num_free == 60 - len(held)
    for name in beams:
        run.free(name)
    assert run.blocks.num_free == 60
