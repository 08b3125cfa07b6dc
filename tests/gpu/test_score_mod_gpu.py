"""`ScoreMod` and block masks on GPUs: the examples of the documents, every kernel, errors, tiles that are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import reference, testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

from .attention_cases import check_lse, run_dense, to_gpu  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

Mod = dict[str, Any]  # expression, mask, arrays (NumPy), reference


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    PLANS.clear()
    yield
    PLANS.clear()


def mod_and_reference(mod: Mod) -> tuple[oa.ScoreMod, Any]:
    """The `ScoreMod` on GPU arrays, and the same for `omniattn.reference`."""
    arrays = mod.get("arrays", {})
    on = {name: torch.from_numpy(x).cuda() for name, x in arrays.items()}
    made = oa.ScoreMod(mod["expression"], mask=mod.get("mask"), **on)

    def function(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return mod["reference"](score, b, h, q, k, **arrays)

    return made, function


def run_both(mod: Mod, q: Any, k: Any, v: Any, dtype: str, **options: Any) -> None:
    made, function = mod_and_reference(mod)
    run_dense(q, k, v, dtype, score_mod=function, gpu={"score_mod": made}, **options)


def hide(score: Any, visible: Any) -> Any:
    return np.where(visible, score, -np.inf)


def examples(seqlen_q: int, seqlen_k: int, heads: int, batch: int) -> dict[str, Mod]:
    """The examples of docs/score_mods.md, and expressions that use every type and way to index."""
    rng = np.random.default_rng(5)
    slopes = (2.0 ** -np.arange(1, heads + 1)).astype(np.float32)
    table = rng.standard_normal((heads, 65)).astype(np.float32)
    doc_q = np.sort(rng.integers(0, 4, (batch, seqlen_q)), axis=1).astype(np.int32)
    doc_k = np.sort(rng.integers(0, 4, (batch, seqlen_k)), axis=1).astype(np.int64)
    prefix = rng.integers(1, seqlen_k, batch).astype(np.int32)
    is_global = (rng.random(seqlen_k) < 0.02).astype(np.bool_)
    odd = rng.standard_normal((heads, 2, seqlen_k)).astype(np.float16)[:, 1]
    return {
        "alibi": {
            "expression": "score + slopes[h] * (k - q)", "arrays": {"slopes": slopes},
            "reference": lambda s, b, h, q, k, slopes: s + slopes[h] * (k - q),
        },
        "table": {
            "expression": "score + table(h, min(max(k - q, -32), 32) + 32)", "arrays": {"table": table},
            "reference": lambda s, b, h, q, k, table: s + table[h, np.clip(k - q, -32, 32) + 32],
        },
        "documents": {
            "expression": "score", "mask": "doc_q(b, q) == doc_k(b, k)", "arrays": {"doc_q": doc_q, "doc_k": doc_k},
            "reference": lambda s, b, h, q, k, doc_q, doc_k: hide(s, doc_q[b, q] == doc_k[b, k]),
        },
        "prefix": {
            "expression": "score", "mask": "k <= q || k < prefix[b]", "arrays": {"prefix": prefix},
            "reference": lambda s, b, h, q, k, prefix: hide(s, (k <= q) | (k < prefix[b])),
        },
        "global": {
            "expression": "score", "mask": "abs(q - k) <= 40 || is_global[k]", "arrays": {"is_global": is_global},
            "reference": lambda s, b, h, q, k, is_global: hide(s, (abs(q - k) <= 40) | is_global[k]),
        },
        "softcap": {
            "expression": "4.0f * tanhf(score / 4.0f)",
            "reference": lambda s, b, h, q, k: 4 * np.tanh(s / 4),
        },
        "by head": {
            "expression": "score * 0.5 + float(odd(h, k))", "mask": "(q + k + h) % 3 != 0 && !(q / 64 == 1 && k >= 64)",
            "arrays": {"odd": odd},
            "reference": lambda s, b, h, q, k, odd: hide(
                s * 0.5 + odd[h, k].astype(np.float32), ((q + k + h) % 3 != 0) & ~((q // 64 == 1) & (k >= 64))
            ),
        },
        "hides all": {
            "expression": "q % 2 == 0 ? score : -INFINITY", "mask": "q < 70 || b == 1",
            "reference": lambda s, b, h, q, k: hide(s, (q % 2 == 0) & ((q < 70) | (b == 1))),
        },
        "lowest": {
            "expression": "k % 3 == 0 ? score : -3.4e38f",
            "reference": lambda s, b, h, q, k: np.where(k % 3 == 0, s, np.float32(-3.4e38)),
        },
    }  # fmt: skip


SHAPES = ((2, 200, 330, 2, 1, 128), (2, 130, 130, 3, 3, 64), (2, 300, 90, 2, 2, 256), (2, 65, 200, 2, 2, 40))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_examples(shape: tuple[int, ...], dtype: str) -> None:
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim = shape
    q, k, v = testing.make_qkv(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=heads_kv, head_dim=head_dim,
        dtype=dtype, seed=3,
    )  # fmt: skip
    for name, mod in examples(seqlen_q, seqlen_k, heads, batch).items():
        run_both(mod, q, k, v, dtype, label=name)
    run_both(examples(seqlen_q, seqlen_k, heads, batch)["alibi"], q, k, v, dtype, causal=True)


@pytest.mark.parametrize("name", ["alibi", "documents", "by head"])
@pytest.mark.parametrize("option", ["softcap", "bias", "bool", "keys", "window", "sinks", "negative", "mma"])
def test_with_other_options(name: str, option: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype, shape = "bfloat16", (2, 200, 328, 2)
    q, k, v = testing.make_qkv(
        batch=2, seqlen_q=200, seqlen_k=328, heads_q=2, heads_kv=1, head_dim=128, dtype=dtype, seed=4
    )
    rng = np.random.default_rng(6)
    options: dict[str, Any] = {
        "softcap": {"softcap": 3.0},
        "bias": {"mask": rng.standard_normal((1, 2, 200, 328)).astype(np.float32)},
        "bool": {"mask": rng.random((1, 2, 200, 328)) < 0.7},
        "keys": {"mask": np.where(np.arange(328) < 250, 0.0, -np.inf).astype(np.float32)[None, None, None]},
        "window": {"window": (100, 20)},
        "sinks": {"sinks": rng.standard_normal(2).astype(np.float32)},
        "negative": {"softmax_scale": -0.1},
        "mma": {},
    }[option]
    if option == "mma":
        cc = torch.cuda.get_device_capability()
        row = "attn_fwd_sm80_bf16_d128_mods"
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", row)
        assert cc >= (8, 0)
    run_both(examples(shape[1], shape[2], 2, 2)[name], q, k, v, dtype, **options)


@pytest.mark.parametrize("kernel", ["", "attn_fwd_sm80_bf16_d128_mods"])
def test_packed(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", kernel)
    lengths_q, lengths_k = [100, 1, 0, 130], [150, 64, 10, 200]
    q, k, v = (
        testing.round_to(np.random.default_rng(seed).standard_normal((sum(n), 2, 128)).astype(np.float32), "bfloat16")
        for seed, n in ((1, lengths_q), (2, lengths_k), (3, lengths_k))
    )
    packed = {
        "cu_seqlens_q": np.cumsum([0, *lengths_q], dtype=np.int32), "max_seqlen_q": 130,
        "cu_seqlens_k": np.cumsum([0, *lengths_k], dtype=np.int32), "max_seqlen_k": 200,
    }  # fmt: skip
    given = {name: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x for name, x in packed.items()}
    made = examples(130, 200, 2, 4)
    for name in ("alibi", "documents", "prefix", "by head"):
        mod, function = mod_and_reference(made[name])
        o, lse = oa.attention_varlen(
            *(to_gpu(x, "bfloat16") for x in (q, k, v)), score_mod=mod, return_lse=True, **given
        )
        want, want_lse = reference.attention_varlen(q, k, v, score_mod=function, **packed)
        assert np.abs(o.float().cpu().numpy() - want).max() < 0.02, name
        check_lse(lse.cpu().numpy(), want_lse, name)


def on_gpu(batch: int = 1, seqlen: int = 256, heads: int = 2, head_dim: int = 128) -> list[Any]:
    torch.manual_seed(0)
    shape = (batch, seqlen, heads, head_dim)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def test_the_compiler_says_what_is_wrong() -> None:
    q, k, v = on_gpu()
    slopes = torch.ones(2, device="cuda")
    for mod, said in (
        (oa.ScoreMod("score + slops[h]", slopes=slopes), '"slops" is undefined'),
        (oa.ScoreMod("score", mask="slopes[h] <", slopes=slopes), "score_mod mask(2)"),
        (oa.ScoreMod("score = 1.0f"), "score_mod expression(1)"),
        (oa.ScoreMod("score + slopes(h, q)", slopes=slopes), "one index for each of its dimensions"),
        (oa.ScoreMod("score + slopes", slopes=slopes), "score_mod expression(1)"),
    ):
        with pytest.raises(oa.errors.CompileError) as caught:
            oa.attention(q, k, v, score_mod=mod)
        assert said in str(caught.value)
    # Nothing is kept of it: the next call is as before.
    assert oa.attention(q, k, v, score_mod=oa.ScoreMod("score")).isfinite().all()


def test_contents_and_shapes_of_arrays_compile_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = on_gpu()
    bias = torch.randn(2, 256, device="cuda")
    first = oa.attention(q, k, v, score_mod=oa.ScoreMod("score + bias(h, k)", bias=bias))
    monkeypatch.setenv("OMNIATTN_DISABLE_JIT", "1")
    PLANS.clear()
    wider = torch.empty(2, 512, device="cuda")[:, ::2]
    wider.copy_(bias)
    mod = oa.ScoreMod("score + bias(h, k)", bias=wider)
    assert torch.equal(oa.attention(q, k, v, score_mod=mod), first)
    wider.zero_()
    assert not torch.equal(oa.attention(q, k, v, score_mod=mod), first)


def test_a_hidden_tile_is_never_loaded() -> None:
    q, k, v = on_gpu(seqlen=512)
    k[:, 128:384] = float("nan")
    v[:, 128:384] = float("nan")
    mod = oa.ScoreMod("score", mask="k < 128 || k >= 384")
    assert oa.attention(q, k, v, score_mod=mod).isfinite().all()
    if torch.cuda.get_device_capability() != (9, 0):
        return
    blocks = torch.tensor([True, False, False, True], device="cuda")[None, None, None]
    assert torch.equal(oa.attention(q, k, v, score_mod=mod), oa.attention(q, k, v, block_mask=blocks))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
)
@pytest.mark.parametrize("form", ["", "bias", "mod", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_masks(head_dim: int, form: str) -> None:
    dtype = "float16"
    q, k, v = testing.make_qkv(
        batch=2, seqlen_q=500, seqlen_k=700, heads_q=4, heads_kv=2, head_dim=head_dim, dtype=dtype, seed=8
    )
    rng = np.random.default_rng(9)
    for size, shape in (((64, 64), (2, 4, 8, 11)), ((128, 256), (1, 4, 4, 3)), ((192, 64), (2, 1, 3, 11))):
        blocks = rng.random(shape) < 0.4
        blocks[..., 1, :] = False  # rows that see nothing
        full = blocks.repeat(size[0], 2)[:, :, :500].repeat(size[1], 3)[..., :700]
        options: dict[str, Any] = {"causal": {"causal": True}}.get(form, {})
        gpu: dict[str, Any] = {"block_mask": torch.from_numpy(blocks).cuda(), "block_size": size, "mask": None}
        mask: Any = full
        if form == "bias":
            bias = rng.standard_normal((2, 4, 500, 700)).astype(np.float32)
            wide = torch.zeros(2, 4, 500, 704, device="cuda")
            wide[..., :700] = torch.from_numpy(bias)
            gpu["mask"], mask = wide[..., :700], np.where(full, bias, -np.inf).astype(np.float32)
        if form == "mod":
            mod, options["score_mod"] = mod_and_reference(examples(500, 700, 4, 2)["by head"])
            gpu["score_mod"] = mod
        run_dense(q, k, v, dtype, mask=mask, gpu=gpu, label=str(size), **options)


CHECKED = """
import torch, omniattn as oa
q = torch.randn(1, 64, 2, 64, device="cuda", dtype=torch.float16)
table = torch.zeros(2, 10, device="cuda")
oa.attention(q, q, q, score_mod=oa.ScoreMod("score + table(h, k)", table=table))
torch.cuda.synchronize()
"""


def test_checked_indices() -> None:
    env = {**os.environ, "OMNIATTN_CHECK_SCORE_MOD": "1"}
    child = subprocess.run([sys.executable, "-c", CHECKED], env=env, capture_output=True, text=True, check=False)
    assert child.returncode != 0
    assert "of dimension 1 of 'table' is outside 0 to 9" in child.stdout
    fine = CHECKED.replace("(2, 10", "(2, 64")
    child = subprocess.run([sys.executable, "-c", fine], env=env, capture_output=True, text=True, check=False)
    assert child.returncode == 0, child.stderr


def test_repeats_are_equal_bit_for_bit() -> None:
    q, k, v = on_gpu(batch=2, seqlen=700)
    slopes = torch.tensor([0.5, 0.25], device="cuda")
    mod = oa.ScoreMod("score + slopes[h] * (k - q)", mask="(q ^ k) % 5 != 0", slopes=slopes)
    first = oa.attention(q, k, v, score_mod=mod)
    for _ in range(5):
        assert torch.equal(oa.attention(q, k, v, score_mod=mod), first)
