"""What a call is, without arrays: its facts, and shapes and dtypes of what it makes."""

from .append import AppendProblem, CopyProblem
from .attention import UNLIMITED, Alternatives, AttentionProblem, AttentionStrides, Descale, Descales, Pages
from .backward import GRADIENTS, BackwardProblem, BackwardStrides
from .decode import DecodeProblem
from .dequantize import DequantizeProblem
from .indexer import IndexLogitsProblem, TopKProblem
from .merge import MergeProblem
from .operands import OPERANDS, QuantizedK, QuantizedQ, QuantizedQK, QuantizedV
from .outputs import Output
from .precision import EXACT, FP8_ARRAYS, KNOBS, PRECISIONS, Auto, Fp8, Int4, Int8, Precision
from .quantize import QuantizeCall, QuantizeProblem
from .sparse import Sparse
from .target import Target
from .with_cache import WithCacheProblem

__all__ = [
    "EXACT",
    "FP8_ARRAYS",
    "GRADIENTS",
    "KNOBS",
    "OPERANDS",
    "PRECISIONS",
    "UNLIMITED",
    "Alternatives",
    "AppendProblem",
    "AttentionProblem",
    "AttentionStrides",
    "Auto",
    "BackwardProblem",
    "BackwardStrides",
    "CopyProblem",
    "DecodeProblem",
    "DequantizeProblem",
    "Descale",
    "Descales",
    "Fp8",
    "IndexLogitsProblem",
    "Int4",
    "Int8",
    "MergeProblem",
    "Output",
    "Pages",
    "Precision",
    "QuantizeCall",
    "QuantizeProblem",
    "QuantizedK",
    "QuantizedQ",
    "QuantizedQK",
    "QuantizedV",
    "Sparse",
    "Target",
    "TopKProblem",
    "WithCacheProblem",
]
