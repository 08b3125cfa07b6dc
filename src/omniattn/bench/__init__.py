"""Timing with anchors: the machinery behind ``omniattn bench``.

``shapes``
    The problems that are timed, and their FLOP and byte counts.
``timing``
    Interleaved measurement with device events, cold L2, rotating inputs; medians and spreads.
``sustained``
    One candidate at a time, back to back, at the clock that it settles at.
``power``
    SM clock and power from nvidia-smi meanwhile.
``anchors``
    What is timed side by side: omniattn, the torch SDPA backends, other attention packages that are installed.
``low_precision``
    This package's contenders for a low precision: exact, end to end, the kernel alone.
``options``, ``option_cases``, ``option_problem``, ``option_contenders``, ``option_report``
    Every option of ``attention`` beside the plain call and the best other implementation.
``shape_runs``, ``shape_cases``, ``packed_problem``, ``shape_contenders``, ``shape_report``
    Few queries, short and packed sequences, windows beside the best other implementation.
``attempt``
    The check of a result before it is timed, for the options and for these.
``backward``, ``backward_cases``, ``backward_problem``, ``backward_contenders``, ``backward_report``
    Gradients, alone and with the forward, beside torch's attention.
``decode``
    A step of decoding from caches in every format, beside torch's attention.
``serve``
    Steps of an engine on its own pools, beside own caches and FlashAttention-3.
``beside_copy``
    ``append`` and the quantizers, beside a copy.
``ceilings``
    What the chip gives in the same run: a large matrix product and a device-to-device copy.
``host``
    Host time of a warm call, import time, time of a first run-time compilation.
``document``
    The JSON of all of them, and what it says of the machine.
``report``
    Medians to TFLOP/s, ratios and percentages; no device needed.
``plot``
    Bar charts of a report (matplotlib).

Nothing here imports torch or matplotlib before it is called.
"""

from __future__ import annotations

from omniattn.bench.report import Measurement, Report, geometric_mean
from omniattn.bench.shapes import FORWARD_SHAPES, LOW_PRECISION_SHAPES, ForwardShape, filter_shapes
from omniattn.bench.timing import Timing

__all__ = [
    "FORWARD_SHAPES",
    "LOW_PRECISION_SHAPES",
    "ForwardShape",
    "Measurement",
    "Report",
    "Timing",
    "filter_shapes",
    "geometric_mean",
]
