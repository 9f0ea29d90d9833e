"""Recurrent state in memory: every fixed-size tensor of a sequence lies in one row of bytes.

    row    [ conv of layer 0 | recurrent of layer 0 | conv of layer 1 | ... ]    one per sequence, in its slot
    batch  [B, row bytes]                                                        of the rows that decode together

Models change these tensors in place, so a batch must be one tensor whose rows *are* the sequences' state: gathering
moves the slots' rows into it, and as long as the same sequences decode together nothing is copied again. Knows layouts
and tensors, no model. Used by the slots and the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from common.layout import DTYPE_BYTES, StateLayout

TORCH_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# Keeps every tensor aligned for vector loads and for views as any dtype.
ALIGNMENT = 64


@dataclass(frozen=True, slots=True)
class Part:
    """Where one tensor lies in a row of bytes."""

    offset: int
    num_bytes: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, rows: torch.Tensor) -> torch.Tensor:
        """The tensor in each of `rows` [B, row bytes]: [B, *shape], sharing memory."""
        part = rows[:, self.offset : self.offset + self.num_bytes].view(self.dtype)
        return part.reshape(-1, *self.shape) if rows.shape[0] == 1 else torch.unflatten(part, 1, self.shape)


class FixedLayout:
    """Where the tensors of all `recurrent` states lie; `num_bytes` is 0 for a model without any."""

    def __init__(self, layout: StateLayout) -> None:
        self.parts: dict[int, tuple[Part, ...]] = {}
        offset = 0
        for number, spec in enumerate(layout.states):
            if spec.is_rows:
                continue
            parts = []
            for tensor in spec.tensors:
                size = prod(tensor.shape) * DTYPE_BYTES[tensor.dtype]
                parts.append(Part(offset, size, tensor.shape, TORCH_DTYPES[tensor.dtype]))
                offset += -(-size // ALIGNMENT) * ALIGNMENT
            self.parts[number] = tuple(parts)
        self.num_bytes = offset

    def new_row(self, device: torch.device) -> torch.Tensor:
        """The state before any token: all zero, [row bytes]."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)


class FixedRows:
    """The recurrent states of some sequences as one batch."""

    def __init__(self, layout: FixedLayout, rows: torch.Tensor) -> None:
        self._layout, self.rows = layout, rows
        self._views: dict[int, tuple[torch.Tensor, ...]] = {}

    def tensors(self, number: int) -> tuple[torch.Tensor, ...]:
        """The tensors of state `number`, each [B, *shape]; writing to them writes to the sequences' state."""
        found = self._views.get(number)
        if found is None:
            found = self._views[number] = tuple(part.view(self.rows) for part in self._layout.parts[number])
        return found


class HasFixed(Protocol):
    """A slot, as the batch sees it."""

    fixed: torch.Tensor


class FixedBatch:
    """Keeps the recurrent states of the sequences that decode together in one tensor."""

    def __init__(self, layout: FixedLayout) -> None:
        self._layout = layout
        self._held: list[torch.Tensor] = []
        self._rows: FixedRows | None = None

    def gather(self, slots: Sequence[HasFixed]) -> FixedRows:
        """One batch of these slots, in order. The slots' rows become part of it."""
        same = len(slots) == len(self._held) and all(
            slot.fixed is held for slot, held in zip(slots, self._held, strict=True)
        )
        if same and self._rows is not None:
            return self._rows
        rows = torch.stack([slot.fixed for slot in slots])
        self._held = list(rows.unbind(0))
        for slot, row in zip(slots, self._held, strict=True):
            slot.fixed = row
        self._rows = FixedRows(self._layout, rows)
        return self._rows

    def clear(self) -> None:
        """Let go of the memory once nothing decodes."""
        self._held, self._rows = [], None
