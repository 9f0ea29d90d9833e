"""Attention of decode rows by kernels: exact as float32 allows, the same bits in any company, nothing else touched."""

from __future__ import annotations

import random as random_numbers
import sys

import pytest
import torch
from torch.nn import functional

from common.engine import decode_rows, kernel_attention, kernel_llvm
from common.engine.decode_rows import MIN_PARALLEL, DecodeAttention
from common.engine.kernel_blocks import BLOCK
from common.engine.kernel_llvm import Once
from common.layout import StateLayout, StateSpec, TensorSpec
from tests.engine.attention_layer import Layer, random, run

LENGTHS = (1, 2, 3, 4, 5, 9, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 2 * BLOCK + 3, 500)


def check(layer: Layer, lengths, **options) -> None:
    found, _ = run(layer, lengths, **options)
    for row, (num, seed) in enumerate(zip(lengths, range(0, 2000 * len(lengths), 2000), strict=True)):
        expected, terms = layer.expected(num, seed, **options)
        assert ((found[row] - expected).abs() <= 1e-5 * terms + 1e-30).all(), (layer, num)


GROUPS = [Layer(heads=2 * g, dim=8 * g, value_dim=8) for g in range(1, 17)]
WIDTHS = [Layer(dim=d, value_dim=dv) for d, dv in ((1, 1), (3, 9), (7, 33), (12, 20), (64, 64), (80, 65), (256, 256))]
WINDOWS = [Layer(window=w) for w in (2, 3, 7, BLOCK, BLOCK + 1, 100)]
LATENTS = [Layer(16, 1, 576, rank=512), Layer(5, 1, 41, rank=33), Layer(4, 1, 24, rank=16), Layer(1, 1, 3, rank=2)]
LAYERS = [*GROUPS, *WIDTHS, *WINDOWS, *LATENTS]


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_equals_a_float64_reference(layer) -> None:
    lengths = [n - 1 for n in LENGTHS]
    check(layer, lengths)
    check(layer, lengths[::-1], scale=0.3, sinks=random(layer.heads, seed=9) * 3)


def test_equals_a_float64_reference_for_random_shapes() -> None:
    rnd = random_numbers.Random(7)
    for _ in range(60):
        kv_heads, dim = rnd.randrange(1, 6), rnd.randrange(1, 140)
        layer = Layer(
            kv_heads * rnd.randrange(1, 9), kv_heads, dim, rnd.randrange(1, 140), rnd.choice((0, 0, 2, 30, 90))
        )
        check(layer, [rnd.randrange(0, 400) for _ in range(rnd.randrange(1, 5))])


def test_equals_a_float64_reference_on_a_long_context() -> None:
    check(Layer(8, 1, 256, 256), [1999, 3, 1024])
    check(Layer(9, 3, 64, 64), [1999, 64])


def test_as_accurate_as_torch() -> None:
    layer, ours, theirs = Layer(9, 3, 64, 64), 0.0, 0.0
    for num, seed in ((90, 0), (700, 3000), (1500, 6000)):
        expected, _ = layer.expected(num, seed)
        found, [slot] = run(layer, [num], [seed])
        keys, values = (t.transpose(0, 1)[None] for t in slot.read(1, 0, num + 1))
        torchs = functional.scaled_dot_product_attention(layer.query(seed).view(1, 3, 3, 64), keys, values)
        ours += float((found[0] - expected).abs().mean())
        theirs += float((torchs.view(9, 64) - expected).abs().mean())
    assert ours <= 1.1 * theirs


def test_weights_are_accurate_to_the_last_bits() -> None:
    # Two tokens: scores x and 0, values 1 and 0.
    layer = Layer(1, 1, 1, 1)
    rows = layer.attention()
    worst = 0.0
    for x in (*(-i / 8 for i in range(8 * 86)), -0.0, -1e-30, 1e-3, 20.0, 86.0):
        slot = layer.slot(1, 0)
        slot.write(1, 0, [torch.full((1, 1, 1), x), torch.ones(1, 1, 1)])
        one = rows.rows([slot], [1])
        one.add(1, torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1, 1))
        found = one.attend(1, torch.ones(1, 1, 1, 1), 1.0, None)
        expected = torch.tensor(x, dtype=torch.float32).double().sigmoid()
        worst = max(worst, float((found.double() - expected).abs() / expected))
    assert worst < 2e-7


@pytest.mark.parametrize("layer", LAYERS, ids=str)
def test_a_row_does_not_depend_on_its_company(layer) -> None:
    attention, lengths = layer.attention(), [n - 1 for n in LENGTHS]
    seeds = list(range(0, 2000 * len(lengths), 2000))
    together, _ = run(layer, lengths, seeds, attention=attention)
    for row in range(len(lengths)):
        alone, _ = run(layer, lengths[row : row + 1], seeds[row : row + 1], attention=attention)
        assert torch.equal(alone[0], together[row])
    backwards, _ = run(layer, lengths[::-1], seeds[::-1], attention=attention)
    assert torch.equal(backwards.flip(0), together)


@pytest.mark.parametrize("num_threads", [2, 3])
@pytest.mark.parametrize(
    "layer", [Layer(9, 3, 64, 64), Layer(8, 2, 80, 48, window=200), Layer(7, 1, 72, rank=64)], ids=str
)
def test_threads_change_nothing(layer, num_threads) -> None:
    lengths = [700, 64, 333, 0]
    assert 200 * layer.heads * layer.dim > MIN_PARALLEL // 2  # the keys of the first row alone
    attention, used = layer.attention(), []
    attend = attention.attend
    attention.attend = lambda call, threads: (used.append(threads), attend(call, threads))
    alone, _ = run(layer, lengths, attention=attention)
    assert torch.get_num_threads() == 1
    torch.set_num_threads(num_threads)
    try:
        for _ in range(20):
            assert torch.equal(run(layer, lengths, attention=attention)[0], alone)
        run(layer, [0], attention=attention)
        assert used == [1, *[num_threads] * 20, 1]
    finally:
        torch.set_num_threads(1)


def test_without_openmp_one_thread_does_all(monkeypatch) -> None:
    class Nothing:
        pass

    layer = Layer(9, 3, 64, 64)
    expected, _ = run(layer, [700, 40])
    monkeypatch.setattr(kernel_llvm.ctypes, "CDLL", lambda _name: Nothing())
    attend, _engine = kernel_attention._compile()
    serial = DecodeAttention(attend, layer.layout, {})
    torch.set_num_threads(2)
    try:
        assert torch.equal(run(layer, [700, 40], attention=serial)[0], expected)
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("layer", [Layer(), Layer(window=40), Layer(4, 1, 24, rank=16)], ids=str)
def test_nan_and_infinity_go_where_they_must(layer) -> None:
    lengths = [100, 100, 3]
    clean, _ = run(layer, lengths, [0, 0, 7000])

    def nan_in_one_query(query, _first, _second) -> None:
        query[1, 2, 0, 5] = torch.nan

    found, _ = run(layer, lengths, [0, 0, 7000], change=nan_in_one_query)
    assert found[1, 2].isnan().all()
    found[1, 2] = clean[1, 2]
    assert torch.equal(found, clean)

    def infinite_query(query, _first, _second) -> None:
        query[0, 0] = 0
        query[0, 0, 0, 0] = torch.inf

    found, _ = run(layer, lengths, [0, 0, 7000], change=infinite_query)
    assert found[0, 0].isnan().all() and torch.equal(found[1:], clean[1:])

    def nan_in_a_new_row(_query, first, _second) -> None:
        first[1, 0, 0, 3] = torch.nan

    found, _ = run(layer, lengths, [0, 0, 7000], change=nan_in_a_new_row)
    group = layer.heads // layer.kv_heads
    assert found[1, :group].isnan().all()
    assert torch.equal(found[1, group:], clean[1, group:]) and torch.equal(found[[0, 2]], clean[[0, 2]])


def test_infinite_scores_and_values() -> None:
    layer = Layer(2, 1, 4, 4)

    def attend(keys, values, sinks=None):
        slot = layer.slot(2, 0)
        slot.write(1, 0, [keys[:2, None], values[:2, None]])
        rows = layer.attention().rows([slot], [2])
        rows.add(1, keys[2:][None, None], values[2:][None, None])
        return rows.attend(1, torch.ones(1, 2, 1, 4), 1.0, sinks)[0, 0]

    keys, values = torch.zeros(3, 4), torch.tensor([[1.0] * 4, [2.0] * 4, [6.0] * 4])
    assert torch.equal(attend(keys, values), torch.full((2, 4), 3.0))
    keys[1] = -torch.inf
    assert torch.equal(attend(keys, values), torch.full((2, 4), 3.5))
    values[1, 2] = torch.nan  # 0 * NaN
    assert attend(keys, values).isnan().tolist() == [[False, False, True, False]] * 2
    values[1, 2] = 2
    keys[1] = torch.inf
    assert attend(keys, values).isnan().all()
    keys[:] = -torch.inf
    assert attend(keys, values).isnan().all()
    assert torch.equal(attend(keys, values, torch.zeros(2)), torch.zeros(2, 4))
    keys[:] = 1e30  # no overflow: the greatest score counts as 0
    assert torch.equal(attend(keys, values), torch.full((2, 4), 3.0))
    values[2, 1] = torch.inf
    assert attend(keys, values)[0].tolist() == [3.0, torch.inf, 3.0, 3.0]


def test_sinks() -> None:
    layer = Layer()
    plain, _ = run(layer, [70, 3])
    none = torch.full((layer.heads,), -torch.inf)
    assert torch.equal(run(layer, [70, 3], sinks=none)[0], plain)
    assert float(run(layer, [70, 3], sinks=none + torch.inf)[0].nan_to_num(7).min()) == 7
    assert torch.equal(run(layer, [70, 3], sinks=torch.full((layer.heads,), 1e4))[0], torch.zeros_like(plain))
    one = none.clone()
    one[4] = 2.0
    found, _ = run(layer, [70, 3], sinks=one)
    assert (found[:, 4].abs() < plain[:, 4].abs()).all()
    found[:, 4] = plain[:, 4]
    assert torch.equal(found, plain)


def test_what_the_kernels_do_not_do_is_left_alone() -> None:
    layer = Layer()
    query, pieces = layer.query(0), [p.transpose(0, 1)[None] for p in layer.rows(1, 500)]

    def attend(query=query, pieces=pieces, sinks=None):
        slot = layer.slot(5, 0)
        rows = layer.attention().rows([slot], [5])
        assert rows.attend(1, query, None, sinks) is None  # no new rows
        rows.add(1, *pieces)
        out = rows.attend(1, query, None, sinks)
        assert (out is None) == (rows.take(1) is not None)
        assert slot.read(1, 5, 6)[0].isnan().all() == (out is None)
        return out

    assert attend() is not None
    assert attend(query=query.double()) is None
    assert attend(pieces=[p.bfloat16() for p in pieces]) is None
    assert attend(query=query[:, :5]) is None
    assert attend(query=query.transpose(1, 3).contiguous().transpose(1, 3)) is None
    assert attend(pieces=[p[..., :8] for p in pieces]) is None
    assert attend(sinks=torch.zeros(6).double()) is None
    assert attend(sinks=torch.zeros(1)) is None
    fixed = (TensorSpec("conv0", (4, 3), "float32"),)
    assert DecodeAttention.make(StateLayout((StateSpec(0, "recurrent", fixed),)), {}) is None
    half = (TensorSpec("k", (2, 4), "bfloat16"), TensorSpec("v", (2, 4), "bfloat16"))
    assert DecodeAttention.make(StateLayout((StateSpec(0, "full", half),)), {}) is None


def test_inputs_of_any_strides() -> None:
    layer = Layer(6, 2, 16, 16)
    expected, _ = run(layer, [40, 7])
    slots = [layer.slot(40, 0), layer.slot(7, 2000)]
    query = torch.cat([layer.query(0), layer.query(2000)])
    pieces = [torch.stack(p).transpose(1, 2) for p in zip(layer.rows(1, 500), layer.rows(1, 2500), strict=True)]
    # As views of one projection of all heads: [B, 1, (6 + 2 + 2) * 16].
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in (query, *pieces)], dim=2)
    parts = [p.unflatten(2, (-1, 16)).transpose(1, 2) for p in fused.split([96, 32, 32], dim=2)]
    rows = layer.attention().rows(slots, [40, 7])
    rows.add(1, *parts[1:])
    assert torch.equal(rows.attend(1, parts[0], None, None)[:, 0], expected)


def test_without_llvm(monkeypatch) -> None:
    monkeypatch.setattr(decode_rows, "attention", Once(kernel_attention._compile, "no kernels"))
    monkeypatch.setitem(sys.modules, "llvmlite", None)
    monkeypatch.setitem(sys.modules, "llvmlite.binding", None)
    assert DecodeAttention.make(Layer().layout, {}) is None
    assert "llvmlite" in decode_rows.attention.reason
