"""State of prefixes as bytes: how the groups of a cache's entries are cut out of a slot, and put back into one.

A part holds the rows of one group's layers for the tokens of one entry, tensor after tensor in the layout's order: a
segment's raw bytes. Of windows it holds the last rows alone, as many as any later token can see, or as are there. Knows
slots and numpy, no engine and no event loop; the copies run in worker threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from common.layout import StateLayout
from common.sched.executor import Slot
from common.sched.prefix_index import ROWS, STATE, WINDOW, Entry, group_of

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Export:
    """Rows [start, stop) of one group as a slot has them: a read-only view for each tensor. STATE: that at `stop`."""

    start: int
    stop: int
    views: tuple[memoryview, ...]


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Layer numbers of a group, and bytes of a row of each of their tensors (of the whole tensor for STATE).

    `max_rows`: the last so many tokens of an entry are kept; 0: all.
    """

    group: int
    layers: tuple[int, ...]
    row_bytes: tuple[int, ...]
    max_rows: int = 0

    def first_row(self, entry: Entry) -> int:
        """Where a whole part begins."""
        if self.group == STATE:
            return entry.stop - 1
        return entry.stop - min(entry.num_tokens, self.max_rows or entry.num_tokens)

    def num_bytes(self, entry: Entry, first: int) -> int:
        """Bytes of a part that begins with token `first`."""
        return sum(self.row_bytes) * (entry.stop - first)

    def first_in(self, source: Export, entry: Entry) -> int | None:
        """Where the part that an export has of an entry begins; None: it has none, or only a part of all rows."""
        first = max(self.first_row(entry), source.start)
        if self.group == STATE:
            return first if source.stop == entry.stop else None
        is_there = first < entry.stop <= source.stop
        return first if is_there and (self.group == WINDOW or first == entry.start) else None


def group_layouts(layout: StateLayout) -> dict[int, GroupLayout]:
    """The groups that a model has."""
    found: dict[int, GroupLayout] = {}
    for group in (ROWS, WINDOW, STATE):
        layers = tuple(n for n, spec in enumerate(layout.states) if group_of(spec.kind) == group)
        if layers:
            sizes = tuple(t.row_bytes for n in layers for t in layout.states[n].tensors)
            windows = [layout.states[n].window - 1 for n in layers] if group == WINDOW else [0]
            found[group] = GroupLayout(group, layers, sizes, max(windows))
    return found


def export(slot: Slot, group: GroupLayout, start: int, stop: int) -> Export | None:
    """What a slot still has of rows [start, stop) (of the state at `stop`); None: nothing. On the engine's thread."""
    if group.group == STATE:
        return Export(stop - 1, stop, slot.exported(stop - 1, stop, group.layers))
    first = max(start, slot.first_row(group.layers))
    return Export(first, stop, slot.exported(first, stop, group.layers)) if first < stop else None


def cut(source: Export, group: GroupLayout, entry: Entry, first: int) -> Bytes:
    """The part of one entry that begins with token `first`, copied. Raises MemoryError."""
    part = np.empty(group.num_bytes(entry, first), np.uint8)
    at = 0
    for view, size in zip(source.views, group.row_bytes, strict=True):
        rows = np.frombuffer(view, np.uint8)[(first - source.start) * size : (entry.stop - source.start) * size]
        np.copyto(part[at : at + rows.size], rows)
        at += rows.size
    return part


def pieces(
    layout: StateLayout, group: GroupLayout, span: tuple[int, int], part: Bytes, wanted: tuple[int, int]
) -> Iterator[tuple[int, int, tuple[int, ...], tuple[memoryview, ...]]]:
    """What a part of tokens `span` has for whoever holds [0, wanted[0]) and goes on at wanted[1]: start, stop, layers,
    and views of the part.
    """
    by_start: dict[int, list[int]] = {}
    for n in group.layers:
        spec = layout.states[n]
        first = max(span[0], wanted[0], spec.needed_from(wanted[1])) if spec.is_rows else span[0]
        by_start.setdefault(first, []).append(n)
    num_rows, offsets, at = span[1] - span[0], {}, 0
    for n in group.layers:
        offsets[n] = at
        at += num_rows * sum(t.row_bytes for t in layout.states[n].tensors)
    for first, layers in by_start.items():
        if first >= span[1]:
            continue
        views = []
        for n in layers:
            at = offsets[n]
            for tensor in layout.states[n].tensors:
                size = tensor.row_bytes
                views.append(part[at + (first - span[0]) * size : at + num_rows * size].data.toreadonly())
                at += num_rows * size
        yield first, span[1], tuple(layers), tuple(views)


def put(slot: Slot, group: GroupLayout, span: tuple[int, int], part: Bytes, wanted_from: int) -> None:
    """Write a part of tokens `span` to a slot, but for rows before `wanted_from`.

    Raises:
        RequestFailed: the slot is gone.
    """
    start, stop = max(span[0], wanted_from), span[1]
    if start >= stop:
        return
    at = 0
    for view, size in zip(slot.writable(start, stop, group.layers), group.row_bytes, strict=True):
        at += (start - span[0]) * size
        np.copyto(np.frombuffer(view, np.uint8), part[at : at + len(view)])
        at += len(view)
    slot.landed(start, stop, group.layers)
