"""diffusers on omniattn against its native backend, in float32 on the CPU."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DeviceError, DtypeError, ShapeError, UnsupportedError

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from diffusers.models import attention_dispatch  # noqa: E402

from omniattn.integrations import diffusers as integration  # noqa: E402

pytestmark = pytest.mark.frameworks

integration.register()
dispatch = attention_dispatch.dispatch_attention_fn


@pytest.fixture(autouse=True)
def _native_again() -> Any:
    """Models set the backend of the whole process too."""
    yield
    attention_dispatch._AttentionBackendRegistry.set_active_backend(attention_dispatch.AttentionBackendName.NATIVE)


def _flux() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 16, 4), "encoder_hidden_states": torch.randn(1, 6, 32),
        "pooled_projections": torch.randn(1, 32), "timestep": torch.tensor([1.0]), "img_ids": torch.randn(16, 3),
        "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip
    return model, inputs


def _wan() -> tuple[Any, dict[str, Any]]:
    torch.manual_seed(0)
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, rope_max_seq_len=32,
    )  # fmt: skip
    inputs = {
        "hidden_states": torch.randn(1, 4, 2, 8, 8), "timestep": torch.tensor([3]),
        "encoder_hidden_states": torch.randn(1, 6, 16),
    }  # fmt: skip
    return model, inputs


def _run(model: Any, backend: str, inputs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    model.set_attention_backend(backend)
    model.zero_grad()
    result = model(**inputs, return_dict=False)[0]
    result.square().mean().backward()
    return result.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("make", [_flux, _wan])
def test_transformers(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make()
    want, gradients = _run(model, "native", inputs)
    precisions, attention = [], oa.attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        precisions.append(options["precision"])
        return attention(*arrays, **options)

    monkeypatch.setattr(oa, "attention", recorded)
    got, made = _run(model, "omniattn", inputs)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)
    assert set(made) == set(gradients)
    for name, gradient in made.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-5, msg=name)
    assert precisions
    assert set(precisions) == {"exact"}
    precisions.clear()
    model.set_attention_backend("omniattn_int8")
    with torch.no_grad():
        got = model(**inputs, return_dict=False)[0]
    assert set(precisions) == {"int8"}
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    assert not torch.equal(got, want)
    precisions.clear()
    model.set_attention_backend("omniattn_auto")
    with torch.no_grad():
        got = model(**inputs, return_dict=False)[0]
    assert set(precisions) == {"auto"}
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def _qkv(queries: int = 5, keys: int = 5, heads: int = 2, seed: int = 0) -> list[Any]:
    made = torch.Generator().manual_seed(seed)
    shapes = ((2, queries, 2, 8), (2, keys, heads, 8), (2, keys, heads, 8))
    return [torch.randn(shape, generator=made) for shape in shapes]


def _visible(*shape: int) -> Any:
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    visible[..., 0] = True
    return visible


def _added(*shape: int) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("queries", "keys", "options"),
    [
        (5, 5, {}),
        (5, 7, {"attn_mask": _visible(2, 7)}),
        (5, 7, {"attn_mask": _added(2, 7)}),
        (5, 7, {"attn_mask": _visible(5, 7)}),
        (5, 7, {"attn_mask": _visible(2, 1, 5, 7)}),
        (5, 7, {"attn_mask": _added(1, 2, 5, 7)}),
        (5, 7, {"attn_mask": _added(2, 1, 1, 7).double()}),
        (5, 5, {"is_causal": True}),
        (5, 7, {"is_causal": True}),
        (7, 5, {"is_causal": True}),
        (5, 7, {"is_causal": True, "attn_mask": _visible(2, 7)}),
        (7, 5, {"is_causal": True, "attn_mask": _added(2, 1, 7, 5)}),
        (5, 7, {"scale": 0.7}),
    ],
)
def test_against_native(queries: int, keys: int, options: dict[str, Any]) -> None:
    q, k, v = _qkv(queries, keys)
    mask = options.get("attn_mask")
    if mask is not None and mask.dtype == torch.float64:
        options = {**options, "attn_mask": mask.float()}
    want = dispatch(q, k, v, **options, backend="native")
    got = dispatch(q, k, v, **{**options, **({} if mask is None else {"attn_mask": mask})}, backend="omniattn")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_integer_masks_are_boolean_or_an_error() -> None:
    """Never added as 0 and 1, as some of diffusers' own backends do; its native one refuses them too."""
    x, mask = torch.randn(2, 5, 2, 8), torch.tensor([[1, 1, 1, 0, 0], [1, 1, 0, 0, 0]])
    for backend in ("native", "omniattn", "omniattn_int8"):
        with pytest.raises(RuntimeError, match=r"mask.* bool"):
            dispatch(x, x, x, attn_mask=mask, backend=backend)
    want = dispatch(x, x, x, attn_mask=mask != 0, backend="native")
    torch.testing.assert_close(dispatch(x, x, x, attn_mask=mask != 0, backend="omniattn"), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_learned_mask_gets_its_gradient(dtype: str) -> None:
    q, k, v = _qkv(5, 7)
    masks = [_added(2, 7).to(getattr(torch, dtype)).requires_grad_() for _ in range(2)]
    dispatch(q, k, v, attn_mask=masks[0].float(), backend="native").sin().sum().backward()
    dispatch(q, k, v, attn_mask=masks[1], backend="omniattn").sin().sum().backward()
    assert masks[0].grad.abs().max() > 0
    torch.testing.assert_close(masks[1].grad, masks[0].grad, rtol=0, atol=1e-3 if dtype == "float16" else 1e-6)


def test_masks_of_other_shapes_and_places() -> None:
    """(batch, keys) is padding; with another number of columns it is not, and has to fit queries and keys."""
    q, k, v = _qkv(2, 7)
    column = _added(2, 1)
    want = dispatch(q, k, v, attn_mask=column.expand(2, 7)[None], backend="native")
    torch.testing.assert_close(dispatch(q, k, v, attn_mask=column, backend="omniattn"), want, rtol=0, atol=1e-6)
    for shape in ((2, 6), (3, 2, 7), (2, 0, 2, 7), (1, 1, 1, 2, 7)):
        with pytest.raises(ShapeError, match="'attn_mask'"):
            dispatch(q, k, v, attn_mask=_added(*shape), backend="omniattn")
    with pytest.raises(DeviceError, match="'attn_mask'"):
        dispatch(q, k, v, attn_mask=torch.ones(2, 7, dtype=torch.bool, device="meta"), backend="omniattn")


def test_grouped_heads_and_lse() -> None:
    q, k, v = _qkv(5, 6, heads=1)
    want = dispatch(q, k, v, enable_gqa=True, backend="native")
    o, lse = dispatch(q, k, v, enable_gqa=True, attention_kwargs={"return_lse": True}, backend="omniattn")
    torch.testing.assert_close(o, want, rtol=0, atol=1e-6)
    scores = torch.einsum("bqhd,bkd->bhqk", q, k[:, :, 0]) * 8**-0.5
    torch.testing.assert_close(lse, scores.logsumexp(-1), rtol=0, atol=1e-5)


def test_windows() -> None:
    q, k, v = _qkv()
    steps = torch.arange(5)[:, None] - torch.arange(5)
    want = dispatch(q, k, v, attn_mask=(steps <= 2) & (steps >= -1), backend="native")
    got = dispatch(q, k, v, attention_kwargs={"window_size": (2, 1)}, backend="omniattn")
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_the_backend_is_a_member_like_others() -> None:
    names = attention_dispatch.AttentionBackendName
    integration.register()
    own = [names.OMNIATTN, names.OMNIATTN_INT8, names.OMNIATTN_AUTO]
    assert [x for x in names if x.value.startswith("omniattn")] == own
    assert names("omniattn") is names["OMNIATTN"] is names.OMNIATTN
    assert names.OMNIATTN == "omniattn"
    assert isinstance(names.OMNIATTN, names)
    assert attention_dispatch._AttentionBackendRegistry._is_context_parallel_available(names.OMNIATTN)
    q, k, v = _qkv()
    with diffusers.models.attention_dispatch.attention_backend("omniattn"):
        got = dispatch(q, k, v)
    assert torch.equal(got, dispatch(q, k, v, backend="omniattn"))


@pytest.mark.parametrize("mask", [None, _visible(2, 1, 1, 6)])
def test_context_parallelism_by_steps(mask: Any) -> None:
    """What a ring calls: the keys of each device, results merged by lse, gradients from the merged result."""
    whole = [x.requires_grad_() for x in _qkv(4, 6)]
    grad_out = torch.randn(2, 4, 2, 8, generator=torch.Generator().manual_seed(9))
    want = dispatch(*whole, attn_mask=mask, backend="native")
    want.backward(grad_out)
    q, k, v = (x.detach() for x in whole)
    forward, backward = integration._forward_of("exact"), integration._backward_of("exact")
    kept: dict[str, Any] = {}
    ctx = SimpleNamespace(save_for_backward=lambda *tensors: kept.update(saved=tensors))
    # Ulysses: all keys at once, and everything from the context.
    out = forward(ctx, q, k, v, mask, _save_ctx=True)
    ctx.saved_tensors = kept["saved"]
    torch.testing.assert_close(out, want, rtol=0, atol=1e-6)
    for got, x in zip(backward(ctx, grad_out), whole, strict=True):
        torch.testing.assert_close(got, x.grad, rtol=0, atol=1e-6)
    if mask is not None:
        return
    parts = [(k[:, :2], v[:, :2]), (k[:, 2:], v[:, 2:])]
    results = [forward(ctx, q, *part, return_lse=True, _save_ctx=i == 0) for i, part in enumerate(parts)]
    ctx.saved_tensors = kept["saved"]
    assert torch.equal(ctx.saved_tensors[1], parts[0][0])
    (o, lse), (o_next, lse_next) = results
    assert lse.shape == (2, 4, 2)
    share = torch.sigmoid(lse_next - lse)[..., None]
    o, lse = o + share * (o_next - o), torch.logaddexp(lse, lse_next)
    torch.testing.assert_close(o, want, rtol=0, atol=1e-6)
    steps = [backward(ctx, grad_out, query=q, key=a, value=b, out=o, lse=lse) for a, b in parts]
    torch.testing.assert_close(steps[0][0] + steps[1][0], whole[0].grad, rtol=0, atol=1e-6)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([steps[0][i], steps[1][i]], 1), whole[i].grad, rtol=0, atol=1e-6)


def test_tensors_of_a_collective_in_flight() -> None:
    q, k, v = _qkv()
    ctx = SimpleNamespace()
    flying = SimpleNamespace(wait=lambda: k)
    assert torch.equal(
        integration._forward_of("exact")(ctx, q, flying, v, _save_ctx=False), dispatch(q, k, v, backend="omniattn")
    )


def _parallel(ring: int) -> Any:
    return SimpleNamespace(context_parallel_config=SimpleNamespace(ring_degree=ring, ulysses_degree=3 - ring))


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"dropout_p": 0.1}, UnsupportedError, "dropout_p=0.1"),
        *(
            ({"attn_mask": _visible(*shape).to(dtype)}, DtypeError, "mask != 0 makes booleans of integers")
            for shape in ((2, 5), (5, 5), (2, 1, 5, 5))
            for dtype in (torch.uint8, torch.int32, torch.int64)
        ),
        ({"attn_mask": _added(2, 5).to(torch.complex64)}, DtypeError, "attn_mask"),
        ({"heads": 1}, ShapeError, "enable_gqa=True"),
        ({"keys": 6, "attention_kwargs": {"window_size": (1, 1)}}, UnsupportedError, "5 queries and 6 keys"),
        ({"is_causal": True, "parallel_config": _parallel(2)}, UnsupportedError, "is_causal with context"),
        ({"heads": 1, "enable_gqa": True, "parallel_config": _parallel(2)}, UnsupportedError, "enable_gqa with"),
        ({"attn_mask": _visible(2, 5), "parallel_config": _parallel(2)}, UnsupportedError, "ring"),
        (
            {"attn_mask": _added(2, 1, 1, 5).requires_grad_(), "parallel_config": _parallel(1)}, UnsupportedError,
            "requires a gradient",
        ),
        (
            {"attention_kwargs": {"window_size": (1, 1)}, "parallel_config": _parallel(1)}, UnsupportedError,
            "window_size with context",
        ),
    ],
    ids=str,
)  # fmt: skip
def test_what_is_not_served(
    options: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*_: Any, **__: Any) -> None:
        raise AssertionError("it should have raised before")

    monkeypatch.setattr(oa, "attention", attention)
    options = dict(options)
    q, k, v = _qkv(keys=options.pop("keys", 5), heads=options.pop("heads", 2))
    with pytest.raises(error) as caught:
        dispatch(q, k, v, **options, backend="omniattn")
    assert says in str(caught.value)


def _ones(*shape: int) -> Any:
    return torch.ones(shape)


@pytest.mark.parametrize(
    ("argument", "error", "options"),
    [
        *(("dropout_p", ArgumentError, {"dropout_p": x}) for x in (float("nan"), -0.5, None, "0.1")),
        *(("is_causal", ArgumentError, {"is_causal": x}) for x in ("no", None, [True])),
        *((name, ArgumentError, {name: "no"}) for name in ("enable_gqa", "return_lse", "scale")),
        *((name, DtypeError, {name: _ones(2, 5, 2, 16).double()}) for name in ("key", "value")),
        ("attn_mask", ShapeError, {"attn_mask": _ones(2, 1, 4, 5)}),
        *((name, ArgumentError, {name: 1.5}) for name in ("query", "key", "value", "attn_mask")),
        *((name, ShapeError, {name: _ones(2, 5, 16)}) for name in ("query", "key", "value")),
        *(
            ("window_size", ArgumentError, {"window_size": x})
            for x in (None, 3, (1,), (1, 2, 3), (-2, -2), (1, -5), (1.5, 1), (True, 1), "ab", (None, None))
        ),
        *(
            ("value", ShapeError, {"key": _ones(2, 9, 2, 16), "value": _ones(2, n, 2, 16), "is_causal": True})
            for n in (7, 12)
        ),
        (
            "attn_mask", ShapeError,
            {"key": _ones(2, 9, 2, 16), "value": _ones(2, 9, 2, 16), "attn_mask": _ones(2, 1, 5, 5), "is_causal": True},
        ),
        ("parallel_config", ArgumentError, {"_parallel_config": object()}),
    ],
)  # fmt: skip
def test_refused_by_name(argument: str, error: type[Exception], options: dict[str, Any]) -> None:
    arrays = {name: _ones(2, 5, 2, 16) for name in ("query", "key", "value")}
    with pytest.raises(error) as caught:
        integration._backend("exact")(**{**arrays, **options})
    assert type(caught.value) is error
    assert f"argument '{argument}'" in str(caught.value)


def test_as_many_heads_with_enable_gqa_and_context_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """diffusers refuses enable_gqa there, and with as many heads it says nothing."""
    arguments = inspect.signature(attention_dispatch._templated_context_parallel_attention)
    got: list[Any] = []

    def templated(*given: Any, **options: Any) -> Any:
        got.append(arguments.bind(*given, **options).arguments["enable_gqa"])
        return given[0]

    monkeypatch.setattr(attention_dispatch, "_templated_context_parallel_attention", templated)
    dispatch(*_qkv(), enable_gqa=True, backend="omniattn", parallel_config=_parallel(1))
    assert got == [False]


def test_gradients_of_int8_with_context_parallelism() -> None:
    with pytest.raises(UnsupportedError, match="int8"):
        integration._backward_of("int8")(SimpleNamespace(), torch.zeros(1))


@pytest.mark.parametrize("lacks", ["AttentionBackendName", "_templated_context_parallel_attention"])
def test_another_version_of_diffusers(lacks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(attention_dispatch, lacks)
    with pytest.raises(UnsupportedError, match=lacks) as caught:
        integration.register()
    assert diffusers.__version__ in str(caught.value)
