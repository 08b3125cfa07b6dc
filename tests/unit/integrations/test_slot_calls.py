"""What the backend of SGLang does before an error, without SGLang, on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402
from omniattn.integrations.slot_steps import Step  # noqa: E402
from omniattn.integrations.token_slots import SlotBackend  # noqa: E402
from tests.slot_requests import Requests, layer_of  # noqa: E402

pytestmark = pytest.mark.frameworks


class Backend(SlotBackend):
    """With a list of what was written."""

    written: list[Any]

    def _store(self, layer: Any, slots: Any, window_slots: Any, k: Any, v: Any) -> None:
        self.written.append(slots)


@pytest.mark.parametrize(
    ("options", "given", "error", "says"),
    [
        ({"attn_type": "encoder_only"}, {}, UnsupportedError, "bidirectional attention over tokens of before the step"),
        ({}, {"sinks": [1.0]}, ArgumentError, "argument 'sinks': expected a tensor or None"),
        ({}, {"something": 1}, UnsupportedError, "'something' of a layer"),
    ],
)
def test_nothing_is_written_before_an_error(
    options: dict[str, Any], given: dict[str, Any], error: type[Exception], says: str
) -> None:
    rows = torch.zeros((4, 64), dtype=torch.int32)
    backend = Backend(SimpleNamespace(dtype=torch.float16), rows, 16)
    backend.written = []
    lens = torch.tensor([9], dtype=torch.int32)
    starts = torch.tensor([0, 3], dtype=torch.int32)
    backend.forward_metadata = Step(lens, rows[:1, ::16], None, None, starts, 3, True, [3])
    x = torch.zeros(3, 4, 16, dtype=torch.float16)
    batch = SimpleNamespace(out_cache_loc=torch.arange(3))
    with pytest.raises(error) as caught:
        backend.forward_extend(x, x[:, :2], x[:, :2], layer_of(Requests(rows, 8, 16), **options), batch, **given)
    assert says in str(caught.value)
    assert backend.written == []
