"""`ScoreMod` with other options and in packed sequences, and block masks, on GPUs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import reference, testing  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

from .attention_cases import check_lse, run_dense, to_gpu  # noqa: E402
from .score_mod_cases import examples, mod_and_reference, run_both  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.mark.parametrize("kernel", ["", "attn_fwd_sm80_bf16_d128_mods"])
@pytest.mark.parametrize("name", ["lowest", "causal by hand"])
def test_scores_of_any_size_with_small_biases(name: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kernel:
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", kernel)
    q, k, v = testing.make_qkv(
        batch=1, seqlen_q=200, seqlen_k=328, heads_q=2, heads_kv=1, head_dim=128, dtype="bfloat16", seed=5
    )
    rng = np.random.default_rng(7)
    zeros, keys = np.zeros((200, 328), np.float32), 0.5 * rng.standard_normal((1, 328)).astype(np.float32)
    for mask in (zeros, keys.astype(np.float32)):
        run_both(examples(200, 328, 2, 1)[name], q, k, v, "bfloat16", mask=mask, label=str(mask.shape))


def test_packed_sequences_do_not_see_their_neighbours() -> None:
    torch.manual_seed(3)
    q, k, v = (torch.randn(260, 2, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    starts = torch.tensor([0, 100, 260], device="cuda", dtype=torch.int32)
    mod = oa.ScoreMod("score + 0.1f * (k - q)")
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 160, "max_seqlen_k": 160}
    clean = oa.attention_varlen(q, k, v, score_mod=mod, **packed)[:100]
    q[100:] = float("nan")
    assert torch.equal(oa.attention_varlen(q, k, v, score_mod=mod, **packed)[:100], clean)


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
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm80_bf16_d128_mods")
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
    # The longest sequence is said too short: nothing is found out about the tiles of longer ones.
    for name, longest in (("alibi", 200), ("documents", 200), ("prefix", 200), ("by head", 200), ("documents", 70)):
        given["max_seqlen_k"] = longest
        mod, function = mod_and_reference(made[name])
        o, lse = oa.attention_varlen(
            *(to_gpu(x, "bfloat16") for x in (q, k, v)), score_mod=mod, return_lse=True, **given
        )
        want, want_lse = reference.attention_varlen(q, k, v, score_mod=function, **packed)
        assert np.abs(o.float().cpu().numpy() - want).max() < 0.02, name
        check_lse(lse.cpu().numpy(), want_lse, name)


@pytest.mark.parametrize("kernel", ["", "mods"])
@pytest.mark.parametrize("form", ["", "bias", "keys", "mod", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_block_masks(head_dim: int, form: str, kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dtype = "float16"
    if kernel:
        names = [f"attn_fwd_sm80_fp16_d{head_dim}{suffix}_mods" for suffix in ("", "_n64")]
        known = {spec.name for spec in REGISTRY}
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", ",".join(name for name in names if name in known))
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
        if form == "keys":
            bias = rng.standard_normal((2, 1, 1, 700)).astype(np.float32)
            gpu["mask"], mask = torch.from_numpy(bias).cuda(), np.where(full, bias, -np.inf).astype(np.float32)
        if form == "mod":
            mod, options["score_mod"] = mod_and_reference(examples(500, 700, 4, 2)["by head"])
            gpu["score_mod"] = mod
        run_dense(q, k, v, dtype, mask=mask, gpu=gpu, label=str(size), **options)


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="the Hopper kernel's"
)
def test_explain_counts_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "attn_fwd_sm90_fp16_d64_m256n64_masks")
    q, k, v = (torch.randn(2, 320, 2, 64, device="cuda", dtype=torch.float16) for _ in range(3))
    assert oa.explain(q, k, v, causal=True).tiles() is None
    mask = torch.zeros(1, 1, 320, 320, device="cuda", dtype=torch.bool)
    mask[..., :64, :128] = True
    mask[..., 64:, 200] = True
    found = oa.explain(q, k, v, mask=mask)
    assert "0.102 MB are read to find hidden tiles" in str(found)
    counts = found.tiles()
    # Rows of tiles 1 to 4 see a part of tile 3 of the keys. One tile of queries has 256 rows.
    assert (counts.hidden, counts.cut, counts.whole) == (25 - 2 - 4, 4, 2)
    assert (counts.steps, counts.most_steps) == (3 + 1, 2 * 5)
    mod = oa.ScoreMod("score", mask="k / 64 == q / 64")
    counts = oa.explain(q, k, v, score_mod=mod, causal=True).tiles()
    assert (counts.hidden, counts.cut, counts.whole) == (20, 0, 5)
    blocks = torch.eye(5, device="cuda", dtype=torch.bool).expand(2, 1, 5, 5)
    counts = oa.explain(q, k, v, block_mask=blocks, block_size=64).tiles()
    assert (counts.hidden, counts.cut, counts.whole) == (20, 0, 5)
    assert counts.steps == 5
