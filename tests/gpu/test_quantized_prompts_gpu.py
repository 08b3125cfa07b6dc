"""Prompts over caches that `append` quantizes, against the NumPy reference on the same bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.problems import dequantize  # noqa: E402
from tests.gpu.decode_cases import Case, Filled, compare  # noqa: E402

pytestmark = pytest.mark.gpu

FORMATS: tuple[dict[str, Any], ...] = (
    {"k_dtype": "fp8", "v_dtype": "fp8"},
    {"k_dtype": "int8", "v_dtype": "int8"},
    {"k_dtype": "int4", "v_dtype": "int4"},
    {"k_dtype": "int4", "v_dtype": "int8", "group_size": 32},
    {"k_dtype": "io", "v_dtype": "int4"},
    {"k_dtype": "int4", "v_dtype": "int4", "cache_options": {"layout": "fbgemm"}},
    {"k_dtype": "int8", "v_dtype": "int8", "cache_options": {"zero_point": False, "hadamard": True}},
)
LENGTHS = (700, 131, 0, 90, 2000)


def run(filled: Filled, **options: Any) -> Any:
    """The call, into memory of NaN."""
    out = torch.full_like(filled.q, float("nan"))
    places = {"seq_lens": filled.lens, "block_table": filled.table, "recent_slots": filled.slots}
    return oa.attention_with_kvcache(filled.q, filled.cache, out=out, return_lse=True, **places, **options)


def filled_by(formats: dict[str, Any], **more: Any) -> Filled:
    """A cache with all tokens in it. fbgemm has no head_dim that pads a row."""
    filled = Filled(Case(**{"lengths": LENGTHS, "q_len": 80, **formats, **more}))
    filled.append()
    return filled


# Rows in FBGEMM's layout are not padded.
@pytest.mark.parametrize(
    ("dim", "formats"),
    [
        (dim, of)
        for dim in (64, 96, 128, 256)
        for of in FORMATS
        if dim != 96 or "layout" not in of.get("cache_options", {})
    ],
    ids=str,
)
def test_every_format(dim: int, formats: dict[str, Any]) -> None:
    """Contiguous, pages of 3 and of 64 tokens; heads that share keys, or do not."""
    for block_size, heads, dtype in ((0, 2, "bfloat16"), (3, 8, "float16"), (64, 2, "bfloat16")):
        filled = filled_by(formats, head_dim=dim, block_size=block_size, heads_kv=heads, dtype=dtype)
        for options in ({}, {"window": (100, 0)}, {"deterministic": True}):
            got = run(filled, **options)
            compare(
                got,
                filled.reference(window=options.get("window")),
                filled.case,
                f"{block_size} {options}",
                rounded=True,
            )


def test_what_append_did_to_keys_is_undone() -> None:
    """Mean, scales of channels, rotation, and a recent window, which knows none of them."""
    rng = np.random.default_rng(0)
    for window in (0, 40, 333):
        for block_size in (0, 16):
            options: dict[str, Any] = {
                "hadamard": True, "k_mean": rng.standard_normal((2, 128)).astype(np.float32),
                "k_channel_scale": rng.uniform(0.5, 2.0, (2, 128)).astype(np.float32),
            }  # fmt: skip
            if window:
                options |= {"recent_window": window, "recent_dtype": "bf16"}
                options |= {"recent_slots": 7} if block_size else {}
            filled = filled_by(
                {"k_dtype": "int8", "v_dtype": "int4", "cache_options": options}, block_size=block_size, heads_kv=2,
                kind="biased",
            )  # fmt: skip
            compare(run(filled), filled.reference(), filled.case, f"{window} {block_size}", rounded=True)


def test_many_tokens_on_a_long_cache() -> None:
    """As an engine has it, beside the same tokens in 16 bits."""
    for name, most in (("int8", 0.03), ("int4", 0.4), ("fp8", 0.1)):
        shape = {"lengths": (9000, 5000), "q_len": 1024, "heads_q": 32, "heads_kv": 8, "block_size": 64}
        results = []
        for k_dtype in (name, "io"):
            filled = filled_by({"k_dtype": k_dtype, "v_dtype": k_dtype}, **shape)
            results.append(run(filled)[0].float())
        assert not results[0].isnan().any()
        assert float((results[0] - results[1]).abs().mean() / results[1].abs().mean()) < most


def packed(filled: Filled, rows: list[int], **options: Any) -> tuple[Any, Any]:
    """The last queries of each sequence, packed, and what the batch gives for them."""
    q_len = filled.case.q_len
    whole = run(filled, **options)
    picked = [torch.arange(q_len - n, q_len, device="cuda") + b * q_len for b, n in enumerate(rows)]
    at = torch.cat(picked)
    flat = filled.q.flatten(0, 1)[at].contiguous()
    starts = torch.tensor(np.cumsum([0, *rows]), dtype=torch.int32, device="cuda")
    out = torch.full_like(flat, float("nan"))
    got = oa.attention_with_kvcache(
        flat, filled.cache, seq_lens=filled.lens, block_table=filled.table, cu_seqlens_q=starts, max_seqlen_q=q_len,
        out=out, return_lse=True, **options,
    )  # fmt: skip
    heads = whole[1].shape[1]
    expected = whole[0].flatten(0, 1)[at], whole[1].swapaxes(0, 1).reshape(heads, -1)[:, at]
    return got, expected


def same(got: Any, expected: Any) -> None:
    torch.testing.assert_close(got[0], expected[0], atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(got[1], expected[1], atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("formats", FORMATS, ids=str)
@pytest.mark.parametrize("options", [{}, {"window": (100, 0)}, {"deterministic": True}], ids=str)
def test_prompts_and_single_tokens(formats: dict[str, Any], options: dict[str, Any]) -> None:
    """Single tokens by the kernels of decode, on the codes; the others in 16 bits."""
    filled = filled_by(formats, block_size=16, heads_kv=2, lengths=(700, 131, 90, 64, 2000, 80))
    same(*packed(filled, [80, 1, 0, 2, 1, 80], **options))


@pytest.mark.parametrize("batch", [False, True])
def test_rounds(monkeypatch: pytest.MonkeyPatch, batch: bool) -> None:
    """A workspace that has not room for all sequences at a time gives the same bits."""
    filled = filled_by(FORMATS[1], block_size=16, heads_kv=2, lengths=(700, 131, 0, 90, 2000, 513, 80, 1200))
    rows = [80, 70, 33, 1, 80, 40, 2, 80]
    call = (lambda: run(filled, deterministic=True)) if batch else lambda: packed(filled, rows, deterministic=True)[0]
    once = call()
    monkeypatch.setattr(dequantize, "_MOST_BYTES", 17 * 2 * 128 * 2 * 128 * 2)
    # Another call as to selection and plans: of a table with room for other lengths.
    if filled.table is not None:
        filled.table = torch.nn.functional.pad(filled.table, (0, 3))
    several = call()
    for one, other in zip(once, several, strict=True):
        assert torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    assert not several[0].isnan().any()


def test_a_graph_with_other_lengths() -> None:
    """Lengths, starts and tables change in the arrays that a graph was captured with."""
    filled = filled_by(FORMATS[1], block_size=16, heads_kv=2, lengths=(700, 131, 90, 2000))
    q = torch.randn(170, 8, 128, device="cuda", dtype=torch.bfloat16)
    starts, lens = torch.tensor([0, 80, 81, 81, 161], dtype=torch.int32, device="cuda"), filled.lens.clone()
    assert filled.table is not None
    table = filled.table.clone()

    def call() -> Any:
        return oa.attention_with_kvcache(
            q, filled.cache, seq_lens=lens, block_table=table, cu_seqlens_q=starts, max_seqlen_q=120, return_lse=True
        )

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = call()
    for cu, numbers in (([0, 80, 81, 81, 161], (700, 131, 90, 2000)), ([0, 1, 121, 151, 152], (650, 130, 31, 1999)),
                        ([0, 0, 0, 0, 0], (0, 0, 0, 0)), ([0, 3, 43, 44, 170], (5, 43, 90, 126))):  # fmt: skip
        starts.copy_(torch.tensor(cu, dtype=torch.int32))
        lens.copy_(torch.tensor(numbers, dtype=torch.int32))
        table.copy_(filled.table.flip(1) if numbers[0] == 5 else filled.table)
        if numbers[0] == 5:  # blocks of nobody are elsewhere: their entries may be anything
            table.copy_(filled.table)
            table[0, 1:] = 2**31 - 1
        graph.replay()
        expected = call()
        assert all(torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0)) for a, b in zip(results, expected, strict=True))
        assert not results[0].isnan().any()
        assert not results[0][cu[-1] :].any()


@pytest.mark.parametrize("q_len", [1, 7, 80])
@pytest.mark.parametrize("block_size", [0, 3, 64])
def test_padding_in_front(block_size: int, q_len: int) -> None:
    """Of 16 bits: as the tokens behind it alone."""
    pads = (100, 3, 1, 90, -5)
    filled = filled_by({"k_dtype": "io", "v_dtype": "io"}, block_size=block_size, heads_kv=2, q_len=q_len)
    starts = np.cumsum([0, *LENGTHS])
    for options in ({}, {"window": (40, 0)}, {"softcap": 5.0}):
        o, lse = run(filled, leftpad_k=torch.tensor(pads, dtype=torch.int32, device="cuda"), **options)
        for b, pad in enumerate(pads):
            own = slice(starts[b] + min(max(pad, 0), LENGTHS[b]), starts[b + 1])
            expected = oa.attention(
                filled.q[b : b + 1], filled.k[own][None], filled.v[own][None], causal=True, return_lse=True, **options
            )
            same((o[b : b + 1], lse[b : b + 1]), expected)


@pytest.mark.parametrize("formats", [FORMATS[1], FORMATS[5]], ids=str)
def test_padding_in_front_of_codes(formats: dict[str, Any]) -> None:
    """As if the table began behind it."""
    filled = filled_by(formats, block_size=16, heads_kv=2, lengths=(700, 131, 96, 2000))
    assert filled.table is not None
    made = run(filled, leftpad_k=torch.full((4,), 96, dtype=torch.int32, device="cuda"))
    filled.table, filled.lens = filled.table[:, 6:].contiguous(), filled.lens - 96
    same(made, run(filled))


def test_options() -> None:
    """Softcap, sinks, a score modification, keys behind the query."""
    filled = filled_by(FORMATS[1], block_size=64, heads_kv=2)
    sinks = torch.linspace(-1.0, 2.0, 8, device="cuda")
    compare(
        run(filled, softcap=4.0, sinks=sinks), filled.reference(softcap=4.0, sinks=sinks.cpu().numpy()), filled.case
    )
    mod = oa.ScoreMod("score * 1.0")
    plain, modified = run(filled, causal=False), run(filled, causal=False, score_mod=mod)
    same(plain, modified)
