"""What the calls of ``decode`` have in common that compute two sides of the keys apart, and merge them."""

from __future__ import annotations

from .. import runtime
from ..select import Target, select_merge_states
from .decode import DecodePlan
from .merge_states import MergePlan, Strides3
from .params import WORKSPACE_ALIGNMENT


class MergedPlan:
    """Two launches of ``decode`` and `merge_states_sm80`; everything about them but their pointers.

    Parameters
    ----------
    first, second : DecodePlan
        Their O is contiguous, (batch, q_len, num_q_heads, head_dim) or a shape that lies as this one does.
    shape : (batch, q_len, num_q_heads, head_dim)
    first_lse : (batch, head, seq) strides in elements of the first side's LSE
        The second one's and the merged one is contiguous, (batch, num_q_heads, q_len).
    o_strides : (batch, seq, head, ...) in elements of the merged O
    dtype : str
        Of q.
    ordinal : int
        The GPU.
    """

    __slots__ = ("_places", "first", "merge", "second", "workspace_bytes")

    def __init__(
        self,
        first: DecodePlan,
        second: DecodePlan,
        shape: tuple[int, int, int, int],
        first_lse: Strides3,
        o_strides: tuple[int, ...],
        dtype: str,
        ordinal: int,
    ) -> None:
        self.first, self.second = first, second
        batch, q_len, heads, dim = shape
        device = runtime.device_info(ordinal)
        selection = select_merge_states(dtype, Target(device.cc, device.max_smem_optin))
        own, own_lse = (q_len * heads * dim, heads * dim, dim), (heads * q_len, q_len, 1)
        self.merge = MergePlan(
            runtime.load(selection.spec, ordinal),
            (own, own, (o_strides[0], o_strides[1], o_strides[2])),
            (first_lse, own_lse, own_lse),
            shape,
            2,
        )
        rows = batch * q_len * heads
        # The sides' O, their LSE, a place for the merged one, and scratch memory that one side has after the other.
        self._places = [0]
        for size in (2 * rows * dim, 2 * rows * dim, 4 * rows, 4 * rows, 4 * rows):
            self._places.append(self._places[-1] + -(-size // WORKSPACE_ALIGNMENT) * WORKSPACE_ALIGNMENT)
        self.workspace_bytes = self._places[-1] + max(first.workspace_bytes, second.workspace_bytes)

    def launch_sides(
        self, stream: int, first: tuple[int, ...], second: tuple[int, ...], results: tuple[int, int, int, int]
    ) -> None:
        """Queue all kernels.

        Parameters
        ----------
        first, second : tuple of int
            The sides' pointers in the order of `DecodePlan.launch`, the first eleven.
        results : (sinks, o, lse, workspace)
            Of the call; the sinks are the second side's.
        """
        sinks, o, lse, workspace = results
        o_first, o_second, lse_first, lse_second, lse_merged, scratch = (workspace + at for at in self._places)
        self.first.launch(stream, (*first, 0, o_first, lse_first, scratch))
        self.second.launch(stream, (*second, sinks, o_second, lse_second, scratch))
        self.merge.launch(stream, (o_first, o_second, o, lse_first, lse_second, lse or lse_merged))
