"""Slots: rows come back as they went in, views never change, staging behaves like direct memory."""

from __future__ import annotations

import pytest
import torch

from common.engine.state import SlotState
from common.errors import RequestFailed
from common.layout import StateLayout, StateSpec, TensorSpec

CPU = torch.device("cpu")


def layout(dtype="float32", window=8) -> StateLayout:
    tensors = (TensorSpec("k", (2, 4), dtype), TensorSpec("v", (1, 6), dtype))
    return StateLayout((StateSpec(0, "full", tensors), StateSpec(1, "window", tensors, window=window)))


def rows(start, stop, seed=0):
    """Rows that say which token and tensor they are."""
    positions = torch.arange(start, stop).float() + seed * 1000
    return [positions[:, None, None].expand(-1, 2, 4), positions[:, None, None].expand(-1, 1, 6) + 0.5]


def fill(slot, stop, step, start=0):
    for a in range(start, stop, step):
        for layer in (0, 1):
            slot.write(layer, a, rows(a, min(a + step, stop)))


@pytest.mark.parametrize("step", [1, 3, 5])
@pytest.mark.parametrize("stop", [1, 7, 8, 40])
def test_read_gives_what_was_written(step, stop):
    slot = SlotState(layout(), 40, room=5, device=CPU)
    fill(slot, stop, step)
    for layer, spec in enumerate(layout().states):
        first = spec.needed_from(stop - 1)
        for found, expected in zip(slot.read(layer, first, stop), rows(first, stop), strict=True):
            assert torch.equal(found, expected)


def test_full_rows_beyond_the_slot_are_a_bug():
    slot = SlotState(layout(), 10, room=5, device=CPU)
    with pytest.raises(ValueError, match="do not fit"):
        slot.write(0, 8, rows(8, 12))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("has_staging", [False, True])
def test_export_into_another_slot(dtype, has_staging):
    source = SlotState(layout(dtype), 30, room=5, device=CPU)
    target = SlotState(layout(dtype), 50, room=9, device=CPU)
    target._has_staging = has_staging
    target.prepare_import(30)
    fill(source, 23, 5)
    segments = [(0, 23, (0,))]
    fill(source, 30, 5, start=23)
    segments += [(23, 30, (0, 1))]
    for start, stop, layers in segments:
        buffers = target.writable(start, stop, layers)
        again = target.writable(start, stop, layers)
        for view, same, data in zip(buffers, again, source.exported(start, stop, layers), strict=True):
            assert data.readonly
            view[:] = data
            assert same == data
        target.landed(start, stop, layers)
    for layer, first in ((0, 0), (1, 23)):
        for found, expected in zip(target.read(layer, first, 30), source.read(layer, first, 30), strict=True):
            assert torch.equal(found, expected)
    fill(target, 50, 3, start=30)
    assert torch.equal(target.read(1, 42, 50)[0], rows(42, 50)[0].to(found.dtype))


def test_window_views_survive_replaced_buffers():
    slot = SlotState(layout(), 100, room=4, device=CPU)
    kept = []
    for a in range(0, 100, 4):
        fill(slot, a + 4, 4, start=a)
        views = slot.exported(a, a + 4, (0, 1))
        kept.append((views, [bytes(v) for v in views]))
    slot.free()
    for views, copies in kept:
        assert [bytes(v) for v in views] == copies


def test_copy_goes_its_own_way():
    one, two = (SlotState(layout(), 60, room=5, device=CPU) for _ in range(2))
    fill(one, 33, 5)
    two.copy_from(one, 33)
    for layer in (0, 1):
        one.write(layer, 33, rows(33, 34, seed=1))
        two.write(layer, 33, rows(33, 34, seed=2))
    assert float(one.read(1, 33, 34)[0][0, 0, 0]) == 1033
    assert float(two.read(1, 33, 34)[0][0, 0, 0]) == 2033
    for found, expected in zip(two.read(1, 26, 33), rows(26, 33), strict=True):
        assert torch.equal(found, expected)


def test_memory_is_as_the_specs_say():
    slot = SlotState(layout(), 60, room=5, device=CPU)
    held = {"full": 0, "window": 0}
    for spec, state in zip(layout().states, slot._layers, strict=True):
        held[spec.kind] += sum(t.numel() * t.element_size() for t in state.tensors)
    assert slot.num_bytes == held
    slot.free()
    slot.free()
    assert slot.num_bytes == {}


def test_a_freed_slot_refuses_quietly():
    slot = SlotState(layout(), 60, room=5, device=CPU)
    slot.free()
    with pytest.raises(RequestFailed, match="gone"):
        slot.writable(0, 5, (0,))


@pytest.mark.parametrize("span", [(-1, 4), (4, 4), (5, 4), (0, 61), (60, 70)])
@pytest.mark.parametrize("layer", [0, 1])
def test_rows_outside_the_slot_are_refused(span, layer):
    slot = SlotState(layout(), 60, room=5, device=CPU)
    slot.prepare_import(40)
    with pytest.raises(RequestFailed, match="outside"):
        slot.writable(*span, (layer,))
