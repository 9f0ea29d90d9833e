"""Which rows of which layers a stream needs, which segments claim them, and how far a prefix of segments reaches.

Every row is claimed at most once and only rows that are needed may be claimed, so a segment's memory is bounded by the
request before it is reserved. Pure bookkeeping over the layout; owned by ReceiveStream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from common.errors import BadMessage
from common.layout import StateLayout
from common.wire.messages import Piece


class Coverage:
    """Rows of one request: [start, stop) is asked for, [0, start) is held."""

    def __init__(self, layout: StateLayout, start: int, stop: int) -> None:
        self.layout, self.start, self.stop = layout, start, stop
        self.required = layout.required_segments(start, stop)
        self._claims: dict[int, list[tuple[int, int]]] = {}

    def check(self, segment: Piece) -> int:
        """Raw bytes of the segment.

        Raises:
            BadMessage: rows or layers that are not in the request or the layout, or are claimed already.
        """
        start, stop = segment.start, segment.stop
        name = f"PIECE of segment {segment.no}"
        if not self.start <= start < stop <= self.stop:
            raise BadMessage(f"{name}: rows [{start}, {stop}) are not within [{self.start}, {self.stop})")
        if len(set(segment.layers)) != len(segment.layers):
            raise BadMessage(f"{name}: a layer is named twice in {segment.layers!r:.200}")
        for n in segment.layers:
            needed = self.required.get(n)
            if needed is None or not needed[0] <= start < stop <= needed[1]:
                raise BadMessage(f"{name}: rows [{start}, {stop}) of layer {n} are not needed, only {needed}")
            if not self.layout.states[n].is_rows and (start, stop) != needed:
                raise BadMessage(f"{name}: the state of layer {n} is one piece and belongs to rows {needed}")
            if self._is_claimed(n, start, stop):
                raise BadMessage(f"{name}: rows [{start}, {stop}) of layer {n} overlap another segment")
        return self.layout.segment_bytes(start, stop, segment.layers)

    def claim(self, segment: Piece) -> None:
        """The rows belong to this segment from now on; `check` has passed."""
        for n in segment.layers:
            claims = self._claims.setdefault(n, [])
            claims.insert(bisect_left(claims, (segment.start, segment.stop)), (segment.start, segment.stop))

    def missing(self) -> str:
        """ "" when every needed row is claimed, else the first that is not."""
        for n, (first, stop) in self.required.items():
            reach = _reach(self._claims.get(n, []), first)
            if reach < stop:
                return f"layer {n} ({self.layout.states[n].kind}): row {reach} of [{first}, {stop}) did not arrive"
        return ""

    def prefix(self, segments: Iterable[Piece]) -> int:
        """The largest position at which every layer can continue with only these segments."""
        rows: dict[int, list[tuple[int, int]]] = {}
        for s in segments:
            for n in s.layers:
                rows.setdefault(n, []).append((s.start, s.stop))
        spans = {n: sorted(r) for n, r in rows.items()}
        ends = {stop for r in spans.values() for _, stop in r}
        ends |= {_reach(spans.get(n, []), self.start) for n in self.required}
        return next((p for p in sorted(ends, reverse=True) if self._can_continue(spans, p)), self.start)

    def _can_continue(self, spans: dict[int, list[tuple[int, int]]], position: int) -> bool:
        for n, (first, stop) in self.layout.required_segments(self.start, position).items():
            if self.layout.states[n].is_rows:
                if _reach(spans.get(n, []), first) < stop:
                    return False
            elif (first, stop) not in spans.get(n, []):
                return False
        return position >= self.start

    def _is_claimed(self, layer: int, start: int, stop: int) -> bool:
        claims = self._claims.get(layer, [])
        at = bisect_left(claims, (start, stop))
        return (at > 0 and claims[at - 1][1] > start) or (at < len(claims) and claims[at][0] < stop)


def _reach(spans: list[tuple[int, int]], first: int) -> int:
    """How far sorted spans go on without a gap from `first`."""
    for start, stop in spans:
        if start > first:
            break
        first = max(first, stop)
    return first
