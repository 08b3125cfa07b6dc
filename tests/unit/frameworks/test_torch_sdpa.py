"""``omniattn.torch.sdpa`` and ``use_sdpa`` against torch's function: shapes, masks, gradients, errors, what goes on."""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.frameworks

from torch.nn.attention.bias import causal_lower_right  # noqa: E402

import omniattn.torch as oat  # noqa: E402
from omniattn.torch import functional, operators, shapes  # noqa: E402

F = torch.nn.functional
ORIGINAL = F.scaled_dot_product_attention

#: Shapes of query, key and value, and the options.
CASES: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "plain": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), {}),
    "other length": ((2, 3, 5, 8), (2, 3, 7, 8), (2, 3, 7, 8), {"scale": 0.3}),
    "causal": ((2, 3, 5, 8), (2, 3, 5, 8), (2, 3, 5, 8), {"is_causal": True}),
    "causal, more keys": ((2, 3, 4, 8), (2, 3, 9, 8), (2, 3, 9, 8), {"is_causal": True}),
    "causal, more queries": ((2, 3, 9, 8), (2, 3, 4, 8), (2, 3, 4, 8), {"is_causal": True}),
    "causal, one query": ((2, 3, 1, 8), (2, 3, 4, 8), (2, 3, 4, 8), {"is_causal": True}),
    "3 dimensions": ((3, 5, 8), (3, 5, 8), (3, 5, 8), {"is_causal": True}),
    "2 dimensions": ((5, 8), (7, 8), (7, 8), {}),
    "5 dimensions": ((2, 2, 3, 5, 8), (2, 2, 3, 7, 8), (2, 2, 3, 7, 8), {}),
    "head_dim 5": ((2, 3, 5, 5), (2, 3, 5, 5), (2, 3, 5, 5), {"is_causal": True}),
    "head_dim 12, scale": ((1, 2, 5, 12), (1, 2, 5, 12), (1, 2, 5, 12), {"scale": 0.2}),
    "smaller head_dim of value": ((1, 2, 5, 16), (1, 2, 6, 16), (1, 2, 6, 8), {}),
    "larger head_dim of value": ((1, 2, 5, 6), (1, 2, 6, 6), (1, 2, 6, 19), {}),
    "one head of keys": ((2, 3, 5, 8), (2, 1, 6, 8), (2, 1, 6, 8), {}),
    "one head of values": ((2, 3, 5, 8), (2, 3, 6, 8), (2, 1, 6, 8), {}),
    "one head of queries": ((2, 1, 5, 8), (2, 3, 6, 8), (2, 3, 6, 8), {}),
    "one sequence of keys": ((3, 2, 5, 8), (1, 2, 6, 8), (1, 2, 6, 8), {"is_causal": True}),
    "fewer dimensions": ((2, 3, 5, 8), (6, 8), (3, 6, 8), {}),
    "groups": ((2, 4, 5, 8), (2, 2, 6, 8), (2, 2, 6, 8), {"enable_gqa": True}),
    "groups of 3 dimensions": ((4, 5, 8), (2, 5, 8), (2, 5, 8), {"enable_gqa": True, "is_causal": True}),
    "groups, other heads of values": ((2, 4, 5, 8), (2, 2, 6, 8), (2, 4, 6, 8), {"enable_gqa": True}),
    "no keys": ((1, 2, 3, 8), (1, 2, 0, 8), (1, 2, 0, 8), {}),
}
#: Shape of the mask, with queries (2, 2, 3, 5, 8) or (2, 3, 5, 8) and 7 keys.
MASKS: list[tuple[tuple[int, ...], int]] = [
    ((5, 7), 4), ((1, 7), 4), ((2, 1, 5, 7), 4), ((2, 3, 1, 7), 4), ((3, 5, 7), 4), ((2, 3, 5, 7), 4), ((5, 7), 5),
    ((3, 5, 7), 5), ((2, 1, 1, 5, 7), 5), ((1, 1, 1, 5, 7), 5), ((2, 3, 5, 1), 5),
]  # fmt: skip


@pytest.fixture(autouse=True)
def _seed() -> Iterator[None]:
    torch.manual_seed(5)
    yield
    assert F.scaled_dot_product_attention is ORIGINAL


def _leaf(*shape: int, dtype: Any = torch.float64) -> Any:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


def _math(q: Any, k: Any, v: Any, mask: Any = None, **options: Any) -> Any:
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        return ORIGINAL(q, k, v, mask, **options)


def _same(inputs: list[Any], mask: Any = None, **options: Any) -> None:
    """Results and gradients of both functions."""
    made, expected = oat.sdpa(*inputs, mask, **options), _math(*inputs, mask, **options)
    assert made.shape == expected.shape
    assert made.dtype == expected.dtype
    torch.testing.assert_close(made, expected, rtol=1e-5, atol=1e-6)
    if made.numel() == 0:
        return
    leaves = [x for x in (*inputs, mask) if x is not None and x.requires_grad]
    weight = torch.randn_like(expected)
    for a, b in zip(
        *(torch.autograd.grad(x, leaves, weight, allow_unused=True) for x in (made, expected)), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_semantics_of_shapes(name: str) -> None:
    *shapes_of, options = CASES[name]
    _same([_leaf(*shape) for shape in shapes_of], **options)


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize(("shape", "rank"), MASKS, ids=str)
def test_masks(shape: tuple[int, ...], rank: int, kind: str) -> None:
    lead = (2, 2, 3)[5 - rank :]
    inputs = [_leaf(*lead, rows, 8) for rows in (5, 7, 7)]
    if kind == "bool":
        mask = torch.rand(shape) < 0.6
        mask[..., 0, :] = False  # a query that sees nothing gives 0
    else:
        mask = _leaf(*shape)
    _same(inputs, mask)


def test_a_float32_mask_beside_16_bits() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8).bfloat16() for _ in range(3))
    mask = torch.randn(5, 5)
    made = oat.sdpa(q, k, v, mask)
    assert made.dtype == torch.bfloat16
    torch.testing.assert_close(made.float(), _math(q.float(), k.float(), v.float(), mask), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("make", ["transposed", "packed", "channels last", "sliced"])
def test_strides(make: str) -> None:
    """Any memory; the result's is that of the query, so that models reshape it without a copy."""
    if make == "packed":
        packed = _leaf(2, 5, 3, 3, 8)
        inputs = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    else:
        memory = {"transposed": (2, 5, 3, 8), "channels last": (2, 3, 8, 5), "sliced": (2, 3, 5, 17)}[make]
        leaves = [_leaf(*memory) for _ in range(3)]
        inputs = [
            x.transpose(1, 2) if make == "transposed" else x.transpose(2, 3) if make == "channels last" else x[..., ::2]
            for x in leaves
        ]
    _same(inputs, is_causal=True)
    if make in ("transposed", "packed"):
        assert oat.sdpa(*inputs).transpose(1, 2).is_contiguous()
        assert oat.sdpa(*(x.detach() for x in inputs)).transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(("rows", "columns"), [(4, 4), (3, 6), (6, 3)])
@pytest.mark.parametrize("make", ["causal_upper_left", "causal_lower_right"])
def test_causal_biases(make: str, rows: int, columns: int) -> None:
    from torch.nn.attention import bias

    mask = getattr(bias, make)(rows, columns)
    q, k, v = torch.randn(1, 2, rows, 8), torch.randn(1, 2, columns, 8), torch.randn(1, 2, columns, 8)
    expected = _math(q, k, v, mask._materialize())
    torch.testing.assert_close(oat.sdpa(q, k, v, mask), expected)
    q, k, v = (torch.nn.functional.pad(x, (0, 260)) for x in (q, k, v))  # too large for kernels
    with oat.use_sdpa():
        made = F.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(made, _math(q, k, v, mask._materialize()))


def _call(**changes: Any) -> Callable[[], Any]:
    arguments: dict[str, Any] = {name: torch.randn(2, 4, 5, 8) for name in ("query", "key", "value")}
    arguments |= changes
    return lambda: oat.sdpa(**arguments)


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        ({"attn_mask": causal_lower_right(5, 5), "is_causal": True}, ArgumentError, "is_causal is True"),
        ({"attn_mask": torch.ones(5, 5).int()}, DtypeError, "'attn_mask': expected bool"),
        ({"attn_mask": torch.ones(5, 5).half()}, DtypeError, "'attn_mask'"),
        ({"attn_mask": torch.ones(5, 6)}, ShapeError, "'attn_mask': expected a shape that broadcasts"),
        ({"attn_mask": torch.ones(5, 5, device="meta")}, DeviceError, "'attn_mask'"),
        ({"dropout_p": 0.1, "precision": "int8"}, UnsupportedError, "dropout_p=0.1 with precision='int8'"),
        ({"dropout_p": 1.5}, ArgumentError, "'dropout_p': expected a probability"),
        ({"key": torch.randn(2, 4, 5, 16)}, ShapeError, "'key': expected head_dim 8"),
        ({"key": torch.randn(2, 4, 5, 8).double()}, DtypeError, "'key'"),
        ({"value": torch.randn(2, 4, 6, 8)}, ShapeError, "'value': expected 5 rows"),
        ({"value": torch.randn(8)}, ShapeError, "'value': expected at least 2 dimensions"),
        ({"key": torch.randn(3, 4, 5, 8)}, ShapeError, "broadcast"),
        ({"key": torch.randn(2, 2, 5, 8), "value": torch.randn(2, 2, 5, 8)}, ShapeError, "broadcast"),
        (
            {"key": torch.randn(2, 3, 5, 8), "value": torch.randn(2, 3, 5, 8), "enable_gqa": True},
            ShapeError,
            "divides query's 4",
        ),
        ({"key": torch.randn(5, 8), "enable_gqa": True}, ShapeError, "at least 3 dimensions"),
        ({"precision": "int9"}, ArgumentError, "sdpa(): argument 'precision'"),
        # What `attention` says, of its own arguments, is told of these.
        ({"scale": "1"}, ArgumentError, "sdpa(): argument 'scale': expected a finite number"),
        ({"scale": float("nan")}, ArgumentError, "sdpa(): argument 'scale'"),
        ({"attn_mask": torch.ones(5, 5).to_sparse()}, UnsupportedError, "sdpa(): argument 'attn_mask' has layout"),
        ({"is_causal": 1}, ArgumentError, "sdpa(): argument 'is_causal': expected True or False"),
        ({"is_causal": "no"}, ArgumentError, "sdpa(): argument 'is_causal'"),
        ({"enable_gqa": "no"}, ArgumentError, "sdpa(): argument 'enable_gqa'"),
        ({"dropout_p": None}, ArgumentError, "sdpa(): argument 'dropout_p': expected a finite number"),
    ],
)
def test_errors(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error) as caught:
        _call(**changes)()
    assert text in str(caught.value)
    assert isinstance(caught.value, RuntimeError)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_no_tensor_is_torch_s_error(name: str) -> None:
    for wrong in (None, 3, [1.0]):
        with pytest.raises(TypeError, match=f"argument '{name}'.*must be Tensor"):
            _call(**{name: wrong})()


def test_the_signature_is_sdpa_s() -> None:
    names = ["query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale", "enable_gqa", "precision"]
    parameters = inspect.signature(oat.sdpa).parameters
    assert list(parameters) == names
    assert parameters["precision"].kind is inspect.Parameter.KEYWORD_ONLY
    assert oat.sdpa.__name__ == ORIGINAL.__name__  # context_parallel wraps what it finds under that name
    with oat.use_sdpa():
        assert list(inspect.signature(F.scaled_dot_product_attention).parameters) == names[:-1]
        assert F.scaled_dot_product_attention.__name__ == ORIGINAL.__name__


class _Subclass(torch.Tensor):
    pass


def _odd(kind: str) -> list[Any]:
    if kind == "nested":
        return [torch.nested.nested_tensor([torch.randn(2, n, 8) for n in (3, 5)]) for _ in range(3)]
    made = [torch.randn(1, 2, 5, 8) for _ in range(3)]
    return [
        {
            "head_dim 513": lambda x: torch.randn(1, 2, 5, 513),
            "meta": lambda x: x.to("meta"),
            "subclass": lambda x: x.as_subclass(_Subclass),
            "complex64": lambda x: x.to(torch.complex64),
        }[kind](x)
        for x in made
    ]


@pytest.mark.parametrize("kind", ["head_dim 513", "meta", "subclass", "nested", "complex64"])
def test_what_goes_to_the_function_of_before(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every argument, and whatever it returns; also from `sdpa` itself."""
    calls = []

    def before(*arguments: Any, **options: Any) -> str:
        calls.append((arguments, options))
        return "result"

    inputs = _odd(kind)
    mask = torch.ones(5, 5).bool()
    assert kind.split(" ")[0] in str(oat.fallback_reason(*inputs, mask)).lower().replace("head dimensions", "head_dim")
    monkeypatch.setattr(F, "scaled_dot_product_attention", before)
    with oat.use_sdpa("int8"):
        assert F.scaled_dot_product_attention(*inputs, mask, scale=0.5, enable_gqa=True) == "result"
    monkeypatch.undo()
    monkeypatch.setattr(functional, "_BEFORE", before)
    assert oat.sdpa(*inputs, mask, scale=0.5, enable_gqa=True) == "result"
    for arguments, options in calls:
        assert all(a is b for a, b in zip(arguments, (*inputs, mask), strict=False))
        assert arguments[4:] == (0.0, False)
        assert options == {"scale": 0.5, "enable_gqa": True}
    assert len(calls) == 2
    with pytest.raises(ArgumentError):
        oat.sdpa(*inputs, precision="int9")


def test_wide_heads_of_a_low_precision_go_there(monkeypatch: pytest.MonkeyPatch) -> None:
    q = torch.randn(1, 2, 5, 264)
    assert oat.fallback_reason(q, q, q) is None
    assert "(264, 264) are not from 1 to 256, the most of a low precision" in str(
        oat.fallback_reason(q, q, q, precision="int8")
    )
    wanted = F.scaled_dot_product_attention(q, q, q)
    monkeypatch.setattr(functional, "_BEFORE", lambda *_, **__: "result")
    assert oat.sdpa(q, q, q, precision="int8") == "result"
    torch.testing.assert_close(oat.sdpa(q, q, q), wanted)


def test_plain_calls_do_not_go_there() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        q = torch.randn(1, 2, 5, 8, dtype=dtype)
        assert oat.fallback_reason(q, q, q, torch.ones(5, 5).bool()) is None


def test_precision_reaches_the_kernels() -> None:
    q, k, v = (torch.randn(1, 2, 33, 64) for _ in range(3))
    exact, low = oat.sdpa(q, k, v), oat.sdpa(q, k, v, precision="int8")
    assert not torch.equal(exact, low)
    torch.testing.assert_close(exact, low, rtol=0.1, atol=0.1)
    with oat.use_sdpa("int8"):
        assert torch.equal(F.scaled_dot_product_attention(q, k, v), low)
    with pytest.raises(ArgumentError):
        oat.use_sdpa("int9")


def test_use_sdpa_restores_and_nests() -> None:
    context = oat.use_sdpa()
    with context:
        first = F.scaled_dot_product_attention
        assert first is not ORIGINAL
        with context, oat.use_sdpa("int8"):
            assert F.scaled_dot_product_attention is not first
        assert F.scaled_dot_product_attention is first
    assert F.scaled_dot_product_attention is ORIGINAL
    with pytest.raises(KeyError), context:
        raise KeyError
    assert F.scaled_dot_product_attention is ORIGINAL

    @oat.use_sdpa()
    def decorated() -> Any:
        return F.scaled_dot_product_attention

    assert decorated() is not ORIGINAL
    assert decorated() is not decorated()


def test_blocks_that_overlap() -> None:
    """Left in the order in which they were entered: each function passes calls on when its block is left."""
    q = torch.randn(1, 1, 3, 8)
    first, second = oat.use_sdpa("int8"), oat.use_sdpa()
    first.__enter__()
    taken = F.scaled_dot_product_attention
    second.__enter__()
    first.__exit__(None, None, None)
    assert torch.equal(F.scaled_dot_product_attention(q, q, q), oat.sdpa(q, q, q))
    assert torch.equal(taken(q, q, q), ORIGINAL(q, q, q))
    second.__exit__(None, None, None)
    assert F.scaled_dot_product_attention is ORIGINAL


def test_all_threads_see_it() -> None:
    seen = []
    context = oat.use_sdpa()

    def other() -> None:
        seen.append(F.scaled_dot_product_attention)
        with context:
            seen.append(F.scaled_dot_product_attention)

    with context:
        mine = F.scaled_dot_product_attention
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert F.scaled_dot_product_attention is mine
    assert seen[0] is mine
    assert seen[1] not in (mine, ORIGINAL)


def test_a_module_of_torch_runs_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = torch.nn.MultiheadAttention(16, 2, batch_first=True)
    x = torch.randn(2, 5, 16)
    hidden = torch.zeros(2, 5).bool()
    hidden[1, 3:] = True
    expected = layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    calls = []
    attention = functional.attention
    monkeypatch.setattr(functional, "attention", lambda *a, **o: (calls.append(a), attention(*a, **o))[1])
    with oat.use_sdpa():
        made = layer(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
    torch.testing.assert_close(made, expected)
    assert len(calls) == 1


def test_compiled_without_breaks() -> None:
    def f(q: Any, k: Any, v: Any) -> Any:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    inputs = [torch.randn(2, 3, rows, 6, requires_grad=True) for rows in (9, 4, 4)]
    expected = ORIGINAL(*inputs, is_causal=True)
    with oat.use_sdpa():
        made = torch.compile(f, fullgraph=True, backend="aot_eager")(*inputs)
    torch._dynamo.reset()
    torch.testing.assert_close(made, expected)
    for a, b in zip(*(torch.autograd.grad(x.sin().sum(), inputs) for x in (made, expected)), strict=True):
        torch.testing.assert_close(a, b)


def test_questions_about_gpus_are_compiled_without_breaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, in the parts that only tensors on a GPU reach."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda ordinal: (9, 0) if ordinal == -1 else (7, 5))

    def f(x: Any) -> Any:
        if functional._has_kernels(x.get_device()) and not functional._has_kernels(0):
            x = x + (1 if shapes.has_readable_rows(x, 8) else 2)
        return x

    for shape, added in (((3, 16), 1), ((3, 12), 2)):
        x = torch.zeros(shape)
        assert torch.equal(torch.compile(f, fullgraph=True, backend="eager", dynamic=False)(x), x + added)
    torch._dynamo.reset()


def test_transforms_and_modes() -> None:
    q, k, v = (torch.randn(3, 2, 2, 5, 6) for _ in range(3))

    def loss(q: Any, k: Any, v: Any) -> Any:
        return oat.sdpa(q, k, v, is_causal=True).square().sum()

    made = torch.func.vmap(torch.func.grad(loss))(q, k, v)
    for i in range(3):
        leaf = q[i].clone().requires_grad_()
        (expected,) = torch.autograd.grad(ORIGINAL(leaf, k[i], v[i], is_causal=True).square().sum(), leaf)
        torch.testing.assert_close(made[i], expected)
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(2, 3, 5, 12)
        assert oat.sdpa(x, x, x, torch.empty(5, 5)).shape == (2, 3, 5, 12)


def test_autocast_makes_it_16_bit() -> None:
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    with torch.autocast("cpu", torch.bfloat16):
        made = oat.sdpa(q, k.bfloat16(), v)
    assert torch.equal(made, oat.sdpa(q.bfloat16(), k.bfloat16(), v.bfloat16()))


@pytest.mark.parametrize(
    ("q", "k", "causal", "grouped", "common"),
    [
        ((2, 4, 5, 8), (2, 4, 5, 8), True, False, True),
        ((2, 4, 5, 8), (2, 4, 6, 8), False, False, True),
        ((2, 4, 5, 8), (2, 4, 6, 8), True, False, False),
        ((2, 4, 5, 8), (2, 2, 5, 8), True, True, True),
        ((2, 4, 5, 8), (2, 2, 5, 8), True, False, False),
        ((2, 4, 5, 8), (1, 4, 5, 8), False, False, False),
        ((2, 4, 5, 8), (1, 2, 5, 8), False, True, False),
        ((2, 4, 5, 8), (2, 0, 5, 8), False, True, False),
        ((2, 4, 5, 12), (2, 4, 5, 12), False, False, False),
        ((2, 4, 5, 520), (2, 4, 5, 520), False, False, False),
        ((4, 5, 8), (4, 5, 8), False, False, False),
        ((2, 4, 5, 8), (4, 5, 8), False, False, False),
    ],
    ids=str,
)
def test_shapes_of_the_fast_path(q: Any, k: Any, causal: bool, grouped: bool, common: bool) -> None:
    assert functional._is_common(q, k, k, causal, grouped) is common


def test_memory_that_kernels_cannot_read() -> None:
    x = torch.randn(2, 3, 4, 8)
    assert shapes.readable(x) is x
    assert shapes.readable(x.expand(2, 3, 4, 8)[:, :1].expand(2, 3, 4, 8)).stride(1) == 0
    assert shapes.readable(x.transpose(2, 3)).stride() == (96, 32, 4, 1)
    assert shapes.has_readable_rows(x, 8)
    assert not shapes.has_readable_rows(x, 16)
    assert not shapes.has_readable_rows(x.transpose(2, 3), 8)


def test_code_of_the_page() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "torch.md").read_text(encoding="utf-8")
    own = text[text.index("## `sdpa` and") : text.index("## transformers")]
    blocks = re.findall(r"^```python\n(.*?)^```", own, re.MULTILINE | re.DOTALL)
    # torchtitan's: test_torchtitan; the last one needs two processes: test_torch_context_parallel
    assert len(blocks) == 4
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))
    for block in blocks[: 2 if operators.HAS_IMPLEMENTATIONS else 1]:
        names: dict[str, Any] = {"q": q, "k": k, "v": v}
        exec(block, names)
        assert names["o"].shape == q.shape
