"""Layers and a model of DeepSeek V3's sizes by latent rows, beside their attention as it is defined, on a GPU."""

from __future__ import annotations

import copy

import pytest

torch = pytest.importorskip("torch")

from tests import latent_layer  # noqa: E402
from tests.latent_layer import BOUND, FORMATS, Layer, Sequences  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 0), reason="kernels need sm_80"
    ),
]

KINDS = [(dtype, fmt) for dtype in BOUND for fmt in FORMATS if (dtype, fmt) != ("float16", "656")]


@pytest.mark.parametrize(("dtype", "fmt"), KINDS)
def test_absorbed_steps_are_the_unabsorbed_attention(dtype: str, fmt: str) -> None:
    """64 steps of two sequences; of rows in 8 bits the keys are those that the rows stand for."""
    for heads, lengths in ((3, (81, 70)), (16, (600, 64, 333))):
        assert latent_layer.decode_steps(Sequences(Layer(heads, dtype, "cuda"), lengths, fmt), 64) < BOUND[dtype]


@pytest.mark.parametrize(("dtype", "fmt"), KINDS)
def test_lists_are_the_unabsorbed_attention_over_them(dtype: str, fmt: str) -> None:
    sequences = Sequences(Layer(16, dtype, "cuda"), (300,), fmt)
    for topk in (300, 64, 16):
        assert latent_layer.sparse_prompt(sequences, topk) < BOUND[dtype]


@pytest.mark.parametrize("dtype", list(BOUND))
def test_the_unabsorbed_prompt(dtype: str) -> None:
    assert latent_layer.whole_prompt(Sequences(Layer(16, dtype, "cuda"), (300,), "16")) < BOUND[dtype]


def test_a_model_of_transformers() -> None:
    """Logits by our attention with heads of 192 and 128 channels, and by latent rows, beside those of eager."""
    pytest.importorskip("transformers")
    from omniattn.integrations.transformers import register

    model = latent_layer.small_model()
    tokens = torch.randint(0, 128, (2, 60), generator=torch.Generator().manual_seed(3)).cuda()
    exact = latent_layer.logits_of(copy.deepcopy(model).double().cuda(), tokens, 40)
    half = model.bfloat16().cuda()
    eager = latent_layer.logits_of(half, tokens, 40) - exact
    register()
    half.set_attn_implementation("omniattn")
    assert (latent_layer.logits_of(half, tokens, 40) - exact).norm() < 1.3 * eager.norm()
    calls = latent_layer.use_latent_caches(half)
    found = latent_layer.logits_of(half, tokens, 40) - exact
    assert calls == ["attention_sparse"] * 2 + ["decode"] * 40
    assert found.norm() < 1.3 * eager.norm()
    assert found.abs().max() < 2 * eager.abs().max()
