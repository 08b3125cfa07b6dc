"""Tables of whole models: reports of ``examples/transformers_model``."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Source, below, number, table, value_of

_PROGRAM = "python examples/transformers_model/compare.py"
SOURCES: dict[str, Source] = {
    "transformers": Source(_PROGRAM, "transformers", False),
    "transformers_weights": Source(f"{_PROGRAM} --gguf SmolLM2-135M-Instruct.Q4_1.gguf", "transformers", False),
    "transformers_batches": Source("python examples/transformers_model/batches.py", "transformers_batches", False),
}


def speed(report: Report) -> str:
    """Prefill, training step and generation with each attention."""
    sizes = report["sizes"]
    header = [
        "attention",
        "prefill of {} × {} tokens, ms".format(*sizes["prefill"]),
        "training step of {} × {}, ms".format(*sizes["training"]),
        "{} sequences, new tokens/s".format(sizes["prompt"][0]),
    ]
    lines = [
        [
            f"`{row['attention']}`",
            number(row["prefill_ms"], 1),
            number(row["training_ms"], 1),
            number(row["tokens_per_second"], 0),
        ]
        for row in report["rows"]
    ]
    notes = [f"{row['attention']}, {what}: {note}" for row in report["rows"] for what, note in row["notes"].items()]
    return below(table(header, lines), report, *notes)


def quality(report: Report) -> str:
    """Perplexity of real weights, and the greedy tokens that are eager attention's."""
    lines = [
        [f"`{row['attention']}`", number(row["perplexity"], 3), f"{value_of(row, 'same_tokens') or 0.0:.0%}"]
        for row in report["rows"]
    ]
    return below(table(["attention", "perplexity", "greedy tokens as eager's"], lines), report)


def batches(report: Report) -> str:
    """Seconds of ``generate_batch`` with each attention."""
    sizes = report["sizes"]
    lines = [
        [
            "`{}`".format(row["attention"].replace("|", "\\|")),
            *(number(value_of(row, key), 2) for key in ("seconds", "without_graphs", "kept")),
            f"{value_of(row, 'same_requests') or 0.0:.0%}",
        ]
        for row in report["rows"]
    ]
    new = sizes["requests"] * sizes["new"]
    header = [f"attention, {new} new tokens of {sizes['requests']} requests", "a call, s", "without graphs, s"]
    return below(table([*header, "manager kept, s", "same requests as the first"], lines), report)


PARTS: dict[str, Part] = {
    "transformers": Part(("transformers",), speed),
    "transformers_weights": Part(("transformers_weights",), quality),
    "transformers_weights_speed": Part(("transformers_weights",), speed),
    "transformers_batches": Part(("transformers_batches",), batches),
}
