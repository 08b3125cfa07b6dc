"""Continuous batching on a paged KV cache: requests come and go between steps, and share the prompt they begin with.

Per layer there is one `PagedKVCache`; one `BlockManager` says which blocks belong to whom, in all layers alike. A step:

    extend (BlockManager) -> copy_blocks -> per layer: append K and V (rotated and quantized inside), decode

and is the same for 16 tokens of one prompt and for one new token of each running request.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import omniattn as oa
from omniattn.errors import OutOfBlocksError

SMOLLM2 = Path(__file__).resolve().parents[1] / "smollm2"
if str(SMOLLM2) not in sys.path:
    sys.path.append(str(SMOLLM2))  # the network, its weights and its tokenizer are those of that example

from array_backend import Array, Backend  # noqa: E402
from model import Model, rotary_tables  # noqa: E402

#: Tokens of a prompt that one step takes: what `decode` allows.
PROMPT_CHUNK = 16
#: Name of the sequence that holds the common prompt. Requests are numbers.
COMMON = "common prompt"


@dataclass
class Request:
    """A prompt and what has been generated for it.

    Attributes
    ----------
    number : int
    prompt : list of int
        Behind the common prompt.
    count : int
        Tokens to generate at most.
    answer : list of int
    pauses : int
        How often its blocks were taken away for others; its tokens are then computed again.
    """

    number: int
    prompt: list[int]
    count: int
    answer: list[int] = field(default_factory=list)
    pauses: int = 0


class PagedModel:
    """A network with paged caches in place of its attention.

    Parameters
    ----------
    model : Model
    num_blocks, block_size : int
        Of each layer's cache.
    max_tokens : int
        Length of a sequence at most.
    cache_dtype : str
        Of K and V, as `omniattn.PagedKVCache` takes it.
    """

    def __init__(self, model: Model, num_blocks: int, block_size: int, max_tokens: int, cache_dtype: str) -> None:
        self.model = model
        self.manager = oa.BlockManager(num_blocks, block_size)
        config, backend = model.config, model.backend
        like = model.weights.output_norm
        self.caches = [
            oa.PagedKVCache(
                num_blocks, block_size, config.num_kv_heads, config.head_dim, like=like, k_dtype=cache_dtype
            )
            for _ in range(config.num_layers)
        ]
        cos, sin = rotary_tables(config, 0, max_tokens)
        self._cos, self._sin = backend.table(cos), backend.table(sin)
        half = config.head_dim // 2
        self._angles = {"cos": backend.table(cos[:, 0, :half]), "sin": backend.table(sin[:, 0, :half])}

    def step(self, sequences: Sequence[Any], tokens: np.ndarray) -> np.ndarray:
        """Feed tokens (sequences, n) and return each sequence's likeliest next one.

        Raises
        ------
        OutOfBlocksError
            The caches are full; nothing has changed.
        """
        model, config, backend = self.model, self.model.config, self.model.backend
        batch, count = tokens.shape
        copies = self.manager.extend(dict.fromkeys(sequences, count))
        lengths = self.manager.seq_lens(sequences)
        positions = backend.indices(lengths[:, None] - count + np.arange(count))
        cos, sin = self._cos[positions], self._sin[positions]
        pages = {
            "seq_lens": int32(backend, lengths),
            "block_table": int32(backend, self.manager.block_table(sequences)),
        }
        x = model.weights.embedding[backend.indices(tokens)]
        for layer, cache in zip(model.weights.layers, self.caches, strict=True):
            oa.copy_blocks(cache, copies)
            y = model._norm(x, layer.attn_norm)
            q = (y @ layer.wq.T).reshape(batch, count, config.num_q_heads, config.head_dim)
            k = (y @ layer.wk.T).reshape(batch, count, config.num_kv_heads, config.head_dim)
            v = (y @ layer.wv.T).reshape(batch, count, config.num_kv_heads, config.head_dim)
            oa.append(cache, k, v, rope="half", **self._angles, **pages)
            o = oa.decode(model._rotate(q, cos, sin), cache, **pages)
            x = x + o.reshape(batch, count, config.num_q_heads * config.head_dim) @ layer.wo.T
            y = model._norm(x, layer.ffn_norm)
            x = x + (model._silu(y @ layer.w_gate.T) * (y @ layer.w_up.T)) @ layer.w_down.T
        last = model._norm(x[:, -1], model.weights.output_norm)
        return backend.to_numpy(model.logits(last)).argmax(axis=-1)

    def feed(self, sequence: Any, tokens: Sequence[int]) -> int:
        """Feed a whole prompt to one sequence, `PROMPT_CHUNK` tokens a step; the likeliest next token."""
        best = -1
        for begin in range(0, len(tokens), PROMPT_CHUNK):
            best = int(self.step([sequence], np.array([tokens[begin : begin + PROMPT_CHUNK]]))[0])
        return best


def int32(backend: Backend, values: np.ndarray) -> Array:
    """Lengths and block tables: int32 where the model's arrays are."""
    return backend.cast_like(backend.indices(values), backend.xp.zeros(0, dtype=backend.xp.int32))


class Server:
    """Requests of different lengths in one batch.

    A request joins when its prompt fits; when the caches are full in the middle, the youngest one leaves its blocks and
    waits again.

    Parameters
    ----------
    paged : PagedModel
    common : sequence of int
        Tokens that every request begins with. They are computed once, and every request shares their blocks.
    stop : int
        Token that ends an answer; -1: none.
    """

    def __init__(self, paged: PagedModel, common: Sequence[int], stop: int = -1) -> None:
        if not len(common):
            raise ValueError("common: expected one token or more, received none")
        self.paged, self.common, self.stop = paged, list(common), stop
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.done: list[Request] = []
        self.steps = 0
        self.most_blocks = 0
        paged.manager.add(COMMON)
        paged.feed(COMMON, self.common)

    def submit(self, prompt: Sequence[int], count: int) -> Request:
        """Queue a request."""
        if not len(prompt) or count < 1:
            raise ValueError(f"expected a prompt and a positive count, received {len(prompt)} tokens and {count}")
        request = Request(len(self.waiting) + len(self.running) + len(self.done), list(prompt), count)
        self.waiting.append(request)
        return request

    def run(self) -> list[Request]:
        """Until every request is done; in the order in which they were submitted."""
        while self.waiting or self.running:
            self._admit()
            if not self.running:
                raise MemoryError(f"request {self.waiting[0].number} alone needs more blocks than the caches have")
            self._advance()
        return sorted(self.done, key=lambda request: request.number)

    def _admit(self) -> None:
        manager = self.paged.manager
        while self.waiting:
            request = self.waiting[0]
            tokens = request.prompt + request.answer
            manager.fork(COMMON, request.number)
            try:
                best = self.paged.feed(request.number, tokens)
            except OutOfBlocksError:
                manager.free(request.number)
                return
            self.waiting.popleft()
            self.running.append(request)
            self._take(request, best)

    def _advance(self) -> None:
        """One token for each running request."""
        while self.running:
            numbers = [request.number for request in self.running]
            tokens = np.array([[request.answer[-1]] for request in self.running])
            try:
                best = self.paged.step(numbers, tokens)
            except OutOfBlocksError:
                self._pause(self.running[-1])
                continue
            self.steps += 1
            for request, token in zip(list(self.running), best, strict=True):
                self._take(request, int(token))
            return

    def _take(self, request: Request, token: int) -> None:
        manager = self.paged.manager
        self.most_blocks = max(self.most_blocks, manager.num_blocks - manager.num_free)
        if token != self.stop:
            request.answer.append(token)
        if token == self.stop or len(request.answer) == request.count:
            self.running.remove(request)
            manager.free(request.number)
            self.done.append(request)

    def _pause(self, request: Request) -> None:
        if len(self.running) == 1:
            raise MemoryError(f"request {request.number} alone needs more blocks than the caches have")
        self.running.remove(request)
        self.paged.manager.free(request.number)
        request.pauses += 1
        self.waiting.appendleft(request)
