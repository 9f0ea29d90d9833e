"""Slots that kernels write to and attend over: rows land in their place, windows slide, memory stays where it is."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from common.engine.decode_rows import DecodeAttention
from common.engine.state import SlotState
from common.errors import RequestFailed
from tests.engine.attention_layer import CPU, Layer, run


@pytest.mark.parametrize("layer", [Layer(), Layer(window=9), Layer(3, 3, 5, 11), Layer(4, 1, 24, rank=16)], ids=str)
def test_new_rows_land_in_their_place_and_nowhere_else(layer) -> None:
    lengths, seeds = [0, 1, 4, 64, 130], [0, 2000, 4000, 6000, 8000]
    _, slots = run(layer, lengths, seeds)
    for slot, num, seed in zip(slots, lengths, seeds, strict=True):
        expected = layer.slot(num, seed)
        new = layer.rows(1, seed + 500)
        expected.write(1, num, [torch.cat(new, dim=-1)] if layer.rank else new)
        for mine, other in zip(slot._layers, expected._layers, strict=True):
            assert mine.base == other.base
            for a, b in zip(mine.tensors, other.tensors, strict=True):
                # A window's fresh buffer holds whatever was in memory where no token is.
                kept = (
                    slice(layer.spec.needed_from(num) - mine.base, num + 1 - mine.base) if layer.window else slice(None)
                )
                assert torch.equal(a[kept].nan_to_num(7), b[kept].nan_to_num(7))
                assert a[num - mine.base].isfinite().all() or mine is not slot._layers[1]


def decode_step(layer: Layer, attention: DecodeAttention, slots, starts, seed: int) -> torch.Tensor:
    """One more token in every slot, the same by kernels and by torch on copies of the slots."""
    copies = []
    for slot, start in zip(slots, starts, strict=True):
        copies.append(SlotState(slot._layout, slot._num_tokens, slot._room, CPU))
        copies[-1].copy_from(slot, start)
    query = torch.cat([layer.query(seed + i) for i in range(len(slots))])
    new = [torch.stack(p) for p in zip(*(layer.rows(1, seed + 10 * i) for i in range(len(slots))), strict=True)]
    rows = attention.rows(slots, starts)
    rows.add(1, *(p.transpose(1, 2) for p in new))
    found = rows.attend(1, query, None, None)
    assert found is not None
    for i, (copy, start) in enumerate(zip(copies, starts, strict=True)):
        copy.write(1, start, [p[i] for p in new])
        first = layer.spec.needed_from(start)
        keys, values = (t.transpose(0, 1)[None] for t in copy.read(1, first, start + 1))
        for mine, other in zip(slots[i].read(1, first, start + 1), copy.read(1, first, start + 1), strict=True):
            assert torch.equal(mine, other)
        folded = query[i].view(1, layer.kv_heads, -1, layer.dim)
        expected = functional.scaled_dot_product_attention(folded, keys, values)
        torch.testing.assert_close(found[i, 0], expected.view(layer.heads, -1), rtol=1e-5, atol=1e-5)
    return found


@pytest.mark.parametrize("window", [2, 3, 8])
@pytest.mark.parametrize("room", [1, 2, 5])
def test_windows_slide_at_every_boundary(window, room) -> None:
    layer = Layer(window=window, room=room)
    attention, size = layer.attention(), 40
    for begin in range(window + room + 2):
        slots, starts = [layer.slot(begin, 0, size), layer.slot(0, 0, size)], [begin, 0]
        while starts[0] < size:
            decode_step(layer, attention, slots, starts, seed=100 * starts[0])
            starts = [s + 1 for s in starts]
        with pytest.raises(ValueError, match="do not fit"):
            attention.rows(slots, starts)


def test_views_of_a_window_survive_the_slide() -> None:
    layer = Layer(window=4, room=3)
    attention, slot, kept = layer.attention(), layer.slot(2, 0, 60), []
    for start in range(2, 60):
        decode_step(layer, attention, [slot], [start], seed=start)
        views = slot.exported(start, start + 1, (1,))
        kept.append((views, [bytes(v) for v in views]))
    for views, copies in kept:
        assert [bytes(v) for v in views] == copies


# 8: still in the first buffer of a window, but with another first row.
@pytest.mark.parametrize("begin", [8, 30])
@pytest.mark.parametrize("parks", [False, True])
@pytest.mark.parametrize("layer", [Layer(), Layer(window=6)], ids=str)
def test_slots_that_were_imported_copied_and_parked(layer, parks, begin) -> None:
    attention = layer.attention()
    plain, source = layer.slot(begin, 0, 60), layer.slot(begin, 0, 60)
    slot = SlotState(layer.layout, 60, layer.room, CPU, parks=parks)
    attention.rows([slot], [0])
    first = layer.spec.needed_from(begin)
    slot.prepare_import(begin)
    for view, data in zip(slot.writable(first, begin, (1,)), source.exported(first, begin, (1,)), strict=True):
        view[:] = data
    slot.landed(first, begin, (1,))
    for start in range(begin, 60):
        found = decode_step(layer, attention, [slot, plain], [start, start], seed=10 * start)
        again = decode_step(layer, attention, [plain, slot], [start, start], seed=10 * start)
        assert found.shape == again.shape
        if start % 3 == 0:
            slot.park(start + 1)
            if parks:
                with pytest.raises(RequestFailed, match="gone"):
                    attention.rows([slot], [start + 1])
            slot.unpark()
        elif start % 7 == 0 or start == 8:
            other = SlotState(layer.layout, 60, layer.room, CPU, parks=parks)
            attention.rows([other], [0])
            other.copy_from(slot, start + 1)
            slot.free()
            slot = other


def test_slots_that_cannot_be_attended_to() -> None:
    layer = Layer(window=6)
    attention, slot = layer.attention(), layer.slot(30, 0, 60)
    attention.rows([slot], [30])
    with pytest.raises(ValueError, match="no longer has the rows"):
        attention.rows([slot], [8])
    slot.free()
    with pytest.raises(RequestFailed, match="gone"):
        attention.rows([slot], [30])


def test_memory_lives_as_long_as_the_forward() -> None:
    layer = Layer()
    expected, _ = run(layer, [300])
    slot = layer.slot(300, 0)
    rows = layer.attention().rows([slot], [300])
    rows.add(1, *(p.transpose(0, 1)[None] for p in layer.rows(1, 500)))
    slot.free()
    held = [torch.full((301, 2, 16), torch.nan) for _ in range(20)]
    assert torch.equal(rows.attend(1, layer.query(0), None, None)[:, 0], expected)
    assert len(held) == 20
