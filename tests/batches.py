"""Continuous batching of transformers over tiny random models: requests, runs, and what tokens may differ by."""

from __future__ import annotations

import inspect
from typing import Any

import omniattn
from tests.tiny_models import DECODERS, VOCABULARY, decoder

#: Greedy tokens that each request gets.
NEW = 12
#: Softcap and sinks are no detail of these models, in contrast to those of `tiny_models`.
_CHANGES = {"gemma2": {"query_pre_attn_scalar": 1}}


def record_calls(monkeypatch: Any) -> list[tuple[str, dict[str, Any]]]:
    """Calls of the package's functions from here on, and their options."""
    made: list[tuple[str, dict[str, Any]]] = []

    def recorded(name: str, function: Any) -> Any:
        def call(*arrays: Any, **options: Any) -> Any:
            made.append((name, options))
            return function(*arrays, **options)

        return call

    for name in ("append", "decode", "attention", "attention_varlen", "attention_with_kvcache"):
        monkeypatch.setattr(omniattn, name, recorded(name, getattr(omniattn, name)))
    return made


def model_of(name: str, **changes: Any) -> Any:
    """A model of `tiny_models.DECODERS` for longer sequences."""
    return decoder(name, **{"max_position_embeddings": 2048, **_CHANGES.get(name, {}), **changes})


def names() -> list[str]:
    """Decoders whose layers continuous batching has."""
    return [name for name in DECODERS if name not in ("llama4", "deepseek_v3")]


def prompts(count: int = 64, longest: int = 40, shared: int = 17) -> list[list[int]]:
    """Requests of unequal length; every eighth begins with the same ``shared`` tokens."""
    import torch

    made = torch.Generator().manual_seed(1)

    def tokens(length: int) -> list[int]:
        return torch.randint(5, VOCABULARY, (length,), generator=made).tolist()  # type: ignore[no-any-return]

    lengths = torch.randint(1, longest + 1, (count,), generator=made).tolist()
    prefix = tokens(shared)
    return [(prefix if i % 8 == 0 else []) + tokens(length) for i, length in enumerate(lengths)]


def generate_batch(model: Any, attention: str, requests: list[list[int]], new: int = NEW, **options: Any) -> Any:
    """Tokens that ``model.generate_batch`` makes of each request; an error of one of them is raised.

    ``page`` of the options is the size of a page, which versions name differently; ``warmup`` is generate_batch's own,
    and ``keep`` its persistent_manager.
    """
    import transformers

    kind = transformers.ContinuousBatchingConfig
    known = inspect.signature(kind).parameters
    if "page" in options:
        options["page_size" if "page_size" in known else "block_size"] = options.pop("page")
    if "auto_switch_to_flash" in known:
        options.setdefault("auto_switch_to_flash", False)
    config = transformers.GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=None, pad_token_id=0)
    model.set_attn_implementation(attention)
    own = {"warmup": options.pop("warmup", True), "persistent_manager": options.pop("keep", False)}
    made = model.generate_batch(
        requests, generation_config=config, continuous_batching_config=kind(**options), **own
    )  # fmt: skip
    # Numbers of requests go on where a manager is kept.
    results = sorted(made.values(), key=lambda result: int(result.request_id.rpartition("_")[2]))
    errors = {result.error for result in results if result.error}
    if errors or len(results) != len(requests):
        raise AssertionError(f"{len(results)} of {len(requests)} requests came back, with {errors}")
    return [result.generated_tokens for result in results]


def sdpa_of_batches() -> str:
    """What SDPA is called in continuous batching: 5.17 has names of its own."""
    from transformers import AttentionInterface

    return "paged|sdpa" if "paged|sdpa" in AttentionInterface().valid_keys() else "sdpa"


def generate(model: Any, attention: str, requests: list[list[int]], new: int = NEW) -> list[list[int]]:
    """Tokens that ``model.generate`` makes of the same requests, padded on the left."""
    import torch

    longest = max(map(len, requests))
    ids = torch.tensor([[0] * (longest - len(request)) + request for request in requests], device=model.device)
    real = torch.tensor(
        [[0] * (longest - len(request)) + [1] * len(request) for request in requests], device=model.device
    )  # fmt: skip
    model.set_attn_implementation(attention)
    made = model.generate(
        ids, attention_mask=real, max_new_tokens=new, min_new_tokens=new, do_sample=False, eos_token_id=None,
        pad_token_id=0,
    )  # fmt: skip
    return made[:, longest:].tolist()  # type: ignore[no-any-return]


def check_same(
    exact: Any, requests: list[list[int]], want: Any, got: Any, rounding: float, most: float = 0.125
) -> None:
    """Nearly all requests have the same tokens; where they part, the two tokens are a tie but for rounding.

    ``exact`` is the model in float32, with eager attention, and judges by its logits: ``rounding`` is a part of the
    largest, and ``most`` the part of the requests that may differ.
    """
    import torch

    assert [len(tokens) for tokens in got] == [len(tokens) for tokens in want]
    exact.set_attn_implementation("eager")
    apart = [i for i in range(len(want)) if want[i] != got[i]]
    assert len(apart) <= most * len(want), f"{len(apart)} of {len(want)} requests differ"
    for i in apart:
        at = next(j for j, (a, b) in enumerate(zip(want[i], got[i], strict=True)) if a != b)
        ids = torch.tensor([requests[i] + want[i][:at]], device=exact.device)
        with torch.no_grad():
            logits = exact(ids, use_cache=False).logits[0, -1].float()
        top, wanted, given = logits.max(), logits[want[i][at]], logits[got[i][at]]
        # Which of the two is wrong, it says too.
        behind = f"{float(top - wanted):.3f} and {float(top - given):.3f} below the largest logit, {float(top):.3f}"
        assert abs(float(wanted - given)) <= rounding * float(logits.abs().max()), (
            f"request {i} of {len(requests[i])} tokens, token {at}: {behind}; {want[i]} and {got[i]}"
        )
