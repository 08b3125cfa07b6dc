"""transformers on omniattn against its own eager attention, in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import omniattn as oa
from tests import tiny_models
from tests.tiny_models import DECODERS, decoder, padding, tokens

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from omniattn.integrations import transformers as integration  # noqa: E402

pytestmark = pytest.mark.frameworks


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Options of the calls of attention."""
    made: list[dict[str, Any]] = []
    attention = oa.attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        made.append(options)
        return attention(*arrays, **options)

    monkeypatch.setattr(oa, "attention", recorded)
    integration.register()
    return made


def run(
    model: Any, kind: str, real: Any, inputs: dict[str, Any], of: Callable[[Any], Any]
) -> tuple[Any, dict[str, Any]]:
    """Results at the real tokens, and every parameter's gradient of their mean square."""
    tiny_models.switch(model, kind)
    model.zero_grad()
    result = of(model(**inputs))[real.bool()]
    result.float().square().mean().backward()
    return result.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def compare(model: Any, real: Any, of: Callable[[Any], Any], **inputs: Any) -> None:
    """Results and gradients of both implementations."""
    want, gradients = run(model, "eager", real, inputs, of)
    got, made = run(model, "omniattn", real, inputs, of)
    scale = float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * scale)
    assert set(made) == set(gradients)
    largest = max(float(x.abs().max()) for x in gradients.values())
    for name, gradient in made.items():
        torch.testing.assert_close(gradient, gradients[name], rtol=0, atol=1e-5 * largest, msg=name)


def logits(output: Any) -> Any:
    return output.logits


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, side: str, calls: list[dict[str, Any]]) -> None:
    real = padding(side)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    compare(
        decoder(name), real, logits, input_ids=tokens(), attention_mask=real, position_ids=positions, use_cache=False
    )
    assert len(calls) == 2
    for options in calls:
        mask = options["mask"]
        if name != "llama4":
            # Masks are never as large as the scores.
            assert options["window"][1] == 0
            assert mask is None if side == "none" else mask.shape == (2, 1, 1, 11)
        assert options["precision"] == "exact"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss", "t5"])
def test_generation(name: str, cache: str) -> None:
    """Token for token, and the logits of every step."""
    model = tiny_models.t5() if name == "t5" else decoder(name)
    made = []
    for kind in ("eager", "omniattn"):
        tiny_models.switch(model, kind)
        made.append(
            model.generate(
                tokens(), attention_mask=padding("left"), max_new_tokens=8, do_sample=False, eos_token_id=None,
                cache_implementation=cache, disable_compile=True, output_logits=True, return_dict_in_generate=True,
            )
        )  # fmt: skip
    assert torch.equal(made[0].sequences, made[1].sequences)
    assert len(made[1].logits) == 8
    for want, got in zip(made[0].logits, made[1].logits, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert name == "t5" or made[0].sequences[:, 11:].unique().numel() > 2


@pytest.mark.parametrize("kind", ["dynamic", "by_config", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma2", "phimoe"])
def test_prefill_in_two_steps(name: str, kind: str, calls: list[dict[str, Any]]) -> None:
    model, real, ids = decoder(name), padding("left"), tokens()
    made = []
    for implementation in ("eager", "omniattn"):
        model.set_attn_implementation(implementation)
        if kind == "static":
            cache = transformers.StaticCache(config=model.config, max_cache_len=16)
        else:
            cache = transformers.DynamicCache(**({"config": model.config} if kind == "by_config" else {}))
        with torch.no_grad():
            parts = [
                model(input_ids=ids[:, a:b], attention_mask=real[:, :b], past_key_values=cache).logits
                for a, b in ((0, 6), (6, 11))
            ]
        made.append(torch.cat(parts, dim=1)[real.bool()])
    torch.testing.assert_close(made[1], made[0], rtol=0, atol=1e-5 * float(made[0].abs().max()))
    assert all(options["mask"] is None or options["mask"].shape[2] == 1 for options in calls)


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoders(name: str, side: str, calls: list[dict[str, Any]]) -> None:
    real = padding(side)
    model = getattr(tiny_models, name)()
    compare(model, real, lambda output: output.last_hidden_state, input_ids=tokens(), attention_mask=real)
    # A window of 6 reaches 3 tokens to each side.
    expected = {"bert": [None, None], "modernbert": [None, (3, 3)]}[name]
    assert [options["window"] for options in calls] == expected
    assert all((options["mask"] is None) == (side == "none") for options in calls)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_and_decoder(name: str, side: str, calls: list[dict[str, Any]]) -> None:
    model, mask, targets = getattr(tiny_models, name)(), padding(side), tokens(length=7, seed=2)
    inputs = {"input_ids": tokens(), "attention_mask": mask, "decoder_input_ids": targets, "use_cache": False}
    compare(model, torch.ones(2, 7), lambda output: output[0], **inputs)
    assert len(calls) == 6
    if name == "t5":
        # Keys of a bias lie next to each other, as the faster kernels want them.
        assert all(options["mask"].dtype == torch.float32 and options["mask"].stride(-1) == 1 for options in calls)
        _, gradients = run(model, "omniattn", torch.ones(2, 7), inputs, logits)
        biases = [x for parameter, x in gradients.items() if "relative_attention_bias" in parameter]
        assert len(biases) == 2
        assert all(float(x.abs().max()) > 0 for x in biases)


@pytest.mark.parametrize("name", ["llama", "phimoe", "gemma2"])
def test_packed_sequences(name: str) -> None:
    """One row of three sequences gives what each gives alone."""
    model, ids = decoder(name), tokens(1)
    model.set_attn_implementation("omniattn")
    parts = [ids[:, :3], ids[:, 3:9], ids[:, 9:]]
    positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
    with torch.no_grad():
        alone = torch.cat([model(part, use_cache=False).logits for part in parts], dim=1)
        packed = model(ids, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
        starts = torch.tensor([0, 3, 9, 11], dtype=torch.int32)
        lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
        packed = model(ids, position_ids=positions, use_cache=False, **lengths).logits
        torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))


def test_decoder_as_an_encoder() -> None:
    model = decoder("gemma3", use_bidirectional_attention=True)
    real = padding("right")
    compare(model, real, logits, input_ids=tokens(), attention_mask=real, use_cache=False)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_masks_of_the_caller(dtype: str) -> None:
    visible = torch.rand(2, 1, 11, 11, generator=torch.Generator().manual_seed(0)) < 0.6
    visible |= torch.eye(11, dtype=torch.bool)
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    model, ids = decoder("llama"), tokens()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, attention_mask=added, use_cache=False).logits
        model.set_attn_implementation("omniattn")
        got = model(ids, attention_mask=visible if dtype == "bool" else added, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("dtype", ["uint8", "int32", "int64"])
def test_masks_of_integers(dtype: str) -> None:
    """Of 4 dimensions, which transformers passes on as they are: no element is added as 0 or 1. Of 2: padding."""
    visible = torch.ones(2, 1, 11, 11, dtype=torch.bool).tril()
    model, ids, real = decoder("llama"), tokens(), padding("left")
    with torch.no_grad():
        for name in ("sdpa", "omniattn"):
            model.set_attn_implementation(name)
            with pytest.raises(RuntimeError, match=r"mask.* bool"):
                model(ids, attention_mask=visible.to(getattr(torch, dtype)), use_cache=False)
        got = model(ids, attention_mask=real.to(getattr(torch, dtype)), use_cache=False).logits
        assert torch.equal(got, model(ids, attention_mask=real.bool(), use_cache=False).logits)


def test_gradient_checkpoints() -> None:
    model, real = decoder("gemma2").train(), padding("left")
    for reentrant in (False, True):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        compare(model, real, logits, input_ids=tokens(), attention_mask=real, use_cache=False)


def test_int8(calls: list[dict[str, Any]]) -> None:
    model, real, ids = decoder("qwen3"), padding("left"), tokens()
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, attention_mask=real).logits[real.bool()]
        model.set_attn_implementation("omniattn_int8")
        output = model(ids, attention_mask=real, use_cache=True)
        got = output.logits[real.bool()]
        assert [options["precision"] for options in calls] == ["int8"] * 2
        calls.clear()
        step = torch.cat([real, torch.ones(2, 1, dtype=torch.long)], dim=1)
        model(ids[:, :1], attention_mask=step, past_key_values=output.past_key_values)
        assert [options["precision"] for options in calls] == ["exact"] * 2
    error = torch.nn.functional.cosine_similarity(got.flatten(), want.flatten(), dim=0)
    assert 0.99 < float(error) < 1
    assert not torch.allclose(got, want, atol=1e-6)


def test_auto(calls: list[dict[str, Any]]) -> None:
    model, real, ids = decoder("qwen3"), padding("left"), tokens()
    found = {}
    with torch.no_grad():
        for name in ("omniattn", "omniattn_auto"):
            model.set_attn_implementation(name)
            found[name] = model(ids, attention_mask=real, use_cache=True).logits
    assert [options["precision"] for options in calls] == ["exact"] * 2 + ["auto"] * 2
    assert torch.equal(found["omniattn"], found["omniattn_auto"])


def test_autocast(calls: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of q and k give float32 there, and v stays bfloat16."""
    model, dtypes = decoder("qwen3"), []
    attention = oa.attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        dtypes.append({x.dtype for x in arrays})
        return attention(*arrays, **options)

    monkeypatch.setattr(oa, "attention", recorded)
    model.set_attn_implementation("omniattn")
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        model(tokens())
    assert dtypes == [{torch.bfloat16}] * 2
