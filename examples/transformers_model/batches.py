"""Continuous batching of transformers with several attentions: the same tokens? and how fast?

python examples/transformers_model/batches.py           # CUDA, a random Llama of 8 layers, 64 requests, 2048 new tokens
python examples/transformers_model/batches.py --small   # CPU, a tiny model in fp32, seconds
"""

from __future__ import annotations

import argparse
import inspect
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import transformers

from omniattn.bench.document import document, environment, reference_environment, write
from omniattn.integrations import transformers as omniattn_transformers


@dataclass(frozen=True)
class Sizes:
    """Of model and requests; ``longest`` prompts, and ``new`` tokens of each request."""

    layers: int = 8
    hidden: int = 2048
    heads: int = 32
    kv_heads: int = 8
    requests: int = 64
    longest: int = 1024
    new: int = 32
    page: int = 256
    pages: int = 400
    step: int = 2048
    repeats: int = 3


SMALL = Sizes(2, 64, 4, 2, 5, 20, 4, 8, 64, 64, 1)


@dataclass
class Row:
    """What one attention gave: seconds of a call as it comes, without graphs, and with a manager that is kept."""

    attention: str
    seconds: float | None = None
    without_graphs: float | None = None
    kept: float | None = None
    same_requests: float | None = None
    notes: dict[str, str] = field(default_factory=dict)


def attentions() -> list[str]:
    """Names that run here: those of SDPA and of this package, and flash attention where it is installed."""
    sdpa = "paged|sdpa" if "paged|sdpa" in transformers.AttentionInterface().valid_keys() else "sdpa"
    flash = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
    return [sdpa, "omniattn", *(name for name, module in flash.items() if find_spec(module) is not None)]


def model_of(sizes: Sizes, device: str) -> Any:
    """A Llama with random weights."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96 if device == "cpu" else 32000, hidden_size=sizes.hidden, intermediate_size=4 * sizes.hidden,
        num_hidden_layers=sizes.layers, num_attention_heads=sizes.heads, num_key_value_heads=sizes.kv_heads,
        max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16).eval()


def prompts(sizes: Sizes, vocabulary: int) -> list[list[int]]:
    """Requests of 1 to ``longest`` tokens."""
    made = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, sizes.longest + 1, (sizes.requests,), generator=made).tolist()
    return [torch.randint(3, vocabulary, (length,), generator=made).tolist() for length in lengths]


class Batches:
    """``generate_batch`` of one model and its requests."""

    def __init__(self, model: Any, sizes: Sizes) -> None:
        self.model, self.sizes = model, sizes
        self.requests = prompts(sizes, model.config.vocab_size)
        self.generation = transformers.GenerationConfig(
            max_new_tokens=sizes.new, do_sample=False, eos_token_id=-1, pad_token_id=0
        )  # fmt: skip

    def run(self, keep: bool = False, **options: Any) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of each request."""
        kind = transformers.ContinuousBatchingConfig
        known = inspect.signature(kind).parameters
        options["page_size" if "page_size" in known else "block_size"] = self.sizes.page
        if "auto_switch_to_flash" in known:
            options["auto_switch_to_flash"] = False
        config = kind(num_blocks=self.sizes.pages, max_batch_tokens=self.sizes.step, **options)
        self._wait()
        start = time.perf_counter()
        made = self.model.generate_batch(
            self.requests, generation_config=self.generation, continuous_batching_config=config,
            persistent_manager=keep,
        )  # fmt: skip
        self._wait()
        taken = time.perf_counter() - start
        results = sorted(made.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
        errors = sorted({str(result.error) for result in results if result.error})
        if errors or len(results) != len(self.requests):
            raise RuntimeError(errors[0] if errors else f"{len(results)} of {len(self.requests)} requests came back")
        return taken, [result.generated_tokens for result in results]

    def _wait(self) -> None:
        if self.model.device.type != "cpu":
            torch.cuda.synchronize()

    def median(self, **options: Any) -> float:
        """Seconds of a call, after one more."""
        taken = [self.run(**options)[0] for _ in range(self.sizes.repeats + 1)][1:]
        return sorted(taken)[len(taken) // 2]


def measure(batches: Batches, attention: str, expected: list[list[int]] | None) -> tuple[Row, list[list[int]] | None]:
    """Times of one attention; tokens of its first call beside the first attention's."""
    row, tokens = Row(attention), None
    try:
        batches.model.set_attn_implementation(attention)
        _, tokens = batches.run()
        expected = tokens if expected is None else expected
        row.same_requests = sum(a == b for a, b in zip(tokens, expected, strict=True)) / len(tokens)
        row.seconds = batches.median()
        row.without_graphs = batches.median(use_cuda_graph=False)
        row.kept = batches.median(keep=True)
    except (RuntimeError, ValueError, ImportError) as error:
        row.notes["error"] = str(error).splitlines()[0][:120]
    batches.model.destroy_cached_continuous_batching_manager()
    return row, tokens


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| attention | a call, s | without graphs, s | with a manager that is kept, s | requests as the first row's |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [(row.seconds, ".3f"), (row.without_graphs, ".3f"), (row.kept, ".3f"), (row.same_requests, ".0%")]
        shown = ["–" if value is None else format(value, form) for value, form in cells]
        name = row.attention.replace("|", "\\|")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return "\n".join([*lines, *(f"{row.attention}: {note}" for row in rows for note in row.notes.values())])


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the program; returns the rows of its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", help="names, with commas between; all that run here unless given")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, help="write a JSON document")
    arguments = parser.parse_args(argv)
    device, sizes = ("cpu", SMALL) if arguments.small else ("cuda", Sizes())
    omniattn_transformers.register()
    batches, rows, expected = Batches(model_of(sizes, device), sizes), [], None
    for name in arguments.attentions.split(",") if arguments.attentions else attentions():
        row, tokens = measure(batches, name, expected)
        rows.append(row)
        expected = tokens if expected is None else expected
    new = sizes.requests * sizes.new
    print(f"{sizes.requests} requests, {new} new tokens, transformers {transformers.__version__}")
    print(table(rows))
    if arguments.out is not None:
        where = reference_environment() if device == "cpu" else environment(torch)
        data = document("transformers_batches", protocol="wall",
                        command="python examples/transformers_model/batches.py", environment=where,
                        rows=[asdict(row) for row in rows], sizes=asdict(sizes), model="random Llama",
                        transformers=transformers.__version__)  # fmt: skip
        write(data, arguments.out)
    return rows


if __name__ == "__main__":
    main()
