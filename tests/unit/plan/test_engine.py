"""The engine of all operations: plans and their cache, records, outputs, explanations; without a GPU."""

from __future__ import annotations

import dataclasses
import gc
import pickle
import threading
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import omniattn as oa
from omniattn import arrays, runtime
from omniattn.errors import ArgumentError, DriverError
from omniattn.launch.host_struct import At, HostStruct
from omniattn.launch.structs import KV_COPY
from omniattn.plan import engine
from omniattn.plan.cache import PlanCache
from omniattn.plan.engine import PLANS, Call, Described, describing
from omniattn.registry import REGISTRY
from omniattn.runtime import record
from omniattn.runtime.device import DeviceInfo
from omniattn.runtime.driver import set_driver
from omniattn.runtime.driver_base import driver_error, launch_facts
from omniattn.runtime.record import MAX_ARGUMENT_BYTES, LaunchRecord, Pointer, Program
from tests.unit.launch.launch_fakes import Kernel, program_of, unpacked

LENS = np.array([5, 7], np.int32)
STARTS = np.array([0, 3, 5], np.int32)


def ones(*shape: int, dtype: str = "float16") -> np.ndarray:
    return np.ones(shape, dtype)


def contiguous(**options: Any) -> oa.KVCache:
    return oa.KVCache(2, 16, 2, 64, like=ones(1), **{"k_dtype": "int8", **options})


def paged() -> oa.PagedKVCache:
    return oa.PagedKVCache(
        8, 4, 2, 64, like=ones(1), k_dtype="fp8", recent_window=4, recent_dtype="fp16", recent_slots=2
    )


Make = Callable[[], tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]]


def _operands() -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    qk, v = oa.quantize_qk(ones(2, 5, 4, 64), ones(2, 7, 2, 64), with_bias=True), oa.quantize_v(ones(2, 7, 2, 64))
    return oa.attention, (qk.q, qk.k, v), {"return_lse": True}


_QKV = (ones(2, 5, 4, 64), ones(2, 7, 2, 64), ones(2, 7, 2, 64))
_PACKED = (ones(5, 4, 64), ones(5, 2, 64), ones(5, 2, 64))
_BOTH = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS, "max_seqlen_q": 3, "max_seqlen_k": 3}
_LSE = ones(2, 4, 5, dtype="float32")
#: One call of every operation: function, arguments, options.
CALLS: dict[str, Make] = {
    "attention": lambda: (oa.attention, _QKV, {"causal": True, "return_lse": True}),
    "attention HND": lambda: (oa.attention, tuple(x.swapaxes(1, 2) for x in _QKV), {"layout": "HND"}),
    "attention int8": lambda: (oa.attention, _QKV, {"precision": "int8"}),
    "attention_varlen": lambda: (oa.attention_varlen, _PACKED, {**_BOTH, "return_lse": True}),
    "operands": _operands,
    "decode": lambda: (oa.decode, (ones(2, 1, 4, 64), contiguous()), {"seq_lens": LENS, "return_lse": True}),
    "with cache": lambda: (
        oa.attention_with_kvcache,
        (ones(2, 20, 4, 64), contiguous(k_dtype="fp16")),
        {"seq_lens": LENS},
    ),
    "with cache, tokens": lambda: (oa.attention_with_kvcache, (ones(2, 1, 4, 64), contiguous()), {"seq_lens": LENS}),
    "sparse": lambda: (
        oa.attention_sparse,
        (ones(2, 4, 576), ones(32, 1, 576)),
        {"indices": np.zeros((2, 8), np.int32), "return_lse": True},
    ),
    "decode, lists": lambda: (
        oa.decode,
        (ones(2, 1, 4, 576), oa.PagedKVCache.from_arrays(ones(4, 8, 1, 576), head_dim_v=512)),
        {"indices": np.zeros((2, 1, 8), np.int32), "topk_length": LENS},
    ),
    "append": lambda: (oa.append, (contiguous(), ones(2, 1, 2, 64), ones(2, 1, 2, 64)), {"seq_lens": LENS}),
    "copy_blocks": lambda: (oa.copy_blocks, (paged(), [(0, 1)]), {}),
    "copy_recent": lambda: (oa.copy_recent, (paged(), [(0, 1)]), {}),
    "merge_states": lambda: (oa.merge_states, (_QKV[0], _LSE, _QKV[0], _LSE), {}),
    "quantize_qk": lambda: (oa.quantize_qk, _QKV[:2], {"smooth_q": True}),
    "quantize_qk packed": lambda: (oa.quantize_qk, _PACKED[:2], _BOTH),
    "quantize_v": lambda: (oa.quantize_v, _QKV[2:], {}),
    "index_logits": lambda: (
        oa.index_logits,
        (
            np.zeros((2, 1, 8, 128), ml_dtypes.float8_e4m3fn),
            np.zeros((4, 16, 1, 132), np.uint8),
            ones(2, 8, dtype="float32"),
        ),
        {"seq_lens": LENS, "block_table": np.zeros((2, 2), np.int32)},
    ),
    "top_k": lambda: (oa.top_k, (ones(2, 40, dtype="float32"), 3), {"lengths": LENS}),
    "sparse_blocks": lambda: (oa.sparse_blocks, _QKV[:2], {"topk": 0.5}),
}


# The cache of plans


def test_a_full_cache_keeps_its_newer_half() -> None:
    cache: PlanCache[int] = PlanCache(6)
    for i in range(6):
        cache.put(i, 10 * i)
    assert (len(cache), cache.get(0)) == (6, 0)
    cache.put(6, 60)
    assert [cache.get(i) for i in range(7)] == [None, None, None, 30, 40, 50, 60]
    assert len(cache) == 4


def test_another_driver_means_other_plans() -> None:
    cache: PlanCache[int] = PlanCache(6)
    cache.put("key", 1)
    set_driver(None)
    assert len(cache) == 0
    cache.put("key", 2)
    assert cache.get("key") == 2


def test_threads_share_a_cache() -> None:
    cache: PlanCache[int] = PlanCache(16)

    def fill(first: int) -> None:
        for i in range(first, first + 2000):
            cache.put(i, i)
            assert cache.get(i) in (i, None)

    threads = [threading.Thread(target=fill, args=(n * 10_000,)) for n in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert 1 <= len(cache) <= 16


@pytest.mark.parametrize("name", [name for name in CALLS if not name.startswith("copy")])
def test_repeated_calls_have_one_plan(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    function, arguments, options = CALLS[name]()
    PLANS.clear()
    made: list[Call] = []
    plain = engine.make_plan

    def make_plan(call: Call, tensors: Any, *, load: bool) -> Any:
        made.append(call)
        return plain(call, tensors, load=load)

    monkeypatch.setattr(engine, "make_plan", make_plan)
    for _ in range(3):
        function(*arguments, **options)
    assert (len(made), len(PLANS)) == (1, 1)
    # Other facts are another plan.
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "kv_copy_sm80")
    function(*arguments, **options)
    assert len(PLANS) == 2
    PLANS.clear()


@pytest.mark.parametrize(
    ("function", "arguments", "name"),
    [
        (oa.decode, lambda: (None, contiguous()), "q"),
        (oa.decode, lambda: (ones(2, 1, 4, 64), contiguous()), "seq_lens"),
        (oa.attention_sparse, lambda: (None, ones(32, 576)), "q"),
        (oa.attention_sparse, lambda: (ones(2, 4, 576), None), "kv"),
        (oa.append, lambda: (contiguous(), None, ones(2, 1, 2, 64)), "k"),
        (oa.append, lambda: (contiguous(), ones(2, 1, 2, 64), None), "v"),
        (oa.quantize_qk, lambda: (None, _QKV[1]), "q"),
        (oa.quantize_qk, lambda: (_QKV[0], None), "k"),
        (oa.quantize_v, lambda: (None,), "v"),
        (oa.merge_states, lambda: (_QKV[0], None, _QKV[0], _LSE), "lse_a"),
    ],
)
def test_a_required_array_that_is_none(function: Any, arguments: Any, name: str) -> None:
    options = {"seq_lens": None} if function in (oa.decode, oa.append) else {}
    if options and name != "seq_lens":
        options = {"seq_lens": LENS}
    if function is oa.attention_sparse:
        options = {"indices": np.zeros((2, 8), np.int32)}
    for _ in range(2):
        with pytest.raises(ArgumentError, match=f"'{name}'.*an array.*NoneType"):
            function(*arguments(), **options)


def test_options_that_cannot_be_a_key_are_validated_all_the_same() -> None:
    PLANS.clear()
    window: Any = [3, 0]
    for _ in range(2):
        oa.attention(*_QKV, window=window)
    assert len(PLANS) == 0
    with pytest.raises(ArgumentError, match="window"):
        oa.attention(*_QKV, window=[3, "x"])  # type: ignore[arg-type]


# Outputs


@pytest.mark.parametrize("name", CALLS)
def test_outputs_of_the_problem_are_what_the_call_returns(name: str) -> None:
    function, arguments, options = CALLS[name]()
    with describing(), pytest.raises(Described) as caught:
        function(*arguments, **options)
    outputs = caught.value.plan.problem.outputs
    result = function(*arguments, **options)
    if result is None:
        assert outputs == ()
    elif isinstance(result, (oa.QuantizedQK, oa.QuantizedV)):
        assert outputs
        for output in outputs:
            array = getattr(result, output.name)
            assert (array.shape, array.dtype.name) == (output.shape, output.dtype), output.name
    else:
        results = result if isinstance(result, tuple) else (result,)
        own = {"index_logits": ["logits"], "top_k": ["indices"], "sparse_blocks": ["blocks"]}
        assert [x.name for x in outputs] == own.get(name, ["o", "lse"][: len(results)])
        assert [(x.shape, x.dtype.name) for x in results] == [(x.shape, x.dtype) for x in outputs]


# Explanations


@pytest.mark.parametrize("name", CALLS)
def test_explain_on_the_cpu(name: str) -> None:
    function, arguments, options = CALLS[name]()
    said = oa.explain(function, *arguments, **options)
    assert (said.kernel, said.arch, said.launches, said.workspace_bytes) == ("reference (NumPy, CPU)", "cpu", (), 0)
    assert "reference (NumPy, CPU)" in str(said)
    assert said.min_bytes >= 0


#: The kernels of each call on a Hopper GPU, by family; the one that it is about comes first.
FAMILIES: dict[str, list[str]] = {
    "attention": ["attn_fwd_sm90"],
    "attention HND": ["attn_fwd_sm90"],
    "attention int8": ["attn_int8_sm90", "quantize_kv_sm90"],
    "attention_varlen": ["attn_fwd_sm90"],
    "operands": ["attn_int8_sm90"],
    "decode": ["decode_sm80", "decode_combine_sm80"],
    "with cache": ["attn_fwd_sm90"],
    "with cache, tokens": ["decode_sm80", "decode_combine_sm80"],
    "sparse": ["mla_decode_few_sm90"],  # each CTA has whole lists: nothing is to be merged
    "decode, lists": ["mla_decode_few_sm90", "mla_combine_sm80"],
    "append": ["kv_append_sm80"],
    "copy_blocks": ["kv_copy_sm80"],
    "copy_recent": ["kv_copy_sm80"],
    "merge_states": ["merge_states_sm80"],
    "quantize_qk": ["quantize_sm80", "quantize_delta_sm80"],
    "quantize_qk packed": ["quantize_sm80"],
    "quantize_v": ["quantize_sm80"],
    "index_logits": ["index_logits_sm90"],
    "top_k": ["top_k_sm80"],
    "sparse_blocks": ["block_means_sm80", "choose_blocks_sm80"],
}
_FAMILY = {spec.name: spec.family for spec in REGISTRY}


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Callable[[tuple[Any, ...]], None]:
    """Arrays pass for a GPU's; the function puts caches among some arguments there too. Nothing can be loaded."""
    info = DeviceInfo(0, "Fake Hopper", (9, 0), 132, 227 << 10, 50 << 20, (13, 0))
    describe = arrays.describe

    def on_gpu(value: Any, name: str, *rest: Any) -> Any:
        t = describe(value, name)
        t.device, t.ptr = "cuda", 0x1000 if t.ptr else 0
        return t

    def load(spec: Any, ordinal: int) -> Any:
        raise AssertionError("explain loads nothing")

    monkeypatch.setattr(runtime, "device_info", lambda ordinal: info)
    monkeypatch.setattr(runtime, "has_tensor_maps", lambda: True)
    monkeypatch.setattr(runtime, "load", load)

    def place(arguments: tuple[Any, ...]) -> None:
        monkeypatch.setattr(arrays, "describe", on_gpu)
        for x in arguments:
            if isinstance(x, oa.KVCache):
                for t in x.tensors:
                    t.device = "cuda"

    return place


@pytest.mark.parametrize("name", CALLS)
def test_explain_on_a_gpu(
    name: str, hopper: Callable[[tuple[Any, ...]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    function, arguments, options = CALLS[name]()
    hopper(arguments)
    said = oa.explain(function, *arguments, **options)
    assert _FAMILY[said.kernel] == FAMILIES[name][0]
    assert {_FAMILY[launch.kernel] for launch in said.launches} == set(FAMILIES[name])
    assert said.why
    assert said.device == "cuda:0 Fake Hopper"
    assert said.grid >= 1
    assert said.threads >= 32
    assert all(launch.grid >= 1 and launch.threads >= 32 for launch in said.launches)
    of_decode = ("decode", "decode, lists", "sparse", "with cache, tokens")
    with_workspace = name in ("attention int8", "sparse_blocks", *of_decode) or name.startswith("quantize")
    assert (said.workspace_bytes > 0) == with_workspace
    text = str(said)
    assert said.kernel in text
    assert "GFLOP" in text or not name.startswith(("attention", "operands")) or "unknown" in text
    for other in {launch.kernel for launch in said.launches} - {said.kernel}:
        assert f"also     {other}" in text
    # The kernel that is forced is the one that is explained.
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", said.kernel)
    assert oa.explain(function, *arguments, **options).why[0] == f"OMNIATTN_FORCE_KERNEL={said.kernel}"
    monkeypatch.setenv("OMNIATTN_FORCE_KERNEL", "nobody")
    with pytest.raises(ArgumentError, match="OMNIATTN_FORCE_KERNEL"):
        oa.explain(function, *arguments, **options)


# Records and structs


def record_of(size: int, pointers: tuple[Pointer, ...] = ()) -> LaunchRecord:
    return LaunchRecord(REGISTRY[0], (1, 2, 3), 64, bytes(range(256)) * (size // 256) + bytes(size % 256), pointers)


def test_what_no_driver_launches_is_refused() -> None:
    assert record_of(MAX_ARGUMENT_BYTES).num_ctas == 6
    with pytest.raises(ValueError, match=rf"{MAX_ARGUMENT_BYTES + 1} bytes of arguments: a kernel takes"):
        record_of(MAX_ARGUMENT_BYTES + 1)
    one = record_of(256)
    assert dataclasses.replace(one, grid=(2**31 - 1, 65535, 65535), threads=1024, cluster=(1, 5, 3)).num_ctas
    for changes in (
        {"grid": (0, 1, 1)}, {"grid": (2**31, 1, 1)}, {"grid": (1, 65536, 1)}, {"grid": (1, 1, 65536)},
        {"grid": (1, 1, 0)}, {"threads": 0}, {"threads": 1056}, {"grid": (3, 1, 1), "cluster": (2, 1, 1)},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"kernel {one.spec.name}, grid"):
            dataclasses.replace(one, **changes)


def test_a_launch_that_fails_says_what_it_was() -> None:
    class Failing(Kernel):
        def launch(self, *args: Any, **options: Any) -> None:
            memory = launch_facts({}, (3 << 20, 9 << 20))
            raise driver_error("cuLaunchKernel", "CUDA_ERROR_OUT_OF_MEMORY", "no", memory) from KeyError("binding")

    kernel = Failing(256)
    one = dataclasses.replace(record_of(256, (Pointer(8, "a"),)), cluster=(1, 2, 1), overlap=True)
    program = Program([one, one], ("a",), lambda spec: kernel, "attention of q float16 (1, 2, 3, 8)")  # type: ignore[arg-type]
    first, second = program.launches
    text = (
        f"kernel {one.spec.name}, grid (1, 2, 3), block (64, 1, 1), cluster (1, 2, 1), {one.spec.smem_bytes} "
        "bytes of dynamic shared memory, 256 bytes of arguments, overlapping the kernel before it, "
        "of attention of q float16 (1, 2, 3, 8)"
    )
    assert program.texts == (text, text)
    for launch in (first, second, program.launch):
        with pytest.raises(DriverError) as caught:
            launch(9, [0x100])
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.call, error.code) == ("cuLaunchKernel", "CUDA_ERROR_OUT_OF_MEMORY")
        assert error.launch == f"{text}; 3 of 9 MiB of GPU memory are free"
        begin = f"cuLaunchKernel failed with CUDA_ERROR_OUT_OF_MEMORY: no. Launch: {error.launch}. What to do: free"
        assert str(error).startswith(begin)
        assert isinstance(caught.value.__cause__, KeyError)  # what the binding raised


def test_addresses_are_written_over_the_template() -> None:
    pointers = (Pointer(24, "b", 5), Pointer(8, "a"), Pointer(16, "b"), Pointer(64, "none"))
    one = record_of(256, pointers)
    program, (kernel,) = program_of([one], ("a", "none", "b"))
    for a, b in ((0x100, 0x2000), (1 << 63, 3)):
        program.launch(9, [a, 0, b])
        _, grid, threads, stream, data, attributes = kernel.log[-1]
        assert (grid, threads, stream, attributes) == ((1, 2, 3), 64, 9, None)
        wanted = bytearray(range(256))
        for at, value in ((8, a), (16, b), (24, b + 5), (64, 0)):
            wanted[at : at + 8] = value.to_bytes(8, "little")
        assert data[:256] == bytes(wanted)
    with pytest.raises(KeyError):
        program_of([one], ("a", "b"))


def test_packed_arguments_are_kept_by_address_and_do_not_pile_up() -> None:
    program, (kernel,) = program_of([record_of(256, (Pointer(8, "a"), Pointer(16, "b")))], ("a", "unused", "b"))
    bound = program.launches[0].__self__  # type: ignore[attr-defined]
    for i in range(4 * record._MAX_ARGUMENTS):
        for unused in (1, 2):  # what no pointer reads makes no difference
            program.launch(9, [i, unused, i + 1])
            assert kernel.log.pop()[4][8:24] == i.to_bytes(8, "little") + (i + 1).to_bytes(8, "little")
        assert len(bound._by_addresses) <= record._MAX_ARGUMENTS
    before = dict(bound._by_addresses)
    program.launch(9, [i, 3, i + 1])
    assert bound._by_addresses == before


def test_packed_arguments_of_many_launches_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()
    before = record._kept[0]
    monkeypatch.setattr(record, "_MAX_KEPT", before + 100)
    programs = [program_of([record_of(64, (Pointer(8, "a"), Pointer(16, "b")))], ("a", "b"))[0] for _ in range(10)]
    for i in range(60):
        for program in programs:
            program.launch(9, [i, i + 1])
    sets = [program.launches[0].__self__._by_addresses for program in programs]  # type: ignore[attr-defined]
    assert all((59, 60) in found for found in sets), "what was used last is kept"
    assert sum(map(len, sets)) == record._kept[0] - before <= 100 + 10 * record._FEW
    del programs, program
    gc.collect()
    assert record._kept[0] == before, "what is gone does not count"


def test_launches_of_a_program_in_their_order() -> None:
    log: list[Any] = []
    at = (Pointer(0, "x"),)
    records = [LaunchRecord(spec, (i, 1, 1), 32, bytes(8), at, overlap=i > 1) for i, spec in enumerate(REGISTRY[:3], 1)]
    program, _ = program_of(records, ("x",), log)
    program.launch(3, [0x10])
    assert [(kernel.spec, grid) for kernel, grid, *_ in log] == [(r.spec, r.grid) for r in records]
    assert [attributes and attributes.overlap for *_, attributes in log] == [None, True, True]


def test_a_struct_wants_a_value_for_each_field() -> None:
    small = HostStruct("Small", ("P", "a"), ("q", "b"), ("2i", "c"))
    values: dict[str, object] = {"a": At("x", 3), "b": -5, "c": (1, -2)}
    packed = small.pack(values)
    assert (packed.pointers, packed.tensor_maps) == ((Pointer(0, "x", 3),), ())
    assert unpacked(packed.data, small) == {"a": 0, "b": -5, "c": (1, -2)}
    assert small.pack({**values, "a": None}).pointers == ()
    with pytest.raises(ValueError, match=r"Small: fields without a value, or values without a field: b$"):
        small.pack({name: x for name, x in values.items() if name != "b"})
    with pytest.raises(ValueError, match="values without a field: zeros"):
        small.pack({**values, "zeros": 0})


def test_arrays_of_pointers() -> None:
    values: dict[str, object] = {"planes": [At("k"), None, At("v", 8), None], "block_bytes": (1, 2, 3, 4)}
    values |= {name: (0,) * int(code[:-1]) if code[:-1] else 0 for name, code in KV_COPY.fields if name not in values}
    start = KV_COPY.offsets["planes"]
    assert KV_COPY.pack(values).pointers == (Pointer(start, "k"), Pointer(start + 16, "v", 8))
