"""Layers and a model of DeepSeek V3's sizes by latent rows, beside their attention as it is defined, on the CPU."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from tests import latent_layer  # noqa: E402
from tests.latent_layer import BOUND, FORMATS, Layer, Sequences  # noqa: E402

pytestmark = pytest.mark.frameworks

DTYPES = ("float16", "bfloat16")


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_steps_are_the_unabsorbed_attention(dtype: str, fmt: str) -> None:
    """64 steps of two sequences; of rows in 8 bits the keys are those that the rows stand for."""
    sequences = Sequences(Layer(3, dtype, "cpu"), (81, 70), fmt)
    assert latent_layer.decode_steps(sequences, 64) < BOUND[dtype]


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_lists_are_the_unabsorbed_attention_over_them(dtype: str, fmt: str) -> None:
    sequences = Sequences(Layer(3, dtype, "cpu"), (60,), fmt)
    for topk in (60, 16):
        assert latent_layer.sparse_prompt(sequences, topk) < BOUND[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_unabsorbed_prompt(dtype: str) -> None:
    assert latent_layer.whole_prompt(Sequences(Layer(3, dtype, "cpu"), (60,), "16")) < BOUND[dtype]


@pytest.mark.parametrize(("fmt", "least", "most"), [("e4m3", 0.005, 0.12), ("656", 0.005, 0.06)])
def test_what_rows_in_8_bits_cost(fmt: str, least: float, most: float) -> None:
    """o beside that of the rows before they are quantized."""
    layer = Layer(3, "bfloat16", "cpu")
    eight, whole = Sequences(layer, (81, 70), fmt), Sequences(layer, (81, 70), "16")
    errors = [
        latent_layer.error_of(eight.expected(b, n - 1)[None], whole.expected(b, n - 1)[None])
        for b, n in enumerate(eight.lengths)
    ]
    assert least < max(errors) < most


def test_a_model_of_transformers() -> None:
    """Logits by our attention with heads of 192 and 128 channels, and by latent rows, beside those of eager."""
    pytest.importorskip("transformers")
    from omniattn.integrations.transformers import register

    model = latent_layer.small_model()
    tokens = torch.randint(0, 128, (2, 28), generator=torch.Generator().manual_seed(3))
    exact = latent_layer.logits_of(model, tokens, 20)
    register()
    model.set_attn_implementation("omniattn")
    assert (latent_layer.logits_of(model, tokens, 20) - exact).abs().max() < 1e-4 * exact.abs().max()

    model.set_attn_implementation("eager")
    half = copy.deepcopy(model).bfloat16()
    eager = latent_layer.logits_of(half, tokens, 20) - exact
    half.set_attn_implementation("omniattn")
    assert (latent_layer.logits_of(half, tokens, 20) - exact).norm() < 1.3 * eager.norm()
    calls = latent_layer.use_latent_caches(half)
    found = latent_layer.logits_of(half, tokens, 20) - exact
    assert calls == ["attention_sparse"] * 2 + ["decode"] * 16
    assert found.norm() < 1.3 * eager.norm()
    assert found.abs().max() < 2 * eager.abs().max()
