"""Lossy codecs: every value within half a step of its group, self-contained, smaller, and no lie is believed."""

from __future__ import annotations

import contextlib
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BadMessage
from common.layout import StateLayout, StateSpec, TensorSpec
from common.wire.codec import Codec, TensorRun, segment_shape
from common.wire.lossy import GROUP_CHANNELS, GROUP_TOKENS

LEVELS = {"q8": 255, "q4": 23}


def state(num_rows: int, num_channels: int, seed: int = 0) -> np.ndarray:
    """Keys as models have them: channels of very different size and offset, tokens alike."""
    rng = np.random.default_rng(seed)
    size, offset = rng.lognormal(0, 1.5, num_channels), rng.normal(0, 4, num_channels)
    return (rng.standard_normal((num_rows, num_channels)) * size + offset).astype(np.float32)


def as_bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "bfloat16":
        return (values.astype("<f4").view("<u4") >> 16).astype("<u2").tobytes()
    return values.astype({"float32": "<f4", "float16": "<f2", "float64": "<f8"}[dtype]).tobytes()


def as_floats(data: bytes, dtype: str) -> np.ndarray:
    if dtype == "bfloat16":
        return (np.frombuffer(data, "<u2").astype("<u4") << 16).view("<f4").astype(np.float64)
    return np.frombuffer(data, {"float32": "<f4", "float16": "<f2", "float64": "<f8"}[dtype]).astype(np.float64)


def through(codec: str, data: bytes, shape: list[TensorRun], num_buffers: int = 1) -> tuple[bytes, int, str]:
    """What comes out, the encoded size, and the codec that was used."""
    cut = np.linspace(0, len(data) // 8, num_buffers + 1).astype(int) * 8
    cut[-1] = len(data)
    buffers = [memoryview(data)[a:b] for a, b in pairwise(cut)]
    encoded = Codec().encode(codec, buffers, shape)
    sent = b"".join(bytes(p) for p in encoded.parts)
    assert len(sent) == encoded.num_bytes
    if encoded.codec == "raw":
        return sent, len(sent), "raw"
    out = bytearray(len(data))
    views = [memoryview(out)[a:b] for a, b in pairwise(cut)]
    Codec().decode(encoded.codec, memoryview(sent), views, shape)
    return bytes(out), len(sent), encoded.codec


def group_steps(values: np.ndarray, run: TensorRun, levels: int) -> np.ndarray:
    """The step of each value's group."""
    steps = np.empty_like(values)
    if run.is_per_channel:
        for a in range(0, run.num_rows, GROUP_TOKENS):
            part = values[a : a + GROUP_TOKENS]
            steps[a : a + GROUP_TOKENS] = (part.max(0) - part.min(0)) / levels
    else:
        for a in range(0, run.num_channels, GROUP_CHANNELS):
            part = values[:, a : a + GROUP_CHANNELS]
            steps[:, a : a + GROUP_CHANNELS] = ((part.max(1) - part.min(1)) / levels)[:, None]
    return steps


@pytest.mark.parametrize("codec", ["q8", "q4"])
@pytest.mark.parametrize("is_per_channel", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("size", [(1, 1), (1, 64), (64, 64), (65, 192), (200, 100), (3, 63), (129, 576)])
def test_every_value_is_within_half_a_step(codec, is_per_channel, dtype, size):
    run = TensorRun(*size, dtype, is_per_channel)
    data = as_bytes(state(*size), dtype)
    values = as_floats(data, dtype).reshape(size)
    found, _, used = through(codec, data, [run])
    got = as_floats(found, dtype).reshape(size)
    if used == "raw":
        assert np.array_equal(values, got)
        return
    # The ends are float16, which widens a group a little; what comes out is rounded to the dtype.
    rounding = {"float32": 2**-22, "float64": 2**-22, "bfloat16": 2**-8, "float16": 2**-10}[dtype]
    slack = 2**-10 * np.abs(values).max() / LEVELS[codec] + rounding * np.abs(values) + 1e-6
    assert (np.abs(got - values) <= 0.505 * group_steps(values, run, LEVELS[codec]) + slack).all()


@pytest.mark.parametrize(("codec", "most"), [("q8", 0.53), ("q4", 0.27)])
def test_size_of_what_a_model_makes(codec, most):
    run = TensorRun(256, 192, "bfloat16", is_per_channel=True)
    _, num, used = through(codec, as_bytes(state(256, 192), "bfloat16"), [run])
    assert used == codec
    assert num <= most * run.num_bytes


LAYOUT = StateLayout(
    (
        StateSpec(0, "full", (TensorSpec("k", (3, 64), "float32"), TensorSpec("v", (3, 64), "float32"))),
        StateSpec(1, "latent", (TensorSpec("latent", (80,), "bfloat16"),)),
        StateSpec(2, "recurrent", (TensorSpec("conv", (64, 4), "float32"), TensorSpec("count", (8,), "int32"))),
    )
)


def test_the_layout_says_what_is_grouped_how():
    shape = segment_shape(LAYOUT, 10, 40, (0, 1, 2))
    assert [(r.num_rows, r.num_channels) for r in shape] == [(30, 192), (30, 192), (30, 80), (1, 256), (1, 8)]
    first = segment_shape(LAYOUT, 0, 40, (0,))
    assert [(r.num_rows, r.is_delicate) for r in first] == [(4, True), (36, False), (4, True), (36, False)]
    assert [r.num_rows for r in segment_shape(LAYOUT, 2, 3, (0,))] == [1, 1]
    assert [r.is_per_channel for r in shape] == [True, False, False, False, False]
    assert [r.is_delicate for r in shape] == [False, False, False, True, True]
    assert sum(r.num_bytes for r in shape) == LAYOUT.segment_bytes(10, 40, (0, 1, 2))


@pytest.mark.parametrize("codec", ["q8", "q4"])
@pytest.mark.parametrize("num_buffers", [1, 2, 7])
def test_a_whole_segment(codec, num_buffers):
    shape = segment_shape(LAYOUT, 0, 100, (0, 1, 2))
    parts = [as_bytes(state(r.num_rows, r.num_channels, n), r.dtype) for n, r in enumerate(shape[:-1])]
    parts.append(np.arange(8, dtype="<i4").tobytes())
    data = b"".join(parts)
    found, _, used = through(codec, data, shape, num_buffers)
    assert used == codec
    assert found[-32:] == parts[-1]  # no floats: as they are
    recurrent = as_floats(found[-32 - 1024 : -32], "float32").reshape(1, -1)
    wanted = as_floats(parts[-2], "float32").reshape(1, -1)
    assert (np.abs(recurrent - wanted) <= 0.51 * group_steps(wanted, shape[-2], 255) + 1e-4).all()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_sent_as_it_is(bad):
    values = state(64, 64)
    values[3, 5] = bad
    run = TensorRun(64, 64, "float32", is_per_channel=True)
    found, _, used = through("q4", values.tobytes(), [run])
    assert used in ("zstd", "raw")
    assert found == values.tobytes()


@pytest.mark.parametrize("scale", [1e-30, 1e-7, 1e30, 3e38])
def test_sizes_that_float16_does_not_hold(scale):
    values = np.linspace(-scale, scale, 64 * 64, dtype=np.float32).reshape(64, 64)
    run = TensorRun(64, 64, "float32")
    found, _, used = through("q8", values.tobytes(), [run])
    assert used == "q8"
    got = np.frombuffer(found, "<f4").reshape(64, 64)
    assert np.isfinite(got).all()
    assert np.abs(got / scale - values / scale).max() < 1 / 100


def test_constant_groups_come_back_exactly():
    values = np.repeat(np.float32([[0.0, -3.0, 7.25, 1000.0]]), 64, axis=0)
    found, _, _ = through("q4", values.tobytes(), [TensorRun(64, 4, "float32", is_per_channel=True)])
    assert np.allclose(np.frombuffer(found, "<f4").reshape(64, 4), values, rtol=1e-3)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_damaged_bytes_are_typed_errors(data):
    codec = data.draw(st.sampled_from(["q8", "q4"]))
    shape = segment_shape(LAYOUT, 0, 20, (0, 1, 2))
    raw = b"".join(
        as_bytes(state(r.num_rows, r.num_channels), r.dtype) if r.is_float else bytes(r.num_bytes) for r in shape
    )
    encoded = Codec().encode(codec, [memoryview(raw)], shape)
    good = bytearray(b"".join(bytes(p) for p in encoded.parts))
    how = data.draw(st.sampled_from(["flip", "cut", "more", "other codec"]))
    if how == "flip":
        for _ in range(data.draw(st.integers(1, 4))):
            good[data.draw(st.integers(0, len(good) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    elif how == "cut":
        del good[data.draw(st.integers(0, len(good) - 1)) :]
    elif how == "more":
        good += bytes(data.draw(st.integers(1, 50)))
    else:
        codec = {"q8": "q4", "q4": "zstd"}[codec]
    out = bytearray(len(raw))
    with contextlib.suppress(BadMessage):
        Codec().decode(codec, memoryview(bytes(good)), [memoryview(out)], shape)
        assert how in ("flip", "other codec")
