"""One transformers model with several attentions: the same results? and how fast?

python examples/transformers_model/compare.py                      # CUDA, a random Llama of 1.2 billion weights
python examples/transformers_model/compare.py --gguf SmolLM2.gguf  # real weights: perplexity and greedy generation too
python examples/transformers_model/compare.py --small              # CPU, a tiny model in fp32, seconds
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

from omniattn.bench.document import document, environment, reference_environment, write
from omniattn.integrations import transformers as omniattn_transformers

ATTENTIONS = ("eager", "sdpa", "flex_attention", "omniattn", "omniattn_int8")


@dataclass(frozen=True)
class Sizes:
    """Tokens of what is measured, as (sequences, tokens each)."""

    prefill: tuple[int, int] = (2, 8192)
    training: tuple[int, int] = (2, 4096)
    prompt: tuple[int, int] = (8, 512)
    new_tokens: int = 64
    repeats: int = 5


SMALL = Sizes((1, 24), (1, 16), (2, 6), 4, 1)


@dataclass
class Row:
    """What one attention gave; None where it was not measured, and why in ``notes``."""

    attention: str
    perplexity: float | None = None
    same_tokens: float | None = None
    prefill_ms: float | None = None
    training_ms: float | None = None
    tokens_per_second: float | None = None
    notes: dict[str, str] = field(default_factory=dict)


def random_model(small: bool, device: str) -> Any:
    """A Llama with random weights: 16 layers of 32 heads on 8 of 64, or a tiny one."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=96 if small else 32000, hidden_size=64 if small else 2048, intermediate_size=128 if small else 8192,
        num_hidden_layers=2 if small else 16, num_attention_heads=4 if small else 32,
        num_key_value_heads=2 if small else 8, max_position_embeddings=32768,
    )  # fmt: skip
    with torch.device(device):
        return transformers.LlamaForCausalLM(config).to(torch.float32 if device == "cpu" else torch.bfloat16)


def gguf_model(path: Path, device: str) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file."""
    where = {"gguf_file": path.name}
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, **where)
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, dtype=torch.bfloat16, **where)
    return model.to(device), tokenizer


def text() -> str:
    """English that is there wherever this example is: the project's documents."""
    root = Path(__file__).resolve().parents[2]
    return "\n\n".join(path.read_text(encoding="utf-8") for path in sorted((root / "docs").glob("*.md")))


def perplexity(model: Any, tokens: torch.Tensor, context: int) -> float:
    """exp of the mean loss over whole windows of ``context`` tokens."""
    windows = tokens[: len(tokens) // context * context].reshape(-1, context)
    with torch.inference_mode():
        losses = [float(model(input_ids=w[None], labels=w[None]).loss) for w in windows]
    return float(torch.tensor(losses).double().mean().exp())


def seconds(call: Callable[[], object], device: str, repeats: int) -> float:
    """Median time of a call, which has run once before."""
    found = []
    for i in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        if i:
            found.append(time.perf_counter() - start)
    return sorted(found)[len(found) // 2]


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def generate(model: Any, prompt: torch.Tensor, new_tokens: int) -> torch.Tensor:
    """Greedy continuation, without the prompt."""
    made = model.generate(
        prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=new_tokens, min_new_tokens=new_tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return made[:, prompt.shape[1] :]


def measure(model: Any, attention: str, sizes: Sizes, device: str) -> Row:
    """Prefill, training step and generation with one attention."""
    row = Row(attention)
    model.set_attn_implementation(attention)
    vocabulary = model.config.vocab_size

    def tokens(shape: tuple[int, int]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        return torch.randint(3, vocabulary, shape, generator=generator).to(device)

    def prefill() -> None:
        with torch.inference_mode():
            model(input_ids=x, use_cache=False, logits_to_keep=1)

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=y, labels=y, use_cache=False).loss.backward()

    def continue_prompt() -> None:
        generate(model, z, sizes.new_tokens)

    x, y, z = tokens(sizes.prefill), tokens(sizes.training), tokens(sizes.prompt)
    for name, call in (("prefill", prefill), ("training", step), ("generation", continue_prompt)):
        try:
            taken = seconds(call, device, sizes.repeats if name != "generation" else 1)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            row.notes[name] = str(error).splitlines()[0][:120]
            continue
        if name == "generation":
            row.tokens_per_second = sizes.prompt[0] * sizes.new_tokens / taken
        else:
            setattr(row, f"{name}_ms", taken * 1e3)
    model.zero_grad(set_to_none=True)
    return row


def judge(model: Any, tokenizer: Any, rows: Sequence[Row], device: str, most: int) -> None:
    """Perplexity and greedy generation on real weights; what generations share with eager's."""
    tokens = tokenizer(text(), return_tensors="pt").input_ids[0][:most].to(device)
    prompt, expected = tokens[:64][None], None
    for row in rows:
        model.set_attn_implementation(row.attention)
        row.perplexity = perplexity(model, tokens, min(2048, most))
        made = generate(model, prompt, 48)
        expected = made if expected is None else expected
        row.same_tokens = float((made == expected).float().mean())


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| attention | perplexity | greedy tokens as eager's | prefill, ms | training step, ms | new tokens/s |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        cells = [
            (row.perplexity, ".3f"), (row.same_tokens, ".0%"), (row.prefill_ms, ".2f"), (row.training_ms, ".2f"),
            (row.tokens_per_second, ".0f"),
        ]  # fmt: skip
        shown = ["–" if value is None else format(value, form) for value, form in cells]
        lines.append(f"| {row.attention} | " + " | ".join(shown) + " |")
    notes = [f"{row.attention}, {name}: {note}" for row in rows for name, note in row.notes.items()]
    return "\n".join([*lines, *notes])


def _command(weights: Path | None) -> str:
    return "python examples/transformers_model/compare.py" + (f" --gguf {weights.name}" if weights else "")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    """Run the program; returns the rows of its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--attentions", default=",".join(ATTENTIONS), help="names, with commas between")
    parser.add_argument("--gguf", type=Path, help="weights and tokenizer, in place of a random model")
    parser.add_argument("--tokens", type=int, default=8192, help="tokens of text that perplexity is over")
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--out", type=Path, help="write a JSON document")
    arguments = parser.parse_args(argv)
    device = "cpu" if arguments.small else "cuda"
    omniattn_transformers.register()
    tokenizer = None
    if arguments.gguf is None:
        model = random_model(arguments.small, device)
    else:
        model, tokenizer = gguf_model(arguments.gguf, device)
    sizes = SMALL if arguments.small else Sizes()
    rows = [measure(model, name, sizes, device) for name in arguments.attentions.split(",")]
    if tokenizer is not None:
        judge(model, tokenizer, rows, device, arguments.tokens)
    print(table(rows))
    if arguments.out is not None:
        where = reference_environment() if device == "cpu" else environment(torch)
        data = document("transformers", protocol="wall", command=_command(arguments.gguf), environment=where,
                        rows=[asdict(row) for row in rows], sizes=asdict(sizes),
                        model=arguments.gguf.name if arguments.gguf else "random Llama")  # fmt: skip
        write(data, arguments.out)
    return rows


if __name__ == "__main__":
    main()
