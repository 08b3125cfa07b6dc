"""The stream argument."""

from __future__ import annotations

from typing import Any

import pytest

from omniattn.arrays import resolve_stream
from omniattn.errors import ArgumentError


class _Method:
    def __init__(self, pair: Any) -> None:
        self._pair = pair

    def __cuda_stream__(self) -> Any:
        return self._pair


class _Attribute:
    __cuda_stream__ = (0, 4096)


class Stream:
    """A class whose module is set to that of a framework, below."""

    def __init__(self, **attributes: int) -> None:
        self.__dict__.update(attributes)


@pytest.mark.parametrize(
    ("given", "handle"),
    [
        (None, None),
        (0, 0),
        (1, 0),
        (2, 2),
        (0x7F00DEADBEE0, 0x7F00DEADBEE0),
        (_Method((0, 64)), 64),
        (_Method((0, 1)), 0),
        (_Attribute(), 4096),
    ],
)
def test_accepted(given: Any, handle: int | None) -> None:
    assert resolve_stream(given) == handle


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (-1, "a handle from 0 to 2**64 - 1, received -1"),
        (1 << 64, "a handle from 0 to 2**64 - 1"),
        (True, "received bool: True"),
        (1.5, "received float: 1.5"),
        ("default", "received str: 'default'"),
        (_Method((1, 64)), "version 0 of the __cuda_stream__ protocol, received version 1"),
        (_Method(64), "__cuda_stream__ to give (0, handle), received 64"),
        (_Method((0, "x")), "an integer handle, received str: 'x'"),
        (_Method((0, -8)), "a handle from 0 to 2**64 - 1, received -8"),
        (object(), "None, an integer handle, a torch or CuPy stream, or an object with __cuda_stream__"),
    ],
)
def test_refused(given: Any, text: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        resolve_stream(given)
    assert caught.value.argument == "stream"
    assert text in str(caught.value)


@pytest.mark.parametrize(("module", "attribute"), [("torch.cuda.streams", "cuda_stream"), ("cupy.cuda.stream", "ptr")])
def test_frameworks_from_before_the_protocol(monkeypatch: pytest.MonkeyPatch, module: str, attribute: str) -> None:
    monkeypatch.setattr(Stream, "__module__", module)
    assert resolve_stream(Stream(**{attribute: 4711})) == 4711
    with pytest.raises(ArgumentError):
        resolve_stream(Stream(other=1))
