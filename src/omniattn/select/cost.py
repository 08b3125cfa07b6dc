"""The time of a way of running a call: one model, whatever the kernel, whose coefficients were measured.

A tile of queries takes its beginning and end, and a step for each tile of keys. A step takes as long as its own chain
of products, softmax and waiting, or as the SM needs for what all its warps issue. Tiles come in rounds of CTAs, or are
handed out such that all SMs end together. The call takes that time, or that of its bytes from memory or L2; to it come
launches, what prepares the mask, and the merging of partial results.
"""

from __future__ import annotations

from ..problems.target import Coefficients
from .features import Features, Pass

#: How sharply the longest of several times that overlap decides: they are summed by this power.
_SHARPNESS = 4.0


def cost_us(found: Features, c: Coefficients) -> float:
    """Microseconds that a way of running a call takes."""
    time = c.launch + sum(pass_us(one, c) for one in found.passes) + c.launch_more * (len(found.passes) - 1)
    if found.preparing:
        time += found.preparing * c.launch_more + found.prepared / c.memory
    if found.merged:
        time += c.launch_more + found.merged / c.partial
    return time


def step_us(one: Pass, c: Coefficients) -> float:
    """A step of all CTAs of an SM that run at the same time."""
    of_products = 2.0 if one.bits == 8 else 1.0
    if one.kind == "wgmma":
        scores = c.scores if one.scores else 1.0
        product = c.product * one.keys * one.channels / of_products
        softmax = (c.exp if one.bits > 8 else c.exp_8) * scores * one.keys
        alone = product + c.wait + (c.chain * scores + (c.meet if one.groups > 1 else 0.0)) * one.keys
        busy = one.resident * one.groups * (product + softmax + c.issue)
    else:
        scores = c.sync_scores if one.scores else 1.0
        product = c.sync_product * one.keys * one.channels / of_products
        softmax = c.sync_exp * scores * one.keys
        in_turn = -(-one.groups // one.warps)
        alone = in_turn * product + c.sync_wait + c.sync_chain * scores * one.keys
        busy = one.resident * one.groups * (product + softmax)
    return _longest(alone, busy)


def pass_us(one: Pass, c: Coefficients) -> float:
    """A launch of a kernel that attends, but for launching it."""
    if one.tiles == 0:
        return 0.0
    step = step_us(one, c)
    item = c.item + c.beside * (one.resident - 1) if one.kind == "wgmma" else c.sync_item
    if one.is_even:
        work = -(-int(one.tiles) // one.places) * (item + one.longest * step)
    else:
        of_all = (one.tiles * item + one.steps * step) / min(one.places, one.tiles)
        work = max(item + one.longest * step, of_all * (1.0 + (c.uneven if one.longest else 0.0)))
    slower = c.parts if one.in_parts else 1.0
    share = min(1.0, c.sm_share * one.tiles * one.resident / one.places)
    memory = one.read * slower / (c.memory * max(share, 1e-9))
    return _longest(work, memory, one.reread * slower / c.l2) + (c.walk if one.walks else 0.0)


def _longest(*times: float) -> float:
    """Of times that overlap: a little more than the longest, where others are nearly as long."""
    most = max(times)
    if most <= 0.0:
        return 0.0
    return most * sum((time / most) ** _SHARPNESS for time in times) ** (1.0 / _SHARPNESS)
