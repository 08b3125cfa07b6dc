"""``precision="auto"`` on a GPU: the bits of the precision that `explain` names."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402

pytestmark = pytest.mark.gpu

#: Queries, keys, heads, heads of k and v, head_dim, options.
CALLS: dict[str, tuple[int, int, int, int, int, dict[str, Any]]] = {
    "short": (300, 300, 4, 2, 64, {}),
    "long": (16384, 16384, 16, 4, 128, {}),
    "long, causal": (16384, 16384, 8, 8, 256, {"causal": True}),
    "lse": (32768, 32768, 16, 16, 128, {"return_lse": True}),
    "few queries": (16, 8192, 8, 2, 128, {}),
    "narrow": (1000, 1000, 4, 4, 40, {"softcap": 20.0}),
    "wide": (100, 100, 2, 2, 512, {}),
}


def tensors(queries: int, keys: int, heads: int, heads_kv: int, head_dim: int) -> list[Any]:
    generator = torch.Generator("cuda").manual_seed(7)
    shapes = ((1, queries, heads, head_dim), *((1, keys, heads_kv, head_dim),) * 2)
    return [torch.randn(s, generator=generator, device="cuda", dtype=torch.bfloat16) for s in shapes]


def bits(results: Any) -> list[Any]:
    found = results if isinstance(results, tuple) else (results,)
    return [x.view(torch.int16 if x.element_size() == 2 else torch.int32) for x in found]


@pytest.fixture(autouse=True)
def fresh_plans() -> None:
    PLANS.clear()


@pytest.mark.parametrize("max_error", [0.03, 0.05])
@pytest.mark.parametrize("name", CALLS)
def test_bits_are_those_of_the_precision_that_explain_names(name: str, max_error: float) -> None:
    *shape, options = CALLS[name]
    q, k, v = tensors(*shape)
    auto = oa.Auto(max_error=max_error)
    chosen = oa.explain(q, k, v, precision=auto, **options).problem.precision.name
    want = bits(oa.attention(q, k, v, precision=chosen, **options))
    for _ in range(3):  # by Python, then repeated
        got = bits(oa.attention(q, k, v, precision=auto, **options))
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="choices of Hopper"
)
def test_choices_of_hopper() -> None:
    found = {}
    for name, (*shape, options) in CALLS.items():
        said = oa.explain(*tensors(*shape), precision="auto", **options)
        found[name] = said.problem.precision.name
        assert any("precision=Auto" in reason or "in place of auto" in reason for reason in said.why), said.why
    assert {found[name] for name in ("short", "few queries", "narrow", "wide")} == {"exact"}
    assert {found[name] for name in ("long", "long, causal", "lse")} == {"int8"}


def test_gradients_packed_and_compiled() -> None:
    q, k, v = tensors(16384, 16384, 16, 16, 128)
    chosen = oa.explain(q, k, v, precision="auto", return_lse=True).problem.precision.name
    found = []
    for precision in ("auto", chosen):
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        o = oa.attention(*given, precision=precision, deterministic=True)
        o.float().square().sum().backward()
        found.append([o.detach(), *(x.grad for x in given)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    starts = torch.tensor([0, 1000, 16384], dtype=torch.int32, device="cuda")
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts, "max_seqlen_q": 15384, "max_seqlen_k": 15384}
    rows = [x[0] for x in (q, k, v)]
    chosen = oa.explain(*rows, precision="auto", **packed).problem.precision.name
    got, want = (oa.attention_varlen(*rows, precision=p, **packed) for p in ("auto", chosen))
    assert torch.equal(got, want)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def compiled(q: Any, k: Any, v: Any) -> Any:
        return oa.attention(q, k, v, precision=oa.Auto(max_error=0.05))

    assert torch.equal(compiled(q, k, v), oa.attention(q, k, v, precision="auto"))
