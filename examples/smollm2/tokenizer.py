"""SmolLM2's tokenizer, rebuilt from the tokens and merges in the GGUF metadata: byte-level BPE, one token per digit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weights import metadata

CONTROL = 3  # GGUF token type of <|im_start|> and its like


def build_tokenizer(tokens: Sequence[str], merges: Sequence[str], control: Sequence[str] = ()) -> Any:
    """A `tokenizers.Tokenizer` from a token list, "left right" merge lines and the special tokens among the tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    pairs = []
    for line in merges:
        left, separator, right = line.partition(" ")
        if not separator:
            raise ValueError(f"merges: expected two pieces with a space between, received {line!r}")
        pairs.append((left, right))
    tokenizer = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    return tokenizer


def load_tokenizer(reader: Any) -> Any:
    """The tokenizer of an open GGUF file; refuses one whose text splitting is not SmolLM's."""
    kind = (metadata(reader, "tokenizer.ggml.model"), metadata(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise ValueError(f"tokenizer: expected model 'gpt2' with splitting 'smollm', received {kind}")
    tokens = metadata(reader, "tokenizer.ggml.tokens")
    types = metadata(reader, "tokenizer.ggml.token_type")
    control = [token for token, kind_of in zip(tokens, types, strict=True) if kind_of == CONTROL]
    return build_tokenizer(tokens, metadata(reader, "tokenizer.ggml.merges"), control)
