"""Tables of the SmolLM2 example: what its program has written, to Markdown."""

from __future__ import annotations

from collections.abc import Callable

from build_tools.page_parts import Part, Report, Source, below, table

_PROGRAM = "python examples/smollm2/perplexity.py"

SOURCES: dict[str, Source] = {
    f"perplexity_{name}": Source(f"{_PROGRAM} --{name} --tokens {tokens} --context {context}", bench, False)
    for name, tokens, context in (("precisions", 6144, 2048), ("products", 2048, 1024), ("caches", 2048, 1024))
    for bench in (f"perplexity_{name}",)
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
    "perplexity_precisions": Part(("perplexity_precisions",), perplexity("`precision=`", "Smoothed")),
    "perplexity_products": Part(("perplexity_products",), perplexity("Q·Kᵀ", "P·V", "sums")),
    "perplexity_caches": Part(("perplexity_caches",), perplexity("Cache", "Bytes a token")),
}
