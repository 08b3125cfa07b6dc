"""``attention_sparse`` over an array as torch's operator: compiled, without memory, checked; on the CPU."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn.errors import ArgumentError, UnsupportedError  # noqa: E402

pytestmark = pytest.mark.frameworks

DIM, DIM_V = 24, 16
OPTIONS: dict[str, Any] = {"head_dim_v": DIM_V, "softcap": 3.0, "return_lse": True, "return_max": True}


def arrays(tokens: int = 5) -> tuple[Any, Any, Any, Any]:
    """q, kv, indices and topk_length."""
    torch.manual_seed(tokens)
    q, kv = torch.randn(tokens, 3, DIM).half(), torch.randn(12, DIM).half()
    lists = torch.randint(-1, 12, (tokens, 6), dtype=torch.int32)
    return q, kv, lists, torch.arange(tokens, dtype=torch.int32) % 7


def call(q: Any, kv: Any, indices: Any, lengths: Any) -> Any:
    return oa.attention_sparse(q * 2, kv, indices=indices, topk_length=lengths, **OPTIONS)


@pytest.mark.parametrize("has_head", [True, False])
def test_compiled_whole(has_head: bool) -> None:
    q, kv, indices, lengths = arrays()
    if has_head:
        kv, indices = kv[:, None], indices[:, None]
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    for got, want in zip(compiled(q, kv, indices, lengths), call(q, kv, indices, lengths), strict=True):
        assert torch.equal(got, want)
    # Another number of tokens, the same program.
    for got, want in zip(compiled(*arrays(8)), call(*arrays(8)), strict=True):
        assert torch.equal(got, want)


def test_one_result_and_the_usual_width() -> None:
    q, kv, indices = torch.randn(2, 3, 576).half(), torch.randn(5, 576).half(), torch.zeros(2, 4, dtype=torch.int32)
    compiled = torch.compile(lambda *x: oa.attention_sparse(x[0], x[1], indices=x[2]), fullgraph=True, backend="eager")
    assert torch.equal(compiled(q, kv, indices), oa.attention_sparse(q, kv, indices=indices))


def test_without_memory() -> None:
    from torch._subclasses import FakeTensorMode

    given = arrays()
    with FakeTensorMode() as mode:
        made = call(*(mode.from_tensor(x) for x in given))
    for fake, real in zip(made, call(*given), strict=True):
        assert (fake.shape, fake.dtype) == (real.shape, real.dtype)


def test_opcheck() -> None:
    import omniattn.frameworks.torch.tracing  # noqa: F401

    q, kv, indices, lengths = arrays()
    given = (q, kv, indices, lengths, None, DIM_V, None, 0.0, True, False, False)
    torch.library.opcheck(torch.ops.omniattn.attention_sparse_rows.default, given)


def test_what_the_operator_has_not() -> None:
    q, kv, indices, _ = arrays()
    given = {"indices": indices, "head_dim_v": DIM_V}
    # torch shows what is raised while it reads the caller as its own error, which has the text.
    with pytest.raises(Exception, match="'out': expected None in a traced"):
        torch.compile(lambda x: oa.attention_sparse(x, kv, out=torch.empty(5, 3, DIM_V), **given), fullgraph=True)(q)
    with pytest.raises((ArgumentError, UnsupportedError, RuntimeError), match="head_dim 24, like the cache"):
        torch.compile(lambda x: oa.attention_sparse(x[..., :16], kv, **given), backend="aot_eager")(q)
