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
    """The recurrent states of some sequences as one batch. `memory`: the tensor that `rows` are the first rows of."""

    def __init__(self, layout: FixedLayout, rows: torch.Tensor, memory: torch.Tensor | None = None) -> None:
        self.rows, self.memory = rows, rows if memory is None else memory
        # All at once: made within a forward, they would be part of what is recorded of it (replay.py).
        self._views = {number: tuple(part.view(rows) for part in parts) for number, parts in layout.parts.items()}

    def tensors(self, number: int) -> tuple[torch.Tensor, ...]:
        """The tensors of state `number`, each [B, *shape]; writing to them writes to the sequences' state."""
        return self._views[number]


class HasFixed(Protocol):
    """A slot, as the batch sees it."""

    fixed: torch.Tensor


class FixedBatch:
    """Keeps the recurrent states of the sequences that decode together in one tensor, always the same memory.

    That memory stays where it is until more rows decode together than ever before, so that a forward over them can be
    repeated address for address (replay.py); `memory` is another tensor then.
    """

    def __init__(self, layout: FixedLayout) -> None:
        self._layout = layout
        self.memory = torch.empty(0, layout.num_bytes, dtype=torch.uint8)
        self._views: dict[int, FixedRows] = {}
        self._held: list[tuple[HasFixed, torch.Tensor]] = []

    def gather(self, slots: Sequence[HasFixed]) -> FixedRows:
        """One batch of these slots, in order. The slots' rows become part of it."""
        moved = [i for i, slot in enumerate(slots) if not self._holds(i, slot)]
        if moved or len(slots) < len(self._held):
            self._let_go(set(range(len(slots))).difference(moved))
            self._grow(len(slots), slots[0].fixed.device)
            for i in moved:
                row = self.memory[i]
                row.copy_(slots[i].fixed)
                slots[i].fixed = row
                self._held[i : i + 1] = [(slots[i], row)]
            del self._held[len(slots) :]
        found = self._views.get(len(slots))
        if found is None:
            found = self._views[len(slots)] = FixedRows(self._layout, self.memory[: len(slots)], self.memory)
        return found

    def clear(self) -> None:
        """Let go of all sequences, and of the memory."""
        self._let_go(set())
        self._held, self._views, self.memory = [], {}, self.memory[:0].clone()

    def _holds(self, i: int, slot: HasFixed) -> bool:
        return i < len(self._held) and self._held[i][0] is slot and self._held[i][1] is slot.fixed

    def _let_go(self, kept: set[int]) -> None:
        """Sequences that lose their row, and still have it, get memory of their own."""
        for i, (slot, row) in enumerate(self._held):
            if i not in kept and slot.fixed is row:
                slot.fixed = row.clone()

    def _grow(self, num_rows: int, device: torch.device) -> None:
        if num_rows <= self.memory.shape[0]:
            return
        larger = max(num_rows, 2 * self.memory.shape[0])
        memory = torch.empty(larger, self._layout.num_bytes, dtype=torch.uint8, device=device)
        memory[: self.memory.shape[0]] = self.memory
        self.memory, self._views = memory, {}
        for i, (slot, old) in enumerate(self._held):
            row = memory[i]  # one object: whether a slot still has its row is seen by it
            if slot.fixed is old:
                slot.fixed = row
            self._held[i] = (slot, row)
