"""examples/serve over HTTP on loopback: nothing is lost, nothing waits for ever, who goes away frees its blocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit import serve_fakes as fakes

torch = pytest.importorskip("torch")
aiohttp = pytest.importorskip("aiohttp")
pytestmark = pytest.mark.frameworks

PROMPTS = fakes.prompts(96, seed=5)
#: No token: answers end at their limit.
NONE = -1


class Tokenizer:
    """A character a token; but of the last ten, two make up one."""

    def encode(self, text: str) -> Any:
        return SimpleNamespace(ids=[ord(c) % fakes.VOCABULARY for c in text])

    def decode(self, ids: list[int]) -> str:
        text, i = "", 0
        while i < len(ids):
            if ids[i] < 40:
                text += chr(0x4E00 + ids[i])
            elif i + 1 < len(ids):
                text += chr(0x5E00 + 50 * ids[i] + ids[i + 1])
                i += 1
            else:
                text += "\ufffd"
            i += 1
        return text


@pytest.fixture(scope="module")
def ex() -> Any:
    return fakes.load("server")


@pytest.fixture(scope="module")
def network(ex: Any) -> Any:
    return fakes.tiny(ex)


def alone(ex: Any, network: Any, prompt: list[int], count: int, **sampling: Any) -> str:
    """The text of an engine that has one request."""
    engine = ex.engine.Engine(network, fakes.options(ex))
    request = ex.scheduler.Request(prompt, count, **{"temperature": 0.0, **sampling})
    return Tokenizer().decode(fakes.run(engine, [request])[0])


class Served:
    """A running server, and a session of a client."""

    def __init__(self, engine: Any, session: Any, url: str) -> None:
        self.engine, self.session, self.url = engine, session, url

    async def ask(self, **body: Any) -> tuple[int, Any]:
        """Status and object of a whole answer."""
        async with self.session.post(self.url, json={"temperature": 0, **body}) as response:
            return response.status, await response.json()

    async def stream(self, events: int = 10**9, **body: Any) -> list[dict[str, Any]]:
        """Events of an answer; a client that has enough of them closes its connection."""
        found: list[dict[str, Any]] = []
        async with self.session.post(self.url, json={"temperature": 0, "stream": True, **body}) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            async for line in response.content:
                text = line.decode().removeprefix("data: ").strip()
                if text == "[DONE]":
                    return found
                if text:
                    found.append(json.loads(text))
                if len(found) >= events:
                    response.close()
                    break
        return found

    async def idle(self) -> None:
        """Wait until nothing runs; then every block is free."""
        scheduler, blocks = self.engine.scheduler, self.engine.blocks
        end = time.monotonic() + 60
        while scheduler.running or scheduler.waiting:
            assert time.monotonic() < end, "a request is stuck"
            await asyncio.sleep(0.01)
        assert (blocks.num_free, blocks.sequences, blocks.swapped) == (blocks.num_blocks, (), ())
        assert blocks.num_free_host == (0 if blocks.swap_space is None else blocks.swap_space.num_blocks)


@contextlib.asynccontextmanager
async def served(ex: Any, network: Any, **changes: Any) -> AsyncIterator[Served]:
    engine = ex.engine.Engine(network, fakes.options(ex, **changes))
    app = ex.server.make_app(engine, Tokenizer(), NONE)
    runner = ex.server.web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = ex.server.web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(120)) as session:
            yield Served(engine, session, f"http://127.0.0.1:{port}/v1/completions")
    finally:
        await runner.cleanup()


def text_of(events: list[dict[str, Any]]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


def test_many_clients_some_of_whom_go_away(ex: Any, network: Any) -> None:
    """96 at once on a pool for a few: whole answers and streams; every third client leaves at once or in the middle."""
    counts = [8 + i % 9 for i in range(96)]
    left: list[int] = []

    async def client(server: Served, i: int) -> Any:
        await asyncio.sleep(random.Random(i).random() * 0.5)
        body = {"prompt": PROMPTS[i], "max_tokens": counts[i]}
        if i % 3 == 0:
            left.append(i)
            if i % 2:
                return await server.stream(events=2, **{**body, "max_tokens": 60})
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(server.ask(**{**body, "max_tokens": 60}), 0.05 * (i % 7))
            return None
        return await (server.stream(**body) if i % 3 == 1 else server.ask(**body))

    async def run() -> tuple[list[Any], Any]:
        async with served(ex, network, num_blocks=100, swap_blocks=30, max_requests=32) as server:
            answers = await asyncio.gather(*(client(server, i) for i in range(96)))
            await server.idle()
            again = await server.ask(prompt=PROMPTS[1], max_tokens=counts[1])
            assert again[1]["choices"][0]["text"] == text_of(answers[1])
            return answers, server.engine.scheduler

    answers, scheduler = asyncio.run(run())
    assert scheduler.preemptions > 0
    assert len(left) == 32
    for i, answer in enumerate(answers):
        if i % 3 == 1:
            assert text_of(answer) == alone(ex, network, PROMPTS[i], counts[i])
            assert [event["choices"][0]["finish_reason"] for event in answer] == [None] * (len(answer) - 1) + ["length"]
            assert not any("\ufffd" in event["choices"][0]["text"] for event in answer[:-1])
        elif i % 3 == 2:
            status, found = answer
            assert status == 200
            assert found["choices"][0]["text"] == alone(ex, network, PROMPTS[i], counts[i])
            sizes = [len(PROMPTS[i]), counts[i], len(PROMPTS[i]) + counts[i]]
            assert [*found["usage"].values()] == sizes


def test_a_client_that_goes_away_is_not_waited_for(ex: Any, network: Any) -> None:
    """It would have had the whole cache for a long time."""

    async def run() -> float:
        async with served(ex, network, num_blocks=32, drafts=0) as server:
            begin = time.monotonic()
            for _ in range(3):
                assert len(await server.stream(events=1, prompt=[1, 2], max_tokens=126)) == 1
            await server.idle()
            assert server.engine.scheduler.steps < 200
            return time.monotonic() - begin

    assert asyncio.run(run()) < 60


def test_sampling_and_texts(ex: Any, network: Any) -> None:
    async def run() -> None:
        async with served(ex, network) as server:
            text = "a text, which begins this"
            ids = Tokenizer().encode(text).ids
            _, found = await server.ask(prompt=text, model="m", n=1, stream=None)
            assert found["choices"] == [
                {"index": 0, "text": alone(ex, network, ids, 16), "logprobs": None, "finish_reason": "length"}
            ]
            assert (found["object"], found["model"]) == ("text_completion", "m")
            drawn = alone(ex, network, ids, 20, temperature=1.0, top_p=0.9, seed=7)
            body = {"prompt": text, "max_tokens": 20, "top_p": 0.9, "temperature": None}
            assert (await server.ask(**body, seed=7))[1]["choices"][0]["text"] == drawn
            assert text_of(await server.stream(**body, seed=7)) == drawn
            assert len({(await server.ask(**body))[1]["choices"][0]["text"] for _ in range(6)}) > 1

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "prompt"), ({"prompt": []}, "received 0"), ({"prompt": ""}, "received 0"), ({"prompt": [50]}, "50"),
        ({"prompt": [1.5]}, "1.5"), ({"prompt": ["a", "b"]}, "'a'"), ({"prompt": 3}, "int"),
        ({"prompt": [1], "max_tokens": 128}, "max_tokens = 128"), ({"prompt": [1], "max_tokens": 2.5}, "float"),
        ({"prompt": [1], "n": 2}, "n = 1"), ({"prompt": [1], "stream": "no"}, "stream"),
        ({"prompt": [1], "temperature": -1}, "temperature"), ({"prompt": [1], "top_p": "x"}, "'x'"),
        ({"prompt": [1], "stop": "x"}, "'stop'"), ({"prompt": [1], "logprobs": 2}, "'logprobs'"), ([1], "dictionary"),
        (3, "int"),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_served_is_named(ex: Any, network: Any, body: Any, said: str) -> None:
    async def run() -> None:
        async with served(ex, network) as server, server.session.post(server.url, json=body) as response:
            assert response.status == 400
            assert said in (await response.json())["error"]["message"]
            assert not server.engine.scheduler.waiting

    asyncio.run(run())


def test_a_failure_reaches_everyone(ex: Any, network: Any) -> None:
    """Requests that run, that wait, and that come later."""

    async def run() -> None:
        async with served(ex, network, max_requests=1) as server:
            step = server.engine.step

            def fail() -> Any:
                if server.engine.scheduler.steps == 5:
                    raise MemoryError("no more")
                return step()

            server.engine.step = fail
            body = {"prompt": [1, 2, 3], "max_tokens": 100}
            events, *whole = await asyncio.gather(server.stream(**body), server.ask(**body), server.ask(**body))
            whole.append(await server.ask(**body))
            expected = {"message": "the engine has ended: MemoryError: no more"}
            assert events[-1] == {"error": expected}
            assert [(status, found["error"]) for status, found in whole] == [(500, expected)] * 3

    asyncio.run(run())


def test_command_line(ex: Any, network: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []
    monkeypatch.setattr(ex.server, "load_smollm2", lambda gguf, device, length: (network, Tokenizer(), 2))
    monkeypatch.setattr(ex.server, "Engine", lambda network, options: ran.append(options))
    monkeypatch.setattr(ex.server.web, "run_app", lambda app, **options: ran.append(options))
    monkeypatch.setattr("sys.argv", ["server.py", "--kv", "int4", "--blocks", "99", "--port", "81"])
    ex.server.main()
    assert (ran[0].kv, ran[0].num_blocks, ran[0].swap_blocks) == ("int4", 99, 99)
    assert ran[1] == {"host": "localhost", "port": 81, "handler_cancellation": True}
