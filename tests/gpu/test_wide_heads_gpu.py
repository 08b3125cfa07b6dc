"""Heads of more than 256 channels: forward, gradients, caches, on every generic row that this GPU takes."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.registry import REGISTRY  # noqa: E402

pytestmark = pytest.mark.gpu

#: head_dim, and that of v.
PAIRS = [(264, 264), (320, 320), (384, 384), (512, 512), (512, 256), (256, 512), (512, 64), (72, 328), (504, 264)]
DTYPES = ["float16", "bfloat16"]
#: Of P and O rounded to 16 bits.
ERROR = {"float16": 4e-3, "bfloat16": 2e-2}
#: Endings of the names of tiles.
FORWARD = ["", "_m32", "_n64", "_split", "_m32_split"]
BACKWARD = ["", "_s1", "_m16"]
DQ = ["", "_n16", "_m32"]


def rows(family: str, suffix: str) -> str:
    """Rows of 512 channels with a tile, for both dtypes and all options, as OMNIATTN_FORCE_KERNEL has them."""
    kinds = ("", "_mods", "_paged", "_paged_mods", "_dmask")
    names = {f"{family}_{short}_d512{suffix}{kind}" for short in ("fp16", "bf16") for kind in kinds}
    smem = torch.cuda.get_device_properties(0).shared_memory_per_block_optin
    found = [row.name for row in REGISTRY if row.name in names and row.smem_bytes <= smem]
    if not found:
        pytest.skip(f"{family}{suffix} needs more shared memory than this GPU has")
    return ",".join(found)


def tensors(dims: tuple[int, int], dtype: str, *, batch: int = 2, sq: int = 131, sk: int = 197, heads: int = 6,
            heads_kv: int = 2) -> list[Any]:  # fmt: skip
    torch.manual_seed(sum(dims) + sq)
    shapes = ((batch, sq, heads, dims[0]), *((batch, sk, heads_kv, d) for d in dims))
    return [torch.randn(shape, device="cuda", dtype=getattr(torch, dtype)) for shape in shapes]


def exact(
    q: Any, k: Any, v: Any, *, causal: bool = False, window: Any = None, softcap: float = 0.0, mask: Any = None,
    sinks: Any = None, softmax_scale: float | None = None,
) -> tuple[Any, Any]:  # fmt: skip
    """o and LSE in float64, with gradients."""
    group = q.shape[2] // k.shape[2]
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    scores = q @ k.repeat_interleave(group, 1).mT * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    sq, sk = scores.shape[-2:]
    at = torch.arange(sk, device="cuda")[None] - torch.arange(sq, device="cuda")[:, None] - (sk - sq)
    left, right = window or (-1, -1)
    right = 0 if causal else right
    hidden = (at > right) & (right >= 0) | (at < -left) & (left >= 0)
    scores = scores.masked_fill(hidden, -torch.inf)
    dead = scores.amax(-1, keepdim=True) == -torch.inf
    if sinks is not None:
        column = sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), -1)
    lse = scores.logsumexp(-1)
    p = scores.masked_fill(dead, 0.0).softmax(-1)[..., :sk].masked_fill(dead, 0.0)
    return (p @ v.repeat_interleave(group, 1)).transpose(1, 2), lse


def check(got: Any, wanted: Any, most: float, what: str = "") -> None:
    """Of a size of 1; larger ones by their own."""
    assert got.shape == wanted.shape, what
    assert got.isfinite().all(), what
    error, largest = (got.double() - wanted).abs().max().item(), wanted.abs().max().item()
    assert error <= most * max(1.0, largest), f"{what}: {error:.3g} of {largest:.3g}"


def check_lse(got: Any, wanted: Any, what: str = "") -> None:
    finite = wanted.isfinite()
    assert torch.equal(got.isfinite(), finite), what
    assert (got.double() - wanted)[finite].abs().max().item() <= 2e-3, what


def options_of(dtype: str, batch: int = 2, heads: int = 6, sq: int = 131, sk: int = 197) -> dict[str, dict[str, Any]]:
    torch.manual_seed(1)
    bias = torch.randn(batch, heads, sq, sk + 3, device="cuda")
    return {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": (40, 9)},
        "softcap": {"softcap": 15.0, "causal": True},
        "scale": {"softmax_scale": 0.0},
        "sinks": {"sinks": torch.randn(heads, device="cuda"), "causal": True},
        "bool": {"mask": torch.rand(batch, 1, sq, sk, device="cuda") < 0.6},
        "keys": {"mask": torch.rand(batch, 1, 1, sk, device="cuda") < 0.5},
        "bias": {"mask": bias[..., :sk]},
        "io bias": {"mask": bias[:1, :, :, :sk].to(getattr(torch, dtype)), "causal": True},
    }


@pytest.fixture(params=["chosen", *FORWARD])
def forward_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What selection chooses, and each tile."""
    if request.param != "chosen":
        # Without scores one by one, and without packed sequences and pages.
        others = rows("attn_fwd_sm80", "") if request.param in ("_n64", "_split", "_m32_split") else ""
        monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", f"{rows('attn_fwd_sm80', request.param)},{others}".strip(","))
    return str(request.param)


@pytest.mark.parametrize("dims", PAIRS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_forward(dims: tuple[int, int], dtype: str, forward_tile: str) -> None:
    q, k, v = tensors(dims, dtype)
    for name, options in options_of(dtype).items():
        out = torch.full((2, 131, 6, dims[1]), torch.nan, device="cuda", dtype=q.dtype)
        o, lse = oa.attention(q, k, v, return_lse=True, out=out, **options)
        wanted, wanted_lse = exact(q, k, v, **options)
        assert o is out
        check(o, wanted, ERROR[dtype], name)
        check_lse(lse, wanted_lse, name)


#: Splits take no pages, and need keys.
without_splits = pytest.mark.parametrize(
    "forward_tile", [tile for tile in ("chosen", *FORWARD) if "split" not in tile], indirect=True
)


@pytest.mark.parametrize(("sq", "sk"), [(1, 1), (1, 300), (33, 17), (64, 32), (300, 70), (5, 4000)])
def test_lengths(sq: int, sk: int, forward_tile: str) -> None:
    q, k, v = tensors((512, 320), "bfloat16", sq=sq, sk=sk)
    for causal in (False, True):
        o, lse = oa.attention(q, k, v, causal=causal, return_lse=True)
        wanted, wanted_lse = exact(q, k, v, causal=causal)
        check(o, wanted, ERROR["bfloat16"])
        check_lse(lse, wanted_lse)


@without_splits
def test_no_keys(forward_tile: str) -> None:
    q, k, v = tensors((512, 320), "bfloat16", sq=65, sk=0)
    for causal in (False, True):
        o, lse = oa.attention(q, k, v, causal=causal, return_lse=True)
        assert not o.any()
        assert (lse == -torch.inf).all()


ENDS = (0, 70, 70, 200, 233)


def packed(dims: tuple[int, int], dtype: str = "bfloat16", heads_kv: int = 2) -> tuple[list[Any], dict[str, Any]]:
    given = [x[0] for x in tensors(dims, dtype, batch=1, sq=233, sk=233, heads_kv=heads_kv)]
    starts = torch.tensor(ENDS, device="cuda", dtype=torch.int32)
    return given, {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 130, "max_seqlen_k": 130}


@pytest.mark.parametrize("dims", [(264, 264), (512, 512), (320, 448)], ids=str)
def test_packed(dims: tuple[int, int], forward_tile: str) -> None:
    """Sequences of which one is empty; NaN of the last one reaches nobody else."""
    (q, k, v), starts = packed(dims)
    v[200:] = torch.nan
    for options in ({}, {"causal": True}, {"softcap": 10.0}, {"window": (20, 3)}):
        o, lse = oa.attention_varlen(q, k, v, return_lse=True, **starts, **options)
        for begin, end in ((0, 70), (70, 200)):
            wanted, wanted_lse = exact(*(x[None, begin:end] for x in (q, k, v)), **options)
            check(o[None, begin:end], wanted, ERROR["bfloat16"])
            check_lse(lse[None, :, begin:end], wanted_lse)


@without_splits
@pytest.mark.parametrize("dim", [320, 512])
@pytest.mark.parametrize("page", [16, 7])
def test_pages(dim: int, page: int, forward_tile: str) -> None:
    (q, *_), starts = packed((dim, dim))
    lens = [200, 31, 140, 33]
    pages = -(-200 // page)
    table = torch.randperm(4 * pages, device="cuda", dtype=torch.int32).view(4, pages)
    pool = torch.full((2, 4 * pages, page, 2, dim), torch.nan, device="cuda", dtype=q.dtype)
    torch.manual_seed(3)
    new = torch.randn(4, 2, 200, 2, dim, device="cuda").to(q.dtype)
    for b, n in enumerate(lens):
        for i in range(n):
            pool[:, table[b, i // page], i % page] = new[b, :, i]
    for options in ({"causal": True}, {"causal": True, "softcap": 10.0}):
        o, lse = oa.attention_varlen(
            q, *pool.unbind(0), cu_seqlens_q=starts["cu_seqlens_q"], max_seqlen_q=130, max_seqlen_k=200,
            seqused_k=torch.tensor(lens, device="cuda", dtype=torch.int32), block_table=table, return_lse=True,
            **options,
        )  # fmt: skip
        for b, (begin, end) in enumerate(itertools.pairwise(ENDS)):
            if begin == end:
                continue
            wanted, wanted_lse = exact(q[None, begin:end], *(x[None, : lens[b]] for x in new[b]), **options)
            check(o[None, begin:end], wanted, ERROR["bfloat16"], f"sequence {b} {options}")
            check_lse(lse[None, :, begin:end], wanted_lse, f"sequence {b}")


def test_a_score_mod() -> None:
    near = oa.ScoreMod("score - 0.01f * abs(q - k)", grad="1.0f")
    operands = tensors((512, 512), "bfloat16", sk=131)
    at = torch.arange(131, device="cuda")
    options = {"mask": -0.01 * (at[:, None] - at).abs().double()[None, None]}
    o, lse = oa.attention(*operands, score_mod=near, return_lse=True)
    check(o, exact(*operands, **options)[0], ERROR["bfloat16"])
    do = torch.randn_like(o)
    for x, y in zip(
        oa.attention_backward(do, *operands, o, lse, score_mod=near), gradients(do, operands, **options), strict=False
    ):
        check(x, y, 2 * ERROR["bfloat16"])


# Gradients


@pytest.fixture(params=["chosen", *BACKWARD, *(f"dq{x}" for x in DQ)])
def backward_tile(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What selection chooses; each tile of the kernel of all gradients, and of that of dq alone."""
    if request.param == "chosen":
        return "chosen"
    family = "attn_bwd_dq_sm80" if request.param.startswith("dq") else "attn_bwd_wide_sm80"
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", rows(family, request.param.removeprefix("dq")))
    return str(request.param)


def gradients(do: Any, operands: list[Any], function: Callable[..., Any] = exact, **options: Any) -> list[Any]:
    """Of a function of q, k, v and, where they are given, sinks and an additive mask."""
    leaves = [x.detach().double().requires_grad_() for x in operands]
    extra = [name for name in ("sinks", "mask") if name in options and options[name].is_floating_point()]
    given = {name: options[name].detach().double().requires_grad_() for name in extra}
    function(*leaves, **(options | given))[0].backward(do.double())
    return [x.grad for x in (*leaves, *given.values())]


@pytest.mark.parametrize("dim", [264, 320, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gradients(dim: int, dtype: str, backward_tile: str) -> None:
    operands = tensors((dim, dim), dtype)
    alone = backward_tile.startswith("dq")
    for name, options in options_of(dtype).items():
        o, lse = oa.attention(*operands, return_lse=True, **options)
        do = torch.randn_like(o)
        wanted = ("dq", "dk", "dv", *(("dsinks",) if "sinks" in options else ()))
        if "bias" in name and not alone:
            wanted += ("dmask",)
        given = {x: torch.full_like(t, torch.nan) for x, t in zip(("dq", "dk", "dv"), operands, strict=True)}
        if alone:
            wanted, given = ("dq",), {"dq": given["dq"]}
        got = oa.attention_backward(
            do, *operands, o, lse, wanted=wanted, deterministic=alone and "mask" not in options, **given, **options
        )
        expected = gradients(do, operands, **options)
        for x, y, gradient in zip(got, expected, wanted, strict=False):
            check(x, y, 2 * ERROR[dtype], f"{gradient} {name}")


@pytest.mark.parametrize("dims", [(512, 512), (320, 320)], ids=str)
@pytest.mark.parametrize("deterministic", [False, True])
def test_packed_gradients(dims: tuple[int, int], deterministic: bool) -> None:
    operands, starts = packed(dims)
    o, lse = oa.attention_varlen(*operands, return_lse=True, causal=True, **starts)
    do = torch.randn_like(o)
    got = oa.attention_varlen_backward(do, *operands, o, lse, causal=True, deterministic=deterministic, **starts)
    for begin, end in ((0, 70), (70, 200), (200, 233)):
        parts = [x[None, begin:end] for x in operands]
        for x, y in zip(got, gradients(do[None, begin:end], parts, causal=True), strict=True):
            check(x[None, begin:end], y, 2 * ERROR["bfloat16"], f"{begin}")


@pytest.mark.parametrize("dims", [(512, 256), (128, 320)], ids=str)
def test_autograd(dims: tuple[int, int]) -> None:
    operands = [x.requires_grad_() for x in tensors(dims, "bfloat16")]
    o = oa.attention(*operands, causal=True)
    do = torch.randn_like(o)
    o.backward(do)
    for x, y in zip(operands, gradients(do, operands, causal=True), strict=True):
        check(x.grad, y, 2 * ERROR["bfloat16"])


# Caches

LENS = (1, 300, 77, 0, 150)


def caches(dim: int, dtype: str, kind: str) -> tuple[Any, Any, Any, Any]:
    """A cache of `LENS` tokens, its block table, and K and V of each sequence."""
    torch.manual_seed(dim)
    element = getattr(torch, dtype)
    new = torch.randn(len(LENS), 2, 300, 2, dim, device="cuda").to(element)
    lens = torch.tensor(LENS, device="cuda", dtype=torch.int32)
    short = {"float16": "fp16", "bfloat16": "bf16"}[dtype]
    table = None
    if kind == "contiguous":
        cache = oa.KVCache(len(LENS), 304, 2, dim, like=new, k_dtype=short)
    else:
        size = 16 if kind == "pages" else 5
        count = -(-304 // size)
        table = torch.randperm(len(LENS) * count, device="cuda", dtype=torch.int32).view(len(LENS), count)
        if kind == "pages":
            cache = oa.PagedKVCache(len(LENS) * count, size, 2, dim, like=new, k_dtype=short)
        else:
            memory = torch.full((len(LENS) * count, 2, size, 2, dim + 8), torch.nan, device="cuda", dtype=element)
            cache = oa.PagedKVCache.from_arrays(*memory[..., :dim].unbind(1))
    starts = torch.tensor([0, *torch.tensor(LENS).cumsum(0)], device="cuda", dtype=torch.int32)
    rows = [torch.cat([new[b, side, :n] for b, n in enumerate(LENS)]) for side in range(2)]
    oa.append(cache, *rows, seq_lens=lens, cu_seqlens=starts, block_table=table)
    return cache, table, lens, new


@pytest.mark.parametrize("kind", ["contiguous", "pages", "arrays"])
@pytest.mark.parametrize("dim", [264, 384, 512])
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(dim: int, dtype: str, kind: str) -> None:
    cache, table, lens, new = caches(dim, dtype, kind)
    for q_len, heads, options in (
        (1, 2, {}), (1, 16, {}), (4, 16, {}), (1, 48, {"softcap": 9.0}), (2, 8, {"window": (50, 0)}),
        (3, 6, {"deterministic": True}), (1, 8, {"sinks": True}),
    ):  # fmt: skip
        q = torch.randn(len(LENS), q_len, heads, dim, device="cuda").to(new.dtype)
        if "sinks" in options:
            options = {"sinks": torch.randn(heads, device="cuda")}
        out = torch.full_like(q, torch.nan)
        o, lse = oa.decode(q, cache, seq_lens=lens, block_table=table, return_lse=True, out=out, **options)
        given = {name: x for name, x in options.items() if name != "deterministic"}
        for b, n in enumerate(LENS):
            if n < q_len:
                continue
            wanted, wanted_lse = exact(q[b][None], *(x[None, :n] for x in new[b]), causal=True, **given)
            check(o[b][None], wanted, ERROR[dtype], f"sequence {b}, {q_len} queries, {heads} heads, {options}")
            check_lse(lse[b][None], wanted_lse, f"sequence {b}")
        assert not o[3, 0].any() or "sinks" in options


@pytest.mark.parametrize("kind", ["contiguous", "pages", "arrays"])
@pytest.mark.parametrize("dim", [320, 512])
def test_prompts_over_caches(dim: int, kind: str) -> None:
    """`attention_with_kvcache` of more queries than decode takes, and of one."""
    cache, table, lens, new = caches(dim, "bfloat16", kind)
    for q_len in (1, 40):
        q = torch.randn(len(LENS), q_len, 4, dim, device="cuda").to(new.dtype)
        o = oa.attention_with_kvcache(q, cache, seq_lens=lens, block_table=table)
        for b, n in enumerate(LENS):
            if n >= q_len:
                wanted, _ = exact(q[b][None], *(x[None, :n] for x in new[b]), causal=True)
                check(o[b][None], wanted, ERROR["bfloat16"], f"sequence {b}, {q_len} queries")
    if kind == "contiguous":
        pad = torch.tensor([0, 30, 7, 0, 9], device="cuda", dtype=torch.int32)
        o = oa.attention_with_kvcache(q, cache, seq_lens=lens, leftpad_k=pad)
        for b in (1, 2, 4):
            n, first = LENS[b], int(pad[b])
            wanted, _ = exact(q[b][None], *(x[None, first:n] for x in new[b]), causal=True)
            check(o[b][None], wanted, ERROR["bfloat16"], f"sequence {b} behind padding")
