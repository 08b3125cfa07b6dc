"""``KVCache`` and ``PagedKVCache``: the memory of keys and values between the steps of a decoder."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import arguments, arrays
from ..arrays import Tensor
from ..arrays.identity import Same, key_of
from ..arrays.order import LaunchOrder
from ..errors import ArgumentError, StrideError
from .formats import KV_ARRAY_DTYPES, LATENT_656, LATENT_656_DIM, arrays_row_bytes, check_format
from .key_arrays import describe_key_arrays
from .latent import latent_memory
from .layout import ADDRESSES, CacheLayout, intern
from .leaves import WithLeaves
from .on_arrays import MAX_CACHE_ROWS, OnArrays
from .places import by_position
from .recent import RECENT_SPARE, check_recent
from .scales import places_of_scales

#: What a copy does not have of a cache: it follows from its arrays.
_OF_ADDRESSES = (
    "_order", "_plain_torch", "_identity", "_key", "_operands", "_written", "_apart", "_leaves", "_of",
)  # fmt: skip


class KVCache(OnArrays, WithLeaves):
    """A contiguous cache: room for ``max_seqlen`` tokens of each of ``batch`` sequences.

    Parameters
    ----------
    batch, max_seqlen, num_kv_heads, head_dim : int
        Extents; head_dim is a multiple of 8 from 8 to 512, of quantized formats to 256. Rows are padded to 64, 128,
        256 or 512 channels.
    like : array
        Any array of the framework and on the device that the cache's memory shall come from: torch, CuPy, JAX, NumPy.
    k_dtype, v_dtype : "bf16", "fp16", "fp8" (e4m3), "int8" or "int4"
        Element types; ``v_dtype`` is ``k_dtype`` unless given. A 16-bit type has to be that of the queries.
    group_size : int, optional
        Channels that share a scale (and zero) in quantized rows: 32, 64, 128 or 256; unless given, a whole row: one a
        token and head.
    zero_point : bool
        int8 and int4: fit a zero to each group, or keep it 0 (symmetric). False needs one of these types.
    layout : "fragment" or "fbgemm"
        Order of the bytes: the kernels' own, or that of FBGEMM's int4 caches (K and V int4; head_dim 64, 128 or 256;
        one group a row, or four), for memory that its kernels read or write as well.
    k_mean, k_channel_scale : array, (num_kv_heads, head_dim), float32, optional
        Quantized K only: what is subtracted from K, and what K is divided by, before it is quantized (smoothing, and
        scales per channel; channels with outliers then cost the others no precision). Queries are changed to match.
        Finite numbers, and scales above 0: checked on the CPU; on a GPU that would need a synchronization. The arrays
        have to stay as they are.
    hadamard : bool
        Quantized K only: rotate K's and the queries' channels by a Hadamard matrix, which spreads outliers.
    recent_window : int
        Quantized K or V only: `decode` reads a sequence's newest tokens, so many, as they came, in 16 bits, and the
        older ones quantized (as KIVI's residual does). 0: all are read quantized.
    recent_dtype : "bf16" or "fp16", optional
        Type of the newest tokens; on a GPU it has to be that of the queries. Unless given, that of a 16-bit K or V,
        else "bf16".
    head_dim_v : int, optional
        A latent cache (multi-head latent attention), as in `from_arrays`: one row a token, whose first head_dim_v
        channels are the value too. num_kv_heads is 1, head_dim up to 576, on a GPU (576, 512). ``k_dtype`` is "bf16" or
        "fp16"; "fp8", e4m3 with one scale; or "fp8_ds_mla", vLLM's name of FlashMLA's rows of 656 bytes. ``k`` is
        (batch, max_seqlen, 1, row), with "fp8" and "fp8_ds_mla" uint8, and the arguments above do not apply.
    k_scale : array, (1,), float32, optional
        With head_dim_v and "fp8": the scale, 1 unless given. `append` reads it, and the kernels that decode.

    Attributes
    ----------
    k, v : array
        Data planes, (batch, num_kv_heads, max_seqlen, row): 16-bit elements, or uint8 bytes. With ``layout="fbgemm"``
        (batch, max_seqlen, num_kv_heads, row), FBGEMM's own shape.
    k_params, v_params : array or None
        Parameter planes of quantized K and V, int32 words; None with ``layout="fbgemm"``, whose rows have them.
    k_format, v_format : KVFormat
        Which byte is what; docs/kv_formats.md has the tables.
    recent_k, recent_v, recent_state : array or None
        The newest tokens, (batch, num_kv_heads, recent_window + 16, row) 16-bit elements, and which of them are there,
        (batch, 2) int32.
    nbytes : int
        Bytes of all planes.

    Raises
    ------
    ArgumentError
        Or a subclass: names argument, what was expected and what came.

    Notes
    -----
    Memory is not cleared; what lies beyond a sequence's length is never looked at. `append` writes, `decode` reads.
    Of ``like`` nothing is kept. JAX and other libraries whose arrays come by DLPack wait for the kernels that were
    queued before ``cache.k`` (or another plane) was read or the cache was copied: read it anew after an `append`. They
    do not know of later ones: what they compute from it has to be ready before the next `append`
    (``jax.block_until_ready``). ``copy.deepcopy`` makes a cache with memory of its own (and copies ``k_mean`` and
    ``k_channel_scale`` too). GPUs: compute capability 8.0 and newer; on the CPU everything runs in NumPy.
    """

    paged = False

    def __init__(
        self,
        batch: int,
        max_seqlen: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        like: Any,
        k_dtype: str = "bf16",
        v_dtype: str | None = None,
        group_size: int | None = None,
        zero_point: bool = True,
        layout: str = "fragment",
        k_mean: Any = None,
        k_channel_scale: Any = None,
        hadamard: bool = False,
        recent_window: int = 0,
        recent_dtype: str | None = None,
        head_dim_v: int | None = None,
        k_scale: Any = None,
    ) -> None:
        self._build(
            "KVCache", (batch, max_seqlen), ("batch", "max_seqlen"), num_kv_heads, head_dim, like, k_dtype, v_dtype,
            group_size, zero_point, layout, k_mean, k_channel_scale, hadamard, (recent_window, recent_dtype, batch),
            (head_dim_v, k_scale),
        )  # fmt: skip

    def _build(
        self,
        name: str,
        extents: tuple[Any, Any],
        names: tuple[str, str],
        num_kv_heads: Any,
        head_dim: Any,
        like: Any,
        k_dtype: Any,
        v_dtype: Any,
        group_size: Any,
        zero_point: Any,
        layout: Any,
        k_mean: Any,
        k_channel_scale: Any,
        hadamard: Any,
        recent: tuple[Any, Any, Any],
        latent: tuple[Any, Any],
    ) -> None:
        blocks, block_size, heads = self._check_extents(name, extents, names, num_kv_heads)
        # A module's parameter says where it is as well as any array; nothing is computed with it.
        like = like.detach() if getattr(like, "requires_grad", False) is True else like
        ref = arrays.describe_of(name, like, "like")
        # Of `like` only the place is kept: it may be a large array that its owner wants to be rid of.
        self._device, self._ordinal, self._device_name = ref.device, ref.ordinal, ref.device_name
        if latent[0] is not None:
            others: dict[str, tuple[Any, Any]] = {
                "v_dtype": (v_dtype, None), "group_size": (group_size, None), "zero_point": (zero_point, True),
                "layout": (layout, "fragment"), "k_mean": (k_mean, None), "k_channel_scale": (k_channel_scale, None),
                "hadamard": (hadamard, False), "recent_window": (recent[0], 0), "recent_dtype": (recent[1], None),
                "recent_slots": (recent[2] if self.paged else None, None),
            }  # fmt: skip
            self._settle({"k": latent_memory(self, name, ref, head_dim, k_dtype, latent, others)})
            return
        if latent[1] is not None:
            expected = "None without head_dim_v: quantized rows have scales that `append` fits"
            raise ArgumentError("k_scale", expected, type(latent[1]).__name__, function=name)
        dim = arguments.check_int(head_dim, "head_dim", name)
        if not (8 <= dim <= arguments.MAX_HEAD_DIM and dim % 8 == 0):
            hint = "head_dim_v makes a latent cache, whose rows are wider" if dim == LATENT_656_DIM else None
            expected = f"a multiple of 8 from 8 to {arguments.MAX_HEAD_DIM}"
            raise ArgumentError("head_dim", expected, repr(head_dim), function=name, hint=hint)
        zero_point = arguments.check_bool(zero_point, "zero_point", name)
        self.hadamard = arguments.check_bool(hadamard, "hadamard", name)
        self.head_dim = dim
        self.k_format, self.v_format = (
            check_format(dtype, dim, group_size, zero_point, name, is_key=is_key, layout=layout)
            for dtype, is_key in ((k_dtype, True), (k_dtype if v_dtype is None else v_dtype, False))
        )
        formats = (self.k_format, self.v_format)
        exact = [f.dtype for f in formats if not f.quantized]
        if len(set(exact)) > 1:
            raise ArgumentError(
                "v_dtype",
                f"{exact[0]!r} or an 8- or 4-bit type, with k_dtype {exact[0]!r}",
                repr(v_dtype),
                function=name,
            )
        if not any(f.quantized for f in formats) and group_size is not None:
            raise ArgumentError("group_size", "None, because no format has scales", repr(group_size), function=name)
        if not zero_point and not any(f.dtype in ("int8", "int4") for f in formats):
            raise ArgumentError("zero_point", "True: only int8 and int4 have a zero point", "False", function=name)
        self._key_arrays = describe_key_arrays(
            {"k_mean": k_mean, "k_channel_scale": k_channel_scale}, heads, self.k_format, ref, name
        )
        if self.hadamard and not self.k_format.quantized:
            raise ArgumentError("hadamard", f"False with k_dtype {k_dtype!r}, which is exact", "True", function=name)
        self.recent_window, self.recent_slots, self.recent_format = check_recent(self, name, *recent)
        self.array_order: str | None = None
        planes: dict[str, Tensor] = {}
        for argument, fmt in (("k", self.k_format), ("v", self.v_format)):
            lead = (blocks, heads, block_size) if layout != "fbgemm" else (blocks, block_size, heads)
            dtype = "uint8" if fmt.quantized else KV_ARRAY_DTYPES[fmt.dtype]
            width = fmt.row_bytes if fmt.quantized else fmt.row_dim
            planes[argument] = arrays.empty_like_framework(ref, (*lead, width), dtype)
            if fmt.plane_words:
                planes[argument + "_params"] = arrays.empty_like_framework(ref, (*lead, fmt.plane_words), "int32")
        if self.recent_format is not None:
            ring = (self.recent_slots, heads, self.recent_window + RECENT_SPARE)
            dtype = KV_ARRAY_DTYPES[self.recent_format.dtype]
            for plane in ("recent_k", "recent_v"):
                planes[plane] = arrays.empty_like_framework(ref, (*ring, self.recent_format.row_dim), dtype)
            planes["recent_state"] = arrays.zeros_like_framework(ref, (self.recent_slots, 2), "int32")
        for plane, t in planes.items():
            t.argument = f"cache.{plane}"
        self._settle(planes)

    def _check_extents(self, name: str, extents: tuple[Any, Any], names: tuple[str, str], heads: Any) -> list[int]:
        """Blocks, tokens of one, and heads; they are attributes then."""
        numbers = []
        for value, argument in zip((*extents, heads), (*names, "num_kv_heads"), strict=True):
            numbers.append(arguments.check_int(value, argument, name, least=1))
        for number, argument in zip(numbers, (*names, "num_kv_heads"), strict=True):
            if number > arguments.MAX_ROWS:
                raise ArgumentError(argument, f"at most {arguments.MAX_ROWS}", f"{number}", function=name)
        if numbers[0] * numbers[1] * numbers[2] > MAX_CACHE_ROWS:
            expected = f"at most {MAX_CACHE_ROWS} rows in all (tokens x heads)"
            raise ArgumentError(names[1], expected, " x ".join(map(str, numbers)), function=name)
        self.num_blocks, self.block_size, self.num_kv_heads = numbers
        return numbers

    def __setattr__(self, name: str, value: Any) -> None:
        # What kernels believe of the memory: another number would send them out of bounds.
        if "_planes" in self.__dict__ and not name.startswith("_"):
            raise AttributeError(f"{type(self).__name__}.{name} is fixed when the cache is made; make another cache")
        super().__setattr__(name, value)

    def __getstate__(self) -> dict[str, Any]:
        """For copies and pickles: arrays without their addresses, which a copy of an array does not share."""
        self._planes  # noqa: B018 - looks at memory that nobody has looked at
        state = {name: x for name, x in self.__dict__.items() if name not in _OF_ADDRESSES}
        state["_planes"] = {name: (t.argument, self._array(name), t.readonly) for name, t in self._planes.items()}
        state["_key_arrays"] = {name: (t.argument, t.obj, t.readonly) for name, t in self._key_arrays.items()}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in ("_planes", "_key_arrays"):
            tensors = {}
            for name, (argument, obj, readonly) in state[group].items():
                t = arrays.describe(obj, argument)
                t.argument, t.readonly = argument, readonly
                tensors[name] = t
            state = state | {group: tensors}
        self.__dict__.update(state)
        place = self._planes["k"]  # an array on a GPU may have been unpickled onto another one
        self._device, self._ordinal, self._device_name = place.device, place.ordinal, place.device_name
        self._settle(self._planes)

    def __repr__(self) -> str:
        k, v = self.k_format, self.v_format
        rows = f"{self.num_kv_heads} heads of {self.head_dim}, K {k.dtype}, V {v.dtype}"
        if k.head_dim != v.head_dim:
            name = "fp8_ds_mla" if k.layout == LATENT_656 else k.dtype
            rows = f"latent rows of {k.head_dim}, {v.head_dim} of them V, {name}"
        return f"<{type(self).__name__} {self.num_blocks} x {self.block_size} tokens, {rows}, {self._device_name}>"

    def _array(self, name: str) -> Any:
        """A plane as its framework's array, safe to use there; None for none."""
        if self.leaves is not None:
            return self.leaves.get(name)
        t = self._planes.get(name)
        return None if t is None else self._order.array(name, t)

    @property
    def k(self) -> Any:
        """Data plane of K."""
        return self._array("k")

    @property
    def v(self) -> Any:
        """Data plane of V; of a latent cache None: V is a part of K's rows."""
        return self._array("v")

    @property
    def k_params(self) -> Any:
        """Parameter plane of K, or None."""
        return self._array("k_params")

    @property
    def v_params(self) -> Any:
        """Parameter plane of V, or None."""
        return self._array("v_params")

    @property
    def recent_k(self) -> Any:
        """K of the newest tokens, or None."""
        return self._array("recent_k")

    @property
    def recent_v(self) -> Any:
        """V of the newest tokens, or None."""
        return self._array("recent_v")

    @property
    def recent_state(self) -> Any:
        """Which positions of each slot's sequence are there, or None."""
        return self._array("recent_state")

    @property
    def recent_ring(self) -> int:
        """Tokens of a slot."""
        return self.recent_window + RECENT_SPARE if self.recent_window else 0

    @property
    def nbytes(self) -> int:
        """Bytes of all planes."""
        return sum(t.size * t.itemsize for t in self._planes.values())

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes, all heads, K and V."""
        if self.array_order is not None:
            scales = 8 if self._facts.scales is not None and self._facts.scales.each_row else 0
            if self._facts.is_latent:
                return arrays_row_bytes(self.k_format)
            return self.num_kv_heads * (2 * arrays_row_bytes(self.k_format) + scales)
        return self.num_kv_heads * (self.k_format.token_bytes + self.v_format.token_bytes)

    @property
    def tensors(self) -> list[Tensor]:
        """All arrays that kernels touch: planes, then the caller's."""
        return [*self._planes.values(), *self._key_arrays.values()]

    def address(self, name: str) -> int:
        """Address of a plane (``"k_params"`` say) or of one of the caller's arrays (``"k_mean"``); 0 for none."""
        t = self._planes.get(name) or self._key_arrays.get(name)
        return 0 if t is None else t.ptr

    @property
    def addresses(self) -> tuple[int, ...]:
        """Addresses of all planes and of the caller's arrays, 0 for what is absent."""
        return self._addresses

    @property
    def facts(self) -> CacheLayout:
        """All that a plan depends on, but not the addresses; one object for equal facts."""
        return self._facts

    @property
    def identity(self) -> Same:
        """`facts` by identity, for the keys of plans."""
        return self._identity

    def _settle(self, planes: dict[str, Tensor], *, is_known: bool = False) -> None:
        """Facts and addresses, once the arrays are there; ``is_known``: the facts are."""
        own, keys = self.__dict__, self._key_arrays  # of a cache on known arrays it is made at each call
        tensors = {**planes, **keys} if keys else planes
        operands = tuple([t.obj for t in planes.values()])
        own["_planes"], own["_order"], own["_key"] = planes, LaunchOrder(), key_of(self)
        own["_addresses"] = tuple([tensors[name].ptr if name in tensors else 0 for name in ADDRESSES])
        own["_operands"] = operands, tuple([t.obj for t in keys.values()])
        if not is_known:
            self._find_facts()
        own["_written"] = operands if own["_apart"] else None

    def _find_facts(self) -> None:
        """What does not depend on the arrays' addresses."""
        self._plain_torch = all(t.framework == "torch" for t in self.tensors)
        strides = None
        if self.array_order is not None:
            strides, *rest = (
                by_position(self._planes[name].shape, self._planes[name].strides, self.array_order)[1]
                for name in ("k", "v") if name in self._planes
            )  # fmt: skip
            others = rest[0] if rest else strides
            if strides != others:
                raise StrideError("cache.v", f"strides {strides} of blocks, heads and tokens, like k", f"{others}")
        self._facts = intern(
            CacheLayout(
                self.paged, self.num_blocks, self.block_size, self.num_kv_heads, self.head_dim, self.k_format,
                self.v_format, self.hadamard, tuple(self._key_arrays), self.recent_window, self.recent_ring,
                self.recent_slots, self.recent_format, self._device, self._ordinal, self.array_order, strides,
                places_of_scales({**self._planes, **self._key_arrays}, self.array_order),
            )
        )  # fmt: skip
        self._identity = Same(self._facts)
        planes = list(self._planes.values())
        alike = self._plain_torch and len({t.obj.is_inference() for t in planes}) == 1
        self._apart = alike and arrays.first_shared(planes, self._key_arrays.values()) is None

    @property
    def written(self) -> tuple[Any, ...] | None:
        """Planes of torch, all of inference mode or none, that share no memory; None for others."""
        return self._written

    @property
    def key(self) -> int:
        """The cache's number in this process."""
        return self._key

    @property
    def operands(self) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        """Planes, and the caller's arrays, as operators of a framework take them: for caches that are plain torch."""
        return self._operands

    def on(self, planes: Sequence[Any], key_arrays: Sequence[Any]) -> KVCache:
        """A cache like this one on other memory: arrays as `operands` has them."""
        other = self.__class__.__new__(self.__class__)
        state = self.__getstate__()
        for group, given in (("_planes", planes), ("_key_arrays", key_arrays)):
            old = state[group]
            state[group] = {
                name: (argument, x, readonly)
                for (name, (argument, _, readonly)), x in zip(old.items(), given, strict=True)
            }
        other.__setstate__(state)
        return other

    @property
    def order(self) -> LaunchOrder:
        """Keeps the launches on the planes in order."""
        return self._order

    @property
    def plain_torch(self) -> bool:
        """Whether all arrays are torch's, which orders its work by streams."""
        return self._plain_torch

    @property
    def planes(self) -> dict[str, Tensor]:
        """Planes by name."""
        return self._planes

    @property
    def key_arrays(self) -> dict[str, Tensor]:
        """The caller's k_mean, k_channel_scale, and scales that `append` reads, those that were given."""
        return self._key_arrays


class PagedKVCache(KVCache):
    """A cache of blocks that sequences take as they grow; a block table says which (PagedAttention, Kwon et al. 2023).

    Parameters
    ----------
    num_blocks : int
        Blocks in all.
    block_size : int
        Tokens of a block, any number from 1 on. Multiples of 16 are fastest.
    num_kv_heads, head_dim, like, k_dtype, v_dtype, group_size, zero_point, layout, k_mean, k_channel_scale, hadamard
        As in `KVCache`.
    recent_window, recent_dtype, head_dim_v, k_scale
        As in `KVCache`.
    recent_slots : int
        With recent_window: sequences that there is room for in it; `append` and `decode` take the number of the slot of
        each sequence.

    Attributes
    ----------
    k, v, k_params, v_params, k_format, v_format, recent_k, recent_v, recent_state, nbytes
        As in `KVCache`, the planes with the leading dimensions (num_blocks, num_kv_heads, block_size), or (num_blocks,
        block_size, num_kv_heads) with ``layout="fbgemm"``.

    Raises
    ------
    ArgumentError
        As in `KVCache`.

    Notes
    -----
    `BlockManager` gives out blocks, on the host.
    """

    paged = True

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        like: Any,
        k_dtype: str = "bf16",
        v_dtype: str | None = None,
        group_size: int | None = None,
        zero_point: bool = True,
        layout: str = "fragment",
        k_mean: Any = None,
        k_channel_scale: Any = None,
        hadamard: bool = False,
        recent_window: int = 0,
        recent_dtype: str | None = None,
        recent_slots: int | None = None,
        head_dim_v: int | None = None,
        k_scale: Any = None,
    ) -> None:
        self._build(
            "PagedKVCache", (num_blocks, block_size), ("num_blocks", "block_size"), num_kv_heads, head_dim, like,
            k_dtype, v_dtype, group_size, zero_point, layout, k_mean, k_channel_scale, hadamard,
            (recent_window, recent_dtype, recent_slots), (head_dim_v, k_scale),
        )  # fmt: skip
