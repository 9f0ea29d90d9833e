"""Memory of the process: giving it back to the system, and telling that there was none left."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Where the C library keeps freed memory (glibc does), tell it not to. Takes milliseconds."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)


def is_out_of_memory(error: Exception) -> bool:
    """Whether an operator failed for lack of memory: torch says so in a RuntimeError's text."""
    text = str(error).lower()
    return isinstance(error, MemoryError) or "allocate memory" in text or "out of memory" in text
