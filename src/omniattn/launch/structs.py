"""Every struct that host and device share, field by field (``kernels_cu/params/``; a test compares the layouts)."""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..problems.score_mod import MAX_ARRAYS, MAX_DIMS
from ..runtime.record import MAP_BYTES, Pointer, TensorMap


def _size(code: str) -> int:
    """Bytes of a field: codes are those of the `struct` module, ``P`` for pointers, and ``M`` for a tensor map."""
    return MAP_BYTES if code == "M" else struct.calcsize("<" + code.replace("P", "Q"))


class At(NamedTuple):
    """The address of an operand of the call, or a place behind it.

    Attributes
    ----------
    operand : str
        An argument, an output, or ``"workspace"``.
    offset : int
        Bytes.
    """

    operand: str
    offset: int = 0


class Arguments(NamedTuple):
    """A packed struct.

    Attributes
    ----------
    data : bytes
        Zeros where addresses and tensor maps go.
    pointers, tensor_maps
        As in `LaunchRecord`.
    """

    data: bytes
    pointers: tuple[Pointer, ...]
    tensor_maps: tuple[TensorMap, ...]


class HostStruct:
    """A struct of device code as the host packs it: little-endian, 8-byte fields first, no implicit padding.

    Parameters
    ----------
    name : str
        Of the struct in device code.
    header : str
        Where it is declared, below the kernels root.
    spec : str
        ``"code names; code names"``: code ``P`` (pointer), ``M`` (tensor map), or one of the `struct` module.
    tail : int
        Bytes of padding at the end.
    """

    def __init__(self, name: str, header: str, spec: str, tail: int = 0) -> None:
        self.name = name
        self.header = header
        self.fields: tuple[tuple[str, str], ...] = tuple(
            (field, code) for part in spec.split(";") for code, *names in [part.split()] for field in names
        )
        self._codes = dict(self.fields)
        self.offsets: dict[str, int] = {}
        end = 0
        for field, code in self.fields:
            self.offsets[field] = end
            end += _size(code)
        self.size = end + tail

    def inside(self, prefix: str) -> str:
        """The fields of this struct as those of a member ``prefix``, for another struct's ``spec``."""
        return ";".join(f"{code} {prefix}.{name}" for name, code in self.fields)

    def pack(self, values: dict[str, object]) -> Arguments:
        """Pack values by field name.

        Pointers take an `At`, or None for null; tensor maps a `TensorMap` without its place; the rest numbers, or
        tuples of them for arrays. Every field needs a value, and every value a field.
        """
        if values.keys() != self._codes.keys():
            odd = sorted(values.keys() ^ self._codes.keys())
            raise ValueError(f"{self.name}: fields without a value, or values without a field: {', '.join(odd)}")
        data = bytearray(self.size)
        pointers, maps = [], []
        for name, code in self.fields:
            value, at = values[name], self.offsets[name]
            if code.endswith("P"):
                for i, one in enumerate(value if isinstance(value, list) else [value]):
                    if one is not None:
                        assert isinstance(one, At)
                        pointers.append(Pointer(at + 8 * i, one.operand, one.offset))
            elif code == "M":
                assert isinstance(value, TensorMap)
                maps.append(value._replace(offset=at))
            else:
                struct.pack_into("<" + code, data, at, *(value if isinstance(value, tuple) else (value,)))
        return Arguments(bytes(data), tuple(pointers), tuple(maps))


_STRIDES = "{0}_stride_b {0}_stride_s {0}_stride_h"

TILE_LIST = HostStruct("TileList", "params/attn_fwd.cuh", "I num_items num_pairs num_tail_heads lead_rows")

SPLIT_TILE_LIST = HostStruct(
    "SplitTileList", "params/attn_fwd.cuh",
    "I num_items num_pairs num_tail_heads lead_rows; i num_splits pack num_queries pack_heads;I num_tiles first_tile",
)  # fmt: skip

ATTN_FWD = HostStruct(
    "AttnFwdParams", "params/attn_fwd.cuh",
    "P q k v o lse cu_seqlens_q cu_seqlens_k mask sinks;"
    f"q {' '.join(_STRIDES.format(x) for x in 'qkvo')} lse_stride_b lse_stride_h"
    " mask_stride_b mask_stride_h mask_stride_q mask_stride_k tile_offset;"
    "i batch num_q_heads num_kv_heads seqlen_q seqlen_k mask_rows mask_cols head_dim window_left window_right"
    " num_m_blocks mask_kind sinks_kind;"
    "f softmax_scale softcap; i head_dim_qk",
)  # fmt: skip

ATTN_FWD_SM90 = HostStruct(
    "AttnFwdSm90Params", "params/attn_fwd.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {TILE_LIST.inside('tiles')}", tail=16,
)  # fmt: skip

ATTN_FWD_SPLIT_SM90 = HostStruct(
    "AttnFwdSplitSm90Params", "params/attn_fwd.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {SPLIT_TILE_LIST.inside('tiles')}; P partial_o partial_ml",
    tail=40,
)  # fmt: skip

ATTN_FWD_SHARES_SM90 = HostStruct(
    "AttnFwdSharesSm90Params", "params/attn_fwd.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {SPLIT_TILE_LIST.inside('tiles')}; P partial_o partial_ml cuts",
    tail=32,
)  # fmt: skip

ATTN_COMBINE = HostStruct(
    "AttnCombineParams", "params/attn_combine.cuh",
    "P partial_o partial_ml o lse sinks; q o_stride_b o_stride_s o_stride_h lse_stride_b lse_stride_h;"
    "i num_columns num_splits heads rows pack head_dim threads_log2 sinks_kind; P partial_lse;"
    "i pack_heads tile_rows first_tile blocks num_queries zero",
)  # fmt: skip

ATTN_COMBINE_PACKED = HostStruct(
    "AttnCombinePackedParams", "params/attn_combine.cuh",
    "P partial_o partial_ml cuts o lse sinks; q o_stride_s o_stride_h lse_stride_h;"
    "i block_m pack pack_heads head_dim sinks_kind num_ctas; P partial_lse",
)  # fmt: skip

SCORE_FORMS = HostStruct(
    "ScoreForms", "params/attn_fwd.cuh",
    "P tiles lists; q tiles_stride_b tiles_stride_h tiles_stride_m lists_stride_b lists_stride_h;"
    "i num_tiles forms bias_batch bias_head; f cap_scale factor factor2 cap_limit; 4f cap_poly; f cap_near_limit;"
    "3f cap_near",
)  # fmt: skip

ATTN_FWD_SHARES_FORMS_SM90 = HostStruct(
    "AttnFwdSharesFormsSm90Params", "params/attn_fwd.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {SPLIT_TILE_LIST.inside('tiles')};"
    f"{SCORE_FORMS.inside('forms')}; P partial_o partial_ml cuts", tail=40,
)  # fmt: skip

ATTN_FWD_FORMS_SM80 = HostStruct(
    "AttnFwdFormsSm80Params", "params/attn_fwd.cuh",
    f"{ATTN_FWD.inside('fwd')}; {SCORE_FORMS.inside('forms')}; q mask_first_byte mask_end_byte",
)  # fmt: skip

ATTN_FWD_SPLIT_SM80 = HostStruct(
    "AttnFwdSplitSm80Params", "params/attn_fwd.cuh",
    f"{ATTN_FWD.inside('call')}; P partial_o partial_ml; i pack_log2 pack_heads",
)  # fmt: skip

ATTN_FWD_SPLIT_FORMS_SM80 = HostStruct(
    "AttnFwdSplitFormsSm80Params", "params/attn_fwd.cuh",
    f"{ATTN_FWD_FORMS_SM80.inside('call')}; P partial_o partial_ml; i pack_log2 pack_heads",
)  # fmt: skip

ATTN_FWD_FORMS_SM90 = HostStruct(
    "AttnFwdFormsSm90Params", "params/attn_fwd.cuh",
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {TILE_LIST.inside('tiles')};"
    f"{SCORE_FORMS.inside('forms')}", tail=24,
)  # fmt: skip

ATTN_FWD_SPLIT_FORMS_SM90 = HostStruct(
    "AttnFwdSplitFormsSm90Params", "params/attn_fwd.cuh",
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {SPLIT_TILE_LIST.inside('tiles')};"
    f"{SCORE_FORMS.inside('forms')}; P partial_o partial_ml", tail=48,
)  # fmt: skip

ATTN_BWD = HostStruct(
    "AttnBwdParams", "params/attn_bwd.cuh",
    f"{ATTN_FWD.inside('fwd')};"
    "P d_o dlse dq dk dv dsinks dmask lse2 delta dq_accum sink_partials stray_do;"
    f"q {' '.join(_STRIDES.format(x) for x in ('do', 'dq', 'dk', 'dv'))} dlse_stride_b dlse_stride_h"
    " dmask_stride_b dmask_stride_h dmask_stride_q dmask_stride_k rows_stride_h; i dq_columns num_n_blocks",
)  # fmt: skip

ATTN_BWD_SM90 = HostStruct(
    "AttnBwdSm90Params", "params/attn_bwd.cuh",
    f"M map_q map_k map_v map_do; {ATTN_BWD.inside('bwd')}; {TILE_LIST.inside('tiles')}", tail=16,
)  # fmt: skip

ATTN_BWD_FORMS_SM90 = HostStruct(
    "AttnBwdFormsSm90Params", "params/attn_bwd.cuh",
    f"M map_q map_k map_v map_do; {ATTN_BWD.inside('bwd')}; {TILE_LIST.inside('tiles')};"
    f"{SCORE_FORMS.inside('forms')}; f inv_factor2", tail=20,
)  # fmt: skip

SCORE_MOD_ARRAYS = HostStruct(
    "ScoreModArrays", "params/score_mod.cuh",
    f"{MAX_ARRAYS}P data; {MAX_ARRAYS * MAX_DIMS}q strides; {MAX_ARRAYS * MAX_DIMS}i extents",
)  # fmt: skip

ATTN_FWD_MOD_SM80 = HostStruct(
    "AttnFwdModSm80Params", "params/score_mod.cuh",
    f"{ATTN_FWD_FORMS_SM80.inside('call')}; {SCORE_MOD_ARRAYS.inside('arrays')}",
)  # fmt: skip

ATTN_FWD_SPLIT_MOD_SM80 = HostStruct(
    "AttnFwdSplitModSm80Params", "params/score_mod.cuh",
    f"{ATTN_FWD_MOD_SM80.inside('call')}; P partial_o partial_ml; i pack_log2 pack_heads",
)  # fmt: skip

ATTN_FWD_MOD_SM90 = HostStruct(
    "AttnFwdModSm90Params", "params/score_mod.cuh",
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {TILE_LIST.inside('tiles')};"
    f"{SCORE_FORMS.inside('forms')}; {SCORE_MOD_ARRAYS.inside('arrays')}", tail=24,
)  # fmt: skip

ATTN_FWD_SPLIT_MOD_SM90 = HostStruct(
    "AttnFwdSplitModSm90Params", "params/score_mod.cuh",
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {SPLIT_TILE_LIST.inside('tiles')};"
    f"{SCORE_FORMS.inside('forms')}; {SCORE_MOD_ARRAYS.inside('arrays')}; P partial_o partial_ml", tail=48,
)  # fmt: skip

ATTN_BWD_MOD = HostStruct(
    "AttnBwdModParams", "params/score_mod.cuh",
    f"{ATTN_BWD.inside('call')}; {SCORE_MOD_ARRAYS.inside('arrays')}",
)  # fmt: skip

QUANTIZED_OPERANDS = HostStruct(
    "QuantizedOperands", "params/attn_int8.cuh",
    "P q_scale k_scale row_bias v_scale v_mean delta_s;"
    "q q_scale_stride_h k_scale_stride_h delta_stride_h; i delta_columns head_dim_pad",
)  # fmt: skip

BLOCK_SCALES = HostStruct(
    "BlockScales", "params/attn_int8.cuh",
    "H by_slot q_heads; i row_bytes; q q_stride_b q_stride_h q_stride_block k_stride_b k_stride_h k_stride_block;"
    "i q_blocks k_blocks; P drift; q drift_stride_h",
)  # fmt: skip

ATTN_INT8_SM80 = HostStruct(
    "AttnInt8Sm80Params", "params/attn_int8.cuh",
    f"{ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')}; {BLOCK_SCALES.inside('scales')}",
)  # fmt: skip

ATTN_INT8_SM90 = HostStruct(
    "AttnInt8Sm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{TILE_LIST.inside('tiles')}; i flush_keys reserved; {BLOCK_SCALES.inside('scales')}", tail=40,
)  # fmt: skip

ATTN_INT8_SPLIT_SM90 = HostStruct(
    "AttnInt8SplitSm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{SPLIT_TILE_LIST.inside('tiles')}; i flush_keys reserved; {BLOCK_SCALES.inside('scales')};"
    "P partial_o partial_ml partial_lse", tail=56,
)  # fmt: skip

ATTN_INT8_SHARES_SM90 = HostStruct(
    "AttnInt8SharesSm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{SPLIT_TILE_LIST.inside('tiles')}; i flush_keys reserved; {BLOCK_SCALES.inside('scales')};"
    "P partial_o partial_ml partial_lse cuts", tail=48,
)  # fmt: skip

ATTN_INT8_FORMS_SM90 = HostStruct(
    "AttnInt8FormsSm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{TILE_LIST.inside('tiles')}; {SCORE_FORMS.inside('forms')}; i flush_keys reserved;"
    f"{BLOCK_SCALES.inside('scales')}", tail=48,
)  # fmt: skip

VALUE_FACTORS = HostStruct("ValueFactors", "params/attn_int8.cuh", "P factors; q stride_b stride_h stride_block")

ATTN_FP8_FACTORS_SM89 = HostStruct(
    "AttnFp8FactorsSm89Params", "params/attn_int8.cuh",
    f"{ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')}; {BLOCK_SCALES.inside('scales')};"
    f"{VALUE_FACTORS.inside('factors')}",
)  # fmt: skip

ATTN_FP8_FACTORS_SM90 = HostStruct(
    "AttnFp8FactorsSm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{TILE_LIST.inside('tiles')}; i flush_keys reserved; {BLOCK_SCALES.inside('scales')};"
    f"{VALUE_FACTORS.inside('factors')}", tail=8,
)  # fmt: skip

ATTN_FP8_SPLIT_FACTORS_SM90 = HostStruct(
    "AttnFp8SplitFactorsSm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{SPLIT_TILE_LIST.inside('tiles')}; i flush_keys reserved; {BLOCK_SCALES.inside('scales')};"
    f"P partial_o partial_ml; {VALUE_FACTORS.inside('factors')}", tail=32,
)  # fmt: skip

ATTN_FP8_FORMS_FACTORS_SM90 = HostStruct(
    "AttnFp8FormsFactorsSm90Params", "params/attn_int8.cuh",
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{TILE_LIST.inside('tiles')}; {SCORE_FORMS.inside('forms')}; i flush_keys reserved;"
    f"{BLOCK_SCALES.inside('scales')}; {VALUE_FACTORS.inside('factors')}", tail=16,
)  # fmt: skip

_INT8_SPLIT_FORMS = (
    f"M map_q map_k map_v map_bias; {ATTN_FWD.inside('fwd')}; {QUANTIZED_OPERANDS.inside('operands')};"
    f"{SPLIT_TILE_LIST.inside('tiles')}; {SCORE_FORMS.inside('forms')}; i flush_keys reserved;"
    f"{BLOCK_SCALES.inside('scales')}; P partial_o partial_ml"
)
ATTN_INT8_SPLIT_FORMS_SM90 = HostStruct(
    "AttnInt8SplitFormsSm90Params", "params/attn_int8.cuh", f"{_INT8_SPLIT_FORMS} partial_lse"
)
ATTN_FP8_SPLIT_FORMS_FACTORS_SM90 = HostStruct(
    "AttnFp8SplitFormsFactorsSm90Params", "params/attn_int8.cuh",
    f"{_INT8_SPLIT_FORMS}; {VALUE_FACTORS.inside('factors')}", tail=40,
)  # fmt: skip

QUANTIZE = HostStruct(
    "QuantizeParams", "params/quantize.cuh",
    "P q k v cu_seqlens_q cu_seqlens_k q_int k_int q_scale k_scale row_bias q_mean k_mean v_out v_scale v_mean"
    " partials v_error ticket k_ready v_ready v_bad v_done k_amax k_amax_done q_amax q_amax_done starts_q starts_k"
    " item_table;"
    f"q {' '.join(_STRIDES.format(x) for x in 'qkv')};"
    "i batch num_q_heads num_kv_heads seqlen_q seqlen_k head_dim head_dim_pad slots_q slots_k slots_r key_tile tiles_k"
    " bits q_group_rows granularity flags packed units units_per_group num_groups per_unit_r per_unit_a per_unit_q"
    " per_unit_kv last_base num_items clear_vectors delta_columns levels; f v_levels",
)  # fmt: skip

QUANTIZE_DELTA = HostStruct("QuantizeDeltaParams", "params/quantize.cuh", f"{QUANTIZE.inside('quantize')}; P delta_s")

ROTATION = HostStruct("Rotation", "params/quantize.cuh", "8I signs; i channels; f norm; i to_e4m3 reserved")

QUANTIZE_ROTATED = HostStruct(
    "QuantizeRotatedParams", "params/quantize.cuh",
    f"{QUANTIZE.inside('quantize')}; {ROTATION.inside('rotation')}",
)  # fmt: skip

DECODE = HostStruct(
    "DecodeParams", "params/decode.cuh",
    "P q k v k_params v_params k_mean k_channel_scale seq_lens block_table recent_slots recent_state sinks o lse"
    " partial_o partial_ml;"
    f"q {' '.join(_STRIDES.format(x) for x in 'qo')};"
    "i batch q_len num_q_heads num_kv_heads group num_row_blocks head_dim capacity block_size num_blocks table_columns"
    " window_left sinks_kind hadamard chunk_log2 fixed_splits num_workers recent_window recent_ring recent_num_slots"
    " recent_side; f softmax_scale softcap; i combine_split; I block_multiplier; i block_shift; I worker_multiplier;"
    "i worker_shift; I two_1024; i first_key"
    " prefix_sequences least_seq_len",
)  # fmt: skip

KV_APPEND = HostStruct(
    "KvAppendParams", "params/kv_append.cuh",
    "P k v seq_lens cu_seqlens block_table cos sin k_data v_data k_params v_params k_mean k_channel_scale recent_slots"
    " recent_k recent_v recent_state;"
    f"q {' '.join(_STRIDES.format(x) for x in 'kv')} rows;"
    "i batch tokens num_kv_heads head_dim capacity block_size num_blocks table_columns rope rope_pairs rope_rows"
    " hadamard zero_point recent_ring recent_num_slots; I heads_multiplier; i heads_shift; I tokens_multiplier;"
    "i tokens_shift; I block_multiplier; i block_shift reserved",
)  # fmt: skip

#: Pairs of blocks that one launch of ``kv_copy_sm80`` copies.
MAX_PAIRS = 112

ROWS_TO_FP8 = HostStruct(
    "RowsToFp8", "params/quantize_fp8.cuh",
    "P x out scale; q stride_b stride_s stride_h; i heads rows blocks items",
)  # fmt: skip

QUANTIZE_FP8 = HostStruct(
    "QuantizeFp8Params", "params/quantize_fp8.cuh",
    f"{ROWS_TO_FP8.inside('q')}; {ROWS_TO_FP8.inside('k')}; i head_dim head_dim_pad; {ROTATION.inside('rotation')}",
)  # fmt: skip

QUANTIZE_FP8_SUMS = HostStruct(
    "QuantizeFp8SumsParams", "params/quantize_fp8.cuh",
    f"{QUANTIZE_FP8.inside('rows')}; {QUANTIZE.inside('values')}; i chunks reserved",
)  # fmt: skip

LAYOUT_FP8 = HostStruct(
    "LayoutFp8Params", "params/layout_fp8.cuh",
    "P v descale cu_seqlens_k v_out v_scale drift;"
    "q v_stride_b v_stride_s v_stride_h descale_stride_b descale_stride_h;"
    "i batch num_kv_heads seqlen_k head_dim head_dim_pad slots",
)  # fmt: skip

KV_COPY = HostStruct("KvCopyParams", "params/kv_copy.cuh", f"4P planes; 4q block_bytes; {2 * MAX_PAIRS}i pairs")

MERGE_STATES = HostStruct(
    "MergeStatesParams", "params/merge_states.cuh",
    "P o_a o_b o lse_a lse_b lse seq_lens;"
    f"q {' '.join(_STRIDES.format(x) for x in ('o_a', 'o_b', 'o'))}"
    f" {' '.join(f'{x}_stride_b {x}_stride_h {x}_stride_s' for x in ('lse_a', 'lse_b', 'lse'))} total;"
    "i seqlen num_heads chunks reserved",
)  # fmt: skip

MASK_PACK = HostStruct(
    "MaskPackParams", "params/mask_tiles.cuh",
    "P mask bits key_bias kinds;"
    "q mask_stride_b mask_stride_h mask_stride_q mask_stride_k first_byte end_byte; P cu_seqlens_q cu_seqlens_k;"
    "i mask_kind mask_heads rows cols pack_log2 pack_heads m_tiles n_tiles total_q total_k",
)  # fmt: skip

MASK_ALIGN = HostStruct(
    "MaskAlignParams", "params/mask_tiles.cuh",
    "P mask copy; q mask_stride_b mask_stride_h mask_stride_q mask_stride_k first_byte end_byte;"
    "i mask_heads rows cols row_chunks element_bytes; I chunks",
)  # fmt: skip

MASK_LIST = HostStruct(
    "MaskListParams", "params/mask_tiles.cuh",
    "P kinds lists cu_seqlens_q cu_seqlens_k;"
    "i mask_batch mask_heads m_tiles n_tiles broadcast_rows num_m_blocks block_m lead_rows seqlen_q seqlen_k"
    " window_left window_right pack batch kinds_of_slots zero",
)  # fmt: skip

TILE_KINDS = HostStruct(
    "TileKindsParams", "params/tile_kinds.cuh",
    "P kinds cu_seqlens_q cu_seqlens_k blocks; q block_stride_b block_stride_h block_stride_q block_stride_k;"
    f"i batch heads m_tiles n_tiles seqlen_q seqlen_k block_rows block_keys; {SCORE_MOD_ARRAYS.inside('arrays')}",
)  # fmt: skip

PACKED_PARTS = HostStruct(
    "PackedPartsParams", "params/packed_parts.cuh",
    "P cu_seqlens_q cu_seqlens_k seqused_q seqused_k parts_q parts_k;"
    "q cu_q_stride cu_k_stride used_q_stride used_k_stride; i batch parts",
)  # fmt: skip

STRUCTS: dict[str, HostStruct] = {
    s.name: s
    for s in (
        TILE_LIST, SPLIT_TILE_LIST, ATTN_FWD, ATTN_FWD_SM90, ATTN_FWD_SPLIT_SM90, ATTN_COMBINE,
        ATTN_FWD_SHARES_SM90, ATTN_FWD_SHARES_FORMS_SM90, ATTN_COMBINE_PACKED,
        SCORE_FORMS, ATTN_FWD_FORMS_SM80, ATTN_FWD_SPLIT_SM80, ATTN_FWD_SPLIT_FORMS_SM80, ATTN_FWD_FORMS_SM90,
        ATTN_FWD_SPLIT_FORMS_SM90, ATTN_FWD_SPLIT_MOD_SM90,
        SCORE_MOD_ARRAYS,
        ATTN_FWD_MOD_SM80, ATTN_FWD_SPLIT_MOD_SM80, ATTN_FWD_MOD_SM90, ATTN_BWD, ATTN_BWD_SM90,
        ATTN_BWD_FORMS_SM90, ATTN_BWD_MOD,
        QUANTIZED_OPERANDS, BLOCK_SCALES, ATTN_INT8_SM80, ATTN_INT8_SM90, ATTN_INT8_SPLIT_SM90, ATTN_INT8_SHARES_SM90,
        ATTN_INT8_FORMS_SM90,
        VALUE_FACTORS, ATTN_FP8_FACTORS_SM89, ATTN_FP8_FACTORS_SM90, ATTN_FP8_SPLIT_FACTORS_SM90,
        ATTN_FP8_FORMS_FACTORS_SM90, ATTN_INT8_SPLIT_FORMS_SM90, ATTN_FP8_SPLIT_FORMS_FACTORS_SM90, QUANTIZE, ROTATION,
        QUANTIZE_ROTATED,
        QUANTIZE_DELTA, ROWS_TO_FP8, QUANTIZE_FP8, QUANTIZE_FP8_SUMS, LAYOUT_FP8, DECODE, KV_APPEND, KV_COPY,
        MERGE_STATES, MASK_PACK, MASK_ALIGN, MASK_LIST, TILE_KINDS, PACKED_PARTS,
    )
}  # fmt: skip


def member(prefix: str, values: dict[str, object]) -> dict[str, object]:
    """``values`` of a struct as those of a member ``prefix`` of another one."""
    return {f"{prefix}.{name}": value for name, value in values.items()}


def strides(prefix: str, three: tuple[int, int, int]) -> dict[str, object]:
    """The fields ``{prefix}_stride_b, _s, _h``."""
    return dict(zip((f"{prefix}_stride_b", f"{prefix}_stride_s", f"{prefix}_stride_h"), three, strict=True))
