"""Problems that the tests of masks, biases and softcap share, whichever kernel they are for."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from omniattn import testing

DTYPES = ("float16", "bfloat16")
#: Forms of masks: how queries and keys are extended, and the type.
FORMS = ("bool", "bool keys", "keys", "float32", "io")


def hide_and_show_tiles(visible: Any) -> None:
    """Change a mask of booleans, NumPy or torch: parts of it hide whole tiles, or nothing."""
    rows, keys = visible.shape[-2:]
    visible[..., : rows // 2, : keys // 3] = False
    visible[..., rows // 2 :, keys // 3 : 2 * keys // 3] = True


def tensors(batch: int, seqlen_q: int, seqlen_k: int, heads: int, head_dim: int, dtype: str) -> tuple[Any, ...]:
    """Q, K and V of one kv head, NumPy."""
    return testing.make_qkv(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=1, head_dim=head_dim, dtype=dtype,
        seed=head_dim,
    )  # fmt: skip


def random_options(data: st.DataObject, heads: int, reach: int) -> dict[str, Any]:
    """Options of a random problem, sinks by NumPy. reach: of windows, at most."""
    side = st.one_of(st.just(-1), st.integers(0, reach))
    options: dict[str, Any] = {
        "causal": data.draw(st.booleans()),
        "window": data.draw(st.one_of(st.none(), st.tuples(side, side))),
        "softcap": data.draw(st.sampled_from([0.0, 1.5, 30.0])),
        "softmax_scale": data.draw(st.sampled_from([None, -0.1, 0.0, 0.6])),
    }
    if data.draw(st.booleans()):
        options["sinks"] = np.linspace(-2, 2, heads, dtype=np.float32)
    return options
