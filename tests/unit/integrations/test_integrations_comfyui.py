"""The attention override for ComfyUI, and the example's node, without ComfyUI."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError

torch = pytest.importorskip("torch")

from omniattn.integrations import comfyui as integration  # noqa: E402

pytestmark = pytest.mark.frameworks

NODE = Path(__file__).resolve().parents[3] / "examples" / "comfyui" / "omniattn_node.py"
ON_CPU = integration.make_override(devices=("cpu",))


def own_attention(
    q: Any, k: Any, v: Any, heads: int, mask: Any = None, attn_precision: Any = None, skip_reshape: bool = False,
    skip_output_reshape: bool = False, *, scale: Any = None, enable_gqa: bool = False, **_: Any,
) -> Any:  # fmt: skip
    """What ComfyUI's function for torch does, written out."""
    if not skip_reshape:
        head_dim = q.shape[-1] // heads
        q, k, v = (x.unflatten(-1, (-1, head_dim)).transpose(1, 2) for x in (q, k, v))
    if mask is not None:
        mask = mask[(None,) * (3 - mask.dim())] if mask.dim() < 3 else mask
        mask = mask[:, None] if mask.dim() == 3 else mask
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)
    return out if skip_output_reshape else out.transpose(1, 2).flatten(2)


def never(*_: Any, **__: Any) -> Any:
    raise AssertionError("omniattn takes this call")


def _qkv(skip_reshape: bool = False, heads_kv: int = 2, head_dim: int = 8) -> list[Any]:
    made = torch.Generator().manual_seed(heads_kv)
    tensors = [torch.randn((3, n, h, head_dim), generator=made) for n, h in ((5, 2), (6, heads_kv), (6, heads_kv))]
    return [x.transpose(1, 2) if skip_reshape else x.flatten(2) for x in tensors]


def _some(*shape: int) -> Any:
    visible = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < 0.6
    visible[..., 0] = True
    return visible


@pytest.mark.parametrize("skip_output_reshape", [False, True])
@pytest.mark.parametrize("skip_reshape", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {}, {"scale": 0.5}, {"mask": _some(5, 6)}, {"mask": _some(3, 5, 6)}, {"mask": _some(3, 2, 5, 6)},
        {"mask": _some(1, 1, 1, 6)}, {"mask": torch.linspace(-2, 2, 30).reshape(5, 6)},
        {"mask": torch.linspace(-2, 2, 90).reshape(3, 5, 6)},
        {"attn_precision": torch.float32, "transformer_options": {}, "_inside_attn_wrapper": True, "other": None},
    ],
)  # fmt: skip
def test_against_torch(options: dict[str, Any], skip_reshape: bool, skip_output_reshape: bool) -> None:
    q, k, v = _qkv(skip_reshape)
    given = {**options, "skip_reshape": skip_reshape, "skip_output_reshape": skip_output_reshape}
    got = ON_CPU(never, q, k, v, 2, **given)
    want = own_attention(q, k, v, 2, **given)
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("skip_reshape", [False, True])
def test_grouped_heads(skip_reshape: bool) -> None:
    q, k, v = _qkv(skip_reshape, heads_kv=1)
    got = ON_CPU(never, q, k, v, 2, skip_reshape=skip_reshape, enable_gqa=True)
    want = own_attention(q, k, v, 2, skip_reshape=skip_reshape, enable_gqa=True)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


def test_masks_of_other_dtypes() -> None:
    q, k, v = _qkv()
    mask = torch.linspace(-2, 2, 30).reshape(5, 6)
    got = ON_CPU(never, q, k, v, 2, mask=mask.double())
    torch.testing.assert_close(got, own_attention(q, k, v, 2, mask=mask), rtol=0, atol=1e-6)


def _change(x: Any, i: int, to: Any) -> list[Any]:
    return [*x[:i], to(x[i]), *x[i + 1 :]]


OTHERS: dict[str, tuple[list[Any], dict[str, Any]]] = {
    "dtypes differ": (_change(_qkv(), 2, lambda v: v.double()), {}),
    "integers": ([x.int() for x in _qkv()], {}),
    "head_dim 12": (_qkv(head_dim=12), {}),
    "head_dim 520": (_qkv(head_dim=520), {}),
    "v's own head_dim": (_change(_qkv(skip_reshape=True), 2, lambda v: v.repeat(1, 1, 1, 2)), {"skip_reshape": True}),
    "one batch of keys": ([_qkv()[0], *(x[:1] for x in _qkv()[1:])], {}),
    "fewer heads": (_qkv(heads_kv=1), {}),
    **{
        f"a mask of {x}": (_qkv(), {"mask": torch.ones(5, 6, dtype=getattr(torch, x))})
        for x in ("uint8", "int32", "int64", "complex64")
    },
    "a mask elsewhere": (_qkv(), {"mask": torch.ones(5, 6, device="meta")}),
    "a mask of 1 dimension": (_qkv(), {"mask": torch.ones(6)}),
    "an unknown keyword": (_qkv(), {"something": 1}),
    "heads that do not divide": (_qkv(), {"heads": 3}),
    **{f"heads={x!r}": (_qkv(), {"heads": x}) for x in (0, -2, 2.0, "2", None)},
    **{f"heads={x!r} with skip_reshape": (_qkv(skip_reshape=True), {"heads": x, "skip_reshape": True}) for x in (3, 0)},
    "q that is no tensor": (_change(_qkv(), 0, lambda q: q.numpy()), {}),
    "a mask that is no tensor": (_qkv(), {"mask": [1.0]}),
    "3 dimensions with skip_reshape": (_qkv(), {"skip_reshape": True}),
}


@pytest.mark.parametrize("case", OTHERS)
def test_what_goes_to_comfyui(case: str) -> None:
    arrays, options = OTHERS[case]
    options = dict(options)
    heads = options.pop("heads", 2)
    came: list[Any] = []

    def func(*args: Any, **kwargs: Any) -> str:
        came.append((args, kwargs))
        return "its own"

    assert ON_CPU(func, *arrays, heads, **options) == "its own"
    args, kwargs = came[0]
    assert all(a is b for a, b in zip(args, (*arrays, heads), strict=True))
    assert {
        "mask": None,
        "attn_precision": None,
        "skip_reshape": False,
        "skip_output_reshape": False,
    } | options == kwargs


def test_tensors_of_a_cpu_go_to_comfyui() -> None:
    arrays = _qkv()
    for function in (integration.override, integration.override_int8):
        assert function(lambda *_, **__: "its own", *arrays, 2) == "its own"


def test_int8_and_what_runs_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    precisions, attention = [], oa.attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        precisions.append(options["precision"])
        return attention(*arrays, **options)

    monkeypatch.setattr(oa, "attention", recorded)
    int8 = integration.make_override("int8", devices=("cpu",))
    q, k, v = _qkv()
    want = own_attention(q, k, v, 2)
    got = int8(never, q, k, v, 2)
    assert torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0) > 0.99
    assert not torch.allclose(got, want, atol=1e-6)
    int8(never, q, k, v, 2, low_precision_attention=True)
    torch.testing.assert_close(int8(never, q, k, v, 2, low_precision_attention=False), want, rtol=0, atol=1e-6)
    int8(never, q.requires_grad_(), k, v, 2).sum().backward()
    assert q.grad is not None
    with torch.no_grad():
        int8(never, q, k, v, 2)
    mask = torch.zeros(3, 5, 6, dtype=torch.float64, requires_grad=True)
    int8(never, q.detach(), k, v, 2, mask=mask).sin().sum().backward()
    assert mask.grad.abs().max() > 0
    assert precisions == ["int8", "int8", "exact", "exact", "int8", "exact"]


def test_errors_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def attention(*_: Any, **__: Any) -> None:
        raise RuntimeError("no kernel")

    monkeypatch.setattr(oa, "attention", attention)
    with pytest.raises(RuntimeError, match="no kernel"):
        ON_CPU(never, *_qkv(), 2)
    with pytest.raises(ArgumentError, match="int3"):
        integration.make_override("int3")


def test_the_node_of_the_example() -> None:
    spec = importlib.util.spec_from_file_location("omniattn_node", NODE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (name, node), = module.NODE_CLASS_MAPPINGS.items()  # fmt: skip
    assert name in module.NODE_DISPLAY_NAME_MAPPINGS
    assert node.INPUT_TYPES()["required"]["precision"] == (["exact", "int8"],)

    # ComfyUI's models copy the outer dictionary of options, and share the inner one.
    model = SimpleNamespace(model_options={"transformer_options": {"kept": 1}})
    model.clone = lambda: SimpleNamespace(model_options=dict(model.model_options))
    for precision, expected in (("exact", integration.override), ("int8", integration.override_int8)):
        (patched,) = getattr(node(), node.FUNCTION)(model, precision)
        options = patched.model_options["transformer_options"]
        assert options == {"kept": 1, "optimized_attention_override": expected}
    assert model.model_options == {"transformer_options": {"kept": 1}}


@pytest.mark.parametrize("devices", ["cuda", None, 3, ("cuda", 0)], ids=repr)
def test_devices_that_are_no_tuple_of_str(devices: Any) -> None:
    with pytest.raises(
        ArgumentError, match=r"make_override\(\): argument 'devices': expected a tuple of str, received"
    ):
        integration.make_override(devices=devices)
