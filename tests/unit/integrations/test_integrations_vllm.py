"""The attention backend by vLLM's own classes on the CPU: registered, chosen, built, called; against fp64."""

from __future__ import annotations

import importlib.metadata
import re
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("vllm")

from tests import vllm_host as host  # noqa: E402

import vllm.plugins  # noqa: E402  isort: skip
from vllm.v1.attention.backends.registry import AttentionBackendEnum  # noqa: E402  isort: skip
from vllm.v1.attention.selector import get_attn_backend  # noqa: E402  isort: skip

from omniattn.errors import UnsupportedError  # noqa: E402
from omniattn.integrations import vllm as integration  # noqa: E402

pytestmark = pytest.mark.frameworks
ROOT = Path(__file__).parents[3]
LAYOUTS = ("LBNHC", "LBHNC", "BLNHC", "BLHNC", "BHLNC", "LHBNC")


@pytest.fixture(autouse=True)
def registered() -> None:
    integration.register()


def entry_point() -> importlib.metadata.EntryPoint:
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r'\[project\.entry-points\."(vllm\.general_plugins)"\]\n(\w+) = "([^"]+)"', text)
    assert found is not None
    group, name, value = found.groups()
    return importlib.metadata.EntryPoint(name, value, group)


def engine(made: Any, *, layout: str = "LBNHC", kind: Any = host.Attention, **options: Any) -> host.Engine:
    layer = host.layer_of(made, kind=kind, **options)
    spec = host.spec_of(layer, made)
    return host.Engine(layer, made, host.pool_of(spec, layout), spec)


def recorded(monkeypatch: pytest.MonkeyPatch, name: str) -> list[dict[str, Any]]:
    """Options of the calls of a public function."""
    import omniattn

    made: list[dict[str, Any]] = []
    function = getattr(omniattn, name)

    def call(*arrays: Any, **options: Any) -> Any:
        made.append(options)
        return function(*arrays, **options)

    monkeypatch.setattr(omniattn, name, call)
    return made


# Registered and chosen


def test_vllm_loads_the_plugin_of_pyproject(monkeypatch: pytest.MonkeyPatch) -> None:
    AttentionBackendEnum.CUSTOM.clear_override()
    monkeypatch.setattr(vllm.plugins, "plugins_loaded", False)
    declared = entry_point()

    def found(*, group: str) -> list[importlib.metadata.EntryPoint]:
        return [declared] if group == declared.group else []

    monkeypatch.setattr(importlib.metadata, "entry_points", found)
    vllm.plugins.load_general_plugins()
    assert AttentionBackendEnum.CUSTOM.get_path() == integration.BACKEND
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()  # in another process, or once more


def test_the_command_line_chooses_it() -> None:
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    given = parser.parse_args(["--attention-backend", "CUSTOM"]).attention_backend
    with host.config() as made:
        made.attention_config.backend = type(made.attention_config)(backend=given).backend
        chosen = get_attn_backend(64, torch.float16, "auto")
    assert chosen.__module__ == "omniattn.integrations.vllm.backend"
    assert AttentionBackendEnum[chosen.get_name()] is AttentionBackendEnum.CUSTOM


def test_another_packages_backend_is_left_there() -> None:
    from vllm.v1.attention.backends.registry import register_backend

    register_backend(AttentionBackendEnum.CUSTOM, "somebody.Else")
    try:
        with pytest.raises(UnsupportedError, match=r"somebody\.Else, of another package.*VLLM_PLUGINS=omniattn"):
            integration.register()
        integration.plugin()  # warns
        assert AttentionBackendEnum.CUSTOM.get_path() == "somebody.Else"
    finally:
        AttentionBackendEnum.CUSTOM.clear_override()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        ({"head_size": 520}, "head_size not supported"),
        ({"head_size": 60}, "head_size not supported"),
        ({"dtype": torch.float32}, "torch.float32: only torch.float16 and torch.bfloat16"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "nvfp4"}, "kv_cache_dtype not supported"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "kv_cache_dtype 'int4_per_token_head': only auto"),
        ({"kv_cache_dtype": "bfloat16"}, "kv_cache_dtype 'bfloat16' with torch.float16"),
        ({"kv_cache_dtype": "fp8", "head_size": 72}, "head_size 72 with kv_cache_dtype 'fp8': only multiples of 16"),
        ({"use_mla": True}, "head_size 64 with MLA: only 576"),
        ({"use_sparse": True}, "sparse not supported"),
        ({"use_mm_prefix": True}, "partial multimodal token full attention not supported"),
    ],
)
def test_vllm_says_what_is_not_served(asked: dict[str, Any], reason: str) -> None:
    options = {"head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto", **asked}
    with host.config(), pytest.raises(ValueError, match=re.escape(reason)):
        get_attn_backend(**options)


@pytest.mark.parametrize("field", ["use_pcp", "use_rswa"])
def test_vllm_says_what_else_is_not_served(field: str) -> None:
    chosen = AttentionBackendEnum.CUSTOM.get_class()
    given = {
        "head_size": 64, "dtype": torch.float16, "kv_cache_dtype": "auto", "block_size": 16, "use_mla": False,
        "has_sink": True, "use_sparse": False, "use_mm_prefix": False, "use_per_head_quant_scales": True,
        "attn_type": "decoder", "has_sliding_window": True, "use_non_causal": True, "use_batch_invariant": True,
        "use_kv_connector": True, "use_adaptive_verification": True, "use_dcp": True,
        "device_capability": host.DeviceCapability(8, 0),
    }  # fmt: skip
    assert chosen.validate_configuration(**given) == []
    assert len(chosen.validate_configuration(**given, **{field: True})) == 1
    given["device_capability"] = host.DeviceCapability(7, 5)
    assert chosen.validate_configuration(**given) == ["compute capability not supported"]


@pytest.mark.parametrize(
    ("options", "names"),
    [
        ({"alibi_slopes": [0.5] * 4}, "ALiBi"),
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2"),
        ({"kv_cache_dtype": "int4_per_token_head"}, "int4_per_token_head"),
        ({"head_size": 520}, "head_size 520"),
        ({"kv_lora_rank": 512, "q_lora_rank": None}, "layers with kv_lora_rank"),
        ({"chunk_lookback": 1, "sliding_window": 64}, "layers with chunk_lookback"),
        ({"chunk_lookback": 0}, "layers with chunk_lookback"),
    ],
)
def test_layers_that_are_not_served(options: dict[str, Any], names: str) -> None:
    impl = AttentionBackendEnum.CUSTOM.get_class().get_impl_cls()
    given = {"num_heads": 4, "head_size": 64, "scale": 0.125, "num_kv_heads": 2, **options}
    with pytest.raises(UnsupportedError, match=f"{names}.*--attention-backend"):
        impl(**given)


def test_an_option_that_vllm_passes_as_not_there_is_not_there() -> None:
    with host.config() as made:
        run = engine(made, chunk_lookback=-1)  # as vllm's rnj1 does in layers without chunks
        host.check(run.step(("a", 20), ("b", 5)))


def test_values_of_another_size_and_batches_that_are_not_served() -> None:
    with host.config() as made:
        run = engine(made)
        with pytest.raises(UnsupportedError, match="head_size 32 with values of 64"):
            host.spec_of(host.layer_of(made, "model.layers.1.attn", head_size_v=64), made)
        with pytest.raises(UnsupportedError, match="some requests are causal"):
            run.step(("a", 3), causal=torch.ones(1, dtype=torch.int32))
        with pytest.raises(UnsupportedError, match="mm_prefix"):
            run.step(("a", 3), mm_req_doc_ranges={0: [(0, 2)]})
        q = run.random(1, host.HEADS, host.DIM)
        with pytest.raises(UnsupportedError, match="an output that is quantized"):
            run.layer.impl.forward(run.layer, q, q, q, run.layer.kv_cache, None, q, output_scale=torch.ones(1))


# The version


def test_a_version_that_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    import dataclasses

    from vllm.v1 import kv_cache_interface
    from vllm.v1.attention import backend

    from omniattn.integrations.vllm.versions import TRIED, check_version

    check_version()
    assert vllm.__version__ in TRIED

    def forward(self: Any, layer: Any, query: Any, new_argument: Any) -> None: ...

    def extents(spec: Any, blocks: int) -> tuple[int, ...]:
        return (2, blocks, 16, 2, 128)

    @dataclasses.dataclass
    class Grown(backend.CommonAttentionMetadata):
        tree: Any = None

    for module, name, other, says in (
        (backend.AttentionImpl, "forward", forward, r"AttentionImpl.forward\(self, layer, query, new_argument\)"),
        (backend, "CommonAttentionMetadata", Grown, r"CommonAttentionMetadata with \['tree'\] and without \[\]"),
        (kv_cache_interface, "compute_layer_kv_cache_shape_bytes", extents, r"a KV cache of \(2, 3, 16, 2, 128\) byt"),
        (backend, "MultipleOf", None, r"no vllm\.v1\.attention\.backend\.MultipleOf"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, other)
            with pytest.raises(UnsupportedError, match=rf"{says}.*vllm 0\.31\.0, 0\.32\.0 and 0\.33\.0"):
                check_version()
    check_version()


def test_a_version_that_nobody_has_tried_warns(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    from omniattn.integrations.vllm.versions import check_version

    monkeypatch.setattr(vllm, "__version__", "0.99.0")
    check_version()
    assert "vllm 0.99.0 has not been tried" in caplog.text


# Built and called


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(layout: str) -> None:
    """Prompts, chunks, single tokens and padding, in pools full of NaN."""
    with host.config() as made:
        run = engine(made, layout=layout)
        host.check(run.step(("a", 20), ("b", 5)))
        host.check(run.step(("a", 1), ("b", 1), ("c", 33), padding=2, rows_of_padding=3))
        host.check(run.step(("a", 1), ("b", 12), ("c", 1)))
        host.check(run.step(("a", 1), ("b", 1), ("c", 1), padding=1))


@pytest.mark.parametrize("window", [1, 7, 40])
@pytest.mark.parametrize("softcap", [0.0, 5.0])
def test_windows_softcap_and_sinks(window: int, softcap: float) -> None:
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=torch.float16)
    with host.config() as made:
        run = engine(made, per_layer_sliding_window=window, logits_soft_cap=softcap, sinks=sinks)
        options = {"window": (window - 1, 0), "softcap": softcap, "sinks": sinks}
        host.check(run.step(("a", 37), ("b", 3)), **options)
        host.check(run.step(("a", 1), ("b", 20), padding=1), **options)


def test_blocks_that_a_window_has_left_may_be_anything() -> None:
    with host.config() as made:
        run = engine(made, per_layer_sliding_window=8)
        host.check(run.step(("a", 70)), window=(7, 0))
        run.requests["a"].blocks[:3] = [0, 0, 0]  # vLLM's null block, which is full of NaN
        host.check(run.step(("a", 1)), window=(7, 0))


@pytest.mark.parametrize("window", [None, 6])
def test_non_causal_decoders(window: int | None) -> None:
    both = None if window is None else (window - 1, window - 1)
    with host.config() as made:
        run = engine(made, per_layer_sliding_window=window)
        host.check(run.step(("a", 20), ("b", 5), causal=False), causal=False, window=both)
        host.check(run.step(("a", 4), ("b", 1), padding=1, causal=False), causal=False, window=both)


@pytest.mark.parametrize("scales", [(0.5, 2.0), ([0.5, 0.25], [2.0, 1.0])])
@pytest.mark.parametrize("cache_dtype", ["fp8", "fp8_e4m3"])
def test_e4m3_pools(cache_dtype: str, scales: Any) -> None:
    with host.config(cache_dtype) as made:
        run = engine(made, layout="BLHNC")
        assert run.layer.kv_cache.dtype == torch.uint8
        run.layer._k_scale, run.layer._v_scale = (torch.tensor(x, dtype=torch.float32) for x in scales)

        def rounded(x: Any, scale: Any) -> Any:
            scale = torch.as_tensor(scale, dtype=torch.float32).reshape(-1, 1)
            return (x.float() / scale).to(torch.float8_e4m3fn).float() * scale

        for news in ((("a", 20), ("b", 5)), (("a", 1), ("b", 9))):
            results = [(o, q, rounded(k, scales[0]), rounded(v, scales[1])) for o, q, k, v in run.step(*news)]
            host.check(results)


@pytest.mark.parametrize(("cache_dtype", "largest"), [("fp8_per_token_head", 448.0), ("int8_per_token_head", 127.0)])
@pytest.mark.parametrize("layout", ["LBNHC", "BHLNC"])
def test_pools_with_a_scale_a_token_and_head(cache_dtype: str, largest: float, layout: str) -> None:
    with host.config(cache_dtype) as made:
        run = engine(made, layout=layout)
        assert run.layer.kv_cache.shape[-1] == 2 * host.DIM + 16
        code = torch.float8_e4m3fn if largest == 448.0 else torch.int8

        def rounded(x: Any) -> Any:
            scale = x.float().abs().amax(-1, keepdim=True) / largest
            scaled = x.float() / scale
            return (scaled if code == torch.float8_e4m3fn else scaled.round()).to(code).float() * scale

        for news in ((("a", 20), ("b", 5)), (("a", 1), ("b", 9))):
            host.check([(o, q, rounded(k), rounded(v)) for o, q, k, v in run.step(*news)], atol=4e-3)


def test_a_layer_on_the_pool_of_another_one() -> None:
    with host.config() as made:
        first = engine(made)
        second = host.layer_of(made, "model.layers.1.attn", kv_sharing_target_layer_name=first.name)
        other = host.Engine(second, made, first.layer.kv_cache, first.spec)
        other.free, other.requests = first.free, first.requests
        [(_, _, k, v)] = first.step(("a", 20))
        before = first.layer.kv_cache.clone()
        first.requests["a"].k.clear()  # the second layer sees the same step
        first.requests["a"].v.clear()
        [(o, q, _, _)] = other.step(("a", 20))
        host.check([(o, q, k, v)])
        assert torch.equal(before.view(torch.int16), first.layer.kv_cache.view(torch.int16))


def test_profiling_gives_zeros() -> None:
    with host.config() as made:
        run = engine(made)
        out = torch.full((3, host.HEADS, host.DIM), float("nan"), dtype=torch.float16)
        q = run.random(3, host.HEADS, host.DIM)
        assert run.layer.impl.forward(run.layer, q, q, q, run.layer.kv_cache, None, out) is out
        assert not out.any()


def test_encoders_have_no_pool() -> None:
    from vllm.model_executor.layers.attention.encoder_only_attention import EncoderOnlyAttention

    with host.config() as made:
        layer = host.layer_of(made, kind=EncoderOnlyAttention, per_layer_sliding_window=9)
        assert layer.get_kv_cache_spec(made) is None
        spec = host.spec_of(host.layer_of(made, "model.layers.1.attn"), made)
        run = host.Engine(layer, made, torch.tensor([]), spec)
        host.check(run.step(("a", 20), ("b", 5), padding=1), causal=False, window=(8, 8))


def test_cross_attention() -> None:
    """More queries than keys too: a decoder's prompt over a short encoder."""
    import numpy as np
    from vllm.model_executor.layers.attention.cross_attention import CrossAttention

    with host.config() as made:
        run = engine(made, kind=CrossAttention)
        impl, layer, lengths = run.layer.impl, run.layer, {"a": 21, "b": 4}
        k, v = run.random(25, host.KV_HEADS, host.DIM), run.random(25, host.KV_HEADS, host.DIM)
        run.metadata(tuple(lengths.items()), 0)  # blocks of the encoders' tokens
        for news, keys in (((("a", 2), ("b", 7)), (k, v)), ((("a", 1), ("b", 1)), (None, None))):
            counts = [count for _, count in news]
            starts = torch.tensor([0, counts[0], sum(counts)], dtype=torch.int32)
            table = _table(run, *lengths)
            encoder = torch.tensor(list(lengths.values()), dtype=torch.int32)
            # In the second step the encoder's tokens are there already.
            bound = starts.diff() if keys[0] is not None else starts.diff() + 3
            common = host.CommonAttentionMetadata(
                query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=bound, num_reqs=2,
                num_actual_tokens=sum(counts), max_query_len=max(counts), max_seq_len=32, block_table_tensor=table,
                slot_mapping=torch.zeros(0, dtype=torch.int64), encoder_seq_lens=encoder,
                encoder_seq_lens_cpu=np.array(list(lengths.values())), seq_lens_cpu_upper_bound=bound,
            )  # fmt: skip
            q = run.random(sum(counts), host.HEADS, host.DIM)
            out = impl.forward(layer, q, *keys, layer.kv_cache, run.builder.build(0, common), torch.empty_like(q))
            split, parts = counts[0], (slice(0, 21), slice(21, 25))
            results = [(o, x, k[part], v[part]) for o, x, part in zip(
                (out[:split], out[split:]), (q[:split], q[split:]), parts, strict=True
            )]  # fmt: skip
            host.check(results, causal=False)


def test_chunks_of_local_attention() -> None:
    from vllm.model_executor.layers.attention.chunked_local_attention import ChunkedLocalAttention

    with host.config() as made:
        layer = ChunkedLocalAttention(
            host.HEADS, host.DIM, host.DIM**-0.5, 32, num_kv_heads=host.KV_HEADS, cache_config=made.cache_config,
            prefix="model.layers.0.attn",
        )  # fmt: skip
        spec = host.spec_of(layer, made)
        run = host.Engine(layer, made, host.pool_of(spec), spec)
        run.step(("a", 48))
        [(o, q, k, v)] = run.step(("a", 10))
        host.check([(o, q, k[32:], v[32:])])


def test_prompts_of_layers_that_share_are_cut_to_what_is_needed() -> None:
    """vLLM's builder of ``kv_sharing_fast_prefill`` copies our metadata into a class that is made of it."""
    from vllm.v1.attention.backends.utils import create_fast_prefill_custom_backend

    with host.config() as made:
        run = engine(made)
        kind = create_fast_prefill_custom_backend("FastPrefill_", run.layer.get_attn_backend()).get_builder_cls()
        builder = kind(run.spec, [run.name], made, torch.device("cpu"))
        [(_, q, k, v), _] = run.step(("a", 20), ("b", 1))
        # Of the step's 21 rows the last one of each request is looked at.
        common = host.CommonAttentionMetadata(
            query_start_loc=torch.tensor([0, 20, 21], dtype=torch.int32),
            query_start_loc_cpu=torch.tensor([0, 20, 21], dtype=torch.int32),
            seq_lens=torch.tensor([20, 1], dtype=torch.int32), num_reqs=2, num_actual_tokens=21, max_query_len=20,
            max_seq_len=20, block_table_tensor=_table(run, "a", "b"), slot_mapping=torch.zeros(21, dtype=torch.int64),
            logits_indices_padded=torch.tensor([19, 20]), num_logits_indices=2, max_logits_per_req=1,
            seq_lens_cpu_upper_bound=torch.tensor([20, 1], dtype=torch.int32),
        )  # fmt: skip
        built = builder.build(0, common)
        assert built.num_logits_indices == 2
        q = torch.cat([q[19:], run.random(1, host.HEADS, host.DIM)])
        out = torch.empty_like(q)
        run.layer.impl.forward(run.layer, q, q, q, run.layer.kv_cache, built, out)
        host.check([(out[:1], q[:1], k, v)])


def _table(run: host.Engine, *names: str) -> Any:
    """The blocks of requests, as a step has them."""
    table = torch.zeros(len(names), host.BLOCKS, dtype=torch.int32)
    for row, name in zip(table, names, strict=True):
        row[: len(run.requests[name].blocks)] = torch.tensor(run.requests[name].blocks, dtype=torch.int32)
    return table


def test_another_groups_pools_get_the_same_step() -> None:
    with host.config() as made:
        run = engine(made)
        built = run.builder.build(0, run.metadata((("a", 20),), 1))
        table, slots = torch.ones(2, 3, dtype=torch.int32), torch.arange(20)
        other = run.builder.update_block_table(built, table, slots)
        assert other.block_table.data_ptr() == table.data_ptr()
        assert other.slot_mapping is slots
        assert other.seq_lens is built.seq_lens
        assert built.block_table.data_ptr() != table.data_ptr()


def test_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    calls = recorded(monkeypatch, "attention_with_kvcache")
    with host.config() as made:
        run = engine(made)
        host.check(run.step(("a", 20), ("b", 5)))
    assert [call["deterministic"] for call in calls] == [True]


def test_graphs_are_of_any_batch_and_read_vllms_own_arrays() -> None:
    from vllm.v1.attention.backend import AttentionCGSupport

    with host.config() as made:
        run = engine(made)
        assert run.builder.get_cudagraph_support(made, run.spec) == AttentionCGSupport.ALWAYS
        assert run.builder.supports_draft_decode_metadata_update
        common = run.metadata((("a", 20), ("b", 1)), 1)
        built = run.builder.build_for_cudagraph_capture(common)
        run.builder.update_draft_decode_metadata(built)
        for name, given in (
            ("seq_lens", common.seq_lens), ("query_start_loc", common.query_start_loc),
            ("block_table", common.block_table_tensor), ("slot_mapping", common.slot_mapping),
        ):  # fmt: skip
            assert getattr(built, name).data_ptr() == given.data_ptr(), name
