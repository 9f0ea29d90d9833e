"""Gives freed memory back to the system. Used after large things were dropped: weights at start, recordings later."""

from __future__ import annotations

import ctypes


def trim() -> None:
    """Where the C library keeps freed memory (glibc does), tell it not to. Takes milliseconds."""
    release = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if release is not None:
        release(0)
