"""examples/serve over HTTP on loopback: nothing is lost, nothing waits for ever, who goes away frees its blocks."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.examples import serve_fakes as fakes

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
    engine = ex.engine.Engine(network, fakes.options(ex, max_tokens=256))
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

    async def stream(
        self, events: int = 10**9, begun: Callable[[], None] = lambda: None, **body: Any
    ) -> list[dict[str, Any]]:
        """Events of an answer; a client that has enough of them closes its connection.

        ``begun`` is called when the request is in the engine's queue. "[DONE]" is the last line of all answers but
        those that end with an error.
        """
        found: list[dict[str, Any]] = []
        done = False
        async with self.session.post(self.url, json={"temperature": 0, "stream": True, **body}) as response:
            assert (response.status, response.content_type) == (200, "text/event-stream")
            begun()
            async for line in response.content:
                text = line.decode().removeprefix("data: ").strip()
                assert not (done and text)
                if text == "[DONE]":
                    done = True
                elif text:
                    found.append(json.loads(text))
                if len(found) >= events:
                    response.close()
                    return found
        assert done != ("error" in found[-1])
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
    """96 at once on a pool for a few: whole answers and streams; every third client leaves at once or in the middle.

    Two more stay, of 256 tokens each, which fill the pool: the first to end needs all of it while the other still
    runs. No step begins before both are in the queue, so that one of them has to leave, however slow the machine is.
    """
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
        sizes = {"num_blocks": 64, "max_tokens": 256, "swap_blocks": 30, "max_requests": 32}
        async with served(ex, network, **sizes) as server:
            step, queued, start = server.engine.step, asyncio.Semaphore(0), threading.Event()

            def step_after_start() -> Any:
                assert start.wait(60)
                return step()

            server.engine.step = step_after_start
            stays = [
                asyncio.create_task(server.stream(begun=queued.release, prompt=[i], max_tokens=255)) for i in (1, 2)
            ]
            for _ in stays:
                await asyncio.wait_for(queued.acquire(), 60)
            start.set()
            answers = await asyncio.gather(*(client(server, i) for i in range(96)))
            for i, events in zip((1, 2), await asyncio.gather(*stays), strict=True):
                assert text_of(events) == alone(ex, network, [i], 255)
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
            # In float32 this top_p is 0, of which the likeliest token is left.
            tiny = {"prompt": text, "max_tokens": 20, "temperature": 1, "top_p": 1e-46}
            for _ in range(2):
                status, found = await server.ask(**tiny)
                assert (status, found["choices"][0]["text"]) == (200, alone(ex, network, ids, 20))
            assert text_of(await server.stream(**tiny)) == alone(ex, network, ids, 20)

    asyncio.run(run())


LONG = 10**400
ODD = [
    ({}, "prompt, max_tokens: expected 2 to 128 in all, received 0 and 16"),
    ({"prompt": []}, "received 0"), ({"prompt": ""}, "received 0"), ({"prompt": None}, "prompt"),
    ({"prompt": [50]}, "prompt: expected tokens of 0 to 49, received 50"), ({"prompt": [-1]}, "received -1"),
    ({"prompt": [1.5]}, "1.5"), ({"prompt": ["a", "b"]}, "prompt: expected tokens of 0 to 49, received 'a'"),
    ({"prompt": [1, True]}, "prompt: expected tokens of 0 to 49, received True"), ({"prompt": [LONG]}, "prompt: "),
    ({"prompt": 3}, "prompt: expected a text or tokens, received 3"), ({"prompt": True}, "prompt"),
    ({"max_tokens": 128}, "max_tokens: expected 2 to 128 in all, received 1 and 128"),
    ({"max_tokens": 2.5}, "max_tokens: expected an integer, received 2.5"), ({"max_tokens": -LONG}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens: expected an integer, received True"), ({"max_tokens": "3"}, "max_tokens"),
    ({"seed": False}, "seed: expected an integer, received False"), ({"seed": 1.0}, "seed"), ({"seed": "1"}, "seed"),
    ({"n": 2}, "n: expected 1, received 2"), ({"n": True}, "n: "), ({"model": 3}, "model: expected a text, received 3"),
    ({"stream": "no"}, "stream: expected true or false, received 'no'"), ({"stream": 1}, "stream: "),
    ({"temperature": -1}, "temperature: expected 0 to 100"), ({"temperature": LONG}, "temperature: expected 0 to 100"),
    ({"temperature": float("nan")}, "received nan"), ({"temperature": float("inf")}, "received inf"),
    ({"temperature": "1"}, "temperature: expected a number, received '1'"), ({"temperature": True}, "temperature"),
    ({"top_p": "x"}, "top_p: expected a number, received 'x'"), ({"top_p": float("nan")}, "received 0 and nan"),
    ({"top_p": 0}, "top_p"), ({"top_p": LONG}, "top_p"), ({"top_p": [1]}, "top_p"), ({"top_p": True}, "top_p"),
    ({"stop": "x"}, "stop: expected none, received 'x'"), ({"logprobs": 2}, "logprobs"),
]  # fmt: skip


def test_what_is_not_served_is_named(ex: Any, network: Any) -> None:
    async def run() -> None:
        async with served(ex, network) as server:
            for body, said in ODD:
                status, found = await server.ask(**body if body == {} else {"prompt": [1], **body})
                assert (status, found["error"]["type"]) == (400, "invalid_request_error"), body
                assert said in found["error"]["message"]
            assert not server.engine.scheduler.waiting
            assert (await server.ask(prompt=[1], stop=None, seed=-LONG))[0] == 200

    asyncio.run(run())


@pytest.mark.parametrize(
    ("data", "kind", "said"),
    [
        (b"[1]", "", "body: expected a JSON object, received [1]"), (b'[["prompt", [1]]]', "", "a JSON object"),
        (b"3", "", "received 3"), (b'"a"', "", "received 'a'"), (b"null", "", "received None"), (b"", "", "Expecting"),
        (b"{", "", "Expecting"), (b"[" * 100_000, "", "JSON"), (b'{"prompt": ' * 50_000, "", "JSON"),
        (b'{"prompt": [1]}', "; charset=nope", "nope"), (b'{"prompt": [1]}', "; charset=hex", "hex"),
        (b'{"prompt": "\xff"}', "", "0xff"), (b'{"seed": 1' + b"0" * 5000 + b"}", "", "limit"),
        (b'{"prompt": ' + b"[" * 200 + b"]" * 200 + b"}", "", "prompt: expected tokens of 0 to 49, received [[[[["),
    ],
    ids=lambda x: repr(x)[:40],
)  # fmt: skip
def test_what_is_no_json_object_is_refused(ex: Any, network: Any, data: bytes, kind: str, said: str) -> None:
    async def run() -> None:
        headers = {"Content-Type": f"application/json{kind}"}
        async with (
            served(ex, network) as server,
            server.session.post(server.url, data=data, headers=headers) as response,
        ):
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
            whole += [await server.ask(**body), await server.ask(**body, stream=True)]
            expected = {"message": "the engine has ended: MemoryError: no more"}
            assert events[-1] == {"error": expected}
            assert [(status, found["error"]) for status, found in whole] == [(500, expected)] * 4

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
