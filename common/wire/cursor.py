"""Buffers walked over as if they were one; used by the codecs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from common.errors import LocalProtocolError


class Cursor:
    """Answers the next bytes of buffers, which are flat (`flat`), whatever their borders."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views, self._index, self._at = views, 0, 0

    def take(self, num_bytes: int, width: int) -> Iterator[memoryview]:
        """The next `num_bytes` as slices, each a whole number of elements.

        Raises:
            LocalProtocolError: a buffer's end cuts an element.
        """
        while num_bytes:
            view = self._views[self._index]
            if self._at == len(view):
                self._index, self._at = self._index + 1, 0
                continue
            part = view[self._at : self._at + num_bytes]
            if len(part) % width:
                raise LocalProtocolError(f"a buffer of {len(view)} bytes cuts an element of {width} bytes")
            self._at += len(part)
            num_bytes -= len(part)
            yield part


def flat(buffer: memoryview) -> memoryview:
    """The buffer as bytes in one dimension."""
    return buffer if buffer.format == "B" and buffer.ndim == 1 else buffer.cast("B")


def joined(views: list[memoryview]) -> memoryview:
    """One buffer; copied only if they are several."""
    return views[0] if len(views) == 1 else memoryview(b"".join(views))
