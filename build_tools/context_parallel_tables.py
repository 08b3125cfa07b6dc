"""Tables of sequences that several GPUs share: reports of examples/context_parallel and examples/train_lm."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Row, Source, below, number, ratio, table

SOURCES: dict[str, Source] = {
    "context_parallel": Source("python examples/context_parallel/bench.py", "context_parallel", False),
    "train_lm_parallel": Source("python examples/train_lm/parallel.py", "train_lm", False),
    "long_context": Source("python examples/long_context/long_context.py", "train_lm", False),
}

#: Asked for on two GPUs: speed over context_parallel with cuDNN, and over one GPU with omniattn; by length.
OVER_CUDNN: dict[int, float] = {131072: 1 / 0.87}
OVER_ONE: dict[int, float] = {32768: 1.5, 131072: 1.9}
_HOW = {"one": "–", "allgather": "allgather", "alltoall": "alltoall", "calls": "calls of one GPU alone"}


def _asked(value: float, goal: float | None) -> str:
    """A ratio, beside what is asked for."""
    return ratio(value) if goal is None else f"{ratio(value)} ({goal:.2f})"


def attention(report: Report) -> str:
    """One GPU and several, by cuDNN and by omniattn."""
    rows: dict[tuple[int, str, str], dict[str, Row]] = {}
    for row in report["rows"]:
        rows.setdefault((row["seqlen"], row["what"], row["how"]), {})[row["kernels"]] = row
    lines = []
    for (seqlen, what, how), row in rows.items():
        theirs, ours = row["cudnn"], row["omniattn"]
        is_goal = what == "forward" and how not in ("one", "calls")
        alone = how == "one"
        lines.append(
            [
                f"s{seqlen}, {what}",
                "1" if how in ("one", "calls") else str(ours["gpus"]),
                _HOW[how],
                number(theirs["median_ms"], 2),
                number(ours["median_ms"], 2),
                _asked(1 / ours["time_over_cudnn"], OVER_CUDNN.get(seqlen) if is_goal else None),
                "–" if alone else ratio(theirs["speed_over_one"]),
                "–" if alone else _asked(ours["speed_over_one"], OVER_ONE.get(seqlen) if is_goal else None),
            ]
        )
    shape = f"b1 h{report['heads']} d{report['head_dim']} bf16, {'causal' if report['causal'] else 'full'}"
    header = [shape, "GPUs", "rotate method", "cuDNN, ms", "omniattn, ms", "over cuDNN (goal)",
              "cuDNN over one GPU", "omniattn over one GPU (goal)"]  # fmt: skip
    return below(table(header, lines), report)


def training(report: Report) -> str:
    """The losses of examples/train_lm/parallel.py, or of examples/long_context, and their speed."""
    one = report["rows"][0]["tokens_per_second"]
    lines = [
        [
            row["attention"],
            number(row["first_loss"], 4),
            number(row["last_loss"], 4),
            f"{row['tokens_per_second']:,.0f}",
            ratio(row["tokens_per_second"] / one),
        ]
        for row in report["rows"]
    ]
    apart = [abs(a - b) for a, b in zip(*(run["losses"] for run in report["runs"]), strict=True)]
    note = (
        f"Context {report['config']['context']}, {len(apart)} steps: losses differ by {max(apart):.4f} at most; "
        f"{report['tolerance']} is allowed."
    )
    header = [f"batch {report['batch']}", "first loss", "last loss", "tokens/s", "over one GPU"]
    return below(table(header, lines), report, note)


PARTS: dict[str, Part] = {
    "context_parallel": Part(("context_parallel",), attention),
    "train_lm_parallel": Part(("train_lm_parallel",), training),
    "long_context": Part(("long_context",), training),
}
