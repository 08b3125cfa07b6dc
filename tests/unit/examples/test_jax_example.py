"""examples/train_jax: it learns, with both attentions alike; its benchmark's report; the code of docs/jax.md."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import omniattn as oa
from build_tools import jax_tables

jax = pytest.importorskip("jax")
jnp = pytest.importorskip("jax.numpy")
pytestmark = pytest.mark.frameworks

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "examples" / "train_jax"
MODULES = ("model", "train", "bench")


@pytest.fixture(autouse=True)
def _on_cpu() -> Iterator[None]:
    with jax.default_device(jax.devices("cpu")[0]):
        yield


@pytest.fixture(scope="module")
def ex() -> Any:
    """The example's modules, which import each other by bare names: these must not leak into other tests."""
    before, kept = list(sys.path), {name: sys.modules.pop(name, None) for name in MODULES}
    sys.path[:0] = [str(FOLDER)]
    try:
        return SimpleNamespace(**{name: importlib.import_module(name) for name in MODULES})
    finally:
        sys.path[:] = before
        for name in MODULES:
            sys.modules.pop(name, None)
            if kept[name] is not None:
                sys.modules[name] = kept[name]


def test_it_learns_to_repeat(ex: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs = ex.train.main(["--small", "--steps", "80", "--rate", "5e-3"])
    assert [run.attention for run in runs] == ["omniattn", "xla"]
    ours, theirs = (np.array(run.losses) for run in runs)
    assert ours[0] == pytest.approx(np.log(16), abs=0.1)
    assert ours[-1] < 0.1
    assert np.abs(ours - theirs).max() <= 1e-2
    assert "losses of omniattn and xla differ by 0.00" in capsys.readouterr().out


def test_too_few_steps(ex: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ex.train.main(["--small", "--steps", "1"])
    assert "--steps: expected 2 or more, received 1" in capsys.readouterr().err


@pytest.fixture
def rows(ex: Any) -> list[dict[str, Any]]:
    shape = ex.bench.Shape(1, 128, 8, 2, 64, calls=3)
    samples = {"omniattn": [50.0, 49.0, 51.0], "cudnn": [90.0, 100.0, 110.0], "xla": [200.0, 200.0, 200.0]}
    made = ex.bench.rows_of(shape, ex.bench.FORWARD, samples, 0.001)
    del samples["xla"]
    return [*made, *ex.bench.rows_of(shape, ex.bench.BOTH, samples, 0.001)]


def test_rows_and_tables(ex: Any, rows: list[dict[str, Any]]) -> None:
    found = {(row["contender"], row["what"]): row for row in rows}
    ours = found["omniattn", "forward"]
    assert (ours["name"], ours["median_us"], ours["error"]) == ("d64 b1 h8/2 s128, 3 calls", 50.0, 0.001)
    assert (ours["speed_over_cudnn"], ours["speed_over_xla"]) == (2.0, 4.0)
    assert found["cudnn", "forward"]["error"] is None
    assert "speed_over_xla" not in found["omniattn", "forward + backward"]
    text = [" ".join(line.split()) for line in ex.bench.table(rows).splitlines()]
    assert text[1:] == [
        "d64 b1 h8/2 s128, 3 calls forward 50.0 2 % 2.00x 4.00x",
        "d64 b1 h8/2 s128, 3 calls forward + backward 50.0 2 % 2.00x –",
    ]
    facts = {"device": "NVIDIA Test", "driver": "580.1", "jax": "0.11.2"}
    report = {"rows": rows, "environment": facts, "date": "2026-01-02", "protocol": "wall", "command": "python x.py"}
    page = jax_tables.attention(report)
    assert "| d64 b1 h8/2 s128, 3 calls | forward | 50.0 | 100 | 2.00× | 200 | 4.00× |" in page
    assert "| d64 b1 h8/2 s128, 3 calls | forward + backward | 50.0 | 100 | 2.00× | – | – |" in page
    assert "JAX 0.11.2; wall time of compiled calls" in page


def test_programs_of_the_benchmark(ex: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ex.bench, "_SAMPLE_S", 1e-4)
    shape = ex.bench.Shape(1, 24, 4, 2, 16, calls=2)
    given = ex.bench.inputs(shape)
    ours, xla = (ex.bench.programs(shape, name) for name in ("omniattn", "xla"))
    for what in (ex.bench.FORWARD, ex.bench.BOTH):
        assert ex.bench.error(ours[what](*given), xla[what](*given)) <= ex.bench.LARGEST_ERROR
    samples = ex.bench.measure({"xla": lambda: xla[ex.bench.FORWARD](*given)}, 2)
    assert len(samples["xla"]) == 2
    assert min(samples["xla"]) > 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--out", "no/such/folder/times.json"], "--out: expected a file in an existing folder"),
        (["--shapes", "s77"], "--shapes: expected one of d128 b16 h16 s1024"),
    ],
)
def test_what_the_benchmark_refuses(ex: Any, words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        ex.bench.main(words)
    assert text in capsys.readouterr().err


def test_code_of_the_page() -> None:
    text = (ROOT / "docs" / "jax.md").read_text(encoding="utf-8")
    plain, decoding, sdpa = re.findall(r"^```python\n(.*?)^```", text, re.M | re.DOTALL)
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((2, 9, heads, 64)), "float32") for heads in (4, 2, 2))
    names: dict[str, Any] = {"q": q, "k": k, "v": v}
    exec(plain, names)
    want = oa.attention(q, k, v, causal=True)
    np.testing.assert_array_equal(names["o"], want)
    np.testing.assert_array_equal(names["per_sample"][0], want)
    assert names["dk"].shape == k.shape
    exec(sdpa, names)
    np.testing.assert_allclose(names["o"], want, atol=1e-6)
    tokens = {"q": q[:, :1], "k": k[:, :1], "v": v[:, :1], "lengths": jnp.ones(2, jnp.int32)}
    names = {**tokens, "batch": 2, "num_kv_heads": 2}
    exec(decoding, names)
    np.testing.assert_allclose(names["o"], jnp.repeat(v[:, :1], 2, axis=2), atol=2e-2)


def _attend(causal: bool) -> Any:
    def attend(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, causal=causal)

    return jax.jit(attend)


def test_the_persistent_compilation_cache_is_no_trap(tmp_path: Path) -> None:
    """Two programs that differ in an option have one text, which says where the callback is and not what it does.

    JAX 0.11 keeps programs with callbacks, older ones keep those without only.
    """
    from jax.experimental.compilation_cache import compilation_cache

    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.standard_normal((1, 4, 2, 16)), "float32") for _ in range(3))
    wants = {causal: oa.attention(q, k, v, causal=causal) for causal in (True, False)}
    settings = {
        "jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }  # fmt: skip
    before = {name: getattr(jax.config, name) for name in settings}

    def without(q: Any) -> Any:
        return jnp.sin(q) + 1

    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        for causal in (True, False, True):
            jax.clear_caches()
            compilation_cache.reset_cache()
            np.testing.assert_array_equal(_attend(causal)(q, k, v), wants[causal])
            jax.jit(without)(q)
        assert "jit_without" in " ".join(path.name for path in tmp_path.iterdir())
    finally:
        for name, value in before.items():
            jax.config.update(name, value)
        jax.clear_caches()
        compilation_cache.reset_cache()
