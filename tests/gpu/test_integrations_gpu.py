"""transformers and ComfyUI on a GPU: tiny random models in bf16, against eager attention in bf16 and in fp32."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

import omniattn as oa  # noqa: E402
from omniattn.errors import DtypeError  # noqa: E402
from omniattn.integrations import comfyui  # noqa: E402
from omniattn.integrations import transformers as integration  # noqa: E402
from tests import tiny_models  # noqa: E402
from tests.tiny_models import DECODERS, decoder, tokens  # noqa: E402

pytestmark = pytest.mark.gpu

LENGTH = 200
#: Longer windows than on the CPU, and heads that no kernel has to fill up.
_SIZES: dict[str, dict[str, Any]] = {
    name: {
        "max_position_embeddings": 512,
        **({} if name == "deepseek_v3" else {"head_dim": 64}),
        **({"sliding_window": 37} if "sliding_window" in special else {}),
        **({"attention_chunk_size": 50} if "attention_chunk_size" in special else {}),
    }
    for name, (_, special) in DECODERS.items()
}

integration.register()


@pytest.fixture(autouse=True)
def precisions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Precisions of the calls of attention."""
    made: list[str] = []
    attention = oa.attention

    def recorded(*arrays: Any, **options: Any) -> Any:
        made.append(options["precision"])
        return attention(*arrays, **options)

    monkeypatch.setattr(oa, "attention", recorded)
    return made


def padding(side: str, length: int = LENGTH) -> Any:
    """(2, length), 0 for padding: a third of a row."""
    mask = torch.ones(2, length, dtype=torch.long, device="cuda")
    if side == "left":
        mask[0, : length // 3] = 0
    elif side == "right":
        mask[1, -(length // 3) :] = 0
    return mask


def run(
    model: Any, kind: str, real: Any, of: Callable[[Any], Any], inputs: dict[str, Any], dtype: Any
) -> tuple[Any, dict[str, Any]]:
    """Results at the real tokens in fp32, and every parameter's gradient."""
    model = model.to(dtype)
    tiny_models.switch(model, kind)
    model.zero_grad(set_to_none=True)
    result = of(model(**inputs))[real.bool()].float()
    result.square().mean().backward()
    gradients = {name: p.grad.float() for name, p in model.named_parameters() if p.grad is not None}
    return result.detach(), gradients


def distance(x: Any, y: Any) -> float:
    return float((x - y).norm())


def compare(make: Callable[[], Any], real: Any, of: Callable[[Any], Any], **inputs: Any) -> None:
    """Against fp32, in bf16: no further away than twice what eager attention is."""
    exact, exact_gradients = run(make().cuda(), "eager", real, of, inputs, torch.float32)
    eager, eager_gradients = run(make().cuda(), "eager", real, of, inputs, torch.bfloat16)
    got, gradients = run(make().cuda(), "omniattn", real, of, inputs, torch.bfloat16)
    assert distance(got, exact) <= 2 * distance(eager, exact) + 1e-3 * float(exact.norm())
    assert set(gradients) == set(eager_gradients)
    slack = 1e-2 * max(float(x.norm()) for x in exact_gradients.values())
    for name, gradient in gradients.items():
        allowed = 2 * distance(eager_gradients[name], exact_gradients[name]) + slack
        assert distance(gradient, exact_gradients[name]) <= allowed, name


def logits(output: Any) -> Any:
    return output.logits


@pytest.mark.parametrize("side", ["none", "left", "right"])
@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, side: str, precisions: list[str]) -> None:
    real = padding(side)
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    inputs = {"input_ids": tokens(length=LENGTH).cuda(), "attention_mask": real, "position_ids": positions}
    compare(lambda: decoder(name, **_SIZES[name]), real, logits, use_cache=False, **inputs)
    assert precisions == ["exact"] * 2


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["bert", "modernbert", "t5", "bart"])
def test_encoders(name: str, side: str, precisions: list[str]) -> None:
    real = padding(side, 60)
    inputs = {"input_ids": tokens(length=60).cuda(), "attention_mask": real}
    if name in ("t5", "bart"):
        inputs |= {"decoder_input_ids": tokens(length=41, seed=2).cuda(), "use_cache": False}
        real = torch.ones(2, 41, device="cuda")
    compare(getattr(tiny_models, name), real, lambda output: output[0], **inputs)
    assert precisions


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3", "gpt_oss"])
def test_documents_in_one_row(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the collator without padding makes, in a training step: loss and gradients of documents by themselves."""
    lengths, packed = (70, 1, 200, 33), []
    attention_varlen = oa.attention_varlen

    def recorded(*arrays: Any, **options: Any) -> Any:
        packed.append(options["cu_seqlens_q"].tolist())
        return attention_varlen(*arrays, **options)

    monkeypatch.setattr(oa, "attention_varlen", recorded)
    generator = torch.Generator().manual_seed(0)
    documents = [torch.randint(3, 90, (length,), generator=generator) for length in lengths]
    batch = transformers.DataCollatorWithFlattening()([{"input_ids": x.tolist()} for x in documents])
    padded = {kind: torch.full((4, 200), fill) for kind, fill in
              (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}  # fmt: skip
    for i, x in enumerate(documents):
        padded["input_ids"][i, : len(x)], padded["attention_mask"][i, : len(x)] = x, 1
        padded["labels"][i, 1 : len(x)] = x[1:]
    found = {}
    for kind, dtype, given in (
        ("eager", torch.float32, padded), ("eager", torch.bfloat16, padded), ("omniattn", torch.bfloat16, batch)
    ):  # fmt: skip
        model = decoder(name, **_SIZES[name]).cuda().to(dtype)
        model.set_attn_implementation(kind)
        loss = model(**{key: value.cuda() for key, value in given.items()}, use_cache=False).loss
        loss.backward()
        found[kind, dtype] = loss.detach().float(), {key: x.grad.float() for key, x in model.named_parameters()}
    (want, exact), (_, eager), (got, made) = found.values()
    assert packed
    assert all(starts == [0, 70, 71, 271, 304] for starts in packed)
    assert abs(float(got - want)) <= 5e-3 * float(want)
    for key, gradient in made.items():
        allowed = 2 * distance(eager[key], exact[key]) + 1e-3 * float(exact[key].norm())
        assert distance(gradient, exact[key]) <= allowed, key


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt_oss"])
def test_steps_on_a_cache(name: str, cache: str) -> None:
    """Two steps of prefill and three of one token give the logits of the whole sequence at once."""
    model = decoder(name, **_SIZES[name]).cuda().to(torch.bfloat16)
    model.set_attn_implementation("omniattn")
    ids, real = tokens(length=LENGTH).cuda(), padding("left")
    positions = (real.cumsum(-1) - 1).clamp(min=0)
    if cache == "static":
        states = transformers.StaticCache(config=model.config, max_cache_len=LENGTH + 9)
    else:
        states = transformers.DynamicCache(config=model.config)
    ends = [0, 120, LENGTH - 3, LENGTH - 2, LENGTH - 1, LENGTH]
    with torch.no_grad():
        want = model(ids, attention_mask=real, position_ids=positions, use_cache=False).logits[real.bool()].float()
        parts = [
            model(
                ids[:, a:b], attention_mask=real[:, :b], position_ids=positions[:, a:b], past_key_values=states
            ).logits
            for a, b in itertools.pairwise(ends)
        ]  # fmt: skip
    got = torch.cat(parts, dim=1)[real.bool()].float()
    assert distance(got, want) <= 2e-2 * float(want.norm())


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache: str) -> None:
    model = decoder("llama", **_SIZES["llama"]).cuda().to(torch.bfloat16)
    model.set_attn_implementation("omniattn")
    made = model.generate(
        tokens(length=LENGTH).cuda(), attention_mask=padding("left"), max_new_tokens=8, do_sample=False,
        eos_token_id=None, cache_implementation=cache, disable_compile=True, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    assert made.sequences.shape == (2, LENGTH + 8)
    # The same tokens in one pass of eager attention.
    real = torch.cat([padding("left"), torch.ones(2, 8, dtype=torch.long, device="cuda")], dim=1)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        want = model(made.sequences, attention_mask=real, position_ids=positions, use_cache=False).logits
    want = want[:, LENGTH - 1 : -1].float()
    assert distance(torch.stack(made.logits, dim=1).float(), want) <= 2e-2 * float(want.norm())


@pytest.mark.parametrize("side", ["none", "left"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gemma3", "gpt_oss"])
def test_int8(name: str, side: str, precisions: list[str]) -> None:
    model = decoder(name, **_SIZES[name]).cuda().to(torch.bfloat16)
    ids, real = tokens(length=LENGTH).cuda(), padding(side)
    found = {}
    with torch.no_grad():
        for kind in ("eager", "omniattn_int8"):
            model.set_attn_implementation(kind)
            found[kind] = model(ids, attention_mask=real, use_cache=False).logits[real.bool()].float().flatten()
    assert precisions == ["int8"] * 2
    assert float(torch.nn.functional.cosine_similarity(found["eager"], found["omniattn_int8"], dim=0)) > 0.99


def test_a_training_step_under_autocast() -> None:
    ids, real = tokens(length=LENGTH).cuda(), padding("left")
    losses = []
    for kind in ("eager", "omniattn"):
        model = decoder("qwen3", **_SIZES["qwen3"]).cuda().train()
        model.set_attn_implementation(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(2):
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.bfloat16):
                loss = model(ids, attention_mask=real, labels=ids.masked_fill(real == 0, -100)).loss
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    assert losses[3] < losses[2]
    assert losses[2:] == pytest.approx(losses[:2], rel=1e-2)


def test_fp32_raises() -> None:
    model = decoder("llama", **_SIZES["llama"]).cuda()
    model.set_attn_implementation("omniattn")
    with pytest.raises(DtypeError, match="float32"):
        model(tokens().cuda())


@pytest.mark.parametrize("precision", ["exact", "int8"])
@pytest.mark.parametrize("masked", [False, True])
def test_comfyui(precision: str, masked: bool, precisions: list[str]) -> None:
    q, k, v = (torch.randn(2, n, 4 * 64, device="cuda", dtype=torch.bfloat16) for n in (300, 200, 200))
    mask = torch.rand(300, 200, device="cuda") < 0.7 if masked else None
    function = comfyui.override if precision == "exact" else comfyui.override_int8

    def own(q: Any, k: Any, v: Any, heads: int, mask: Any = None, **_: Any) -> Any:
        by_head = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(*by_head, attn_mask=mask)
        return out.transpose(1, 2).flatten(2)

    got = function(own, q, k, v, 4, mask=mask)
    want = own(q.float(), k.float(), v.float(), 4, mask=mask)
    assert precisions == [precision]
    assert distance(got.float(), want) <= (1e-2 if precision == "exact" else 0.1) * float(want.norm())
    assert torch.equal(function(own, q.float(), k.float(), v.float(), 4, mask=mask), want)
    assert precisions == [precision]
