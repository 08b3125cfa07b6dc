"""What ``omniattn verify --soak`` draws: the same of a seed, all as literals, everything that calls may be given."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import omniattn
from omniattn.problems import precision
from omniattn.testing.inputs import GENERATORS
from omniattn.testing.soak import draw, indexer, machines, mods, pools, sparse, views
from omniattn.testing.soak.operations import OPERATIONS, problem
from omniattn.testing.soak.problem import Problem

#: Problems within which everything is drawn.
N = 5500
#: Arguments that problems leave at their defaults: arrays and caches are positional, streams are another test's.
LEFT = {"stream", "q", "k", "v", "do", "o", "lse", "o_a", "lse_a", "o_b", "lse_b", "cache", "copies", "like"}
#: What a call has drawn is what it was given.
LEFT |= {"return_rng"}


@pytest.fixture(scope="module", params=[True, False], ids=["CPU", "GPU"])
def drawn(request: pytest.FixtureRequest) -> list[Problem]:
    return [problem(1, number, cpu=request.param) for number in range(N)]


def _said(of: Problem) -> dict[str, set[str]]:
    """Arguments that a problem gives to each function."""
    if of.operation in ("index_logits", "top_k"):
        return {of.operation: indexer.arguments_of(of.operation, of.facts)}
    facts, said = of.facts, _of_arrays(of.facts)
    names = {*facts.get("arrays", ()), *facts.get("options", ())}
    names |= {name for name in ("out", "score_mod") if name in facts} | set(facts.get("given", ()))
    if of.operation == "caches":
        cache = "PagedKVCache" if "block_size" in facts else "KVCache"
        common = {"seq_lens", *({"block_table"} if "block_size" in facts else ())}
        recent = "recent_window" in facts["cache"] and "block_size" in facts
        own = {*facts["cache"], *(name for name in ("k_mean", "k_channel_scale") if name in facts)}
        rope = facts.get("rope", {})
        append = {"cu_seqlens"} if any(step["packed"] for step in facts["steps"]) else set()
        append |= ({"cos", "sin"} if rope else set()) | ({"rope"} if "style" in rope else set())
        if any("by_slot" in step for step in facts["steps"]):
            append |= {"slot_mapping", *({"positions"} if rope else ())}
        slots = {"recent_slots"} if recent else set()
        extents = {"num_blocks", "block_size", "batch", "max_seqlen", "num_kv_heads", "head_dim"}
        said |= {} if "pool" in facts else {cache: own | slots | extents}
        said |= {"append": append | common | slots} if facts["steps"] else {}
        return said | {facts.get("function", "decode"): names | common | slots}
    if of.operation == "attention_with_kvcache":
        names |= {"block_table"} if "block_size" in facts else {"batch_index"} if "index" in facts else set()
        names |= {"cu_seqlens_q", "max_seqlen_q"} if facts["packed"] else set()
        names |= {"leftpad_k"} if "leftpad" in facts else set()
    if of.operation in ("latent caches", "own latent caches"):
        names = names - {"k", "k_scale"} | {"seq_lens"} | ({"block_table"} if "block_size" in facts else set())
    if of.operation == "sparse attention":
        names = names - {"k", "k_scale"} | {"indices"} | ({"topk_length"} & set(facts))
        names |= {"kv"} if facts["function"] == "attention_sparse" else set()
        names |= {"head_dim_v"} if facts["source"].startswith("rows") else set()
    function = facts.get("function", of.operation)
    if of.operation in ("low precision", "e4m3 arrays"):
        function = "attention_varlen" if facts["packed"] else "attention"
    return said | {function: names}


def _of_arrays(facts: dict[str, Any]) -> dict[str, set[str]]:
    """What a cache on arrays of the caller is made of."""
    if "appends" in facts:
        own = facts["appends"]
        cache = "PagedKVCache" if "block_size" in facts else "KVCache"
        return {cache: {"head_dim_v", *own} - {"apart"}, "append": {"k_pe"} if own["apart"] else set()}
    if "rows" in facts and "layout" in facts:
        cache = "PagedKVCache" if "block_size" in facts or facts.get("source") == "pages" else "KVCache"
        return {f"{cache}.from_arrays": {"k", "layout", "head_dim_v", *({"k_scale"} & set(facts["arrays"]))}}
    if "pool" not in facts:
        return {}
    names = {"k", "layout"} | ({"v"} if facts["pool"]["kind"] != "rows" else set())
    names |= {"k_scale", "v_scale"} if facts["pool"].get("scales", "none") != "none" else set()
    return {("PagedKVCache" if "block_size" in facts else "KVCache") + ".from_arrays": names}


def test_every_operation_and_every_argument_is_drawn(drawn: list[Problem]) -> None:
    assert {one.operation for one in drawn} == set(OPERATIONS)
    said: dict[str, set[str]] = {}
    for one in drawn:
        for function, names in _said(one).items():
            said.setdefault(function, set()).update(names)
    for name, found in said.items():
        left = set() if name.endswith("from_arrays") else LEFT
        assert set(inspect.signature(operator.attrgetter(name)(omniattn)).parameters) - found - left == set(), name
    functions = {name for name in omniattn.__all__ if inspect.isfunction(getattr(omniattn, name))}
    # Copies follow an append; two launch nothing; shares of heads are searched by calls that are drawn.
    others = {"calibrate_sparse", "choose_shared_runs", "copy_blocks", "copy_recent", "dropout_mask", "explain"}
    assert functions - set(said) == others


def test_every_knob_and_value_of_a_precision_is_drawn(drawn: list[Problem]) -> None:
    found: dict[str, dict[str, set[Any]]] = {}
    for one in drawn:
        given = one.facts.get("options", {}).get("precision")
        if isinstance(given, tuple):
            for knob, value in given[1].items():
                found.setdefault(given[0], {}).setdefault(knob, set()).add(value)
    for kind in (omniattn.Int8, omniattn.Int4, omniattn.Fp8):
        # Blocks that a call predicts are those of problems of their own; fast_exp has errors of its own, which
        # tests/gpu/test_integer_powers_gpu.py bounds.
        left = {"sparse", "fast_exp"}
        assert set(found[kind.__name__]) == {field.name for field in dataclasses.fields(kind)} - left
    assert found["Int8"]["granularity"] | {"per_thread"} == set(precision.GRANULARITIES)
    assert found["Int4"]["pv"] | {"auto"} == set(precision.PV_TYPES)
    assert found["Int8"]["pv_accumulator"] | {"auto"} == set(precision.PV_ACCUMULATORS)
    assert {
        one.facts["options"]["precision"] for one in drawn if isinstance(one.facts["options"].get("precision"), str)
    } == set(precision.PRECISIONS) - {"exact"}


def test_all_kinds_of_blocks_are_drawn(drawn: list[Problem]) -> None:
    facts = [one.facts for one in drawn if one.operation == "sparse_blocks"]
    # A file says what the others would.
    knobs = {field.name for field in dataclasses.fields(omniattn.Sparse)} - {"file", "name"}
    assert knobs <= {name for f in facts for name in f["options"]}
    assert {f["attend"][0] for f in facts if f["attend"]} == {"Int8", "Int4", "Fp8"}
    assert any(f["attend"] is None for f in facts)
    assert {"topk" in f["options"] for f in facts if f["options"].get("causal")} == {True, False}
    low = [one.facts for one in drawn if one.operation == "low precision" and "block_mask" in one.facts["arrays"]]
    assert {f["options"]["precision"][0] for f in low} == {"Int8", "Int4", "Fp8"}


def test_kinds_formats_layouts_and_edges_are_drawn(drawn: list[Problem]) -> None:
    recipes = [recipe for one in drawn for recipe in one.facts["arrays"].values()]
    kinds = {recipe["kind"] for recipe in recipes if "kind" in recipe}
    assert set(draw.KINDS) <= set(GENERATORS)
    masks = {"bool", "bool_rows", "bool_keys", "additive", "additive_hiding", "additive_keys", "additive_lowest"}
    assert kinds == {*draw.KINDS, *masks, "uniform"}
    assert {"float32", "io", "bool", "float8_e4m3fn", "int32"} == {recipe["dtype"] for recipe in recipes}
    assert {name for recipe in recipes for name in recipe.get("view", ())} == {
        "order", "before", "after", "step", "expand",
    }  # fmt: skip
    assert {s for recipe in recipes for s in recipe.get("view", {}).get("step", ())} == {-1, 1, 2}
    assert {one.facts["score_mod"] for one in drawn if "score_mod" in one.facts} == set(mods.MODS)
    options = [one.facts["options"] for one in drawn]
    assert {option["layout"] for option in options if "layout" in option} == {"NHD", "HND"}
    assert {bool(option.get("causal")) for option in options} == {True, False}
    assert any(option.get("softmax_scale", 1) < 0 for option in options)
    dims = {one.facts["head_dims"] for one in drawn if "head_dims" in one.facts}
    of_q = {dim for dim, _ in dims}
    assert {*range(8, 257, 8), 512, 576} <= of_q <= {*range(8, 513, 8), 576}
    assert any(a != b for a, b in dims)
    caches = [one.facts["cache"] for one in drawn if one.operation == "caches"]
    assert {cache["k_dtype"] for cache in caches} == {"bf16", "fp16", "fp8", "int8", "int4"}
    assert {cache.get("layout", "fragment") for cache in caches} == {"fragment", "fbgemm"}
    queries = {n for one in drawn for n in one.facts.get("queries", ())}
    assert {0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129} <= queries
    dense = [one.facts["arrays"]["q"]["shape"] for one in drawn if one.operation == "attention"]
    assert any(shape[0] == 0 for shape in dense)
    assert any(0 in shape[1:3] for shape in dense)
    dtypes = {"float16", "bfloat16"} | ({"float32", "float64"} if "float64" in _dtypes(drawn) else set())
    assert _dtypes(drawn) == dtypes


@pytest.mark.parametrize("operation", ["caches", "attention_with_kvcache"])
def test_all_kinds_of_arrays_of_the_caller_are_drawn(operation: str, drawn: list[Problem]) -> None:
    facts = [one.facts for one in drawn if one.operation == operation and "pool" in one.facts]
    made = [(f["cache"]["k_dtype"], f["pool"]) for f in facts]
    assert {(name, pool.get("scales")) for name, pool in made} == {
        *(("bf16", None), ("fp16", None)), *((name, scales) for name in ("fp8", "int8") for scales in pools.SCALES),
    }  # fmt: skip
    assert {(pool["kind"], pool["layout"]) for _, pool in made} == {(k, o) for k in pools.KINDS for o in ("NHD", "HND")}
    units = {"bf16": 8, "fp16": 8, "fp8": 16, "int8": 16}
    for (name, pool), f in zip(made, facts, strict=True):
        assert f["head_dims"][0] % units[name] == 0
        assert all(side[-1] % units[name] == 0 for side in (pool["view"].get(s, (0,)) for s in ("before", "after")))
    # Memory in every order of K or V, block, and the two others; gaps between all of them, and between rows.
    assert len({pool["view"]["order"] for _, pool in made if "order" in pool["view"] and pool["kind"] == "pair"}) > 9
    for kind, outer in (("pair", 4), ("apart", 3)):
        seen = [pool["view"] for _, pool in made if pool["kind"] == kind]
        for d in range(outer):
            assert any(view.get("step", (1,) * 5)[d] == 2 for view in seen)
            assert any(view.get("before", (0,) * 5)[d] == 1 for view in seen)
        assert any(view.get("after", (0,))[-1] > 0 for view in seen)
    assert {f["nobody"] for f in facts if f["options"].get("window", (-1,))[0] >= 0} == {-1, 1 << 30, "unused"}
    scaled = [f for f in facts if f["pool"].get("scales") == "sequence"]
    assert not any(f["steps"] or "shared_prefix" in f["options"] for f in scaled)
    if operation == "caches":
        written = [f for f in facts if f not in scaled]
        assert all(any(name in f for f in written) for name in ("rope", "function"))
        assert all(any(name in f["options"] for f in facts) for name in ("shared_prefix", "deterministic", "window"))
        assert any(step.get("by_slot") for f in written for step in f["steps"])
        assert any(f.get("copies") and f["pool"].get("scales") == "token" for f in written)
    else:
        eight = [f for f in facts if "scales" in f["pool"]]
        assert {f["packed"] for f in eight} == {True, False}
        assert max(max(f["queries"]) for f in eight) == 150
        assert any("index" in f for f in scaled)
        shared = [
            one.facts for one in drawn if "shared_prefix" in one.facts.get("options", {}) and "queries" in one.facts
        ]
        assert {(f["packed"], f["levels"]) for f in shared} == {(a, b) for a in (True, False) for b in (True, False)}


def test_all_kinds_of_sparse_attention_are_drawn(drawn: list[Problem]) -> None:
    facts = [one.facts for one in drawn if one.operation == "sparse attention"]
    assert {(f["source"], f["function"]) for f in facts} == {
        *((source, "attention_sparse") for source in sparse.SOURCES), ("pages", "decode"), ("sequences", "decode"),
    }  # fmt: skip
    for known in (facts, [one.facts for one in drawn if one.operation == "latent caches"]):
        assert {(f["rows"]["format"], "scale" in f["rows"]) for f in known} == {
            ("16", False), ("656", False), ("e4m3", False), ("e4m3", True),
        }  # fmt: skip
        assert {f["rows"]["dtype"] for f in known if f["rows"]["format"] == "656"} == {"uint8", "float8_e4m3fn"}
    small = [one for one in drawn if one.operation == "sparse attention" and one.facts["topk"] < 100]
    made = [(one.facts, sparse.lists(one)) for one in small]
    assert any((x.indices == -1).all(1).any() for _, x in made)
    assert any(x.lengths is not None and not x.lengths.all() for _, x in made)
    assert any((x.indices >= np.prod(f["lead"])).any() for f, x in made)
    assert any(len(set(keys.tolist())) < len(keys) for _, x in made for keys in x.keys)
    assert all(x.indices.shape[-1] == f["topk"] for f, x in made)


def _dtypes(drawn: list[Problem]) -> set[str]:
    return {one.dtype for one in drawn if one.operation == "attention"}


def test_a_problem_is_made_of_its_seed_and_number_alone(drawn: list[Problem]) -> None:
    cpu = "float64" in _dtypes(drawn)
    for number in range(0, 300, 7):
        again = problem(1, number, cpu=cpu)
        assert again == drawn[number]
        assert ast.literal_eval(repr(again.facts)) == again.facts
    others = [problem(2, number, cpu=cpu) for number in range(100)]
    assert [one.facts for one in others] != [one.facts for one in drawn[:100]]


def test_numbers_are_made_of_seed_number_and_name() -> None:
    one = next(p for n in range(50) if (p := problem(3, n, cpu=True)).operation == "attention")
    q = one.facts["arrays"]["q"]
    assert np.array_equal(one.numbers("q", q), one.numbers("q", q))
    assert not np.array_equal(one.numbers("q", q), one.numbers("k", q))
    other = dataclasses.replace(one, number=one.number + 1)
    assert not np.array_equal(one.numbers("q", q), other.numbers("q", q))


def test_masks_of_every_kind_and_rank_have_numbers(drawn: list[Problem]) -> None:
    made: dict[str, set[int]] = {}
    for one in drawn:
        mask = one.facts["arrays"].get("mask")
        if mask and np.prod(mask["shape"]) < 1000:
            values = one.numbers("mask", mask)
            assert values.shape == views.stored(mask["shape"], mask["view"])
            made.setdefault(mask["kind"], set()).add(values.ndim)
    assert len(made) == 7
    assert {1, 2, 3, 4} <= set().union(*made.values())  # of rank 0 in some seeds


@pytest.mark.parametrize(
    "view",
    [
        {},
        {"order": (1, 0, 2)},
        {"before": (1, 0, 8), "after": (0, 2, 8)},
        {"step": (2, -1, 1), "order": (1, 0, 2)},
        {"expand": (1,), "before": (1, 1, 0), "after": (1, 1, 16)},
    ],
    ids=str,
)
def test_views_hold_their_numbers_amid_nan_and_guards(view: views.View) -> None:
    m = machines.Machine()
    values = np.random.default_rng(0).standard_normal(views.stored((3, 4, 8), view)).astype(np.float32)
    placed = m.place(values, "float32", view, (3, 4, 8))
    assert np.array_equal(placed.array, np.broadcast_to(values, (3, 4, 8)))
    assert np.isnan(placed.base).sum() == placed.base.size - values.size
    if "expand" in view:
        return
    room = m.room((3, 4, 8), "float32", view)
    room.array[...] = 1.0
    assert m.guarded(room)
    if view.get("before"):
        room.base.reshape(-1)[0] = 0.0
        assert not m.guarded(room)


def test_nothing_of_it_imports_a_framework() -> None:
    code = (
        "import sys, omniattn.testing.soak.worker, omniattn.testing.soak.watch, omniattn.cli;"
        "print([name for name in ('torch', 'jax', 'cupy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
