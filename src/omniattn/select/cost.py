"""The time of a way of running a call: one model, whatever the kernel, whose coefficients were measured.

A CTA takes one tile of queries after the other: to begin and end each, and a step for each tile of keys. A step takes
as long as its own chain of products, softmax and waiting, or as the SM needs for what all its warps issue. A launch
takes what its busiest CTA takes, or the time of its bytes from memory or L2; to it come launches, the quantization of
operands, what prepares the mask, and the merging of partial results. Few kernels have a factor besides, for what that
leaves out.
"""

from __future__ import annotations

from ..problems.target import WARP_ROWS, WARPGROUP_ROWS, Coefficients
from .features import Features, Pass

#: Kernels that quantize q, k and v.
_QUANTIZERS = 3


def cost_us(found: Features, c: Coefficients) -> float:
    """Microseconds that a way of running a call takes."""
    time = c.launch + sum(pass_us(one, c) for one in found.passes) + c.launch_more * (len(found.passes) - 1)
    if found.quantized:
        time += _QUANTIZERS * c.launch_more + found.quantized / c.quantize
    if found.preparing:
        time += found.preparing * c.launch_more + found.prepared / c.memory
    if found.merged:
        time += c.merge + found.merged / c.partial
    return time * c.rows.get(found.row, 1.0)


def copying_us(keys: float, bytes_of_key: float, rounds: int, c: Coefficients) -> float:
    """Microseconds that it takes to copy keys and values one behind the other: a launch ahead, and one a round."""
    return (1 + rounds) * c.launch_more + 2 * keys * bytes_of_key / c.memory


def step_us(one: Pass, c: Coefficients) -> float:
    """A step of all CTAs of an SM that run at the same time."""
    of_products = 2.0 if one.bits == 8 else 1.0
    scores = {"masks": c.masks, "functions": c.functions}.get(one.scores, 1.0)
    exp = (c.exp if one.bits > 8 else c.exp_8) * scores * one.keys
    if one.kind == "wgmma":
        bias = (c.bias if one.has_bias else 0.0) * one.keys
        product = c.product * one.keys * one.channels / of_products
        alone = product + c.wait + c.chain * scores * one.keys + bias
        busy = one.resident * one.groups * (product + exp + bias + c.issue)
    else:
        product = c.sync_product * one.keys * one.channels / of_products
        alone = -(-one.groups // one.warps) * product + c.sync_wait
        busy = one.resident * one.groups * longest(product, exp * WARP_ROWS / WARPGROUP_ROWS)
    return longest(alone, busy)


def pass_us(one: Pass, c: Coefficients) -> float:
    """A launch of a kernel that attends, but for launching it."""
    if one.items == 0:
        return 0.0
    item = c.item if one.kind == "wgmma" else c.sync_item
    item += c.store * one.stored + (c.stream if one.is_stream else 0.0)
    step, uneven = step_us(one, c), 1.0 + (c.uneven if one.is_uneven else c.apart * one.apart)
    # Nothing is read while a CTA begins and ends, nor behind its last step.
    first = min(one.items, 1.0) * item + min(one.steps, 1.0) * step
    work = max(one.items - 1.0, 0.0) * item + max(one.steps - 1.0, 0.0) * step * uneven
    if one.short:
        work -= one.short * (step - step_us(one._replace(groups=one.short_groups), c))
    l2 = one.reread * (c.parts if one.in_parts else 1.0) / c.l2
    return first + longest(work, one.read / c.memory, l2) + (c.walk if one.walks else 0.0)


def longest(*times: float) -> float:
    """Of times that overlap, by the sum of their 4th powers: a little more than the longest, if others are as long."""
    most = max(times)
    if most <= 0.0:
        return 0.0
    total = 0.0
    for time in times:
        part = time / most
        total += part * part * part * part
    return most * total**0.25
