"""Formats of KV caches: which byte holds which element. Pure numbers, shared by host code, reference and tests.

docs/kv_formats.md has the tables; kernels_cu/decode/kv_row.cuh has the same formulas for the kernels.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

from ..errors import ArgumentError, UnsupportedError

#: Names of element types of a cache, and bits per element.
KV_BITS: dict[str, int] = {"bf16": 16, "fp16": 16, "fp8": 8, "int8": 8, "int4": 4}
#: Element types of arrays by the names of 16-bit caches.
KV_ARRAY_DTYPES: dict[str, str] = {"bf16": "bfloat16", "fp16": "float16"}
#: Widths of a stored row: head_dim is padded with zeros to one of these.
ROW_DIMS: tuple[int, ...] = (64, 128, 256, 512)
#: Channels of a head in 8 and 4 bits at most.
MAX_QUANTIZED_DIM = 256
#: Where rows have their parameters and in which order their elements: the kernels' own way, or that of FBGEMM's int4.
LAYOUTS: tuple[str, ...] = ("fragment", "fbgemm")
#: The layout of arrays of the caller in 8 bits: channels in their order, scales in arrays of their own.
IN_ORDER = "in_order"
#: Parameter groups of a row that FBGEMM has.
FBGEMM_GROUPS: tuple[int, ...] = (1, 4)
#: Channels of a parameter group at least: K is multiplied 16 channels at a time, V in tiles of 32.
MIN_GROUP = 32


@dataclass(frozen=True)
class KVFormat:
    """How one of K and V is stored.

    A row is one token of one kv head. The data plane has its elements, the parameter plane one 32-bit word for each
    group of ``group_size`` channels: scale in the low and zero in the high half, both bfloat16. An element with the
    code c is ``scale * c + zero``; 16-bit formats have no parameters.

    Attributes
    ----------
    dtype : str
        A key of `KV_BITS`.
    head_dim : int
        Channels that the caller sees.
    group_size : int
        Channels that share scale and zero; the row's whole width for one pair a token.
    zero_point : bool
        int8 and int4: whether the quantizer fits a zero, or keeps it 0.
    is_key : bool
        K and V order their channels differently.
    layout : str
        One of `LAYOUTS`. "fbgemm" (int4): the row begins with a word of parameters for each group, scale and shift in
        fp16, and has the channels in their order behind them; an element with the nibble n is ``scale * n + shift``.
        Or `IN_ORDER` (fp8, int8): an element with the code c is ``scale * c``; integers are in two's complement.
    """

    dtype: str
    head_dim: int
    group_size: int
    zero_point: bool
    is_key: bool
    layout: str = "fragment"

    @property
    def bits(self) -> int:
        """Bits of an element."""
        return KV_BITS[self.dtype]

    @property
    def quantized(self) -> bool:
        """Whether the format has parameters."""
        return self.bits < 16

    @property
    def row_dim(self) -> int:
        """Channels of a stored row."""
        return row_dim(self.head_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in the data plane, a multiple of 16; with FBGEMM's layout parameters too, a multiple of 4."""
        return self.row_dim * self.bits // 8 + 4 * (self.groups - self.plane_words)

    @property
    def groups(self) -> int:
        """Words of parameters of a row; 0 for 16-bit formats and arrays of the caller."""
        return self.row_dim // self.group_size if self.quantized and self.layout != IN_ORDER else 0

    @property
    def plane_words(self) -> int:
        """Words of a row in the parameter plane; 0 where there is no such plane."""
        return 0 if self.layout == "fbgemm" else self.groups

    @property
    def token_bytes(self) -> int:
        """Bytes of a row in both planes."""
        return self.row_bytes + 4 * self.plane_words

    def position(self, channel: int) -> int:
        """Bit of the row at which the element of ``channel`` begins.

        16-bit rows and the caller's are in their natural order, FBGEMM's too, behind their parameters. Other rows
        consist of units of four elements, ordered so that a lane of the tensor core's fragment finds all units that it
        needs in pieces of up to 16 bytes:

        - K: channel 16 s + 4 q + e is element e of unit s of lane q, 4 lanes;
        - V: channel 32 u + 4 g + e is element e of unit u of lane g, 8 lanes.
        """
        if not self.quantized or self.layout == IN_ORDER:
            return self.bits * channel
        if self.layout == "fbgemm":
            return 32 * self.groups + 4 * channel
        lanes = 4 if self.is_key else 8
        unit, lane, element = channel // (4 * lanes), channel // 4 % lanes, channel % 4
        unit_bits = 4 * self.bits
        chunk_bits = min(128, self.row_dim // (4 * lanes) * unit_bits)
        at = unit * unit_bits
        first = (at // chunk_bits * lanes + lane) * chunk_bits
        within = at % chunk_bits
        if self.dtype == "int4" and self.is_key:
            # Two units share a 32-bit word: unit 2i has nibbles 0 and 1 of both halves, unit 2i + 1 nibbles 2 and 3.
            half, nibble = element & 1, 2 * (unit & 1) + (element >> 1)
            return first + within // 32 * 32 + 16 * half + 4 * nibble
        return first + within + element * self.bits


def row_dim(head_dim: int) -> int:
    """Width of a stored row: head_dim padded to one of `ROW_DIMS`; of a latent cache, which is wider, head_dim."""
    return next((dim for dim in ROW_DIMS if dim >= head_dim), head_dim)


def check_format(
    dtype: object,
    head_dim: int,
    group_size: object,
    zero_point: bool,
    function: str,
    *,
    is_key: bool,
    layout: object = "fragment",
) -> KVFormat:
    """Validate one of K's and V's formats.

    Raises
    ------
    ArgumentError
        Names ``k_dtype``, ``v_dtype``, ``group_size``, ``layout`` or ``head_dim``.
    UnsupportedError
        A quantized format of a head_dim that is too large for it.
    """
    name = "k_dtype" if is_key else "v_dtype"
    if not isinstance(dtype, str) or dtype not in KV_BITS:
        raise ArgumentError(name, " or ".join(map(repr, KV_BITS)), repr(dtype), function=function)
    if KV_BITS[dtype] < 16 and head_dim > MAX_QUANTIZED_DIM:
        raise UnsupportedError(
            f"{function}(): {name}={dtype!r} with head_dim={head_dim}",
            instead=f"head_dim up to {MAX_QUANTIZED_DIM}, or K and V in 16 bits",
        )
    width = row_dim(head_dim)
    if group_size is None:
        group = width
    else:
        choices = [MIN_GROUP << i for i in range(int(math.log2(width // MIN_GROUP)) + 1)]
        try:
            group = -1 if isinstance(group_size, bool) else operator.index(group_size)  # type: ignore[arg-type]
        except TypeError:
            group = -1
        if group not in choices:
            expected = f"None or one of {', '.join(map(str, choices))} for head_dim {head_dim}"
            raise ArgumentError("group_size", expected, repr(group_size), function=function)
    if not isinstance(layout, str) or layout not in LAYOUTS:
        raise ArgumentError("layout", " or ".join(map(repr, LAYOUTS)), repr(layout), function=function)
    if layout == "fbgemm":
        if dtype != "int4":
            raise ArgumentError(name, "'int4' with layout 'fbgemm'", repr(dtype), function=function)
        if head_dim not in ROW_DIMS:
            expected = "64, 128 or 256 with layout 'fbgemm', whose rows are not padded"
            raise ArgumentError("head_dim", expected, f"{head_dim}", function=function)
        if width // group not in FBGEMM_GROUPS:
            sizes = [str(width // n) for n in FBGEMM_GROUPS[1:] if width // n >= MIN_GROUP]
            expected = f"None{' or ' + sizes[0] if sizes else ''} with layout 'fbgemm' and head_dim {head_dim}"
            raise ArgumentError("group_size", expected, repr(group_size), function=function)
        if not zero_point:
            raise ArgumentError(
                "zero_point", "True with layout 'fbgemm', which always has one", "False", function=function
            )
    quantized = KV_BITS[dtype] < 16
    return KVFormat(
        dtype, head_dim, group if quantized else width, zero_point and dtype in ("int8", "int4"), is_key, layout
    )
