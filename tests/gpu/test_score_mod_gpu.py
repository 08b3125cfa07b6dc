"""`ScoreMod` and block masks on GPUs: the examples of the documents, every kernel, errors, tiles that are skipped."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

from .score_mod_cases import examples, run_both  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


FEW = ("alibi", "documents", "by head")
#: batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim; which examples: every one is compiled for each.
SHAPES: tuple[tuple[tuple[int, ...], str, tuple[str, ...]], ...] = (
    ((2, 200, 330, 2, 1, 128), "bfloat16", ()),
    ((2, 200, 330, 2, 1, 128), "float16", FEW),
    ((2, 130, 130, 3, 3, 64), "float16", FEW),
    ((2, 130, 130, 3, 3, 64), "bfloat16", ("alibi", "lowest")),
    ((2, 300, 90, 2, 2, 256), "bfloat16", FEW),
    ((2, 65, 200, 2, 2, 40), "bfloat16", FEW),
    ((2, 65, 200, 2, 2, 96), "bfloat16", FEW),
    ((2, 65, 200, 2, 2, 192), "bfloat16", FEW),
)


@pytest.mark.parametrize(("shape", "dtype", "names"), SHAPES, ids=str)
def test_examples(shape: tuple[int, ...], dtype: str, names: tuple[str, ...]) -> None:
    batch, seqlen_q, seqlen_k, heads, heads_kv, head_dim = shape
    q, k, v = testing.make_qkv(
        batch=batch, seqlen_q=seqlen_q, seqlen_k=seqlen_k, heads_q=heads, heads_kv=heads_kv, head_dim=head_dim,
        dtype=dtype, seed=3,
    )  # fmt: skip
    for name, mod in examples(seqlen_q, seqlen_k, heads, batch).items():
        if name in names or not names:
            run_both(mod, q, k, v, dtype, label=name)
    run_both(examples(seqlen_q, seqlen_k, heads, batch)["alibi"], q, k, v, dtype, causal=True)


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


@pytest.mark.parametrize("kernel", ["", "attn_fwd_sm80_bf16_d128_mods"])
def test_the_largest_score_takes_all(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", kernel)
    q, k, v = on_gpu()
    o = oa.attention(q, k, v, score_mod=oa.ScoreMod("k == 100 + h ? 3e38f : score"))
    for head in range(2):
        assert torch.equal(o[:, :, head], v[:, 100 + head, head].expand_as(o[:, :, head]))


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
    blocks = torch.tensor([True, False, False, True], device="cuda")[None, None, None]
    assert torch.allclose(oa.attention(q, k, v, score_mod=mod), oa.attention(q, k, v, block_mask=blocks), atol=4e-3)


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
