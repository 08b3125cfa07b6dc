"""How examples/smollm2 writes the sample of activations."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "smollm2"


@pytest.fixture
def make_sample(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The program; other examples have modules of the same names."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield importlib.import_module("make_sample")
    for name in {path.stem for path in EXAMPLE.glob("*.py")} - before:
        sys.modules.pop(name, None)


def test_the_sample_is_written_as_the_one_that_ships(make_sample: Any) -> None:
    """The same arrays give the same bytes, which NumPy reads."""
    content = files("omniattn.data").joinpath("smollm2_qkv.npz").read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        arrays = {name: archive[name] for name in archive.files}
    stream = io.BytesIO()
    make_sample.write(stream, arrays)
    assert stream.getvalue() == content
