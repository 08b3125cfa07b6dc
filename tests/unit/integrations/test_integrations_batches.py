"""generate_batch of transformers on omniattn, on the CPU: against its own attentions, token for token."""

from __future__ import annotations

import gc
import types
from collections.abc import Iterator
from inspect import signature
from typing import Any

import pytest

from omniattn.errors import UnsupportedError
from tests import batches
from tests.batches import check_same, generate, generate_batch, model_of, prompts, record_calls, sdpa_of_batches

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.generation import continuous_batching  # noqa: E402
from transformers.generation.continuous_batching import initialization  # noqa: E402

from omniattn.integrations import transformers as integration  # noqa: E402
from omniattn.integrations import transformers_paged as paged  # noqa: E402
from omniattn.integrations import transformers_pages as pages_of  # noqa: E402

pytestmark = pytest.mark.frameworks

#: 64 tokens a step: prompts come in chunks, and together with single tokens.
SMALL: dict[str, Any] = {"page": 8, "num_blocks": 512, "max_batch_tokens": 64}
_GETS_CACHE = "cache" in signature(transformers.AttentionInterface()["flash_attention_2"]).parameters
_GETS_CACHE |= sdpa_of_batches() == "paged|sdpa"


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, dict[str, Any]]]:
    """Calls of the package's functions, and their options."""
    made = record_calls(monkeypatch)
    # Without psutil, versions to 5.22 say that the CPU has no memory.
    monkeypatch.setattr(
        continuous_batching.cache, "get_device_and_memory_breakdown", lambda: (torch.device("cpu"), 2**34, 0, 0)
    )
    integration.register()
    return made


@pytest.fixture
def on_pages(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The decode path over pages, which transformers has on GPUs only; and options for it."""

    class Torch:
        cuda = types.SimpleNamespace(is_available=lambda: True)

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(initialization, "torch", Torch())
    return {**SMALL, "max_blocks_per_request": 16, "use_cuda_graph": False, "use_async_batching": False}


def made_by(calls: list[tuple[str, dict[str, Any]]]) -> set[str]:
    return {name for name, _ in calls}


@pytest.mark.parametrize("name", batches.names())
def test_tokens(name: str, calls: list[tuple[str, dict[str, Any]]]) -> None:
    """In float32, those of generate with eager attention, and where it can run this those of SDPA in batches."""
    model, requests = model_of(name), prompts()
    got = generate_batch(model, "omniattn", requests, **SMALL)
    assert made_by(calls) == {"attention_varlen"}
    assert model.config._attn_implementation == "omniattn"
    assert got == generate(model, "eager", requests)
    if name not in ("gemma2", "gpt_oss"):
        assert got == generate_batch(model, sdpa_of_batches(), requests, **SMALL)
    assert len({tuple(tokens) for tokens in got}) > 40
    windows = {options["window"] for _, options in calls}
    if name in ("llama", "phimoe"):
        assert windows == ({None} if name == "llama" else {(4, 0)})
    else:
        assert windows == {None, (4, 0)}


@pytest.mark.parametrize("what", ["softcap", "sinks", "window"])
def test_options_matter(what: str) -> None:
    """Models without them make other tokens: what `test_tokens` has compared is not nothing."""
    name = {"softcap": "gemma2", "sinks": "gpt_oss", "window": "qwen3"}[what]
    requests = prompts(16)
    want = generate_batch(model_of(name), "omniattn", requests, **SMALL)
    changes = {"softcap": {"attn_logit_softcapping": None}, "sinks": {}, "window": {"sliding_window": 30}}[what]
    model = model_of(name, **changes)
    with torch.no_grad():
        for parameter, x in model.named_parameters():
            if parameter.endswith("sinks"):
                x.fill_(-torch.inf)
    assert generate_batch(model, "omniattn", requests, **SMALL) != want


def test_a_window_that_changes_is_seen() -> None:
    """Of a model whose layers do not say their windows."""
    requests = prompts(8)
    model = model_of("phimoe")
    before = generate_batch(model, "omniattn", requests, **SMALL)
    model.config.sliding_window = 30
    after = generate_batch(model, "omniattn", requests, **SMALL)
    assert after != before
    assert after == generate_batch(model_of("phimoe", sliding_window=30), "omniattn", requests, **SMALL)


@pytest.mark.parametrize("name", batches.names())
def test_over_pages(name: str, on_pages: dict[str, Any], calls: list[tuple[str, dict[str, Any]]]) -> None:
    """In 16 bits, where a cache has pages for the package's own functions."""
    exact, model, requests = model_of(name), model_of(name).half(), prompts()
    got = generate_batch(model, "omniattn", requests, **on_pages)
    expected = {"llama": {"append", "decode", "attention_varlen"}}.get(name, {"attention_varlen"})
    if _GETS_CACHE and name != "phimoe":
        expected |= {"append", "attention_with_kvcache"}
    assert made_by(calls) == expected
    check_same(exact, requests, generate(model, "eager", requests), got, 0.01)


def test_padding(
    on_pages: dict[str, Any], calls: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows and requests of padding, which come with compilation and with graphs, change nothing."""
    exact, model, requests = model_of("llama"), model_of("llama").half(), prompts(9)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    configs = {f"{path}_compile_config": transformers.CompileConfig() for path in ("varlen", "decode")}
    got = generate_batch(model, "omniattn", requests, 5, **on_pages, **configs, max_requests_per_batch=16)
    check_same(exact, requests, generate(model, "eager", requests, 5), got, 0.01)
    decoded = [options for name, options in calls if name == "decode"]
    assert max(int(options["seq_lens"].shape[0]) for options in decoded) == 16
    assert any(0 in options["seq_lens"].tolist() for options in decoded)


def test_compilation_passes_it_by() -> None:
    """What it keeps by the identity of tensors is not for a trace; there is a graph break."""
    attention = transformers.AttentionInterface()[paged.BATCHING["omniattn"]]
    module = torch.nn.Module()
    module.layer_idx, module.config = 0, transformers.LlamaConfig()
    starts, rows = torch.tensor([0, 2, 5], dtype=torch.int32), torch.arange(5)
    step = {"cu_seq_lens_q": starts, "cu_seq_lens_k": starts, "write_index": [rows], "read_index": [rows[:0]]}

    def attend(q: Any) -> Any:
        return attention(module, 2 * q, q, q, None, **step, max_length_q=3, max_length_k=3)[0] + 1

    q = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0))
    want = attend(q)
    assert torch.equal(torch.compile(attend, backend="eager")(q), want)
    alone = torch.nn.functional.scaled_dot_product_attention(2 * q[:, :, 2:], q[:, :, 2:], q[:, :, 2:], is_causal=True)
    torch.testing.assert_close(want[:, 2:] - 1, alone.transpose(1, 2), rtol=0, atol=1e-6)


def test_int8(calls: list[tuple[str, dict[str, Any]]]) -> None:
    """Steps with more than one new token of a request are in 8 bits."""
    model, requests = model_of("qwen3"), prompts(16)
    got = generate_batch(model, "omniattn_int8", requests, **SMALL)
    assert model.config._attn_implementation == "omniattn_int8"
    precisions = [(options["max_seqlen_q"] > 1, options["precision"]) for _, options in calls]
    assert set(precisions) == {(True, "int8"), (False, "exact")}
    want = generate(model, "eager", requests)
    same = sum(a == b for x, y in zip(want, got, strict=True) for a, b in zip(x, y, strict=True))
    assert same >= 0.7 * batches.NEW * len(requests)


def test_the_name_inside() -> None:
    """It may be said, and says what it is for."""
    name = paged.BATCHING["omniattn"]
    model, requests = model_of("llama"), prompts(4)
    assert generate_batch(model, name, requests, **SMALL) == generate(model, "eager", requests)
    model.set_attn_implementation(name)
    with pytest.raises(UnsupportedError, match=r"outside of generate_batch.*\"omniattn\""):
        model(torch.tensor([requests[0]]))


def test_models_that_name_their_flash_attentions() -> None:
    """Models with sinks do; any other name with "flash" is replaced by one of theirs."""
    model, requests = model_of("gpt_oss"), prompts(4)
    theirs = list(type(model)._compatible_flash_implementations)
    generate_batch(model, "omniattn", requests, **SMALL)
    assert type(model)._compatible_flash_implementations == theirs
    assert model.config._attn_implementation == "omniattn"


def test_a_manager_that_stays() -> None:
    model, requests = model_of("llama"), prompts(8)
    want = generate(model, "eager", requests)
    known = signature(transformers.ContinuousBatchingConfig).parameters
    options = {name: x for name, x in SMALL.items() if name != "page"}
    options["page_size" if "page_size" in known else "block_size"] = SMALL["page"]
    config = transformers.GenerationConfig(max_new_tokens=batches.NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    model.set_attn_implementation("omniattn")
    cached = transformers.ContinuousBatchingConfig(**options)
    for _ in range(2):
        made = model.generate_batch(
            requests, generation_config=config, continuous_batching_config=cached, persistent_manager=True
        )
        assert sorted(x.generated_tokens for x in made.values()) == sorted(want)
    model.destroy_cached_continuous_batching_manager()
    assert model.config._attn_implementation == "omniattn"
    assert generate(model, "omniattn", requests) == want


def test_inference_mode() -> None:
    """Up to 5.23 the thread that generates is outside of it, and cannot write into what was made inside."""
    model, requests = model_of("llama").half(), prompts(8)
    exact = model_of("llama")
    loop = continuous_batching.ContinuousBatchingManager._run_generation_loop
    with torch.inference_mode("use_inference_mode" in signature(loop).parameters):
        got = generate_batch(model, "omniattn", requests, **SMALL)
    check_same(exact, requests, generate(model, "eager", requests), got, 0.01)


def test_nothing_of_a_cache_is_kept(on_pages: dict[str, Any]) -> None:
    generate_batch(model_of("llama").half(), "omniattn", prompts(4), **on_pages)
    gc.collect()
    assert not pages_of._pages
    assert not pages_of._layers


def test_a_step_is_known_by_its_first_layer() -> None:
    """Layers of one step share its lengths; a step on the same tensor, written anew, does not."""
    starts = torch.tensor([0, 3, 7], dtype=torch.int32)
    first = pages_of.step_of(starts, 0)
    assert pages_of.step_of(starts, 1) is first
    assert first.seq_lens.tolist() == [3, 4]
    starts[1:] += 1
    second = pages_of.step_of(starts, 0)
    assert second.seq_lens.tolist() == [4, 4]
    assert pages_of.step_of(starts, 1) is second
    assert pages_of.step_of(starts, 1) is not second
    assert pages_of.step_of(starts.clone(), 2) is not second


@pytest.mark.parametrize("apart", [1, 2])
def test_pages_of_both_layouts(apart: int) -> None:
    """Tables and slots of K's array lead to the same elements of the cache on it."""
    tokens, pages = 4, 12
    memory = torch.arange(pages * 2 * tokens * 16, dtype=torch.float16).view(2 * pages, tokens, 2, 8)
    k, v = (memory[2:-1], memory[3:]) if apart == 2 else (memory[:pages].clone(), memory[pages:].clone())
    made = pages_of.Pages.on(k, v)
    entries = torch.tensor([[4, 0, 6, -1], [8, 2, -1, -1]], dtype=torch.int32)
    table = made.table(entries)
    assert table.dtype == torch.int32
    for i, j in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1)):
        assert torch.equal(made.cache.k[table[i, j]], k[entries[i, j]])
        assert torch.equal(made.cache.v[table[i, j]], v[entries[i, j]])
    lengths = (10, 5)
    rows = torch.cat([
        entries[i, j // tokens] * tokens + j % tokens + torch.zeros(1, dtype=torch.int64)
        for i, length in enumerate(lengths) for j in range(length)
    ])  # fmt: skip
    starts = torch.tensor([0, 10, 15], dtype=torch.int32)
    of_rows = made.table_of_rows(rows, starts, 12)
    assert of_rows.dtype == torch.int32
    assert torch.equal(of_rows[0, :3], table[0, :3])
    assert torch.equal(of_rows[1, :2], table[1, :2])
    slots = made.slots(rows)
    flat = made.cache.k[slots // tokens, slots % tokens]
    assert torch.equal(flat, k.reshape(-1, 2, 8)[rows])


def test_an_unknown_layout_is_refused() -> None:
    memory = torch.zeros(8, 4, 2, 8, dtype=torch.float16)
    with pytest.raises(UnsupportedError, match="pages of V"):
        pages_of.Pages.on(memory[:-2], memory[2:])


@pytest.mark.parametrize("missing", ["update", "switch_to_cb_friendly_attn", "_lazy_imports"])
def test_another_version_of_transformers(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interface that has moved is named, and ordinary calls work on."""

    def moved(self: Any, other: Any) -> None: ...

    owner = {
        "update": continuous_batching.PagedAttentionCache,
        "switch_to_cb_friendly_attn": continuous_batching.ContinuousBatchingManager,
        "_lazy_imports": transformers.modeling_flash_attention_utils,
    }[missing]
    monkeypatch.setattr(owner, missing, moved)
    integration.register()
    assert paged._what_is_missing() is not None
    model, requests = model_of("llama"), prompts(2)
    assert generate(model, "omniattn", requests) == generate(model, "eager", requests)
    says = rf"{transformers.__version__}.*transformers 5\.17"
    with pytest.raises(UnsupportedError, match=says):
        transformers.AttentionInterface()[paged.BATCHING["omniattn"]]()
    if missing != "switch_to_cb_friendly_attn":
        with pytest.raises(UnsupportedError, match=says):
            generate_batch(model, "omniattn", requests, **SMALL)


def test_keywords_that_are_not_known() -> None:
    attention = transformers.AttentionInterface()[paged.BATCHING["omniattn"]]
    q = torch.zeros(1, 2, 3, 8)
    with pytest.raises(UnsupportedError, match="'something'"):
        attention(torch.nn.Module(), q, q, q, None, write_index=[q], something=1)
    with pytest.raises(UnsupportedError, match="a mask in generate_batch"):
        attention(torch.nn.Module(), q, q, q, torch.zeros(3, 3), write_index=[q])
    with pytest.raises(UnsupportedError, match="not causal"):
        attention(torch.nn.Module(), q, q, q, None, write_index=[q], is_causal=False)


def test_steps_that_are_not_known() -> None:
    """What a step has to bring and does not is named, and nothing is guessed."""
    attention, q = transformers.AttentionInterface()[paged.BATCHING["omniattn"]], torch.zeros(1, 2, 3, 8)
    module, starts = torch.nn.Module(), torch.tensor([0, 3], dtype=torch.int32)
    module.layer_idx, module.config = 0, transformers.LlamaConfig()
    step = {"write_index": [starts], "cu_seq_lens_q": starts}
    with pytest.raises(UnsupportedError, match="a step without cu_seq_lens_k"):
        attention(module, q, q, q, None, **step)
    with pytest.raises(UnsupportedError, match="a step without max_length_q"):
        attention(module, q, q, q, None, **step, cu_seq_lens_k=starts)
    with pytest.raises(UnsupportedError, match="a step without k_cache"):
        attention(module, q, q, q, None, **step, cu_seq_lens_k=starts, block_table=starts)
    with pytest.raises(UnsupportedError, match="lengths of all kinds"):
        attention(module, q, q, q, None, **step, cu_seq_lens_k={"full_attention": starts})


def test_other_flash_attentions_are_imported_as_before() -> None:
    imports = transformers.modeling_flash_attention_utils._lazy_imports
    switch = continuous_batching.ContinuousBatchingManager.switch_to_cb_friendly_attn
    inputs = continuous_batching.input_outputs.ContinuousBatchingIOs
    filling = inputs.prepare_batch_tensors, inputs._reset_static_tensors
    assert all(hasattr(function, "of_omniattn") for function in filling)
    integration.register()
    assert (inputs.prepare_batch_tensors, inputs._reset_static_tensors) == filling
    assert transformers.modeling_flash_attention_utils._lazy_imports is imports
    assert continuous_batching.ContinuousBatchingManager.switch_to_cb_friendly_attn is switch
    with pytest.raises(ImportError):
        imports("flash_attention_3")
    functions = imports(paged.BATCHING["omniattn_int8"])
    assert len(functions) == 5
    for function in functions[:3]:
        with pytest.raises(UnsupportedError, match=r"outside of generate_batch.*\"omniattn\""):
            function()
