"""The documents against the package: links lead somewhere, code runs, nothing public is left out."""

from __future__ import annotations

import inspect
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import omniattn
from build_tools import tuning_records
from omniattn import errors

ROOT = Path(__file__).resolve().parents[3]
API = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
TROUBLE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "examples/**/*.md", "wheels/*.md", "src/**/*.md")
    for path in ROOT.glob(pattern)
)
# Made by the package, never by a caller.
RESULTS = ("Explanation", "QuantizedK", "QuantizedQ", "QuantizedQK", "QuantizedV")
CALLABLES = [getattr(omniattn, name) for name in omniattn.__all__ if callable(getattr(omniattn, name))]
FUNCTIONS = [function for function in CALLABLES if function.__name__ not in RESULTS]


def prose(page: Path) -> str:
    """Text of a page, or of the page that a file of records makes, without its code blocks."""
    text = tuning_records.page(page) if page.suffix == ".toml" else page.read_text(encoding="utf-8")
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    found = set()
    for heading in re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


@pytest.mark.parametrize("page", PAGES + tuning_records.files(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_tables(page: Path) -> None:
    text = prose(page)
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not link.startswith("https://") and not (target.exists() and (not anchor or anchor in anchors(target))):
            broken.append(link)
    assert broken == []
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    assert sorted(headings) == sorted(set(headings)), "a link to a heading that comes twice leads to the first one"
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", row)) for row in table.splitlines()}
        assert len(columns) == 1, table.splitlines()[0]


def test_every_public_name_has_a_place() -> None:
    assert [name for name in omniattn.__all__ if not re.search(rf"\b{name}\b", API)] == []
    assert [name for name in errors.__all__ if name != "OmniattnError" and f"`{name}`" not in TROUBLE] == []


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_every_argument_has_a_place(function: Any) -> None:
    names = list(inspect.signature(function).parameters)
    documented = inspect.getdoc(function) or ""
    if function is omniattn.Int4:  # "`Int8` says the rest"
        documented += inspect.getdoc(omniattn.Int8) or ""
    assert [name for name in names if not re.search(rf"\b{name}\b", documented)] == []
    assert [name for name in names if not re.search(rf"`{name}\b|\b{name}[=,`)]", API)] == []


def code(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M | re.DOTALL)


@pytest.mark.frameworks
def test_code_of_the_page_about_gradients() -> None:
    torch = pytest.importorskip("torch")
    by_torch, by_hand, modified, dropped, blocked = code("backward.md")
    q, k, v, do = (torch.randn(1, 9, 4, 64) for _ in range(4))
    names: dict[str, Any] = {"oa": omniattn, "np": np, "q": q.clone(), "k": k.clone(), "v": v.clone()}
    exec(by_torch, names)
    summed = omniattn.attention_backward(torch.ones_like(q), q, k, v, names["o"].detach(), lse_of(q, k, v), causal=True)
    assert torch.equal(names["q"].grad, summed[0])
    names = {"oa": omniattn, "np": np, "q": q, "k": k, "v": v, "do": do}
    exec(by_hand, names)
    assert names["dq"].shape == q.shape
    exec(modified, names)
    options = {"softcap": 30.0}
    o, lse = omniattn.attention(q, k, v, return_lse=True, **options)
    for gradient, expected in zip(
        (names[x] for x in ("dq", "dk", "dv")), omniattn.attention_backward(do, q, k, v, o, lse, **options), strict=True
    ):
        assert (gradient - expected).abs().max() <= 1e-5
    exec(dropped, names | {"batch": 1, "num_q_heads": 4, "seqlen_q": 9, "seqlen_k": 9})
    exec(blocked, names | {"blocks": torch.ones(1, 1, dtype=torch.bool)})


def lse_of(q: Any, k: Any, v: Any) -> Any:
    return omniattn.attention(q, k, v, causal=True, return_lse=True)[1]


@pytest.mark.frameworks
def test_code_of_the_pages_about_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.chdir(tmp_path)  # a file is written
    generator = torch.Generator().manual_seed(4)

    def array(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    q, k, v = array(1, 40, 4, 64), array(1, 200, 2, 64), array(1, 200, 2, 64)
    for block in code("precision.md"):
        names: dict[str, Any] = {"oa": omniattn, "torch": torch, "q": q, "k": k, "v": v}
        names |= {name: torch.tensor(0.25) for name in ("dq", "dk", "dv")}
        names |= {f"{name}{i}": names[name] for name in "qkv" for i in (2, 3)}
        exec(block, names)
        assert (names["o"] - omniattn.attention(q, k, v, causal=True)).abs().max() <= 0.4

    whole, parts = code("quantization.md")
    names = {"oa": omniattn, "q": q, "k": k, "v": v}
    exec(whole, names)
    assert torch.equal(names["o"], omniattn.attention(q, k, v, causal=True, precision="int8"))

    fixed, packed = parts.split("# Packed")
    names = {"oa": omniattn, "k": k, "v": v, "queries": [array(1, 5, 4, 64), q]}
    exec(fixed, names)
    assert torch.equal(names["o"], omniattn.attention(q, k, v, precision="int8"))

    cu = torch.tensor([0, 10, 40], dtype=torch.int32)
    q, k, v = array(40, 4, 64), array(40, 2, 64), array(40, 2, 64)
    names = {"oa": omniattn, "q": q, "k": k, "v": v, "cu_q": cu, "cu_k": cu, "n": 30, "m": 30}
    exec("# Packed" + packed, names)
    options: dict[str, Any] = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": 30, "max_seqlen_k": 30}
    o, lse = omniattn.attention_varlen(q, k, v, **options, causal=True, return_lse=True, precision="int8")
    assert torch.equal(names["o"], o)
    assert torch.equal(names["lse"], lse)


@pytest.mark.frameworks
def test_code_of_the_page_about_latent_attention() -> None:
    """A layer of DeepSeek's sizes: absorbed and not, over lists of all rows, and in 656 bytes."""
    torch = pytest.importorskip("torch")
    first, absorbed, whole, scaling, writing, sparse, indexed = code("mla.md")
    generator = torch.Generator().manual_seed(6)

    def array(*shape: int, scale: float = 1.0) -> Any:
        return (torch.randn(shape, generator=generator) * scale).bfloat16()

    exec(first.replace('"cuda"', '"cpu"'), {})

    heads, lengths = 2, (40, 25)
    c, r = array(2, 40, 512), array(2, 40, 64)
    names: dict[str, Any] = {
        "oa": omniattn, "torch": torch, "math": math, "heads": heads, "mscale_all_dim": 1.0, "factor": 40,
        "c": c, "r": r, "w_uk": array(heads, 128, 512, scale=0.05), "w_uv": array(heads, 128, 512, scale=0.05),
        "q_nope": array(2, 40, heads, 128), "q_rope": array(2, 40, heads, 64),
        "lens": torch.tensor(lengths, dtype=torch.int32), "table": torch.tensor([[2, 0, 3], [1, 5, 4]]).int(),
    }  # fmt: skip
    exec(scaling, names)
    assert names["scale"] == pytest.approx(0.1352, abs=1e-4)
    exec(whole, names)
    wanted = torch.stack([names["o"][b, n - 1] for b, n in enumerate(lengths)])
    names["pool"] = torch.full((6, 16, 1, 576), torch.nan, dtype=torch.bfloat16)
    rows = torch.cat([c, r], -1)
    for b, n in enumerate(lengths):
        for t in range(n):
            names["pool"][names["table"][b, t // 16], t % 16, 0] = rows[b, t]
    for name in ("q_nope", "q_rope"):
        names[name] = torch.stack([names[name][b, n - 1 : n] for b, n in enumerate(lengths)])
    exec(absorbed, names)
    assert (names["o"][:, 0].float() - wanted.float()).abs().max() < 0.03
    latent = omniattn.decode(
        names["q"], names["cache"], seq_lens=names["lens"], block_table=names["table"], softmax_scale=names["scale"]
    )
    listed = [
        names["table"][b, t // 16] * 16 + t % 16 if t < n else -1 for b, n in enumerate(lengths) for t in range(40)
    ]
    names |= {"indices": torch.tensor(listed, dtype=torch.int32).view(2, 1, 40), "counts": names["lens"]}
    exec(sparse, names)
    assert (names["o"].float() - latent[:, 0].float()).abs().max() < 0.02
    exec(writing, names)
    stored = names["rows_656"](names["pool"][..., :512], names["pool"][..., 512:])
    eight = omniattn.decode(
        names["q"], omniattn.PagedKVCache.from_arrays(stored, head_dim_v=512), indices=names["indices"],
        topk_length=names["counts"], softmax_scale=names["scale"],
    )  # fmt: skip
    assert (eight.float() - latent.float()).norm() < 0.05 * latent.float().norm()
    names |= {
        "q_index": array(2, 1, 64, 128).to(torch.float8_e4m3fn), "weights": array(2, 64).float(),
        "k_index": torch.zeros(6, 16, 1, 132, dtype=torch.uint8),
    }  # fmt: skip
    exec(indexed.replace("2048", "16"), names)
    assert names["indices"].shape == (2, 16)


@pytest.mark.frameworks
def test_code_about_latent_caches() -> None:
    torch = pytest.importorskip("torch")

    def array(*shape: int) -> Any:
        return torch.zeros(shape, dtype=torch.bfloat16)

    attended, written = (block for block in code("api.md") if "head_dim_v=512" in block)
    names: dict[str, Any] = {
        "oa": omniattn, "pool": array(6, 16, 1, 576), "q": array(2, 1, 3, 576), "scale": 192**-0.5,
        "lens": torch.tensor([40, 25]).int(), "table": torch.tensor([[2, 0, 3], [1, 5, 4]]).int(),
    }  # fmt: skip
    exec(attended, names)
    assert names["o"].shape == (2, 1, 3, 512)
    names |= {"kv_c": array(3, 512), "k_pe": array(3, 64), "slots": torch.tensor([0, 127, -1]), "blocks": 2}
    exec(written, names)
    assert names["cache"].k.shape == (2, 64, 1, 656)
