"""Tables of the SmolLM2 example: what its program has written, to Markdown."""

from __future__ import annotations

from collections.abc import Callable

from build_tools.page_parts import Part, Report, Source, below, table

_PROGRAM = "python examples/smollm2/perplexity.py"


def _source(name: str, tokens: int, context: int) -> Source:
    return Source(f"{_PROGRAM} --{name} --tokens {tokens} --context {context}", f"perplexity_{name}", False)


SOURCES: dict[str, Source] = {
    "perplexity_precisions": _source("precisions", 6144, 2048),
    "perplexity_products": _source("products", 2048, 1024),
    "perplexity_caches": _source("caches", 2048, 1024),
}


def perplexity(*columns: str) -> Callable[[Report], str]:
    """A line a row of the report: its first cells, perplexity, and how it differs from the first row."""

    def make(report: Report) -> str:
        lines = []
        for number, row in enumerate(report["rows"]):
            change = f"{100 * row['difference']:+.2f} % ± {100 * row['error']:.2f} %"
            rest = [change, f"{100 * row['agreement']:.2f} %"] if number else ["", ""]
            lines.append([*(row[column] for column in columns), f"{row['perplexity']:.4f}", *rest])
        header = [*columns, "Perplexity", "Difference", "Same top-1"]
        return below(table(header, lines), report)

    return make


#: What the markers of the pages name.
PARTS: dict[str, Part] = {
    "perplexity_precisions": Part(("perplexity_precisions",), perplexity("`precision=`", "Smoothed", "Rotated")),
    "perplexity_products": Part(("perplexity_products",), perplexity("Q·Kᵀ", "P·V", "sums")),
    "perplexity_caches": Part(("perplexity_caches",), perplexity("Cache", "Bytes a token")),
}
