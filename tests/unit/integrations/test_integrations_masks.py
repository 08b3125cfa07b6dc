"""Masks for transformers: which are kept as parts, what they mean, and what the attention function does with them."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

import omniattn as oa
from omniattn.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from tests.tiny_models import decoder, padding, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import DynamicCache, masking_utils  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from omniattn.integrations import transformers as integration  # noqa: E402
from omniattn.integrations import transformers_keywords  # noqa: E402
from omniattn.integrations.masks import StructuredMask, band  # noqa: E402

pytestmark = pytest.mark.frameworks

integration.register()

#: (q_length, kv_length, q_offset, kv_offset): without a cache, one step, several steps, static, sliding caches.
PLACES = [
    (7, 7, 0, 0), (1, 1, 0, 0), (1, 7, 6, 0), (3, 7, 4, 0), (4, 9, 0, 0), (3, 9, 2, 0), (1, 9, 3, 0), (1, 5, 8, 4),
    (3, 7, 8, 4), (2, 6, 4, 0), (5, 3, 0, 0),
]  # fmt: skip
KINDS = ["causal", "sliding", "chunked", "bidirectional", "bidirectional_sliding"]


def _options(kind: str, place: tuple[int, ...], pad: Any, *, as_tensor: bool = False) -> dict[str, Any]:
    q_length, kv_length, q_offset, kv_offset = place
    size = 4
    none = torch.zeros(2, dtype=torch.long)
    function = {
        "causal": masking_utils.causal_mask_function,
        "sliding": masking_utils.sliding_window_causal_mask_function(size),
        "chunked": masking_utils.chunked_causal_mask_function(size, none),
        "bidirectional": masking_utils.bidirectional_mask_function,
        "bidirectional_sliding": masking_utils.sliding_window_bidirectional_mask_function(size),
    }[kind]
    options = {
        "batch_size": 2, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset,
        "q_offset": torch.tensor(q_offset) if as_tensor else q_offset, "mask_function": function,
        "attention_mask": pad, "allow_is_causal_skip": "bidirectional" not in kind,
        "allow_is_bidirectional_skip": "bidirectional" in kind,
        "config": SimpleNamespace(
            sliding_window=size if "sliding" in kind else None, attention_chunk_size=size if kind == "chunked" else None
        ),
    }  # fmt: skip
    if kind not in ("causal", "bidirectional"):
        options["local_size"] = size
    return options


def _seen(mask: Any, kind: str, place: tuple[int, ...]) -> Any:
    """The full mask that a result of the mask function stands for."""
    q_length, kv_length, _, _ = place
    if mask is None:
        # As scaled_dot_product_attention has it: causal from the first key on, a single query sees everything.
        right = -1 if "bidirectional" in kind or q_length == 1 else 0
        mask = band(q_length, kv_length, 0, -1, right, "cpu")
    elif isinstance(mask, StructuredMask):
        mask = mask.materialize()
    return mask.expand(2, 1, q_length, kv_length)


def _full(options: dict[str, Any]) -> Any:
    return masking_utils.sdpa_mask(**{**options, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})


@pytest.mark.parametrize("place", PLACES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_every_mask_means_what_transformers_means(kind: str, place: tuple[int, ...]) -> None:
    q_length, kv_length, q_offset, _ = place
    for side, as_tensor in itertools.product(("absent", "none", "left", "right"), (False, True)):
        seen_tokens = q_offset + q_length
        pad = None if side == "absent" else torch.ones(2, seen_tokens, dtype=torch.bool)
        if side == "left":
            pad[0, : min(2, seen_tokens - 1)] = False
        elif side == "right":
            pad[1, -1:] = False
        options = _options(kind, place, pad, as_tensor=as_tensor)
        want = _full(options)
        got = integration.attention_mask(**options)
        assert torch.equal(_seen(got, kind, place), want), (side, as_tensor)
        if kind in ("causal", "sliding") and q_length > 1 and kv_length >= q_length and side != "right":
            assert got is None or isinstance(got, StructuredMask), (side, as_tensor)


def test_what_no_window_describes() -> None:
    """Masks that transformers says are more than causal, and local masks that cannot be told from chunks."""
    pad = torch.ones(2, 7, dtype=torch.bool)
    options = _options("sliding", PLACES[0], pad)
    assert isinstance(integration.attention_mask(**options), StructuredMask)
    for changes in ({"allow_is_causal_skip": False}, {"config": SimpleNamespace(sliding_window=3)}, {"config": None}):
        got = integration.attention_mask(**{**options, **changes})
        assert type(got) is torch.Tensor
        assert torch.equal(got, _seen(integration.attention_mask(**options), "sliding", PLACES[0]))


def _structured(pad: bool = True) -> tuple[Any, Any]:
    rows = (
        torch.tensor([[False, True, True, True], [True, True, True, True]]) if pad else torch.ones(0, dtype=torch.bool)
    )
    mask = StructuredMask(rows, 2, 3, 4, 1, 1, 0)
    full = torch.tensor([[1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]], dtype=torch.bool).expand(2, 1, 3, 4).clone()
    if pad:
        full[0, :, :, 0] = False
    return mask, full


@pytest.mark.parametrize("pad", [False, True])
def test_a_structured_mask_is_a_tensor(pad: bool) -> None:
    mask, full = _structured(pad)
    assert mask.shape == full.shape
    assert mask.dtype == torch.bool
    assert "StructuredMask(shape=(2, 1, 3, 4)" in repr(mask)
    assert mask.contiguous() is mask
    assert mask.to("cpu") is mask
    copy = mask.clone()
    assert isinstance(copy, StructuredMask)
    assert mask.full is None
    assert type(mask[:, :, 1:]) is torch.Tensor
    assert torch.equal(mask[:, :, 1:], full[:, :, 1:])
    assert torch.equal(~mask, ~full)
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(full, 1.0, 2.0))
    assert torch.equal(mask.to(torch.float32), full.float())
    assert torch.equal(copy.materialize(), full)


def test_what_is_written_to_a_structured_mask_counts() -> None:
    mask, full = _structured()
    mask[:, :, :, 3] = True
    full[:, :, :, 3] = True
    view = mask[0]
    view.fill_(True)
    full[0] = True
    assert torch.equal(mask.materialize(), full)
    assert torch.equal(mask.clone(), full)
    q, k, v = _qkv(3, 4)
    torch.testing.assert_close(_attend(q, k, v, mask), _attend(q, k, v, full), rtol=0, atol=0)


def _qkv(q_len: int, kv_len: int, batch_q: int = 2) -> tuple[Any, ...]:
    made = torch.Generator().manual_seed(q_len * 10 + kv_len)
    shapes = ((batch_q, 2, q_len, 8), (2, 1, kv_len, 8), (2, 1, kv_len, 8))
    return tuple(torch.randn(shape, generator=made) for shape in shapes)


def _attend(
    q: Any, k: Any, v: Any, mask: Any = None, *, name: str = "omniattn", causal: Any = None, **options: Any
) -> Any:
    module = SimpleNamespace() if causal is None else SimpleNamespace(is_causal=causal)
    out, weights = ALL_ATTENTION_FUNCTIONS[name](module, q, k, v, mask, **options)
    assert weights is None
    return out


def _want(q: Any, k: Any, v: Any, visible: Any, bias: Any = 0.0, scale: float = 8**-0.5) -> Any:
    scores = (q * scale) @ k.transpose(-1, -2) + bias
    return (scores.masked_fill(~visible, -torch.inf).softmax(-1) @ v).transpose(1, 2)


@pytest.mark.parametrize(
    ("q_len", "kv_len", "causal", "options", "expected"),
    [
        (4, 4, None, {}, (0, -1, 0)),
        (4, 4, False, {}, (0, -1, -1)),
        (4, 4, False, {"is_causal": True}, (0, -1, 0)),
        (4, 4, True, {"is_causal": False}, (0, -1, -1)),
        (4, 9, True, {}, (0, -1, 0)),
        (6, 3, True, {}, (0, -1, 0)),
        (1, 9, True, {}, (0, -1, -1)),
        (6, 6, True, {"sliding_window": 3}, (0, 2, 0)),
        (6, 9, True, {"sliding_window": 3}, (0, 2, 0)),
        (6, 5, True, {"sliding_window": 3}, (0, 2, 0)),
        (6, 6, False, {"sliding_window": 3}, (0, 2, 2)),
        (1, 6, True, {"sliding_window": 3}, (5, 2, 0)),
        (4, 4, True, {"scaling": 0.3}, (0, -1, 0)),
    ],
    ids=str,
)
def test_without_a_mask(
    q_len: int, kv_len: int, causal: Any, options: dict[str, Any], expected: tuple[int, ...]
) -> None:
    q, k, v = _qkv(q_len, kv_len)
    got = _attend(q, k, v, causal=causal, **options)
    want = _want(q, k, v, band(q_len, kv_len, *expected, "cpu"), scale=options.get("scaling", 8**-0.5))
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("of_mask", ["none", "bool", "float", "parts"])
def test_position_biases(of_mask: str) -> None:
    q, k, v = _qkv(3, 4)
    _, full = _structured()
    bias = torch.randn(1, 3, 4, 2, generator=torch.Generator().manual_seed(0)).permute(0, 3, 1, 2)
    mask = {
        "none": None, "bool": full, "float": torch.zeros(full.shape).masked_fill(~full, -torch.inf),
        "parts": StructuredMask(_structured()[0].rows, 2, 3, 4, 1, 1, 0),
    }[of_mask]  # fmt: skip
    visible = torch.ones(3, 4, dtype=torch.bool) if mask is None else full
    # Nobody is seen by the first query of the first sequence but key 1.
    got = _attend(q, k, v, mask, causal=False, position_bias=bias)
    torch.testing.assert_close(got, _want(q, k, v, visible, bias), rtol=0, atol=1e-6)


def test_learned_masks_and_biases_get_their_gradients() -> None:
    q, k, v = _qkv(3, 4)
    made = torch.Generator().manual_seed(3)
    mask, bias = (torch.randn(n, 2, 3, 4, generator=made, dtype=torch.float64).requires_grad_() for n in (2, 1))
    _attend(q, k, v, mask, causal=False, position_bias=bias).sin().sum().backward()
    both = (mask + bias).detach().float().requires_grad_()
    _want(q, k, v, torch.ones(3, 4, dtype=torch.bool), both).sin().sum().backward()
    torch.testing.assert_close(mask.grad.float(), both.grad, rtol=0, atol=1e-6)
    torch.testing.assert_close(bias.grad.float(), both.grad.sum(0, keepdim=True), rtol=0, atol=1e-5)


def test_one_row_of_queries_for_a_batch() -> None:
    q, k, v = _qkv(3, 4, batch_q=1)
    want = _want(q, k, v, torch.ones(3, 4, dtype=torch.bool))
    torch.testing.assert_close(_attend(q, k, v, causal=False), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("head_dim_v", [8, 24])
def test_value_heads_of_another_size(head_dim_v: int) -> None:
    made = torch.Generator().manual_seed(5)
    q, k = (torch.randn(1, 2, 3, 16, generator=made) for _ in range(2))
    v = torch.randn(1, 2, 3, head_dim_v, generator=made)
    want = _want(q, k, v, band(3, 3, 0, -1, 0, "cpu"), scale=16**-0.5)
    torch.testing.assert_close(_attend(q, k, v), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"output_attentions": True}, UnsupportedError, "never formed"),
        ({"cache": object()}, UnsupportedError, "continuous batching"),
        ({"indices": torch.zeros(1)}, UnsupportedError, "sparse"),
        ({"sinks": torch.zeros(1)}, UnsupportedError, "s_aux"),
        ({"something": 1}, UnsupportedError, "ignore=['something']"),
        ({"cu_seq_lens_q": torch.zeros(2)}, ArgumentError, "cu_seq_lens_k"),
        (dict.fromkeys(integration.PACKED, 1), ShapeError, "batch of 1"),
        ({"attention_mask": StructuredMask(torch.ones(0), 2, 4, 5, 0, -1, 0)}, ShapeError, "6 keys"),
        *(
            ({"attention_mask": torch.ones(2, 1, 4, 6, dtype=dtype), **bias}, DtypeError, "mask != 0 makes booleans")
            for dtype in (torch.uint8, torch.int32, torch.int64)
            for bias in ({}, {"position_bias": torch.zeros(1, 2, 4, 6)})
        ),
        (
            {"attention_mask": torch.zeros(2, 1, 4, 6), **dict.fromkeys(integration.PACKED, 1)}, UnsupportedError,
            "torch.float32 with cu_seq_lens_q",
        ),
    ],
)  # fmt: skip
def test_what_is_not_served(
    options: dict[str, Any], error: type[Exception], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attention(*_: Any, **__: Any) -> None:
        raise AssertionError("it should have raised before")

    monkeypatch.setattr(oa, "attention", attention)
    q, k, v = _qkv(4, 6)
    options = dict(options)
    with pytest.raises(error) as caught:
        _attend(q, k, v, options.pop("attention_mask", None), **options)
    assert says in str(caught.value)


def test_keywords_that_do_not_concern_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integration, "IGNORED", set(integration.IGNORED))
    monkeypatch.setattr(transformers_keywords, "IGNORED", integration.IGNORED)
    q, k, v = _qkv(4, 4)
    want = _attend(q, k, v)
    integration.register(ignore=["something"])
    others = {"something": 1, "position_ids": torch.arange(4), "use_cache": True, "output_attentions": False, "x": None}
    # From 5.24 on what a model keeps keys in is called so; those of it are in k and v already.
    others["cache"] = DynamicCache()
    assert torch.equal(_attend(q, k, v, **others), want)


@pytest.mark.parametrize("ignore", ["something", None, 3, ["something", 1]], ids=repr)
def test_keywords_that_are_no_iterable_of_str(ignore: Any) -> None:
    before = set(integration.IGNORED)
    with pytest.raises(ArgumentError, match=r"register\(\): argument 'ignore': expected an iterable of str, received"):
        integration.register(ignore=ignore)
    assert before == integration.IGNORED


def test_another_version_of_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    def sdpa_mask(batch_size: int, cache_position: Any) -> None: ...

    monkeypatch.setattr(masking_utils, "sdpa_mask", sdpa_mask)
    with pytest.raises(UnsupportedError, match="lack q_length") as caught:
        integration.register()
    assert transformers.__version__ in str(caught.value)


def test_models_say_what_they_do_not_serve() -> None:
    model = decoder("llama", attention_dropout=0.1)
    model.set_attn_implementation("omniattn")
    with pytest.raises(UnsupportedError, match="output_attentions"):
        model(tokens(), output_attentions=True)


def test_models_in_training_drop() -> None:
    """With padding, another result each time, the same one by the same seed, and gradients."""
    model = decoder("llama", attention_dropout=0.3).train()
    model.set_attn_implementation("omniattn")
    seen = []
    for seed in (0, 1, 0):
        torch.manual_seed(seed)
        seen.append(model(tokens(), attention_mask=padding("left")).logits)
    assert torch.equal(seen[0], seen[2])
    assert not torch.allclose(seen[0], seen[1])
    seen[0].square().mean().backward()
    assert all(x.grad is not None and bool(x.grad.isfinite().all()) for x in model.parameters())
    model.eval()
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)


def test_torch_compile_of_a_model_and_of_its_layers() -> None:
    """No graph breaks, with masks made in the graph, and with masks of parts that come into it."""
    model, ids, real = decoder("phimoe"), tokens(), padding("left")
    model.config.num_local_experts = 1
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model.model(ids, attention_mask=real, use_cache=False)[0][real.bool()]
        model.set_attn_implementation("omniattn")
        for layer in model.model.layers:
            layer.self_attn.compile(backend="eager", fullgraph=True)
        got = model.model(ids, attention_mask=real, use_cache=False)[0][real.bool()]
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    compiled = torch.compile(integration.attention_mask, backend="eager", fullgraph=True)
    mask = compiled(2, 11, 11, attention_mask=real.bool())
    assert type(mask) is torch.Tensor
    assert torch.equal(mask, masking_utils.sdpa_mask(2, 11, 11, attention_mask=real.bool(), allow_is_causal_skip=False))
    assert compiled(2, 11, 11) is None
