"""Lossy codecs `q8` and `q4`: every value of a state as one of 256 or 24 levels between the ends of its group.

Keys vary little from token to token within a channel and much between channels, values the other way round (KIVI, Liu
et al., arXiv 2402.02750): so the groups of keys are runs of tokens of one channel, those of everything else are runs of
channels of one token. Levels are not a power of two, and groups are large: an entropy coder packs the codes (zstd), and
the levels at the ends of a large group are rare, so that the 24 of `q4` take about 4 bits with their groups' ends.
Never below 8 bits are recurrent states, whose error is carried on for ever, and a prompt's first tokens. The ends are
float16 where that holds them. Pure numpy over bytes; called by codec.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.errors import BadMessage
from common.layout import DTYPE_BYTES, StateLayout
from common.wire.lossy import GROUP_CHANNELS, GROUP_TOKENS, LEVELS

# The first tokens of a prompt draw much attention whatever they are, and their keys and values are unlike all others.
NUM_SINKS = 4
# Rows quantised at once: what is worked on stays in the processor's cache.
_BLOCK_VALUES = 1 << 16
# float16 ends there, and has fewer digits below.
_MAX_HALF, _MIN_HALF = 6.0e4, 1.0e-4
_FLOATS = {"float32": "<f4", "float16": "<f2", "float64": "<f8"}

Values = np.ndarray[Any, np.dtype[np.float32]]
Codes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclass(frozen=True, slots=True)
class TensorRun:
    """One tensor's rows in a segment: [num_rows, num_channels] of `dtype`, row after row.

    `is_per_channel`: groups are runs of tokens; `is_delicate`: never below 8 bits.
    """

    num_rows: int
    num_channels: int
    dtype: str
    is_per_channel: bool = False
    is_delicate: bool = False

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return DTYPE_BYTES[self.dtype]

    @property
    def num_bytes(self) -> int:
        """Of all rows."""
        return self.num_rows * self.num_channels * self.width

    @property
    def is_float(self) -> bool:
        """Whether levels make sense; other tensors are sent as they are."""
        return self.dtype in _FLOATS or self.dtype == "bfloat16"


def segment_shape(layout: StateLayout, start: int, stop: int, layers: Sequence[int]) -> list[TensorRun]:
    """The tensors in a segment's raw bytes, in order; empty ones left out."""
    runs = []
    for n in layers:
        spec = layout.states[n]
        num_rows = stop - start if spec.is_rows else 1
        for tensor in spec.tensors:
            num_channels = tensor.row_bytes // DTYPE_BYTES[tensor.dtype]
            is_key = tensor.name == "k" and spec.is_rows
            num_first = num_rows if not spec.is_rows else min(max(0, NUM_SINKS - start), num_rows)
            for num, is_delicate in ((num_first, True), (num_rows - num_first, False)):
                if num and num_channels:
                    runs.append(TensorRun(num, num_channels, tensor.dtype, is_key and not is_delicate, is_delicate))
    return runs


@dataclass(frozen=True, slots=True)
class Quantised:
    """A tensor as codes, one byte each, and the lower end and step of every group (float32 or float16, little-endian).

    Codes come group after group where groups are runs of tokens (channel-major within), else row after row.
    """

    codes: Codes
    ends: bytes
    is_half: bool


def num_levels(codec: str, run: TensorRun) -> int:
    """How many codes there are."""
    return 256 if run.is_delicate else LEVELS[codec]


def num_groups(run: TensorRun) -> int:
    """Groups of a tensor."""
    if run.is_per_channel:
        return -(-run.num_rows // GROUP_TOKENS) * run.num_channels
    return run.num_rows * -(-run.num_channels // GROUP_CHANNELS)


def quantise(data: memoryview, run: TensorRun, levels: int) -> Quantised | None:
    """`run.num_bytes` bytes as codes; None when a value is not finite: those must not be sent like this."""
    values = _to_float(data, run)
    codes, lows, steps = [], [], []
    for part in _parts(values, run):
        low, high = part.min(axis=-1), part.max(axis=-1)
        # Half the range each: the difference of two finite values may not be finite.
        step = (high * 0.5 - low * 0.5) * (2.0 / (levels - 1))
        if not np.isfinite(step).all():
            return None
        lows.append(low.ravel())
        steps.append(step.ravel())
    low, step = np.concatenate(lows), np.concatenate(steps)
    is_half = _fits_half(low, step)
    low, step = _ends(low, step, levels, is_half=is_half)
    at = 0
    for part in _parts(values, run):
        shape = part.shape[:-1]
        num = int(np.prod(shape))
        own_low, own_step = low[at : at + num].reshape(*shape, 1), step[at : at + num].reshape(*shape, 1)
        at += num
        scaled = (part - own_low) / np.where(own_step > 0, own_step, 1)
        codes.append(np.clip(np.rint(scaled), 0, levels - 1).astype(np.uint8).ravel())
    kind = "<f2" if is_half else "<f4"
    return Quantised(np.concatenate(codes), low.astype(kind).tobytes() + step.astype(kind).tobytes(), is_half)


def restore(codes: Codes, ends: memoryview, run: TensorRun, *, is_half: bool, out: memoryview) -> None:
    """Write the values of `codes` (one per value of the run) to `out`, in the run's dtype.

    Raises:
        BadMessage: `ends` do not have the size of the run's groups, or are not finite.
    """
    kind, num = ("<f2" if is_half else "<f4"), num_groups(run)
    if len(ends) != 2 * num * (2 if is_half else 4):
        raise BadMessage(f"quantised: {len(ends)} bytes of group ends, must be those of {num} groups")
    pairs = np.frombuffer(ends, kind).astype(np.float32)
    if not np.isfinite(pairs).all():
        raise BadMessage("quantised: a group's end is not finite")
    low, step = pairs[:num], pairs[num:]
    values = np.empty((run.num_rows, run.num_channels), np.float32)
    at = done = 0
    for part in _parts(values, run):
        shape, size = part.shape[:-1], part.size
        own = slice(done, done + int(np.prod(shape)))
        done = own.stop
        levels = codes[at : at + size].reshape(part.shape).astype(np.float32)
        at += size
        part[...] = levels * step[own].reshape(*shape, 1) + low[own].reshape(*shape, 1)
    _from_float(values, run, out)


def _fits_half(low: Values, step: Values) -> bool:
    """Whether float16 holds the ends without making groups much wider."""
    smallest = step.min(initial=np.inf, where=step > 0)
    return bool(np.abs(low).max(initial=0) < _MAX_HALF and step.max(initial=0) < _MAX_HALF and smallest > _MIN_HALF)


def _ends(low: Values, step: Values, levels: int, *, is_half: bool) -> tuple[Values, Values]:
    """As they are sent, and so that every value still lies between them."""
    if not is_half:
        return low, step
    sent_low = low.astype("<f2").astype(np.float32)
    sent_low = np.where(sent_low > low, np.nextafter(sent_low.astype("<f2"), np.float16(-np.inf)), sent_low).astype(
        "f4"
    )
    wanted = step + (low - sent_low) / (levels - 1)
    sent_step = wanted.astype("<f2").astype(np.float32)
    larger = np.nextafter(sent_step.astype("<f2"), np.float16(np.inf)).astype(np.float32)
    return sent_low, np.where(sent_step < wanted, larger, sent_step)


def _parts(values: Values, run: TensorRun) -> Iterator[Values]:
    """Views of the values whose last axis is one group."""
    if run.is_per_channel:
        for first in range(0, run.num_rows, GROUP_TOKENS):
            yield values[first : first + GROUP_TOKENS].T
        return
    rows = max(1, _BLOCK_VALUES // run.num_channels)
    whole = run.num_channels // GROUP_CHANNELS * GROUP_CHANNELS
    for first in range(0, run.num_rows, rows):
        part = values[first : first + rows]
        if whole:
            yield _grouped(part, whole)
        if whole < run.num_channels:
            yield part[:, whole:]


def _grouped(part: Values, whole: int) -> Values:
    """[rows, groups, GROUP_CHANNELS], sharing memory."""
    view = part[:, :whole]
    strides = (view.strides[0], GROUP_CHANNELS * view.strides[1], view.strides[1])
    shape = (view.shape[0], whole // GROUP_CHANNELS, GROUP_CHANNELS)
    return np.lib.stride_tricks.as_strided(view, shape, strides)


def _to_float(data: memoryview, run: TensorRun) -> Values:
    shape = (run.num_rows, run.num_channels)
    if run.dtype == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return wide.view(np.float32).reshape(shape)
    return np.frombuffer(data, _FLOATS[run.dtype]).reshape(shape).astype(np.float32, copy=False)


def _from_float(values: Values, run: TensorRun, out: memoryview) -> None:
    if run.dtype == "bfloat16":
        # Round to nearest, ties to even.
        bits = values.view(np.uint32)
        bits += 0x7FFF + ((bits >> 16) & 1)
        np.frombuffer(out, "<u2")[:] = (bits >> 16).ravel()
    else:
        np.frombuffer(out, _FLOATS[run.dtype])[:] = values.ravel()
