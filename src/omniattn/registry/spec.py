"""What a row of the registry says. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

#: Targets of which a wheel carries what calls take there: `registry.targets`.
PREBUILT_ARCHS: tuple[str, ...] = ("80", "89", "90a", "100", "120")

#: Calls that a kernel takes: those without something, all, or those with it.
Use = Literal["never", "any", "always"]
Sequences = Literal["any", "dense", "packed"]
Masks = Literal["none", "any", "packed", "tiles", "keys"]


@dataclass(frozen=True, slots=True)
class KernelSpec:
    """One kernel binary.

    Attributes
    ----------
    name : str
        Unique; the cubin's file stem and its key in the manifest.
    family : str
        Kernel family, ``<op>_<variant>_<arch>``.
    op : str
        The operation it serves: ``"attention"``, ``"attention_split"``,
        ``"attention_combine"``, ``"attention_combine_lse"``, ``"attention_combine_packed"``,
        ``"quantize"``, ``"quantize_delta"``,
        ``"merge_states"``; of masks ``"mask_pack"``, ``"mask_align"``, ``"mask_list"``,
        ``"tile_kinds"``; of packed sequences
        ``"clear_unused"``; of caches
        ``"append"``, ``"decode"``, ``"decode_combine"``, ``"latent_append"``, ``"latent_decode"``,
        ``"latent_combine"``, ``"dequantize"``, ``"dequantize_rounds"``, ``"copy_blocks"``; of the indexer of sparse
        attention ``"index_logits"``, ``"top_k"``.
    source : str
        Path of the ``.cu`` file below the kernels root.
    symbol : str
        Name of its one ``extern "C"`` kernel.
    defines : tuple of (name, value)
        Compile-time constants.
    min_arch : (major, minor)
        Lowest compute capability it runs on.
    arch_specific : bool
        True if it uses instructions of one ``sm_XYa`` target only.
    prebuild : tuple of str
        Targets the wheel carries it for, by `registry.targets`; elsewhere it is compiled at run time.
    dtype : str
        Element type of q, k, v.
    head_dim : int
        Largest head_dim it takes (the padded tile width).
    own_head_dim_v : int
        The same of v and o where that is another one; else 0.
    above_head_dim : int
        It takes calls alone one of whose two head dims is larger.
    block_m, block_n, num_warps : int
        Tile of query rows and keys, and warps per CTA.
    smem_bytes : int
        Dynamic shared memory per CTA.
    ctas_per_sm : int
        CTAs that the kernel's registers and shared memory leave room for on one SM.
    cluster : int
        Of attention: CTAs, on as many SMs, that take a tile of queries together.
    sequences : str
        ``"dense"`` (batches), ``"packed"``, or ``"any"``.
    paged : bool
        It takes K and V in pages of a pool, and no others.
    tensor_maps : bool
        It reads its arrays by tensor maps, which describe no negative and no huge strides.
    mask_maps : bool
        Of attention that forms scores: an additive mask comes to it by a tensor map, others as another kernel packed
        them. Where that is false it reads masks where they lie.
    map_blocks : bool
        Of decode over latent caches, with `tensor_maps`: a copy brings all channels of keys, else 64 of them.
    query_map : bool
        The same: it reads q by a tensor map, too.
    waits_ahead : bool
        Of the backward: it waits itself for the kernel ahead, so that its launch may begin before that one ends.
    softcap : str
        ``"never"``, ``"any"`` (calls with a softcap and without one) or ``"always"``.
    masks : str
        ``"none"``; ``"any"``: as they lie in memory; ``"packed"``: what another kernel packed, bits or a number a key;
        ``"tiles"``: an additive one that differs between queries, and always one; ``"keys"``: one that is the same for
        all queries, and always one.
    score_mods : bool
        It forms scores one by one, as far as `softcap`, `masks` and `score_mod` say. Forward kernels that do take any
        softmax_scale; others take the maximum of unscaled products. Not an argument: it follows from the first two and
        `block_masks`.
    score_mod : bool
        It can be compiled with a user's score modification.
    dropout : bool
        It can be compiled with dropout.
    lists : bool
        It passes over tiles of keys by a list of those that a mask, a block_mask or a score_mod leaves; of the backward
        over tiles of queries or keys, by one of those that a block_mask leaves. Others visit all tiles.
    block_masks : bool
        Of attention on quantized operands, and of the backward: it takes a block_mask, and no call without one.
    lse : bool
        Of attention and of what merges its results: it makes an LSE.
    smooth_q : str
        Of attention on quantized operands: whether it adds ``delta_s``, as `softcap`.
    value_factors : bool
        It takes v in e4m3 with a factor for each 128 rows, and no other v.
    quantizes_q : bool
        Of attention on quantized operands: it takes q in 16 bits, and makes of it what the quantizers make by default.
    integer_powers : str
        Of attention on quantized operands: which P of common steps it makes of integers (``"none"``; ``"corrected"``,
        which no row has; ``"half linear"``; ``"linear"``). The last is for ``Int8(fast_exp=True)`` alone.
    other_head_dim_v : bool
        It takes v of another head_dim than q, and no other v. Kernels with tensor maps, and those on quantized
        operands, take both.
    any_head_dim_v : bool
        With `other_head_dim_v`: it takes v of q's head_dim too.
    dq, dmask : bool
        Of the backward: it makes the gradient of q; it adds to that of a mask, in every call.
    ordered_dq : bool
        Of the backward: its CTAs add to dq in a fixed order, in every call.
    any_scale : bool
        Of the backward: it takes a softmax_scale that is 0 or not finite in fp32.
    beside : bool
        Of decode: its CTAs have an SM each, beside a kernel that has the others.
    fragments : bool
        Of what is behind the backward: sums of dq lie as accumulators of wgmma do.
    rotated : bool
        Of quantizers: it is for what is rotated or becomes e4m3, and for nothing else.
    qk, pv, pv_accumulator : str
        Of attention: element types of Q K^T (``"io"``: that of q, k, v; ``"int8"``, ``"int4"``, ``"fp8"``) and of P V
        (``"io"``, ``"fp8"``, ``"fp16"``), and the accumulator of P V (``"fp32"``, ``"fp16"``).
    grouping : str
        Of attention on quantized operands: grouping of the operands that it reads (`omniattn.quantize_qk`).
    specialization : (str, str), optional
        Of quantizers: grouping and dtype of V of the one default of int8 attention that the kernel is made for, see
        `problems.quantize.QuantizeProblem.specialization`; None: it is made for anything.
    bias_bytes : int
        Of attention: bytes of an element of the tiles of additive masks that it takes; 0: none.
    generated : tuple of (name, text)
        Source files whose text is not that of the kernels folder: a user's score modification, or dropout.
    most_elems : int
        Of top_k: elements of a row that a CTA has room for; 0: any number.
    cache : tuple of str
        Of decode and append: row formats of K and V (`registry.decode.row_format`).
    """

    name: str
    family: str
    op: str
    source: str
    symbol: str
    defines: tuple[tuple[str, str], ...]
    dtype: str
    head_dim: int
    block_m: int
    block_n: int
    num_warps: int
    smem_bytes: int
    ctas_per_sm: int = 1
    cluster: int = 1
    min_arch: tuple[int, int] = (8, 0)
    arch_specific: bool = False
    prebuild: tuple[str, ...] = ()
    sequences: Sequences = "any"
    paged: bool = False
    tensor_maps: bool = False
    mask_maps: bool = False
    map_blocks: bool = False
    query_map: bool = False
    waits_ahead: bool = False
    softcap: Use = "never"
    masks: Masks = "none"
    score_mod: bool = False
    dropout: bool = False
    lists: bool = False
    block_masks: bool = False
    lse: bool = True
    smooth_q: Use = "never"
    value_factors: bool = False
    quantizes_q: bool = False
    integer_powers: str = "none"
    other_head_dim_v: bool = False
    any_head_dim_v: bool = False
    dq: bool = False
    dmask: bool = False
    ordered_dq: bool = False
    any_scale: bool = True
    fragments: bool = False
    beside: bool = False
    rotated: bool = False
    qk: str = "io"
    pv: str = "io"
    pv_accumulator: str = "fp32"
    grouping: str = ""
    specialization: tuple[str, str] | None = None
    bias_bytes: int = 0
    most_elems: int = 0
    cache: tuple[str, ...] = ()
    generated: tuple[tuple[str, str], ...] = ()
    own_head_dim_v: int = 0
    above_head_dim: int = 0
    score_mods: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        modifies = self.softcap != "never" or self.masks != "none" or self.block_masks
        object.__setattr__(self, "score_mods", modifies)

    @property
    def head_dim_v(self) -> int:
        """Largest head_dim of v and o that it takes."""
        return self.own_head_dim_v or self.head_dim

    @property
    def twin(self) -> str:
        """The name without the dtype: what this row and that of the other 16-bit type have in common."""
        return self.name.replace(f"_{IO_TYPES[self.dtype][0]}_", "_", 1) if self.dtype in IO_TYPES else self.name

    @property
    def rotates_heads(self) -> bool:
        """Of persistent kernels: head by head, it begins each head at another tile."""
        return self.score_mods and self.cluster == 1

    @property
    def stored_bits(self) -> int:
        """Of an element of quantized q and k, as they lie in memory."""
        return 4 if self.qk == "int4" else 8

    @property
    def quantized(self) -> bool:
        """Whether it is attention on quantized operands."""
        return self.qk != "io"

    @property
    def needs_lse(self) -> bool:
        """Whether it always writes the sums that the LSE of quantized operands is made of: partial results have room
        for them only where the call wants it."""
        of_batches = self.op == "attention_split" and self.sequences == "dense"
        return of_batches and self.quantized and self.lse and not (self.score_mods or self.value_factors)

    @property
    def options(self) -> int:
        """How much it does that not every call wants: of rows that serve a call, the fewest are the fastest."""
        return (self.softcap == "any") + self.lists + self.lse

    def at_a_time(self, max_smem: int) -> int:
        """CTAs of an SM, whose CTAs can have ``max_smem`` bytes: 1 KiB of each one's is the system's."""
        return max(1, min(self.ctas_per_sm, (max_smem + 1024) // (self.smem_bytes + 1024)))

    def unfit(self, cc: tuple[int, int], max_smem: int | None = None, *, where: str = "this GPU") -> str:
        """Why a GPU can never run the kernel; empty if it can.

        Parameters
        ----------
        cc : (major, minor)
            Compute capability.
        max_smem : int, optional
            Shared memory that one CTA may have there, bytes.
        where : str
            What the answer calls that GPU; a target of the compiler's has a name of its own.
        """
        if cc < self.min_arch or (self.arch_specific and cc != self.min_arch):
            needed, here = ("{}.{}".format(*x) for x in (self.min_arch, cc))
            if self.arch_specific:
                return f"it is for compute capability {needed} only, {where} has {here}"
            return f"it needs compute capability {needed} or newer, {where} has {here}"
        if max_smem is not None and self.smem_bytes > max_smem:
            return f"it needs {self.smem_bytes} bytes of shared memory, {where} gives {max_smem}"
        return ""


#: Short names of the element types in kernel names, and the tags of ``kernels_cu/ptx/types.cuh``.
IO_TYPES: dict[str, tuple[str, str]] = {
    "float16": ("fp16", "Half"),
    "bfloat16": ("bf16", "BFloat16"),
    "float32": ("fp32", "Float"),
}
