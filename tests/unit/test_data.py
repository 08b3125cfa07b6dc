"""The activation sample that ships with the package: whole, finite, and real (not random numbers)."""

from __future__ import annotations

import hashlib
import io
import subprocess
import sys
from importlib.resources import files

import numpy as np
import pytest

from omniattn.data import Activations, load_activations, load_tokens

LAYERS = [0, 11, 19, 29]
SHA256 = "3fc9ef6e25545dfec2be746ee622f8b349bb05d0728c83308254805fe8e2adcf"


def content() -> bytes:
    return files("omniattn.data").joinpath("smollm2_qkv.npz").read_bytes()


@pytest.fixture(scope="module")
def sample() -> list[Activations]:
    return load_activations()


def attention_weights(layer: Activations) -> np.ndarray:
    """Causal softmax weights (heads, seq, seq) in float64."""
    q, k = layer.q[0].astype(np.float64), np.repeat(layer.k[0].astype(np.float64), 3, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, k) / 8
    scores[:, np.triu(np.ones(scores.shape[1:], dtype=bool), 1)] = -np.inf
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def test_file_is_the_one_that_was_made_and_small() -> None:
    assert len(content()) <= 2_000_000
    assert hashlib.sha256(content()).hexdigest() == SHA256


def test_file_holds_no_pickle() -> None:
    with np.load(io.BytesIO(content()), allow_pickle=False) as archive:
        assert {archive[name].dtype for name in archive.files} == {np.dtype(np.uint16)}
        assert len(archive.files) == 3 * len(LAYERS) + 1


def test_shapes_dtypes_names(sample: list[Activations]) -> None:
    assert [layer.layer for layer in sample] == LAYERS
    assert [layer.name for layer in sample] == [f"SmolLM2 layer {i}" for i in LAYERS]
    for layer in sample:
        assert layer.q.shape == (1, 320, 9, 64)
        assert layer.k.shape == layer.v.shape == (1, 320, 3, 64)
        for x in (layer.q, layer.k, layer.v):
            assert x.dtype == np.float32
            assert x.flags.c_contiguous
            assert x.flags.writeable
    tokens = load_tokens()
    assert tokens.shape == (320,)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() < 49152


def test_values_are_finite_bfloat16_numbers_in_float16_range(sample: list[Activations]) -> None:
    for layer in sample:
        for x in (layer.q, layer.k, layer.v):
            assert np.isfinite(x).all()
            assert not (x.view(np.uint32) & 0xFFFF).any()
            assert 0.1 < np.abs(x).max() < 32
            inexact = x.astype(np.float16).astype(np.float32) != x
            assert inexact.mean() <= 2e-4


def test_calls_do_not_share_memory() -> None:
    first = load_activations()
    first[0].q[...] = np.nan
    assert np.isfinite(load_activations()[0].q).all()


def test_k_channels_have_constant_offsets(sample: list[Activations]) -> None:
    for layer in sample:
        offset = np.abs(layer.k[0].mean(axis=0)) / layer.k[0].std(axis=0)
        # Zero-mean noise of 320 rows would give about 0.04 on average and hardly ever 0.25.
        assert offset.mean() > 0.5
        assert offset.max() > 4


def test_some_channels_stand_out(sample: list[Activations]) -> None:
    for layer in sample:
        peaks = np.abs(layer.k[0]).max(axis=(0, 1))
        assert peaks.max() / np.median(peaks) > 2.5
    v_peaks = np.abs(sample[0].v[0]).max(axis=0)
    assert v_peaks.max() / np.median(v_peaks) > 5


def test_later_layers_attend_to_the_first_token(sample: list[Activations]) -> None:
    share = {layer.layer: attention_weights(layer)[:, 64:, 0].mean() for layer in sample}
    # Even attention over 64..320 keys would give well below 0.01.
    assert share[19] > 0.3
    assert share[29] > 0.3
    assert share[0] < 0.02


def test_q_and_k_are_rotated_by_position(sample: list[Activations]) -> None:
    """Undoing the rotation of K makes its channel pairs steadier over positions: the sample is after rotary."""
    half = np.arange(32)
    angle = np.arange(320)[:, None] * 100000.0 ** (-half / 32)
    turn_back = np.exp(-1j * angle)[:, None, :]
    for layer in sample:
        pairs = layer.k[0, :, :, :32] + 1j * layer.k[0, :, :, 32:]
        # Pairs 0..7 turn by more than 0.05 rad a token: their mean over 320 rotated tokens nearly vanishes.
        rotated = np.abs(pairs.mean(axis=0))[:, :8].mean()
        unrotated = np.abs((pairs * turn_back).mean(axis=0))[:, :8].mean()
        assert unrotated > 2 * rotated


def test_importing_the_loader_does_not_import_numpy() -> None:
    code = "import sys, omniattn.data; print('numpy' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
