"""torchtitan's models with its "varlen" attention on the implementation "omniattn", on the CPU, in bfloat16."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
titan = pytest.importorskip("torchtitan.models.common.attention", exc_type=ImportError)
pytestmark = pytest.mark.frameworks

from torch.nn.attention import (  # noqa: E402
    activate_flash_attention_impl,
    restore_flash_attention_impl,
)
from torchtitan.models import llama3, qwen3  # noqa: E402

from omniattn.torch import flash, operators  # noqa: E402

#: Lengths of the documents in each row of the batch.
DOCUMENTS = ((5, 9, 10), (24,), (1, 23))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Our calls of packed sequences, with the implementation active and its kernels for CPU tensors, too."""
    made: list[str] = []
    for name in ("attention_varlen", "attention_varlen_backward"):
        monkeypatch.setattr(operators, name, _recorded(getattr(operators, name), name, made))
    active = flash.Active("CPU")
    activate_flash_attention_impl("omniattn")
    yield made
    restore_flash_attention_impl()
    active.remove()


def _recorded(function: Any, name: str, made: list[str]) -> Any:
    def call(*arrays: Any, **options: Any) -> Any:
        made.append(name)
        return function(*arrays, **options)

    return call


def written_out(
    q: Any, k: Any, v: Any, starts_q: Any, starts_k: Any, max_q: int, max_k: int, *, scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1), enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """varlen_attn in float32, a document after the other."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    parts, at = [], starts_q.tolist()
    assert (window_size, max_q) == ((-1, 0), max(b - a for a, b in itertools.pairwise(at)))
    for a, b in itertools.pairwise(at):
        own = [x[a:b].transpose(0, 1).float() for x in (q, k, v)]
        s = own[0] @ own[1].mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        s = s.masked_fill(torch.ones(b - a, b - a).triu(1).bool(), -torch.inf)
        parts.append((s.softmax(-1) @ own[2]).transpose(0, 1).to(q.dtype))
    return torch.cat(parts)


def tiny(family: Any, flavor: str) -> Any:
    """Two layers of a model of torchtitan's own configuration for tests."""
    config = family.model_registry(flavor, attn_backend="varlen").model
    config.layers = config.layers[:2]
    torch.manual_seed(0)
    model = config.build()
    model.init_states()
    assert all(isinstance(x.attention.inner_attention, titan.VarlenAttention) for x in model.layers.values())
    return model


def step(model: Any) -> tuple[Any, dict[str, Any]]:
    """The loss of a packed batch and every parameter's gradient."""
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in DOCUMENTS])
    tokens = torch.randint(2048, positions.shape, generator=torch.Generator().manual_seed(1))
    masks = model.get_attention_masks(positions)
    assert masks.cu_seq_q.tolist() == [0, 5, 14, 24, 48, 49, 72]
    logits = model(tokens, positions, masks)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens.roll(-1, 1).flatten())
    loss.backward()
    return loss.detach(), {name: x.grad for name, x in model.named_parameters() if x.grad is not None}


@pytest.mark.parametrize(("family", "flavor"), [(llama3, "debugmodel"), (qwen3, "debugmodel")], ids=["llama3", "qwen3"])
def test_a_tiny_model(family: Any, flavor: str, calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny(family, flavor)
    activate_flash_attention_impl("omniattn")
    other = copy.deepcopy(model)
    got, made = step(model)
    assert calls == ["attention_varlen"] * 2 + ["attention_varlen_backward"] * 2
    monkeypatch.setattr(titan, "varlen_attn", written_out)
    want, gradients = step(other)
    torch.testing.assert_close(got, want, rtol=1e-3, atol=0)
    assert set(made) == set(gradients)
    for name, gradient in gradients.items():
        assert (made[name] - gradient).norm() <= 0.02 * gradient.norm(), name
    assert any("wqkv" in name or "wq" in name for name in gradients)
