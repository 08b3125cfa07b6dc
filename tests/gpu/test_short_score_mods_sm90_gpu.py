"""Small tiles of Hopper's kernel for short sequences with masks and softcap."""

from __future__ import annotations

import math
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402

from .test_few_queries_gpu import _close, exact, tensors  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
    ),
]
#: Batch, heads, lengths: one tile and several, rows of a tile that do not exist, more tiles than CTAs.
SHAPES = (
    (2, (4, 4), (2, 8)),
    (2, (4, 2), (33, 64)),
    (40, (12, 12), (100, 100)),
    (3, (6, 2), (128, 256)),
    (1, (4, 1), (197, 136)),
    (2, (3, 3), (577, 577)),
    (1, (2, 2), (150, 600)),
)


def _row(head_dim: int, kind: str, dtype: str) -> str:
    short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    return f"attn_fwd_sm90_{short}_d{64 if head_dim <= 64 else 128}_m64n64_{kind}"


def _aligned(*shape: int, dtype: Any) -> Any:
    """Normal numbers, rows at multiples of 16 bytes."""
    whole = torch.randn(*shape[:-1], -(-shape[-1] // 8) * 8, device="cuda").to(dtype)
    return whole[..., : shape[-1]]


def mask_of(form: str, batch: int, heads: int, seqlens: tuple[int, int], dtype: Any) -> Any:
    """A mask by its form; some rows of booleans, and of additive masks, see nothing."""
    extents = {
        "boolean": (batch, heads, *seqlens), "boolean of heads": (1, heads, *seqlens),
        "boolean of a batch": (batch, 1, *seqlens), "boolean of keys": (batch, 1, 1, seqlens[1]),
        "of keys": (batch, 1, 1, seqlens[1]), "float32 of keys": (1, heads, 1, seqlens[1]),
        "bias": (batch, heads, *seqlens), "bias of heads": (1, heads, *seqlens),
        "bias of a batch": (batch, 1, *seqlens),
        "float32": (1, heads, *seqlens), "float32 of a batch": (batch, 1, *seqlens), "bias, huge": (1, heads, *seqlens),
        "bias, any rows": (batch, 1, *seqlens), "float32, any rows": (1, heads, *seqlens),
        "bias, any memory": (1, heads, *seqlens), "bias, transposed": (batch, heads, *seqlens),
    }[form]  # fmt: skip
    if "boolean" in form:
        mask = torch.rand(extents, device="cuda") < 0.6
        if extents[2] > 1:
            mask[:, :, 0] = False
            mask[:, :, -1, : seqlens[1] // 2] = False
        else:
            mask[..., seqlens[1] // 3 :] = False
            mask[0] = False
        return mask
    dtype = torch.float32 if "float32" in form else dtype
    if "any" in form:  # of memory that begins and ends with the mask, at a multiple of 2 bytes
        memory = torch.full((math.prod(extents) + 4,), torch.nan, device="cuda", dtype=dtype)
        mask = memory[3 if "memory" in form else 0 :][: math.prod(extents)].view(extents).normal_()
    elif "transposed" in form:
        mask = torch.randn(*extents[:2], extents[3], extents[2], device="cuda", dtype=dtype).transpose(-1, -2)
    else:
        mask = _aligned(*extents, dtype=dtype)
    mask.mul_(3.0)
    if "huge" in form:
        mask.mul_(1e3)
    if extents[2] > 1:
        mask[:, :, 0, 1::2] = torch.finfo(mask.dtype).min
        mask[:, :, -1] = -torch.inf
    else:
        mask[..., -3:] = -torch.inf
    return mask


def _kind(form: str) -> str:
    if "softcap" in form and not form.startswith(("bias", "float32,", "float32 of a batch")):
        return "softcap"
    if "of keys" in form or "boolean" in form:
        return "masks"
    return "bias16" if "bias" in form else "bias32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128])
@pytest.mark.parametrize(
    "form",
    [
        "softcap", "softcap; causal", "softcap; window", "softcap; huge", "negative scale; softcap row", "boolean",
        "boolean of heads", "boolean of a batch; causal", "boolean of keys", "boolean of a batch; softcap",
        "boolean of keys; softcap", "of keys", "float32 of keys; causal", "of keys; sinks", "bias", "bias of heads",
        "bias of a batch; causal", "bias of heads; softcap", "bias, huge", "bias; window", "float32",
        "float32 of a batch; causal", "float32; sinks", "bias, any rows", "float32, any rows; causal",
        "bias, any memory", "bias, transposed",
    ],
)  # fmt: skip
def test_beside_float64(form: str, head_dim: int, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(head_dim, _kind(form), dtype))
    name = form.split(";")[0]
    for batch, heads, seqlens in SHAPES:
        q, k, v = tensors(batch, heads, seqlens, head_dim, dtype)
        call: dict[str, Any] = {"softcap": 5.0} if form.split("; ")[-1] == "softcap" or name == "softcap" else {}
        if name not in ("softcap", "negative scale"):
            call["mask"] = mask_of(name, batch, heads[0], seqlens, q.dtype)
        if form.endswith("huge") and name == "softcap":
            q *= 30.0
        if "causal" in form:
            call["causal"] = True
        if "window" in form:
            call["window"] = (9, 3)
        if "sinks" in form:
            call["sinks"] = torch.randn(heads[0], device="cuda")
        expected = exact(-q if "negative" in form else q, k, v, **call)
        if "negative" in form:
            call["softmax_scale"] = -(head_dim**-0.5)
        o, lse = oa.attention(q, k, v, return_lse=True, **call)
        assert _close(o, lse, *expected, dtype), seqlens
        assert torch.equal(oa.attention(q, k, v, **call), o)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_a_mask_that_changes_between_calls(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention starts before the mask is packed, and waits for it; the workspace is the same in all calls."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(head_dim, "masks", "bfloat16"))
    q, k, v = tensors(64, (8, 8), (200, 200), head_dim, "bfloat16")
    found, masks = [], [torch.rand(64, 8, 200, 200, device="cuda") < x / 10 for x in range(1, 9)]
    for mask in masks:
        found.append(oa.attention(q, k, v, mask=mask, return_lse=True))
    for mask, (o, lse) in zip(masks, found, strict=True):
        assert _close(o, lse, *exact(q, k, v, mask=mask), "bfloat16")


@pytest.mark.parametrize("form", ["masks", "bias16"])
def test_nan_of_hidden_keys(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that the mask hides may be NaN; its value may not."""
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", _row(64, form, "bfloat16"))
    q, k, v = tensors(2, (3, 3), (100, 104), 64, "bfloat16")
    hidden = torch.zeros(1, 3, 100, 104, dtype=torch.bool, device="cuda")
    hidden[..., 17] = hidden[..., 90] = True
    mask = (
        ~hidden if form == "masks" else torch.zeros_like(hidden, dtype=torch.bfloat16).masked_fill(hidden, -torch.inf)
    )
    wanted = exact(q, k, v, mask=mask)
    k[:, 17] = k[:, 90] = torch.nan
    o, lse = oa.attention(q, k, v, mask=mask, return_lse=True)
    assert _close(o, lse, *wanted, "bfloat16")
