"""What follows from a StateLayout: how much memory a slot takes, and which segments leave while a chunk is computed.

Pure functions over plain data; knows no tensors and no scheduler. Called by the slots of both executors and by the
worker.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.layout import StateLayout, StateSpec

# At least this many segments per chunk, so that bytes leave long before the last layer has run.
MIN_SEGMENTS_PER_CHUNK = 4


@dataclass(frozen=True, slots=True)
class SegmentPlan:
    """A segment that can leave once its last layer's rows of the chunk are in the slot."""

    start: int
    stop: int
    layers: tuple[int, ...]
    is_last: bool = False


def slot_rows(spec: StateSpec, num_tokens: int, room: int) -> int:
    """Rows of buffer for a sequence of `num_tokens`: a window keeps its earlier rows and `room` new ones."""
    if spec.kind == "window":
        return min(num_tokens, spec.window - 1 + room)
    return num_tokens if spec.is_rows else 1


def slot_bytes(layout: StateLayout, num_tokens: int, room: int) -> dict[str, int]:
    """Memory of one slot by layer kind."""
    total: dict[str, int] = {}
    for spec in layout.states:
        num = spec.num_bytes(slot_rows(spec, num_tokens, room))
        total[spec.kind] = total.get(spec.kind, 0) + num
    return total


def plan_segments(
    layout: StateLayout, chunk: tuple[int, int], wanted: tuple[int, int], segment_bytes: int
) -> tuple[SegmentPlan, ...]:
    """Segments of one chunk, in the order in which they become ready.

    Args:
        chunk: prompt range [start, stop) that is computed.
        wanted: [first, end) of the whole job: the receiver holds [0, first) and will continue at `end`.
        segment_bytes: raw bytes to aim at; a group of layers closes when it reaches them.
    """
    rows = [_rows_to_send(spec, chunk, wanted) for spec in layout.states]
    total = sum(spec.num_bytes(b - a) for spec, (a, b) in zip(layout.states, rows, strict=True))
    target = min(segment_bytes, -(-total // MIN_SEGMENTS_PER_CHUNK))
    groups: list[tuple[tuple[int, int], list[int]]] = []
    size = target
    for number, (spec, span) in enumerate(zip(layout.states, rows, strict=True)):
        if span[0] >= span[1]:
            continue
        if size >= target or groups[-1][0] != span:
            groups.append((span, []))
            size = 0
        groups[-1][1].append(number)
        size += spec.num_bytes(span[1] - span[0])
    is_end = chunk[1] == wanted[1]
    return tuple(
        SegmentPlan(span[0], span[1], tuple(layers), is_end and i == len(groups) - 1)
        for i, (span, layers) in enumerate(groups)
    )


def _rows_to_send(spec: StateSpec, chunk: tuple[int, int], wanted: tuple[int, int]) -> tuple[int, int]:
    first = max(wanted[0], spec.needed_from(wanted[1])) if spec.is_rows else wanted[1] - 1
    return max(chunk[0], first), min(chunk[1], wanted[1])
