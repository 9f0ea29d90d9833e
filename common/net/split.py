"""Cuts a computed segment into segments of at most so many bytes: by layers first, by rows where one layer is too big.

Pure; nothing is copied. Used by server_stream.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from common.backend import ComputedSegment
from common.errors import LocalProtocolError
from common.layout import StateLayout


def split_segment(layout: StateLayout, segment: ComputedSegment, max_bytes: int) -> Iterator[ComputedSegment]:
    """Segments that together hold the same rows, in order; the segment itself when it is small enough.

    Raises:
        LocalProtocolError: the buffers do not match the layout, or one row of one layer is larger than `max_bytes`.
    """
    start, stop = segment.start, segment.stop
    if start >= stop or any(n >= len(layout.states) for n in segment.layers):
        raise LocalProtocolError(f"segment of rows [{start}, {stop}), layers {segment.layers} is not in the layout")
    num_bytes = layout.segment_bytes(start, stop, segment.layers)
    if sum(b.nbytes for b in segment.buffers) != num_bytes:
        held = sum(b.nbytes for b in segment.buffers)
        raise LocalProtocolError(
            f"the buffers of rows [{start}, {stop}) hold {held} bytes, the layout says {num_bytes}"
        )
    if num_bytes <= max_bytes:
        yield segment
        return
    buffers, at = tuple(b.cast("B") if b.format != "B" or b.ndim != 1 else b for b in segment.buffers), 0
    for group in _layer_groups(layout, segment, max_bytes):
        group_bytes = layout.segment_bytes(start, stop, group)
        if group_bytes <= max_bytes:
            yield replace(segment, layers=group, buffers=_cut(buffers, at, group_bytes))
        else:
            yield from _split_rows(layout, replace(segment, layers=group), buffers, at, max_bytes)
        at += group_bytes


def _layer_groups(layout: StateLayout, segment: ComputedSegment, max_bytes: int) -> list[tuple[int, ...]]:
    groups: list[tuple[int, ...]] = []
    for n in segment.layers:
        longer = (*groups[-1], n) if groups else (n,)
        if groups and layout.segment_bytes(segment.start, segment.stop, longer) <= max_bytes:
            groups[-1] = longer
        else:
            groups.append((n,))
    return groups


def _split_rows(
    layout: StateLayout, segment: ComputedSegment, buffers: tuple[memoryview, ...], at: int, max_bytes: int
) -> Iterator[ComputedSegment]:
    """One layer, by rows: each tensor's rows lie together, so every part takes a slice of every tensor."""
    spec = layout.states[segment.layers[0]]
    row_bytes = [t.row_bytes for t in spec.tensors]
    rows = max_bytes // max(1, sum(row_bytes))
    if not spec.is_rows or rows < 1:
        raise LocalProtocolError(f"a state of {sum(row_bytes)} bytes cannot be cut to {max_bytes} (max_segment_bytes)")
    total = segment.stop - segment.start
    for first, last in pairwise([*range(0, total, rows), total]):
        parts: list[memoryview] = []
        begin = at
        for width in row_bytes:
            parts.extend(_cut(buffers, begin + first * width, (last - first) * width))
            begin += total * width
        yield replace(segment, start=segment.start + first, stop=segment.start + last, buffers=tuple(parts))


def _cut(buffers: tuple[memoryview, ...], at: int, num_bytes: int) -> tuple[memoryview, ...]:
    out: list[memoryview] = []
    for buffer in buffers:
        if at < len(buffer) and num_bytes:
            out.append(buffer[at : at + num_bytes])
            num_bytes -= len(out[-1])
        at = max(0, at - len(buffer))
    return tuple(out)
