"""``SparseCalibration``: what `calibrate_sparse` has found, and the file that `Sparse` reads it from."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..version import __version__
from .sparse import FORMAT, KIND, Sparse


@dataclass(frozen=True)
class CalibratedHeads:
    """The heads of one name, a layer of a model for instance.

    Attributes
    ----------
    shares : tuple of float
        ``topk`` or ``cdf`` of each query head.
    errors : tuple of float
        Relative L1 with them: of all samples the largest.
    kept : tuple of float
        Blocks that are computed, of all that are visible: the mean of all samples.
    samples : int
        How many (q, k, v) there were.
    seqlen_q, seqlen_k, head_dim : int
        Of the last one.
    """

    shares: tuple[float, ...]
    errors: tuple[float, ...]
    kept: tuple[float, ...]
    samples: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int


@dataclass(frozen=True)
class SparseCalibration:
    """What `calibrate_sparse` has found.

    Attributes
    ----------
    by : str
        "topk" or "cdf": what the shares are of.
    max_error : float
    similarity, block_size, keep_first
        As `Sparse` has them.
    causal : bool
        How the tensors were attended to.
    precision : str
        What the errors were measured in.
    entries : dict of str to CalibratedHeads
    """

    by: str
    max_error: float
    similarity: float
    block_size: tuple[int, int]
    keep_first: int
    causal: bool
    precision: str
    entries: Mapping[str, CalibratedHeads]

    def sparse(self, name: str | None = None) -> Sparse:
        """The `Sparse` of one name; of the only one without it. The same as ``Sparse(file=, name=)`` of its file."""
        if name is None and len(self.entries) == 1:
            name = next(iter(self.entries))
        if name is None or name not in self.entries:
            known = ", ".join(map(repr, self.entries))
            raise ArgumentError("name", f"one of {known}", repr(name), function="SparseCalibration.sparse")
        shares: dict[str, Any] = {self.by: self.entries[name].shares}
        return Sparse(**shares, similarity=self.similarity, block_size=self.block_size, keep_first=self.keep_first)

    def to_json(self) -> str:
        """The text of the file: an entry a line."""
        head = {
            "kind": KIND,
            "format": FORMAT,
            "omniattn": __version__,
            "max_error": self.max_error,
            "precision": self.precision,
            "causal": self.causal,
            "rule": {
                "by": self.by,
                "similarity": self.similarity,
                "block_size": list(self.block_size),
                "keep_first": self.keep_first,
            },
        }
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
        entries = [f"    {json.dumps(name)}: {json.dumps(_written(one))}" for name, one in self.entries.items()]
        return "\n".join(["{", *lines, '  "entries": {', ",\n".join(entries), "  }", "}", ""])

    def save(self, file: str | os.PathLike[str]) -> None:
        """Write the file, in place of one that is there."""
        path = Path(file)
        made = path.with_name(f".{path.name}.{os.getpid()}")
        made.write_text(self.to_json(), encoding="utf-8", newline="\n")
        made.replace(path)

    def __str__(self) -> str:
        name = self.precision.partition("(")[0]
        lines = [f"{self.by} of each head: at most {self.max_error:g} relative L1 ({name})"]
        for name, one in self.entries.items():
            kept = sum(one.kept) / len(one.kept)
            lines.append(
                f"{name}: {min(one.shares):g} to {max(one.shares):g}, {kept:.0%} of the blocks are kept, "
                f"error up to {max(one.errors):.4f}"
            )
        return "\n".join(lines)


def _written(one: CalibratedHeads) -> dict[str, Any]:
    return {
        "num_heads": len(one.shares),
        "shares": list(one.shares),
        "errors": [float(f"{x:.4g}") for x in one.errors],
        "kept": [round(x, 4) for x in one.kept],
        "samples": one.samples,
        "seqlen_q": one.seqlen_q,
        "seqlen_k": one.seqlen_k,
        "head_dim": one.head_dim,
    }
