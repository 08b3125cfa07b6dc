"""Rows of latent caches, in 16 bits, in e4m3 and of 656 bytes: how they are made, and what their bytes stand for.

By docs/kv_formats.md, "Latent rows", and by nothing of the library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from omniattn.testing.soak import limits
from omniattn.testing.soak.draw import Draw
from omniattn.testing.soak.formats import e4m3_table
from omniattn.testing.soak.limits import Limits
from omniattn.testing.soak.machines import POISON, Machine, NotHereError, Placed
from omniattn.testing.soak.problem import Problem

#: 16 bits of q's type, e4m3 with one scale or none, 656 bytes.
FORMATS = ("16", "e4m3", "656")
#: Channels in e4m3 of a row of 656 bytes, those that share a scale, and where scales and the other channels begin.
_CODES, _GROUP, _SCALES_AT, _REST_AT, _BYTES = 512, 128, 512, 528, 656
_WIDTHS = {"16": ((24, 16), (40, 8), (576, 512)), "e4m3": ((32, 16), (48, 8), (576, 512)), "656": ((576, 512),)}


def draw_format(d: Draw, *, scaled: bool = True) -> dict[str, Any]:
    """Facts of a problem's rows: their format and widths, the queries' type. scaled: whether k_scale can be given."""
    name = d.weighted({"16": 2.0, "e4m3": 1.0, "656": 1.5})
    rows: dict[str, Any] = {"format": name}
    if name == "656":
        rows["dtype"] = d.pick(("uint8", "float8_e4m3fn"))
    if name == "e4m3" and scaled and d.chance(0.6):
        rows["scale"] = d.pick((0.37, 0.0125, 1.7))
    # On Hopper rows of 656 bytes have kernels of their own for queries in bfloat16.
    dtype = (
        d.pick(("float16", "bfloat16", "bfloat16", "bfloat16")) if name == "656" else d.pick(("float16", "bfloat16"))
    )
    counted = "latent" if name == "16" else f"latent {name}"
    widths = d.pick(_WIDTHS[name]) if d.cpu else (576, 512)
    return {"rows": rows, "dtype": dtype, "head_dims": widths, "counted": counted}


def draw_rows(d: Draw, facts: dict[str, Any], lead: Sequence[int]) -> dict[str, Any]:
    """Recipes of ``k``, (*lead, head_dim), and of ``k_scale``; gaps between rows, and between blocks of them."""
    unit = 8 if facts["rows"]["format"] == "16" else 16
    view = {"after": (*(d.integer(0, 2) for _ in lead), unit * d.integer(0, 2))} if d.chance(0.4) else {}
    recipes = {"k": {**d.numbers((*lead, facts["head_dims"][0]), "io", loud=False), "view": view}}
    if "scale" in facts["rows"]:
        recipes["k_scale"] = {"shape": (1,), "dtype": "float32", "values": (facts["rows"]["scale"],)}
    return recipes


@dataclass(frozen=True)
class Rows:
    """Rows of a problem.

    Attributes
    ----------
    placed : dict
        ``k``, and ``k_scale`` if there is one.
    meant : array
        What the rows stand for in float64, in the shape of the recipe.
    """

    placed: dict[str, Placed]
    meant: Any

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of ``from_arrays`` beside k and head_dim_v."""
        return {"k_scale": self.placed["k_scale"].array} if "k_scale" in self.placed else {}


def place_rows(m: Machine, problem: Problem, unseen: npt.NDArray[Any] | None = None) -> Rows:
    """Rows where a call is given them; ``unseen``: (rows,), those that shall be NaN in every channel and scale."""
    recipe, of_rows = problem.facts["arrays"]["k"], problem.facts["rows"]
    values = np.array(problem.numbers("k", recipe))
    hidden = np.zeros(values.shape[:-1], bool) if unseen is None else unseen.reshape(values.shape[:-1])
    if of_rows["format"] == "16":
        values[hidden] = np.nan
        placed = m.place(values, problem.dtype, recipe["view"])
        return Rows({"k": placed}, m.f64(placed.array))
    if of_rows["format"] == "656":
        stored = _bytes_656(values)
        stored[hidden] = POISON
        placed = m.place(stored, "uint8", recipe["view"])
        meant = _meant_656(m, m.int64(placed.array))
        return Rows({"k": placed if of_rows["dtype"] == "uint8" else _as_e4m3(m, placed)}, meant)
    stored = _codes(values / np.float32(of_rows.get("scale", 1.0)))
    stored[hidden] = POISON
    placed = m.place(stored, "uint8", recipe["view"])
    found = {"k": _as_e4m3(m, placed)}
    meant = m.number(e4m3_table())[m.int64(placed.array)]
    if "scale" in of_rows:
        found["k_scale"] = problem.place(m, "k_scale")
        meant = meant * m.f64(found["k_scale"].array)
    return Rows(found, meant)


def limits_of(m: Machine, problem: Problem) -> Limits:
    """Some kernels round rows of 656 bytes to the queries' type, where they have been multiplied by their scales."""
    rounded = problem.facts["rows"]["format"] == "656" and not m.on_cpu
    return limits.decode(problem.dtype, codes=False, value_codes=False, recent=False, cpu=m.on_cpu, rounded=rounded)


def _as_e4m3(m: Machine, placed: Placed) -> Placed:
    try:
        return dataclasses.replace(placed, array=placed.array.view(m.dtype("float8_e4m3fn")))
    except (TypeError, ValueError) as error:
        raise NotHereError(f"{m.library} has no float8_e4m3fn: {error}".split("\n", 1)[0]) from None


def _codes(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Nearest codes in e4m3; what is larger than the largest becomes that."""
    sizes = np.array(e4m3_table()[:127], np.float32)
    nearest = np.searchsorted((sizes[1:] + sizes[:-1]) / 2, np.abs(x)).astype(np.uint8)
    return np.asarray(nearest | np.where(np.signbit(x), 128, 0).astype(np.uint8))


def _bytes_656(x: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows (..., 576) as bytes."""
    groups = x[..., :_CODES].reshape(*x.shape[:-1], _CODES // _GROUP, _GROUP)
    scales = np.maximum(np.abs(groups).max(-1), np.float32(2.0**-20)) / np.float32(448)
    words = np.ascontiguousarray(x[..., _CODES:], "<f4").view("<u4")
    rest = ((words + 0x7FFF + (words >> 16 & 1)) >> 16).astype("<u2")
    codes = _codes(groups / scales[..., None]).reshape(*x.shape[:-1], _CODES)
    parts = codes, np.ascontiguousarray(scales, "<f4").view(np.uint8), np.ascontiguousarray(rest).view(np.uint8)
    made = np.concatenate(parts, axis=-1)
    assert made.shape[-1] == _BYTES
    return made


def _meant_656(m: Machine, stored: Any) -> Any:
    """What bytes (..., 656), as int64, stand for."""
    lead = tuple(stored.shape[:-1])
    words = stored[..., _SCALES_AT:_REST_AT].reshape(*lead, -1, 4)
    scales = m.words_to_float(sum(words[..., i] * 256**i for i in range(4)))
    codes = m.number(e4m3_table())[stored[..., :_CODES]].reshape(*lead, -1, _GROUP)
    halves = stored[..., _REST_AT:].reshape(*lead, -1, 2)
    rest = m.words_to_float((halves[..., 0] + 256 * halves[..., 1]) * 65536)
    return m.cat([(codes * scales[..., None]).reshape(*lead, _CODES), rest], -1)
