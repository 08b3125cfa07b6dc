"""What ``omniattn bench`` times side by side: omniattn itself and whatever attention packages are installed."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from omniattn.bench.shapes import ForwardShape

#: Called with q, k, v in the candidate's own layout; enqueues the forward pass and returns o.
Forward = Callable[[Any, Any, Any], Any]

#: A sampled error above this is a wrong result, not rounding: bf16 output alone costs about 0.002.
EXACT_ERROR = 0.02
#: Quantizing contenders are allowed more; their error stands in the report.
QUANTIZED_ERROR = 0.2
#: 4 bits cost 0.2 on normal inputs; scores that were lost altogether would cost about 0.8.
INT4_ERROR = 0.4


def is_importable(module: str) -> bool:
    """Whether there is such a module. Imports no module but the package around it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:  # the package around the module is not there
        return False


@dataclass(frozen=True)
class Contender:
    """Something that computes attention on torch CUDA tensors.

    Attributes
    ----------
    key : str
        Name on the command line and in JSON.
    label : str
        Name in tables and plots.
    package, module : str
        Distribution to name in messages; module that must be importable.
    layout : {"NHD", "HND"}
        Layout it is handed, contiguous: each gets the one it was written for.
    error_limit : float
        A larger `sampled_error` is a wrong result. Contenders that quantize their input have a wider one (their times
        are not comparable without their errors).
    build : callable
        ``build(torch, shape) -> Forward``. Everything that a user would do once (planning, workspaces) happens here.
    """

    key: str
    label: str
    package: str
    module: str
    layout: str
    error_limit: float
    build: Callable[[Any, ForwardShape], Forward]

    @property
    def own(self) -> bool:
        """Whether it is this package: its errors are not hidden, and fail the command."""
        return self.package == "omniattn"

    def missing(self) -> str | None:
        """Reason why it cannot run in this environment, or None. Imports no module but the package around it."""
        return None if is_importable(self.module) else f"{self.package} is not installed"


def _omniattn(torch: Any, shape: ForwardShape) -> Forward:
    import omniattn

    return lambda q, k, v: omniattn.attention(q, k, v, causal=shape.causal)


def _sdpa(backend_name: str) -> Callable[[Any, ForwardShape], Forward]:
    def build(torch: Any, shape: ForwardShape) -> Forward:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        backend = getattr(SDPBackend, backend_name)

        def forward(q: Any, k: Any, v: Any) -> Any:
            with sdpa_kernel(backend):
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=shape.causal)

        return forward

    return build


def _flash_attn(module_name: str) -> Callable[[Any, ForwardShape], Forward]:
    def build(torch: Any, shape: ForwardShape) -> Forward:
        function = importlib.import_module(module_name).flash_attn_func

        def forward(q: Any, k: Any, v: Any) -> Any:
            result = function(q, k, v, causal=shape.causal)
            # Some releases return (o, lse), some return o.
            return result[0] if isinstance(result, tuple) else result

        return forward

    return build


def _sageattention(torch: Any, shape: ForwardShape) -> Forward:
    function = importlib.import_module("sageattention").sageattn
    return lambda q, k, v: function(q, k, v, tensor_layout="NHD", is_causal=shape.causal)


def _flashinfer(torch: Any, shape: ForwardShape) -> Forward:
    wrapper_type = importlib.import_module("flashinfer").BatchPrefillWithRaggedKVCacheWrapper
    workspace = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = wrapper_type(workspace, "NHD")
    starts = torch.arange(shape.batch + 1, dtype=torch.int32, device="cuda") * shape.seqlen
    wrapper.plan(
        starts, starts, shape.heads, shape.heads, shape.head_dim, causal=shape.causal, q_data_type=torch.bfloat16
    )
    packed = (shape.batch * shape.seqlen, shape.heads, shape.head_dim)

    def forward(q: Any, k: Any, v: Any) -> Any:
        return wrapper.run(q.view(packed), k.view(packed), v.view(packed)).view(q.shape)

    return forward


#: All contenders in the order of tables and plots; the first one is ours.
CONTENDERS: tuple[Contender, ...] = (
    Contender("omniattn", "omniattn", "omniattn", "omniattn", "NHD", EXACT_ERROR, _omniattn),
    Contender("fa2", "torch FA2", "torch", "torch", "HND", EXACT_ERROR, _sdpa("FLASH_ATTENTION")),
    Contender("cudnn", "torch cuDNN", "torch", "torch", "HND", EXACT_ERROR, _sdpa("CUDNN_ATTENTION")),
    Contender("efficient", "torch efficient", "torch", "torch", "HND", EXACT_ERROR, _sdpa("EFFICIENT_ATTENTION")),
    Contender("flash_attn", "flash-attn", "flash-attn", "flash_attn", "NHD", EXACT_ERROR, _flash_attn("flash_attn")),
    Contender(
        "fa3",
        "FlashAttention-3",
        "flash-attn-3",
        "flash_attn_interface",
        "NHD",
        EXACT_ERROR,
        _flash_attn("flash_attn_interface"),
    ),
    Contender(
        "fa4",
        "FlashAttention-4",
        "flash-attn-4",
        "flash_attn.cute",
        "NHD",
        EXACT_ERROR,
        _flash_attn("flash_attn.cute"),
    ),
    Contender(
        "sageattention", "SageAttention", "sageattention", "sageattention", "NHD", QUANTIZED_ERROR, _sageattention
    ),
    Contender("flashinfer", "FlashInfer", "flashinfer-python", "flashinfer", "NHD", EXACT_ERROR, _flashinfer),
)


@dataclass(frozen=True)
class InputSet:
    """One set of random inputs in both layouts."""

    nhd: tuple[Any, Any, Any]
    hnd: tuple[Any, Any, Any]

    def in_layout(self, layout: str) -> tuple[Any, Any, Any]:
        """q, k, v, contiguous in ``layout``."""
        return self.nhd if layout == "NHD" else self.hnd


def make_inputs(torch: Any, shape: ForwardShape, count: int) -> list[InputSet]:
    """Random normal bf16 inputs, ``count`` different sets."""
    generator = torch.Generator(device="cuda").manual_seed(1234)
    size = (shape.batch, shape.seqlen, shape.heads, shape.head_dim)
    sets = []
    for _ in range(count):
        nhd = tuple(torch.randn(size, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(3))
        sets.append(InputSet(nhd=nhd, hnd=tuple(t.transpose(1, 2).contiguous() for t in nhd)))
    return sets


def sampled_error(torch: Any, shape: ForwardShape, inputs: InputSet, output: Any, layout: str) -> float:
    """Relative L1 error of some rows of ``output`` against a plain fp64 computation of the same rows.

    A fast wrong kernel must not get into a table: first, middle and last rows of the first and the last head are enough
    to catch a kernel that did not run, skipped the mask or read the wrong layout.
    """
    q, k, v = inputs.nhd
    o = output if layout == "NHD" else output.transpose(1, 2)
    if tuple(o.shape) != tuple(q.shape):
        return float("inf")
    step = max(1, shape.seqlen // 16)
    rows = torch.arange(0, shape.seqlen, step, device=q.device)
    rows = torch.cat([rows, rows.new_tensor([shape.seqlen - 1])])
    difference = total = 0.0
    for batch, head in ((0, 0), (shape.batch - 1, shape.heads - 1)):
        scores = q[batch, rows, head].double() @ k[batch, :, head].double().T * shape.head_dim**-0.5
        if shape.causal:
            keys = torch.arange(shape.seqlen, device=q.device)
            scores = scores.masked_fill(keys[None, :] > rows[:, None], float("-inf"))
        expected = torch.softmax(scores, dim=-1) @ v[batch, :, head].double()
        difference += float((o[batch, rows, head].double() - expected).abs().sum())
        total += float(expected.abs().sum())
    return difference / total


def available(
    keys: Sequence[str] | None = None, contenders: Sequence[Contender] = CONTENDERS
) -> tuple[list[Contender], dict[str, str]]:
    """Split contenders into those that can be tried here and those that cannot, with reasons.

    Parameters
    ----------
    keys : sequence of str, optional
        Consider only these, and this package.
    contenders : sequence of Contender
        What there is to choose from.
    """
    usable: list[Contender] = []
    missing: dict[str, str] = {}
    for contender in contenders:
        if keys is not None and contender.key not in keys and not contender.own:
            continue
        reason = contender.missing()
        if reason is None:
            usable.append(contender)
        else:
            missing[contender.key] = reason
    return usable, missing
