"""Coefficients of costs: those of GPUs that were measured, and what follows from them for others."""

from __future__ import annotations

import functools
import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from ..problems.costs import COSTS, OperationCosts
from ..problems.target import PER_CYCLE, Coefficients, PerCycle, Target

#: In the order of the class.
NAMES = tuple(field.name for field in fields(Coefficients) if field.name != "rows")
_FILE = Path(__file__).with_name("coefficients") / "sm_90.json"


class Rates(NamedTuple):
    """What the driver says of a GPU.

    Attributes
    ----------
    cc : (major, minor)
    sm_count : int
    clock_mhz, memory_gb_s : float
        0: unknown.
    """

    cc: tuple[int, int]
    sm_count: int
    clock_mhz: float = 0.0
    memory_gb_s: float = 0.0


#: How far rates that drivers say may be from each other for one model of GPU.
_SAME_RATE = 0.03


@functools.cache
def _file() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(_FILE.read_text(encoding="utf-8"))
    return found


@functools.cache
def _measured() -> tuple[Rates, Coefficients]:
    data = _file()
    major, minor = data["cc"]
    rates = Rates((major, minor), data["sm_count"], data["clock_mhz"], data["memory_gb_s"])
    return rates, Coefficients(**data["coefficients"], rows=data["rows"])


@dataclass(frozen=True, slots=True)
class Rules:
    """Measured numbers of the file that are no coefficients: what decides where the model has nothing to say.

    Attributes
    ----------
    shared_keys : int
        Keys of all kv heads, for each SM, from which on warps of a CTA of ``decode`` share them
        (docs/performance/decode.md).
    list_keys : int
        Keys of a list over a latent cache that CTAs of few rows may have each, to be the fastest
        (docs/performance/records/mla_decode_sm90.toml, "Few sequences", as what follows).
    clustered_blocks : int
        Blocks of such rows from which on clusters of these CTAs are faster.
    worker_keys : int
        Keys of a worker up to which one sequence over a latent cache has no more workers than warps merge at once.
    rows_of_codes : int
        Rows (queries x query heads of a kv head) of a sequence up to which the kernels of ``decode`` are faster over a
        quantized cache than making its keys in 16 bits first (docs/performance/serving.md, as what follows).
    mixed_rows : float
        Rows of all sequences, as a part of those that they would have if all were as long as the longest, up to which
        some are expected to be single tokens: with a third of the rows 0 to 18 % are gained, with half of them 1 to
        9 %, with nearly all of them up to 5 % are lost.
    busy, busy_beside : float
        The part of the SMs that keeps memory busy, with a usual CTA of ``decode`` on each, or with one of
        `KernelSpec.beside`.
    rows_of_attention : float
        Query rows of a kv head and sequence for which attention takes a third of the time that memory takes for the
        keys: of half of them 2 flops a channel and row at 700 TFLOP/s, of all 4 bytes at 2.7 TB/s.
    waves : int
        Persistent CTAs of attention beside ``decode``, for each place on the GPU. Those that find no place before
        ``decode``'s have ended begin late: the more there are, the less each of them has to do, and the more often a
        pipeline is filled.
    page_rows : int
        Rows of a page that are copied together as fast as whole pages: 8 by tensor maps are hardly faster than one by
        one.
    cached_bytes : int
        K and V of heads that are quantized together where the whole of them is read twice: a part of the L2 cache,
        because Q and the outputs pass through it in between.
    tail_bytes : float
        K and V of heads whose tiles follow one by one behind pairs, at most: L2 does not hold more
        (docs/performance/records/attn_fwd_sm90.toml).
    order_steps : dict of int to (float, float)
        By head_dim of the kernels that add to dq in an order: steps by which a head's tiles of keys should follow each
        other, and steps that beginning and ending a tile takes (docs/performance/records/attn_bwd_sm90.toml, H100).
    order_short : (int, int)
        Where gradients are faster by additions to dq in an order than by others: tiles of queries, at most; tiles of
        keys of all query heads over the square of that, at least (docs/performance/records/attn_bwd_sm90.toml, H200).
    order_causal : dict of int to (int, int)
        By head_dim of the kernels that have such an order, causal calls besides: tiles of queries, at most, of query
        heads that share a kv head, and of others.
    order_long : (int, int, int, int)
        Causal calls of head_dim 128 besides: tiles of queries, at least, at most for each query head of a kv head, and
        at most; tiles of keys of all kv heads, at least, twice as many beyond what one head may have (H100).
    int8_from : dict of int to (int, int)
        By the narrowest head_dim that holds a call's: rows and keys from which on int8 with its quantization is faster
        than exact attention, (full, causal or windowed). Of one H200 (docs/performance/results/int8.json, which a test
        compares); where no measured length was faster, the next one.
    auto : dict of str to float
        By what times of exact attention over those of 8 bits are too large by the model, at most, in measured calls
        (docs/performance/results/int8.json, options.json and options_int8.json, H200, which a test compares): "least"
        of all calls that gain; besides, of those with an LSE, of packed sequences, with masks, with functions of
        scores, with a bias, with a head_dim that is padded; "sync" of kernels on mma.sync, measured on Hopper
        (int8_sm80.json). They multiply.
    """

    shared_keys: int
    list_keys: int
    clustered_blocks: int
    worker_keys: int
    rows_of_codes: int
    mixed_rows: float
    busy: float
    busy_beside: float
    rows_of_attention: float
    waves: int
    page_rows: int
    cached_bytes: int
    tail_bytes: float
    order_steps: dict[int, tuple[float, float]]
    order_short: tuple[int, int]
    order_causal: dict[int, tuple[int, int]]
    order_long: tuple[int, int, int, int]
    int8_from: dict[int, tuple[int, int]]
    auto: dict[str, float]


@functools.cache
def rules() -> Rules:
    """Of the GPU that was measured; others have no better ones."""
    data = dict(_file()["rules"])
    for name in ("int8_from", "order_steps", "order_causal"):
        data[name] = {int(width): tuple(pair) for width, pair in data[name].items()}
    for name in ("order_short", "order_long"):
        data[name] = tuple(data[name])
    return Rules(**data)


@functools.cache
def page_factors(cc: tuple[int, int]) -> dict[str, tuple[float, float]]:
    """How much longer kernels take over pages than over what is contiguous, by their names without a dtype.

    Of pages of whole chunks of 16 rows, and of others. Measured on Hopper; elsewhere {}.
    """
    data = _file()
    return {name: (whole, others) for name, (whole, others) in data["pages"].items()} if list(cc) == data["cc"] else {}


def _rates_of(target: Target) -> Rates:
    return Rates(target.cc, target.sm_count, target.clock_mhz, target.memory_gb_s)


def coefficients_of(target: Target) -> Coefficients:
    """What work costs on a GPU: as its user has measured it, or as it follows from the GPU's rates."""
    return _expected(_rates_of(target)) if target.tuning is None else target.tuning.coefficients


def costs_of(op: str, target: Target) -> OperationCosts | None:
    """What work costs in an operation beside attention; None where that was measured neither here nor for the file.

    The file's are for GPUs of the compute capability that was measured. Others lack the ways that are the fastest
    there, and a fit says little about the order of ways that are far from the fastest.
    """
    own = None if target.tuning is None else dict(target.tuning.operations).get(op)
    return own or _expected_costs(op, _rates_of(target))


@functools.lru_cache(64)
def _expected_costs(op: str, rates: Rates) -> OperationCosts | None:
    data = _file().get("operations", {}).get(op)
    measured = _measured()[0]
    return None if data is None or rates.cc != measured.cc else expected_costs(COSTS[op](**data), rates, measured)


def expected_costs(found: OperationCosts, rates: Rates, measured: Rates) -> OperationCosts:
    """What work costs on a GPU, from what it costs on the one that was measured: times go with the clock."""
    clock = rates.clock_mhz / measured.clock_mhz if rates.clock_mhz else 1.0
    return replace(found, **{name: getattr(found, name) / clock for name in found.of_clock})


def scaled_from(target: Target) -> str | None:
    """The GPU whose coefficients are scaled to ``target``; None if its own were measured, by its user or for the file.

    A rate that nobody has asked for tells no GPUs apart.
    """
    if target.tuning is not None:
        return None
    here, there = _rates_of(target), _measured()[0]
    rates = ((here.clock_mhz, there.clock_mhz), (here.memory_gb_s, there.memory_gb_s))
    alike = all(not own or math.isclose(own, other, rel_tol=_SAME_RATE) for own, other in rates)
    return None if alike and here[:2] == there[:2] else str(_file()["device"])


@functools.lru_cache(64)
def _expected(rates: Rates) -> Coefficients:
    return expected(rates)


def _per_cycle(cc: tuple[int, int]) -> PerCycle | None:
    """What an SM does in a cycle: that of the GPU, or of the last one before it of its major version."""
    known = [found for found in PER_CYCLE if found[0] == cc[0] and found <= cc]
    return PER_CYCLE[max(known)] if known else None


def expected(rates: Rates, of: tuple[Rates, Coefficients] | None = None) -> Coefficients:
    """What work costs on a GPU, from what it costs on the one that was measured, or on ``of``.

    What an SM does by itself goes with the clock, products with the tensor cores' rate too; L2 with SMs and clock;
    memory with its bandwidth. Rates that the driver does not say are those of the measured GPU.
    """
    measured, found = _measured() if of is None else of
    clock = rates.clock_mhz / measured.clock_mhz if rates.clock_mhz else 1.0
    memory = rates.memory_gb_s / measured.memory_gb_s if rates.memory_gb_s else 1.0
    l2 = clock * rates.sm_count / measured.sm_count
    there, here = PER_CYCLE[measured.cc], _per_cycle(rates.cc) or PER_CYCLE[measured.cc]
    of_clock = (
        "item", "store", "stream", "wait", "chain", "exp", "issue", "exp_8", "bias", "walk", "sync_item", "sync_wait",
    )  # fmt: skip
    return replace(
        found,
        **{name: getattr(found, name) / clock for name in of_clock},
        product=found.product / clock * there.products / here.products,
        sync_product=found.sync_product / clock * there.sync_products / here.sync_products,
        memory=found.memory * memory,
        partial=found.partial * memory,
        quantize=found.quantize * memory,
        l2=found.l2 * l2,
        apart=found.apart / memory,
    )
