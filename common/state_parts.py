"""State of prefixes as bytes: how the groups of a cache's entries are cut out of a slot, and put back into one.

A part holds the rows of one group's layers for the tokens of one entry, tensor after tensor in the layout's order: a
segment's raw bytes. Knows slots and numpy, no engine and no event loop; the copies run in worker threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.layout import StateLayout
from common.sched.executor import Slot
from common.sched.prefix_index import ROWS, STATE, WINDOW, Entry, group_of

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layer numbers of a group, and bytes of a row of each of their tensors (of the whole tensor for STATE)."""

    group: int
    layers: tuple[int, ...]
    row_bytes: tuple[int, ...]

    def num_bytes(self, num_tokens: int) -> int:
        """Of a part of so many tokens."""
        return sum(self.row_bytes) * (1 if self.group == STATE else num_tokens)


def group_layouts(layout: StateLayout) -> dict[int, GroupLayout]:
    """The groups that a model has."""
    found: dict[int, GroupLayout] = {}
    for group in (ROWS, WINDOW, STATE):
        layers = tuple(n for n, spec in enumerate(layout.states) if group_of(spec.kind) == group)
        if layers:
            sizes = tuple(t.row_bytes for n in layers for t in layout.states[n].tensors)
            found[group] = GroupLayout(group, layers, sizes)
    return found


@dataclass(frozen=True, slots=True)
class Export:
    """Rows [start, stop) of one group as a slot has them: a read-only view for each tensor. STATE: that at `stop`."""

    start: int
    stop: int
    views: tuple[memoryview, ...]


def export(slot: Slot, group: GroupLayout, start: int, stop: int) -> Export | None:
    """What a slot still has of rows [start, stop) (of the state at `stop`); None: nothing. On the engine's thread."""
    if group.group == STATE:
        return Export(stop - 1, stop, slot.exported(stop - 1, stop, group.layers))
    first = max(start, slot.first_row(group.layers))
    return Export(first, stop, slot.exported(first, stop, group.layers)) if first < stop else None


def cut(source: Export, group: GroupLayout, entry: Entry) -> Bytes:
    """The part of one entry, copied. Raises MemoryError."""
    part = np.empty(group.num_bytes(entry.num_tokens), np.uint8)
    first, num_rows = (0, 1) if group.group == STATE else (entry.start - source.start, entry.num_tokens)
    at = 0
    for view, size in zip(source.views, group.row_bytes, strict=True):
        rows = np.frombuffer(view, np.uint8)[first * size : (first + num_rows) * size]
        np.copyto(part[at : at + rows.size], rows)
        at += rows.size
    return part


def put(slot: Slot, group: GroupLayout, entry: Entry, part: Bytes, first: int) -> None:
    """Write a part to a slot, but for rows before `first`. Raises RequestFailed when the slot is gone."""
    if group.group == STATE:
        _write(slot, group, (entry.stop - 1, entry.stop), [(0, size) for size in group.row_bytes], part)
        return
    start = max(entry.start, first)
    skipped, num_rows = start - entry.start, entry.stop - start
    _write(slot, group, (start, entry.stop), [(skipped * s, num_rows * s) for s in group.row_bytes], part)


def _write(slot: Slot, group: GroupLayout, span: tuple[int, int], cuts: Sequence[tuple[int, int]], part: Bytes) -> None:
    at = 0
    for view, (skipped, size) in zip(slot.writable(*span, group.layers), cuts, strict=True):
        at += skipped
        np.copyto(np.frombuffer(view, np.uint8), part[at : at + size])
        at += size
    slot.landed(*span, group.layers)
