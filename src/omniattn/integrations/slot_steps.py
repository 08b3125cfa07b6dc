"""Steps of an engine whose requests are rows of token slots: tables and lengths, made on the device."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

__all__ = ["Step", "Tables"]


@dataclass(slots=True)
class Step:
    """What all layers of a step have in common.

    Attributes
    ----------
    seq_lens : tensor, (requests,), int32
        Tokens of each request, the new ones included.
    table : tensor, (requests, blocks), int32
        Its blocks. Entries behind its last token may be anything.
    window_table : tensor, (requests, blocks), int32, or None
        Its blocks in the pool of the layers with a window, where they have a pool of their own.
    window_slots : tensor, (rows,), int64, or None
        Where the new tokens go in that pool.
    starts : tensor, (requests + 1,), int32, or None
        Packed queries: the row that each request begins with. None: each request has ``longest`` rows.
    longest : int
        The most rows of a request.
    continues : bool
        Some request has tokens from before the step, or may have.
    lengths : list of int
        Of packed queries: rows of each request, on the host.
    """

    seq_lens: torch.Tensor
    table: torch.Tensor
    window_table: torch.Tensor | None
    window_slots: torch.Tensor | None
    starts: torch.Tensor | None = None
    longest: int = 1
    continues: bool = True
    lengths: list[int] = field(default_factory=list)


class Tables:
    """Makes block tables and lengths of ``req_to_token``, on its device and without a synchronization.

    Parameters
    ----------
    req_to_token : tensor, (rows, tokens), int32
        Slots. It is read at each step.
    page_size : int
        Slots of a page.
    to_window : tensor, (slots,), integers, optional
        Slot in the pool of layers with a window of each slot, where these have a pool of their own.
    """

    def __init__(self, req_to_token: torch.Tensor, page_size: int, to_window: torch.Tensor | None = None) -> None:
        self.page_size = page_size
        self.to_window = to_window
        #: The first slot of each page.
        self._firsts = req_to_token[:, ::page_size]
        self._device = req_to_token.device

    @property
    def columns(self) -> int:
        """Blocks of the longest request that there can be."""
        return self._firsts.shape[1]

    def columns_for(self, tokens: int) -> int:
        """Columns for requests of so many tokens: a power of two, so that few widths occur."""
        return min(1 << max(0, -(-tokens // self.page_size) - 1).bit_length(), self.columns)

    def empty(self, requests: int, rows: int, columns: int | None = None) -> Step:
        """A step without values."""
        width = self.columns if columns is None else columns
        has_windows = self.to_window is not None

        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=self._device)

        return Step(
            numbers(requests), numbers(requests, width), numbers(requests, width) if has_windows else None,
            numbers(rows, dtype=torch.int64) if has_windows else None,
        )  # fmt: skip

    def fill(
        self, step: Step, requests: torch.Tensor, seq_lens: torch.Tensor, more: int, slots: torch.Tensor | None
    ) -> None:
        """Write a step's values; all of it can be captured.

        Parameters
        ----------
        step : Step
            Of as many requests.
        requests : tensor, (requests,), integers
            Rows of ``req_to_token``.
        seq_lens : tensor, (requests,), integers
            Their tokens, without ``more`` of the new ones.
        more : int
        slots : tensor, (rows,), integers, or None
            Where the new tokens go.
        """
        step.seq_lens.copy_(seq_lens)
        if more:
            step.seq_lens.add_(more)
        torch.index_select(self._firsts[:, : step.table.shape[1]], 0, requests, out=step.table)
        if self.to_window is not None:
            assert step.window_table is not None
            assert step.window_slots is not None
            step.window_table.copy_(self.to_window[step.table])
            if slots is not None:
                step.window_slots.copy_(self.to_window[slots])
        if self.page_size > 1:
            for table in (step.table, step.window_table):
                if table is not None:
                    table.floor_divide_(self.page_size)
