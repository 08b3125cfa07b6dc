"""Tables of sequences that several GPUs share: of context_parallel, of rings, of trainings."""

from __future__ import annotations

from build_tools.page_parts import Part, Report, Row, Source, below, number, ratio, table

SOURCES: dict[str, Source] = {
    "context_parallel": Source("python examples/context_parallel/bench.py", "context_parallel", False),
    "train_lm_parallel": Source("python examples/train_lm/parallel.py", "train_lm", False),
    "ring": Source("python examples/long_context/times.py --gpus 2", "ring", False),
    "ring_four": Source("python examples/long_context/times.py --gpus 4", "ring", False),
    "long_context": Source("python examples/long_context/long_context.py", "train_lm", False),
}

#: Asked for on two GPUs: speed over context_parallel with cuDNN, and over one GPU with omniattn; by length.
OVER_CUDNN: dict[int, float] = {131072: 1 / 0.87}
OVER_ONE: dict[int, float] = {32768: 1.5, 131072: 1.9}
_HOW = {"one": "–", "allgather": "allgather", "alltoall": "alltoall", "calls": "calls of one GPU alone"}
#: Asked for of two GPUs' rings over one GPU, by length, and of 8 bits on the wire over 16.
RING_OVER_ONE: dict[tuple[str, int], float] = {
    ("forward", 8192): 1.4, ("forward", 32768): 1.85, ("forward", 131072): 1.99,
    ("forward + backward", 32768): 1.75, ("forward + backward", 131072): 1.95,
}  # fmt: skip
_RING_HEADER = ["one GPU, ms", "ring over it (goal)", "in a CUDA graph", "int8 ring over bf16's; in graphs",
                "heads over ranks", "DTensor", "2 × 2", "host, ms: ring, int8"]  # fmt: skip


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


def _faster(wide: Row | None, narrow: Row | None) -> str:
    """Speed of the second over the first."""
    return "–" if wide is None or narrow is None else ratio(wide["median_ms"] / narrow["median_ms"])


def rings(report: Report) -> str:
    """Times of examples/long_context/times.py: a line each shape, forward, both or a step of decoding."""
    calls: dict[tuple[str, str], dict[str, Row]] = {}
    for row in report["rows"]:
        calls.setdefault((row["shape"], row["what"]), {})[row["how"]] = row
    lines = []
    for (shape, what), hows in calls.items():
        one = hows["one"]
        ring = hows.get("ring") or hows["sharded cache"]
        captured, one = hows.get(f"{ring['how']}, graph"), hows.get("one, graph", one)
        captured_low = hows.get("ring, int8, graph")
        low, goal = hows.get("ring, int8"), RING_OVER_ONE.get((what, ring["seqlen"])) if report["gpus"] == 2 else None
        host = [number(row["host_ms"], 2) for row in (ring, low) if row is not None]
        lines.append(
            [
                f"{shape}, {what}",
                number(one["median_ms"], 3),
                _asked(one["median_ms"] / ring["median_ms"], goal),
                "–" if captured is None else ratio(one["median_ms"] / captured["median_ms"]),
                "–" if low is None else f"{_faster(ring, low)}; {_faster(captured, captured_low)}",
                *(
                    "–" if how not in hows else ratio(hows[how]["speed_over_one"])
                    for how in ("heads", "DTensor, heads", "ring of 2 × heads of 2")
                ),
                ", ".join(host),
            ]
        )
    return below(table([f"{report['gpus']} GPUs, causal, bf16", *_RING_HEADER], lines), report)


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
    "ring": Part(("ring",), rings),
    "ring_four": Part(("ring_four",), rings),
    "train_lm_parallel": Part(("train_lm_parallel",), training),
    "long_context": Part(("long_context",), training),
}
