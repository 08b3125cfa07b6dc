"""``seqused_q`` and ``seqused_k`` on a GPU against the same calls on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import omniattn as oa  # noqa: E402
from omniattn import testing  # noqa: E402
from omniattn.plan.engine import PLANS  # noqa: E402
from omniattn.registry import REGISTRY, by_name  # noqa: E402
from omniattn.testing.clear_cases import ClearCase, clear_cases  # noqa: E402
from omniattn.testing.frameworks import CupyFramework, TorchFramework  # noqa: E402

from .attention_cases import check_lse, poisoned, to_gpu, to_numpy  # noqa: E402
from .plans import only_rows  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTHS_Q, LENGTHS_K = [100, 1, 0, 257, 64, 3], [130, 300, 5, 257, 0, 3]
USED_Q, USED_K = [64, 1, 0, 200, 0, 2], [129, 70, 5, 0, 0, 1]
HEADS, HEADS_KV = 4, 2


@pytest.fixture(params=["selected", "generic"])
def family(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """With the kernels that this GPU gets, and with those that every GPU gets."""
    only_rows(monkeypatch, (spec for spec in REGISTRY if request.param == "selected" or not spec.arch_specific))
    yield str(request.param)
    PLANS.clear()


def _packed(*names: str) -> dict[str, Any]:
    ints = {
        "cu_seqlens_q": np.concatenate([[0], np.cumsum(LENGTHS_Q)]),
        "cu_seqlens_k": np.concatenate([[0], np.cumsum(LENGTHS_K)]), "seqused_q": USED_Q, "seqused_k": USED_K,
    }  # fmt: skip
    chosen = ("cu_seqlens_q", "cu_seqlens_k", *names)
    return {name: np.asarray(ints[name], np.int32) for name in chosen} | {
        "max_seqlen_q": max(LENGTHS_Q), "max_seqlen_k": max(LENGTHS_K)
    }  # fmt: skip


def _on_gpu(packed: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.from_numpy(x).cuda() if isinstance(x, np.ndarray) else x for name, x in packed.items()}


def _qkv(head_dim: int = 64, layout: str = "NHD", dtype: str = "bfloat16") -> list[Any]:
    def made(rows: int, heads: int, seed: int) -> Any:
        x, _, _ = testing.make_qkv(
            batch=None, seqlen_q=rows, heads_q=heads, head_dim=head_dim, dtype=dtype, layout=layout, seed=seed
        )
        return x

    return [made(sum(LENGTHS_Q) + 9, HEADS, 1), *(made(sum(LENGTHS_K), HEADS_KV, seed) for seed in (2, 3))]


def _hidden_keys() -> np.ndarray[Any, Any]:
    """Rows of k and v that do not count."""
    starts = np.concatenate([[0], np.cumsum(LENGTHS_K)])
    return np.concatenate([np.arange(a + n, a + m) for a, n, m in zip(starts, USED_K, LENGTHS_K, strict=False)])


@pytest.mark.parametrize("names", [("seqused_q", "seqused_k"), ("seqused_q",), ("seqused_k",)], ids=str)
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"window": (40, 3)}, {"softcap": 5.0, "causal": True}], ids=str
)
@pytest.mark.parametrize(("head_dim", "layout"), [(64, "NHD"), (128, "HND"), (256, "NHD")])
def test_forward(family: str, names: tuple[str, ...], options: dict[str, Any], head_dim: int, layout: str) -> None:
    """Every row is written, and nothing that does not count is read."""
    q, k, v = _qkv(head_dim, layout)
    ref, ref_lse = oa.attention_varlen(q, k, v, **_packed(*names), layout=layout, return_lse=True, **options)
    on_gpu = [to_gpu(x, "bfloat16") for x in (q, k, v)]
    if "seqused_k" in names:
        rows = torch.from_numpy(_hidden_keys()).cuda()
        for x in on_gpu[1:]:
            x.index_fill_(0 if layout == "NHD" else 1, rows, torch.nan)
    out = poisoned(q.shape, "bfloat16")
    _, lse = oa.attention_varlen(
        *on_gpu, **_on_gpu(_packed(*names)), layout=layout, out=out, return_lse=True, **options
    )
    testing.assert_close(to_numpy(out), np.asarray(ref, np.float32), atol=3e-2)
    check_lse(lse.cpu().numpy(), ref_lse, "seqused")


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize("causal", [False, True])
def test_low_precision(precision: str, causal: bool) -> None:
    """Scales and means are those of the rows that count: what does not is loud."""
    q, k, v = (np.asarray(x, np.float32) for x in _qkv(128))
    expected, _ = oa.attention_varlen(q, k, v, **_packed("seqused_q", "seqused_k"), causal=causal, return_lse=True)
    k[_hidden_keys()], v[_hidden_keys()] = 1e4, 1e4
    made = oa.attention_varlen(
        *(torch.from_numpy(x).cuda().bfloat16() for x in (q, k, v)), **_on_gpu(_packed("seqused_q", "seqused_k")),
        causal=causal, precision=precision,
    )  # fmt: skip
    error = np.abs(to_numpy(made) - expected).mean() / np.abs(expected).mean()
    assert error <= 0.12, error


def test_score_mod_sinks_and_masks() -> None:
    q, k, v = _qkv()
    bias = np.linspace(-1, 1, len(LENGTHS_Q), dtype=np.float32)
    sinks = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
    mask = np.random.default_rng(0).random((HEADS, max(LENGTHS_Q), max(LENGTHS_K))) < 0.6

    masks = np.random.default_rng(1).random((len(LENGTHS_Q), 1, max(LENGTHS_Q), max(LENGTHS_K))) < 0.6

    def mod(bias: Any) -> oa.ScoreMod:
        return oa.ScoreMod(
            "score + bias[b] * (k % 7)", mask="k < 200 - b",
            reference=lambda score, b, h, q, k, bias: np.where(k < 200 - b, score + bias[b] * (k % 7), -np.inf),
            bias=bias,
        )  # fmt: skip

    packed = _packed("seqused_q", "seqused_k")
    given = [to_gpu(x, "bfloat16") for x in (q, k, v)]
    for on_cpu, on_gpu in (
        ({"sinks": sinks}, {"sinks": torch.from_numpy(sinks).cuda()}),
        ({"mask": mask}, {"mask": torch.from_numpy(mask).cuda()}),
        ({"mask": masks}, {"mask": torch.from_numpy(masks).cuda()}),
        ({"score_mod": mod(bias)}, {"score_mod": mod(torch.from_numpy(bias).cuda())}),
    ):
        ref, ref_lse = oa.attention_varlen(q, k, v, **packed, return_lse=True, **on_cpu)
        made, lse = oa.attention_varlen(*given, **_on_gpu(packed), return_lse=True, **on_gpu)
        testing.assert_close(to_numpy(made), np.asarray(ref, np.float32), atol=3e-2)
        check_lse(lse.cpu().numpy(), ref_lse, "seqused")


@pytest.mark.parametrize("causal", [False, True])
def test_gradients(family: str, causal: bool) -> None:
    packed = _packed("seqused_q", "seqused_k")
    arrays = [np.asarray(x, np.float32) for x in _qkv(dtype="float16")]
    leaves = [torch.from_numpy(x).cuda().half().requires_grad_() for x in arrays]
    o = oa.attention_varlen(*leaves, **_on_gpu(packed), causal=causal)
    do = np.random.default_rng(4).standard_normal(arrays[0].shape).astype(np.float16).astype(np.float32)
    made = torch.autograd.grad(o, leaves, torch.from_numpy(do).cuda().half())
    ref, lse = oa.attention_varlen(*arrays, **packed, causal=causal, return_lse=True)
    expected = oa.attention_varlen_backward(do, *arrays, ref, lse, **packed, causal=causal)
    for a, b in zip(made, expected, strict=True):
        np.testing.assert_allclose(a.float().cpu().numpy(), b, atol=2e-2)
        assert not a.isnan().any()


def test_graph_reads_new_lengths_and_clamps_them() -> None:
    q, k, v = (to_gpu(x, "bfloat16") for x in _qkv())
    packed = _on_gpu(_packed("seqused_q", "seqused_k"))

    def run() -> Any:
        return oa.attention_varlen(q, k, v, **packed, causal=True)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        o = run()
    for used_q, used_k in ((USED_Q, USED_K), (LENGTHS_Q, LENGTHS_K), ([10**9] * 6, [-3] * 6)):
        packed["seqused_q"].copy_(torch.tensor(used_q))
        packed["seqused_k"].copy_(torch.tensor(used_k))
        graph.replay()
        assert torch.equal(o, run())
    assert not o.any()


def test_cupy_gives_the_bits_of_torch() -> None:
    cupy = pytest.importorskip("cupy")
    tensors = [to_gpu(x, "float16") for x in _qkv(dtype="float16")]
    packed = _on_gpu(_packed("seqused_q", "seqused_k"))
    torch.cuda.synchronize()
    others = {name: cupy.from_dlpack(x) if isinstance(x, torch.Tensor) else x for name, x in packed.items()}
    made = oa.attention_varlen(*map(cupy.from_dlpack, tensors), **others, causal=True)
    assert isinstance(made, cupy.ndarray)
    expected = oa.attention_varlen(*tensors, **packed, causal=True)
    np.testing.assert_array_equal(cupy.asnumpy(made), expected.cpu().numpy())


@pytest.mark.parametrize("framework", [TorchFramework, CupyFramework])
@pytest.mark.parametrize("case", clear_cases(by_name("clear_unused_sm80")), ids=lambda case: str(case.name))
def test_rows_that_are_cleared(case: ClearCase, framework: Any) -> None:
    if framework is CupyFramework:
        pytest.importorskip("cupy")
    assert case.check(framework(), case.prepare()) == (0.0, "")


def test_lengths_that_are_ready_on_the_callers_stream_alone() -> None:
    """Every launch goes to ``stream``: one to another stream would read lengths that are not there yet."""
    q, k, v = (to_gpu(x, "bfloat16") for x in _qkv())
    packed = _on_gpu(_packed("seqused_q", "seqused_k"))
    expected = oa.attention_varlen(q, k, v, **packed)
    late = {name: torch.zeros_like(packed[name]) for name in ("seqused_q", "seqused_k")}
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for _ in range(3):  # the last ones are repeated calls
        for x in late.values():
            x.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            for name, x in late.items():
                x.copy_(packed[name], non_blocking=True)
        made = oa.attention_varlen(q, k, v, **{**packed, **late}, stream=stream)
        torch.cuda.synchronize()
        assert torch.equal(made, expected)
