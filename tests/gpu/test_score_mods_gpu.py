"""Masks, biases and softcap on the Hopper kernel: every form, skipped tiles, special values, what selection says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from hypothesis import HealthCheck, given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

import omniattn as oa  # noqa: E402
from omniattn import reference, testing  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

from .attention_cases import check_lse, run_dense, to_gpu, to_numpy  # noqa: E402
from .score_mod_cases import examples, mod_and_reference  # noqa: E402
from .softcap_mask_cases import DTYPES, FORMS, hide_and_show_tiles, random_options, tensors  # noqa: E402

FORCE = "OMNIATTN_FORCE_KERNEL"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.usefixtures("fresh_plans"),
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="the kernels are for compute capability 9.0",
    ),
]


def mask_of(
    form: str, batch: int, heads: int, seqlen_q: int, seqlen_k: int, dtype: str, seed: int = 0
) -> tuple[np.ndarray[Any, Any], torch.Tensor]:
    """A mask for the reference and for the GPU: parts of it hide whole tiles, or nothing."""
    rng = np.random.default_rng(seed)
    rows = 1 if "keys" in form else seqlen_q
    visible = rng.random((batch, heads, rows, seqlen_k)) < 0.8
    hide_and_show_tiles(visible)
    if form.startswith("bool"):
        return visible, torch.from_numpy(visible).cuda()
    values = np.where(visible, 2 * rng.standard_normal(visible.shape), -np.inf).astype(np.float32)
    if form != "io":
        return values, torch.from_numpy(values).cuda()
    values = testing.round_to(values, dtype)
    return values, to_gpu(values, dtype)


def kernel(*args: Any, **options: Any) -> str:
    return str(oa.explain(*args, **options).kernel)


def large_tiles(head_dim: int, dtype: str, *, varlen: bool = False) -> str:
    """Hopper's rows with scores that list what a mask leaves, those for the fewest forms first."""
    tile = next(width for width in (64, 96, 128, 192, 256) if width >= head_dim)
    rows = [
        spec
        for spec in REGISTRY
        if spec.op == "attention" and spec.family == "attn_fwd_sm90" and spec.score_mods and spec.lists
        if (spec.head_dim, spec.dtype, spec.sequences) == (tile, dtype, "packed" if varlen else "dense")
    ]
    return ",".join(spec.name for spec in sorted(rows, key=lambda spec: spec.options))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [40, 64, 96, 128, 192, 256])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 4.0, "window": (150, 40)}], ids=str)
def test_forms(form: str, head_dim: int, dtype: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, large_tiles(head_dim, dtype))
    q, k, v = tensors(2, 330, 520, 2, head_dim, dtype)
    mask, on_gpu = mask_of(form, 2, 2, 330, 520, dtype)
    on = [to_gpu(x, dtype) for x in (q, k, v)]
    assert kernel(*on, mask=on_gpu, **options).startswith("attn_fwd_sm90")
    run_dense(q, k, v, dtype, mask=mask, gpu={"mask": on_gpu}, **options)


@given(
    data=st.data(),
    form=st.sampled_from(("none", *FORMS)),
    head_dim=st.sampled_from([16, 64, 72, 128, 128, 160, 256]),
    seqlen_q=st.integers(1, 450),
    seqlen_k=st.integers(1, 450),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
def test_random_problems(
    data: st.DataObject, form: str, head_dim: int, seqlen_q: int, seqlen_k: int, dtype: str
) -> None:
    if form in ("float32", "io") and data.draw(st.booleans()):
        seqlen_k = -(-seqlen_k // 8) * 8  # rows of whole 16 bytes: tensor maps
    batch, heads = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 4))
    options = random_options(data, heads, 300)
    gpu = {}
    if form != "none":
        extents = data.draw(st.sampled_from([1, batch])), data.draw(st.sampled_from([1, heads]))
        options["mask"], gpu["mask"] = mask_of(form, *extents, seqlen_q, seqlen_k, dtype, data.draw(st.integers(0, 99)))
    label = f"{form} {options}"
    # Each of these is compiled for each kernel: few of them.
    if head_dim == 128 and dtype == "float16" and (name := data.draw(st.sampled_from(["", "alibi", "by head"]))):
        label += f" {name}"
        made = examples(seqlen_q, seqlen_k, heads, batch)[name]
        gpu["score_mod"], options["score_mod"] = mod_and_reference(made)
    if form in ("none", "float32", "io") and data.draw(st.booleans()):
        rows, keys = data.draw(st.sampled_from([(64, 64), (192, 64), (64, 256)]))
        rng = np.random.default_rng(data.draw(st.integers(0, 99)))
        blocks = rng.random((1, heads, -(-seqlen_q // rows), -(-seqlen_k // keys))) < 0.6
        gpu |= {"block_mask": torch.from_numpy(blocks).cuda(), "block_size": (rows, keys)}
        visible = blocks.repeat(rows, 2)[:, :, :seqlen_q].repeat(keys, 3)[..., :seqlen_k]
        mask = options.get("mask")
        gpu.setdefault("mask", None)
        options["mask"] = visible if mask is None else np.where(visible, mask, -np.inf).astype(np.float32)
        label += f" blocks of {rows, keys}"
    q, k, v = tensors(batch, seqlen_q, seqlen_k, heads, head_dim, dtype)
    run_dense(q, k, v, dtype, label, gpu=gpu, **options)


#: Tiles of 64 rows (lines) and 64 keys: hidden, a part hidden, visible. Each warpgroup passes over the hidden ones of
#: its rows: at the beginning, in between, at the end, all of them.
RUNS = {
    "alternating": ["X.X.X.X.X", ".X.X.X.X.", "X.X.X.X.X", ".X.X.X.X."],
    "ends": ["..XXoXX..", "XX.....oX", "....X....", "X........"],
    "one warpgroup of three": [".........", "XoXXXoXXX", ".........", ".........", "........."],
    "one tile": ["........X", "X........", "....o....", "........."],
    "parts": ["o.o.o.o.o", "ooo...ooo", ".........", "o........"],
    "nothing": [".........", ".........", ".........", "........."],
}


def mask_of_tiles(lines: list[str], seqlen_q: int, seqlen_k: int, seed: int = 0) -> np.ndarray[Any, Any]:
    rng = np.random.default_rng(seed)
    share = np.array([[{".": 0.0, "o": 0.6, "X": 1.0}[x] for x in line] for line in lines])
    rows = np.arange(seqlen_q) // 64 % len(lines)
    cols = np.arange(seqlen_k) // 64 % len(lines[0])
    return (rng.random((1, 1, seqlen_q, seqlen_k)) < share[rows[:, None], cols[None]]).astype(np.bool_)


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 5.0}, {"window": (200, 100)}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", RUNS)
def test_runs_of_tiles(name: str, head_dim: int, options: dict[str, Any]) -> None:
    """Warpgroups that skip steps keep the order of all, whatever they skip; three heads of queries on one of keys."""
    for seqlen_q, seqlen_k in ((600, 570), (64, 570), (333, 130), (257, 64)):
        q, k, v = tensors(1, seqlen_q, seqlen_k, 3, head_dim, "bfloat16")
        mask = mask_of_tiles(RUNS[name], seqlen_q, seqlen_k)
        on_gpu = torch.from_numpy(mask).cuda()
        label = f"{name} {seqlen_q} {seqlen_k}"
        run_dense(q, k, v, "bfloat16", label, mask=mask, gpu={"mask": on_gpu}, **options)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_runs_of_random_tiles(head_dim: int) -> None:
    rng = np.random.default_rng(head_dim)
    q, k, v = tensors(2, 800, 1000, 2, head_dim, "float16")
    for share in (0.1, 0.5, 0.9):
        lines = ["".join(rng.choice(list(".oX"), 16, p=[1 - share, share / 2, share / 2])) for _ in range(13)]
        mask = mask_of_tiles(lines, 800, 1000)
        run_dense(q, k, v, "float16", str(share), mask=mask, gpu={"mask": torch.from_numpy(mask).cuda()})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("options", [{}, {"causal": True}], ids=str)
def test_softcap_of_any_scores(options: dict[str, Any], head_dim: int, dtype: str) -> None:
    """Far below the cap, near to it and beyond it, and from one to the other: each has its own approximation."""
    q, k, v = tensors(1, 320, 700, 2, head_dim, dtype)
    for softcap in (0.3, 3.0, 12.0, 400.0):
        run_dense(q, k, v, dtype, str(softcap), softcap=softcap, **options)
    k = k.copy()
    k[:, [70, 300, 301]] *= 6.0
    k = testing.round_to(k, dtype)
    for softcap in (5.0, 25.0, 60.0):
        run_dense(q, k, v, dtype, f"{softcap}, large keys", softcap=softcap, **options)


def check_biased(
    q: np.ndarray[Any, Any], k: np.ndarray[Any, Any], v: np.ndarray[Any, Any], on: list[torch.Tensor],
    mask: np.ndarray[Any, Any], form: str, label: str,
) -> None:  # fmt: skip
    """``on``: q, k and v on the GPU. LSE is not compared where all keys have the lowest number: it is cut."""
    mask = testing.round_to(mask, "bfloat16") if form == "io" else np.float32(mask)
    on_gpu = to_gpu(mask, "bfloat16") if form == "io" else torch.from_numpy(mask).cuda()
    o, lse = oa.attention(*on, mask=on_gpu, return_lse=True)
    ref_o, ref_lse = reference.attention(q, k, v, mask=mask)
    naive, _ = testing.same_dtype_naive(q, k, v, dtype="bfloat16", mask=mask)
    testing.assert_close(to_numpy(o), ref_o, naive=naive, dtype="bfloat16", atol=1e-6, label=label)
    there = ref_lse > -1e30
    check_lse(lse.cpu().numpy()[there], ref_lse[there], label)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("form", ["float32", "io"])
def test_keys_that_a_bias_hides_may_be_nan(form: str, head_dim: int) -> None:
    """-inf hides a key whatever its product is, in every tile of keys."""
    q, k, v = tensors(1, 200, 520, 2, head_dim, "bfloat16")
    mask, _ = mask_of(form, 1, 1, 200, 520, "bfloat16")
    hidden = [3, 130, 131, 400, 519]
    mask[..., hidden] = -np.inf
    on = [to_gpu(x, "bfloat16") for x in (q, k, v)]
    on[1][:, hidden] = torch.nan
    check_biased(q, k, v, on, mask, form, str(head_dim))


@pytest.mark.parametrize("form", ["float32", "io"])
def test_biases_of_all_sizes(form: str) -> None:
    """Rows whose base is large, or none yet, beside others: causal by -inf, lowest numbers first, growing ones."""
    q, k, v = tensors(1, 256, 640, 1, 128, "bfloat16")
    on = [to_gpu(x, "bfloat16") for x in (q, k, v)]
    rows, keys = np.arange(256)[:, None], np.arange(640)[None]
    lowest = np.float32(-3.0e38)
    for name, mask in {
        "causal": np.where(keys > rows + 384, -np.inf, 0.0),
        "lowest": np.where(keys > rows + 64, lowest, 0.0),
        "only lowest in some rows": np.where((rows % 3 == 0) | (keys % 2 == 0), lowest, 1.0),
        "hidden first, then lowest": np.where(keys >= 320, -np.inf, lowest) + np.zeros((256, 1)),
        "large": np.where(keys == 200, 3.0e4, 0.0) + np.zeros((256, 1)),
        "growing": 2.0e4 - 60.0 * keys + 0.0 * rows,
    }.items():
        check_biased(q, k, v, on, np.float32(mask)[None, None], form, name)


@pytest.mark.parametrize("form", ["bool", "bool keys", "keys"])
def test_tiles_that_nobody_sees_are_never_loaded(form: str) -> None:
    """NaN in K and V there reaches nobody: not even as 0 times NaN."""
    q, k, v = tensors(1, 300, 640, 2, 128, "bfloat16")
    mask, on_gpu = mask_of(form, 1, 1, 300, 640, "bfloat16")
    hidden = slice(128, 320)
    mask[..., hidden] = False if form.startswith("bool") else -np.inf
    on_gpu[..., hidden] = False if form.startswith("bool") else -torch.inf
    clean = [to_gpu(x, "bfloat16") for x in (q, k, v)]
    want = oa.attention(*clean, mask=on_gpu)
    for x in clean[1:]:
        x[:, hidden] = torch.nan
    got = oa.attention(*clean, mask=on_gpu)
    assert torch.equal(got, want)
    assert not got.isnan().any()


@pytest.mark.parametrize("form", ["float32", "io", "keys"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -3.0e38, 1.0e30, 9000.0])
def test_special_values(form: str, value: float) -> None:
    """In one key's column: NaN reaches every row, infinity as the reference says, large numbers decide."""
    q, k, v = tensors(1, 130, 264, 1, 64, "bfloat16")
    mask, _ = mask_of(form, 1, 1, 130, 264, "bfloat16")
    mask[..., 100] = value if form != "io" else testing.round_to(np.float32(value), "bfloat16")
    on_gpu = to_gpu(mask, "bfloat16") if form == "io" else torch.from_numpy(mask).cuda()
    run_dense(q, k, v, "bfloat16", mask=mask, gpu={"mask": on_gpu})


def test_rows_that_have_only_the_lowest_number_are_means() -> None:
    q, k, v = tensors(1, 64, 200, 1, 64, "bfloat16")
    for on_gpu in (
        torch.full((64, 200), torch.finfo(torch.float32).min, device="cuda"),
        torch.full((1, 200), torch.finfo(torch.float32).min, device="cuda"),
        torch.full((64, 200), torch.finfo(torch.bfloat16).min, device="cuda", dtype=torch.bfloat16),
    ):
        out = oa.attention(*(to_gpu(x, "bfloat16") for x in (q, k, v)), mask=on_gpu).float()
        want = to_gpu(v, "bfloat16").float().mean(dim=1, keepdim=True).expand_as(out)
        assert torch.allclose(out, want, atol=2e-3)


@pytest.mark.parametrize("form", FORMS)
def test_same_bits_every_time(form: str) -> None:
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(2, 700, 900, 4, 128, "bfloat16"))
    _, mask = mask_of(form, 2, 4, 700, 904, "bfloat16")
    mask = mask[..., :900]
    want = oa.attention(q, k, v, mask=mask, softcap=20.0)
    for _ in range(30):
        assert torch.equal(oa.attention(q, k, v, mask=mask, softcap=20.0), want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mask_that_moves_by_one_element(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same shape and strides, another alignment: tensor maps cannot describe it, and it is copied for them."""
    monkeypatch.setenv(FORCE, large_tiles(128, "bfloat16"))
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(1, 200, 256, 2, 128, "bfloat16"))
    memory = torch.randn(200, 272, device="cuda").to(dtype)
    for shift in (0, 1, 0, 3, 8):
        mask = memory[:, shift : shift + 256]
        aligned = mask.data_ptr() % 16 == 0
        text = str(oa.explain(q, k, v, mask=mask))
        assert "attn_fwd_sm90" in text
        assert ("mask_align_sm80" in text) == (not aligned)
        got, want = oa.attention(q, k, v, mask=mask), oa.attention(q, k, v, mask=mask.contiguous())
        assert torch.allclose(got.float(), want.float(), atol=2e-2)


def test_explain_names_the_kernels_of_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, "attn_fwd_sm90_bf16_d128_m64n64_masks")
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(1, 200, 256, 2, 128, "bfloat16"))
    found = oa.explain(q, k, v, mask=torch.ones(1, 1, 200, 256, dtype=torch.bool, device="cuda"))
    assert "mask_pack_sm80_bf16" in str(found)
    assert "mask_list_sm80" not in str(found)  # small tiles visit all keys
    assert found.tiles() is None
    monkeypatch.setenv(FORCE, large_tiles(128, "bfloat16"))
    text = str(oa.explain(q, k, v, mask=torch.zeros(200, 257, device="cuda")[:, :256]))
    assert "rows at multiples of 16 bytes" in text
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(1, 200, 320, 2, 128, "bfloat16"))
    text = str(oa.explain(q, k, v, mask=torch.ones(1, 1, 200, 320, dtype=torch.bool, device="cuda")))
    assert "mask_pack_sm80_bf16" in text
    assert "mask_list_sm80" in text


def test_captured_calls_see_the_mask_of_their_replay() -> None:
    q, k, v = (to_gpu(x, "bfloat16") for x in tensors(1, 300, 512, 2, 64, "bfloat16"))
    mask = torch.rand(1, 1, 300, 512, device="cuda") < 0.5
    oa.attention(q, k, v, mask=mask)
    graph, out = torch.cuda.CUDAGraph(), torch.empty_like(q)
    with torch.cuda.graph(graph):
        oa.attention(q, k, v, mask=mask, out=out)
    for fraction in (0.0, 0.3, 1.0):
        mask.copy_(torch.rand(mask.shape, device="cuda") < fraction)
        graph.replay()
        assert torch.equal(out, oa.attention(q, k, v, mask=mask))
    assert not out.isnan().any()


@pytest.mark.parametrize("form", ["bool", "keys", "float32", "io"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"softcap": 4.0}], ids=str)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_packed_sequences_with_masks(
    form: str, options: dict[str, Any], head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as batches of one, of which each has its part of the mask; neighbours that are NaN are not seen."""
    of_packed, of_one = (large_tiles(head_dim, "bfloat16", varlen=varlen) for varlen in (True, False))
    monkeypatch.setenv(FORCE, f"{of_packed},{of_one}")
    lengths_q, lengths_k = [5, 0, 300, 129, 64, 200], [70, 9, 320, 0, 257, 64]
    cu = [torch.tensor(np.cumsum([0, *x]), dtype=torch.int32, device="cuda") for x in (lengths_q, lengths_k)]
    q, k, v = (torch.randn(sum(n), 4, head_dim, device="cuda", dtype=torch.bfloat16) for n in (
        lengths_q, lengths_k, lengths_k))  # fmt: skip
    _, mask = mask_of("bool keys" if form == "keys" else form, 6, 1, 300, 320, "bfloat16")
    packed = {"cu_seqlens_q": cu[0], "cu_seqlens_k": cu[1], "max_seqlen_q": 300, "max_seqlen_k": 320}
    name = kernel(oa.attention_varlen, q, k, v, mask=mask, **packed, **options)
    assert name.startswith("attn_fwd_sm90")
    assert "_varlen_" in name
    got = oa.attention_varlen(q, k, v, mask=mask, **packed, **options)
    for b in range(6):
        rows, keys = (slice(c[b].item(), c[b + 1].item()) for c in cu)
        if lengths_q[b]:
            part = mask[b : b + 1, :, : lengths_q[b] if mask.shape[2] > 1 else 1, : lengths_k[b]]
            want = oa.attention(q[None, rows], k[None, keys], v[None, keys], mask=part, **options)[0]
            assert torch.allclose(got[rows].float(), want.float(), atol=2e-2), b
    k[cu[1][2] : cu[1][3]] = torch.nan
    v[cu[1][2] : cu[1][3]] = torch.nan
    again = oa.attention_varlen(q, k, v, mask=mask, **packed, **options)
    others = torch.ones(len(q), dtype=torch.bool)
    others[cu[0][2] : cu[0][3]] = False
    assert torch.equal(again[others], got[others])


def test_explain_counts_tiles_of_packed_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FORCE, "attn_fwd_sm90_bf16_d64_m192n64_varlen_masks")
    cu = torch.tensor([0, 64, 64, 364], dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(364, 2, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    packed = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 300, "max_seqlen_k": 300}
    mask = torch.zeros(3, 1, 1, 300, device="cuda", dtype=torch.bool)
    mask[0, ..., :64] = True
    mask[2, ..., 100:128] = True
    counts = oa.explain(oa.attention_varlen, q, k, v, mask=mask, **packed).tiles()
    assert (counts.hidden, counts.cut, counts.whole) == (15 - 2, 1, 1)
    # Tiles of 192 queries: one of the first sequence, two of the last.
    assert (counts.steps, counts.most_steps) == (1 + 2, 1 + 2 * 5)
    mod = oa.ScoreMod("score", mask="k / 64 == q / 64")
    counts = oa.explain(oa.attention_varlen, q, k, v, score_mod=mod, **packed).tiles()
    assert (counts.hidden, counts.cut, counts.whole) == (20, 1, 5)
    assert counts.steps == 1 + 3 + 2


def test_packed_sequences_with_softcap() -> None:
    heads, lengths = 4, [5, 0, 300, 129, 64]
    starts = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32, device="cuda")
    q, k, v = (torch.randn(sum(lengths), heads, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    call = {"softcap": 3.0, "causal": True}
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 300, "max_seqlen_k": 300}
    got = oa.attention_varlen(q, k, v, **packed, **call)
    for begin, end in zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True):
        if begin < end:
            want = oa.attention(*(x[None, begin:end] for x in (q, k, v)), **call)[0]
            assert torch.allclose(got[begin:end].float(), want.float(), atol=1e-2)
