"""Batches of transformers without padding: sequences one behind the other in a row, against padded ones by eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import omniattn as oa
from tests.tiny_models import DECODERS, decoder

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers import masking_utils  # noqa: E402

from omniattn.errors import ShapeError  # noqa: E402
from omniattn.integrations import transformers as integration  # noqa: E402
from omniattn.integrations.masks import PackedMask  # noqa: E402
from omniattn.integrations.transformers_packed import packed_positions  # noqa: E402

pytestmark = pytest.mark.frameworks

LENGTHS = (7, 1, 12, 4)
STARTS = [0, 7, 8, 20, 24]


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Name and options of the calls of attention."""
    made: list[tuple[str, dict[str, Any]]] = []

    def recorded(name: str) -> Any:
        function = getattr(oa, name)

        def call(*arrays: Any, **options: Any) -> Any:
            made.append((name, options))
            return function(*arrays, **options)

        return call

    for name in ("attention", "attention_varlen"):
        monkeypatch.setattr(oa, name, recorded(name))
    integration.register()
    return made


def documents() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 90, (length,), generator=generator) for length in LENGTHS]


def collated(**options: Any) -> dict[str, Any]:
    """The documents in one row, by transformers' own collator."""
    collator = transformers.DataCollatorWithFlattening(**options)
    return dict(collator([{"input_ids": x.tolist()} for x in documents()]))


def padded() -> dict[str, Any]:
    """The documents in rows of their own; the first token of each is no target, as the collator has it."""
    batch = {name: torch.full((len(LENGTHS), max(LENGTHS)), fill)
             for name, fill in (("input_ids", 0), ("labels", -100), ("attention_mask", 0))}  # fmt: skip
    for i, x in enumerate(documents()):
        batch["input_ids"][i, : len(x)] = x
        batch["labels"][i, 1 : len(x)] = x[1:]
        batch["attention_mask"][i, : len(x)] = 1
    return batch


def step(model: Any, kind: str, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The loss of a batch and every parameter's gradient."""
    model = copy.deepcopy(model)
    model.set_attn_implementation(kind)
    loss = model(**batch).loss
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def compare(name: str, batch: dict[str, Any]) -> None:
    """Loss and gradients are those of padded rows by eager attention."""
    model = decoder(name)
    by_eager = padded()
    if name == "llama4" and not hasattr(masking_utils, "remap_positions_for_packed_sequence"):
        by_eager = collated()  # transformers before 5.23 counts chunks from the beginning of the row
    want, gradients = step(model, "eager", {**by_eager, "use_cache": False})
    got, made = step(model, "omniattn", batch)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=0)
    assert set(made) == set(gradients)
    largest = max(float(x.abs().max()) for x in gradients.values())
    for parameter, gradient in made.items():
        torch.testing.assert_close(gradient, gradients[parameter], rtol=0, atol=1e-5 * largest, msg=parameter)


@pytest.mark.parametrize("lengths", [False, True], ids=["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", DECODERS)
def test_batches_without_padding(name: str, lengths: bool, calls: list[tuple[str, dict[str, Any]]]) -> None:
    batch = collated(return_flash_attn_kwargs=lengths)
    assert ("cu_seq_lens_q" in batch) == lengths
    compare(name, {**batch, "use_cache": False})
    assert len(calls) == 2
    for function, options in calls:
        if function == "attention":  # chunks are no window
            assert (name, options["mask"].dtype) == ("llama4", torch.bool)
            continue
        assert options["cu_seqlens_q"].tolist() == STARTS
        assert (options["max_seqlen_q"], options["max_seqlen_k"]) == (12, 12)
        assert options["window"] in ((-1, 0), (4, 0))
    windows = [options["window"] for function, options in calls if function == "attention_varlen"]
    assert sorted(windows) == {
        "phimoe": [(4, 0)] * 2, "llama": [(-1, 0)] * 2, "deepseek_v3": [(-1, 0)] * 2, "llama4": [(-1, 0)],
    }.get(name, [(-1, 0), (4, 0)])  # fmt: skip


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt_oss"])
def test_with_a_cache(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """transformers makes a cache unless it is told not to, and then looks for packed sequences nowhere."""
    compare(name, collated())
    assert [function for function, _ in calls] == ["attention_varlen"] * 2
    assert all(options["cu_seqlens_q"].tolist() == STARTS for _, options in calls)


def test_int8_forwards(calls: list[tuple[str, dict[str, Any]]]) -> None:
    model = decoder("qwen3")
    want, gradients = step(model, "eager", {**padded(), "use_cache": False})
    got, made = step(model, "omniattn_int8", {**collated(), "use_cache": False})
    assert {(function, options["precision"]) for function, options in calls} == {("attention_varlen", "int8")}
    assert 0 < abs(float(got - want)) < 0.02 * float(want)
    for name, gradient in gradients.items():
        assert torch.nn.functional.cosine_similarity(made[name].flatten(), gradient.flatten(), dim=0) > 0.97, name


def test_rows_of_a_batch(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Two rows, each of other documents; the second is one document."""
    model = decoder("qwen3")
    ids = torch.randint(3, 90, (2, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.stack([torch.cat([torch.arange(4), torch.arange(5)]), torch.arange(9)])
    with torch.no_grad():
        model.set_attn_implementation("eager")
        want = model(ids, position_ids=positions, use_cache=False).logits
        model.set_attn_implementation("omniattn")
        got = model(ids, position_ids=positions, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))
    assert [options["cu_seqlens_q"].tolist() for _, options in calls] == [[0, 4, 9, 18]] * 2


def test_positions_that_are_written_again(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """What was found is kept by the tensor, until that changes."""
    model, ids = decoder("gpt_oss"), torch.arange(3, 13)[None]
    positions = torch.arange(10)[None].clone()
    model.set_attn_implementation("omniattn")
    with torch.no_grad():
        model(ids, position_ids=positions)
        assert [function for function, _ in calls] == ["attention"] * 2
        calls.clear()
        positions[:, 6:] -= 6
        for _ in range(2):
            packed = model(ids, position_ids=positions).logits
        assert [options["cu_seqlens_q"].tolist() for _, options in calls] == [[0, 6, 10]] * 4
        assert calls[0][1]["cu_seqlens_q"] is calls[2][1]["cu_seqlens_q"]
        alone = torch.cat([model(ids[:, part]).logits for part in (slice(0, 6), slice(6, 10))], dim=1)
    torch.testing.assert_close(packed, alone, rtol=0, atol=1e-5 * float(alone.abs().max()))
    with torch.inference_mode():
        written = torch.arange(10)[None].clone()
        assert packed_positions(written, 10, -1) is None
        written[:, 6:] -= 6
        mask = packed_positions(written, 10, 2)
        assert (mask.starts.tolist(), mask.left, mask.right) == ([0, 6, 10], 2, 0)
    assert packed_positions(torch.tensor([[0, 2, 4, 7]]), 4, -1) is None
    assert packed_positions(torch.arange(8).view(2, 4), 4, -1) is None
    assert packed_positions(None, 4, -1) is None


def mask_by(kind: str, positions: Any, name: str = "qwen3", **options: Any) -> Any:
    model = decoder(name)
    model.set_attn_implementation(kind)
    embeddings = torch.zeros(*positions.shape, 8)
    function = getattr(masking_utils, options.pop("function", "create_causal_mask"))
    return function(model.config, embeddings, None, None, position_ids=positions, **options)


@pytest.mark.parametrize("function", ["create_causal_mask", "create_sliding_window_causal_mask"])
def test_the_mask_is_that_of_sdpa(function: str) -> None:
    positions = torch.stack([torch.cat([torch.arange(n) for n in parts]) for parts in ((7, 1, 4), (2, 10))])
    want = mask_by("sdpa", positions, function=function)
    mask = mask_by("omniattn", positions, function=function)
    assert isinstance(mask, PackedMask)
    assert (mask.starts.tolist(), mask.longest) == ([0, 7, 8, 12, 14, 24], 10)
    assert "sequences=5, longest=10" in repr(mask)
    for kept in (mask.clone(), mask.to("cpu", copy=True)):
        assert isinstance(kept, PackedMask)
        assert kept.full is None
        assert torch.equal(kept.materialize(), want)
    assert mask.full is None
    assert torch.equal(mask & torch.ones_like(want), want)
    assert mask.full is not None
    names, context = mask.__tensor_flatten__()
    again = PackedMask.__tensor_unflatten__({name: getattr(mask, name) for name in names}, context, mask.shape, None)
    assert torch.equal(again & torch.ones_like(want), want)


def test_masks_that_say_more_are_full() -> None:
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]

    def every_second(b: Any, h: Any, q: Any, k: Any) -> Any:
        return k % 2 == 0

    for which in ("and_mask_function", "or_mask_function"):
        want = mask_by("sdpa", positions, **{which: every_second})
        got = mask_by("omniattn", positions, **{which: every_second})
        assert type(got) is torch.Tensor
        assert torch.equal(got, want)


def test_a_mask_and_lengths() -> None:
    """Both hold where the mask is the caller's: nothing of it is ignored."""
    model, ids = decoder("llama"), torch.arange(3, 14)[None]
    seen = torch.rand(1, 1, 11, 11, generator=torch.Generator().manual_seed(2)) < 0.7
    seen = (seen | torch.eye(11, dtype=torch.bool)).tril()
    starts = torch.tensor([0, 3, 9, 11], dtype=torch.int32)
    lengths = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "max_length_q": 6, "max_length_k": 6}
    of = torch.searchsorted(starts, torch.arange(11, dtype=torch.int32), right=True)
    both = seen & (of[:, None] == of)
    model.set_attn_implementation("omniattn")
    with torch.no_grad():
        got = model(ids, attention_mask=seen, use_cache=False, **lengths).logits
        want = model(ids, attention_mask=both, use_cache=False).logits
        other = model(ids, attention_mask=seen, use_cache=False).logits
    assert torch.equal(got, want)
    assert not torch.allclose(got, other, atol=1e-3)


def test_a_mask_that_was_used_as_a_tensor(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """The full mask counts then."""
    q = torch.randn(1, 2, 6, 8)
    mask = PackedMask(torch.tensor([0, 2, 6], dtype=torch.int32), 1, 6, 4, -1, 0)
    attend = transformers.AttentionInterface()["omniattn"]
    packed = attend(torch.nn.Module(), q, q, q, mask)[0]
    full = mask & True
    assert torch.equal(mask.materialize(), full)
    torch.testing.assert_close(attend(torch.nn.Module(), q, q, q, mask)[0], packed)
    assert [function for function, _ in calls] == ["attention_varlen", "attention"]
    with pytest.raises(ShapeError, match="as the mask of packed sequences has it"):
        attend(torch.nn.Module(), q[:, :, :5], q, q, PackedMask(mask.starts, 1, 6, 4, -1, 0))


def test_under_torch_compile() -> None:
    """Lengths of what is traced are not known: masks are full there, and results the same."""
    model, batch = decoder("llama"), collated()
    model.set_attn_implementation("omniattn")
    with torch.no_grad():
        want = model(**batch, use_cache=False).logits
        compiled = torch.compile(model, backend="eager")
        got = compiled(**batch, use_cache=False).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


@pytest.mark.parametrize("name", ["qwen3", "gpt_oss"])
def test_trainer(name: str, tmp_path: Any, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Losses of transformers' own loop are those of padded batches by eager attention."""
    pytest.importorskip("accelerate")
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, 15, (24,), generator=generator).tolist()
    rows = [torch.randint(3, 90, (length,), generator=generator).tolist() for length in lengths]
    data = [{"input_ids": row, "labels": [-100, *row[1:]]} for row in rows]

    def pad(batch: list[dict[str, list[int]]]) -> dict[str, Any]:
        longest = max(len(row["input_ids"]) for row in batch)

        def filled(name: str, fill: int) -> Any:
            return torch.tensor([row[name] + [fill] * (longest - len(row[name])) for row in batch])

        ids = filled("input_ids", 0)
        return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": filled("labels", -100)}

    losses = {}
    for kind, collator in (("eager", pad), ("omniattn", transformers.DataCollatorWithFlattening())):
        model = decoder(name).train()
        model.set_attn_implementation(kind)
        how = transformers.TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=4, max_steps=5, logging_steps=1, report_to=[],
            use_cpu=True, learning_rate=1e-3, save_strategy="no", disable_tqdm=True, seed=1,
        )  # fmt: skip
        trainer = transformers.Trainer(model=model, args=how, train_dataset=data, data_collator=collator)
        trainer.train()
        losses[kind] = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(losses["omniattn"]) == 5
    assert losses["omniattn"] == pytest.approx(losses["eager"], rel=1e-4)
    assert [function for function, _ in calls] == ["attention_varlen"] * 10
