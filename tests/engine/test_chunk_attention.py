"""Attention of a chunk by machine code: against torch, and the same bits on any number of threads."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from common.engine import kernel_chunk
from common.engine.chunk_attention import ChunkAttention
from common.engine.kernel_llvm import LANES

# heads, kv heads, key dim, value dim
SHAPES = [
    (9, 3, 64, 64),
    (4, 1, 256, 256),
    (2, 2, 24, 32),
    (16, 1, 40, 32),
    (8, 8, 16, 16),
    (7, 7, 100, 80),
    (1, 1, 1, 16),
]
# earlier tokens, tokens of the chunk
SIZES = [(0, 1), (0, 2), (0, 64), (0, 65), (1, 63), (63, 33), (200, 100), (130, 1), (1000, 7)]


@pytest.fixture(scope="module")
def chunks() -> ChunkAttention:
    made = ChunkAttention.make()
    assert made is not None, kernel_chunk.chunk_kernel.reason
    return made


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def tensors(shape: tuple[int, int, int, int], size: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    heads, kv_heads, key_dim, value_dim = shape
    start, length = size
    query = random(heads, length, key_dim, seed=1) * 2
    return query, random(start + length, kv_heads, key_dim, seed=2), random(start + length, kv_heads, value_dim, seed=3)


def by_torch(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    window: int = 0,
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64; [c, heads, value dim]."""
    query, keys, values = query.double(), keys.double(), values.double()
    group, num, length = query.shape[0] // keys.shape[1], keys.shape[0], query.shape[1]
    keys, values = (t.transpose(0, 1).repeat_interleave(group, dim=0) for t in (keys, values))
    scores = query @ keys.transpose(1, 2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    position, key = torch.arange(num - length, num)[:, None], torch.arange(num)
    hidden = (key > position) | ((key <= position - window) if window else torch.tensor(False))
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.double().view(-1, 1, 1).expand(-1, length, 1)
        scores = torch.cat([scores, extra], dim=-1)
        values = functional.pad(values, (0, 0, 0, 1))
    return (torch.softmax(scores, dim=-1) @ values).transpose(0, 1)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", SIZES)
def test_equals_torch(chunks, shape, size):
    query, keys, values = tensors(shape, size)
    out = chunks.attend(query, keys, values, window=0, scale=None, sinks=None)
    torch.testing.assert_close(out.double(), by_torch(query, keys, values), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 16, 63, 64, 65, 500])
@pytest.mark.parametrize("size", SIZES)
def test_windows(chunks, window, size):
    query, keys, values = tensors(SHAPES[0], size)
    out = chunks.attend(query, keys, values, window=window, scale=0.3, sinks=None)
    torch.testing.assert_close(out.double(), by_torch(query, keys, values, window, 0.3), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
def test_sinks(chunks, size):
    query, keys, values = tensors(SHAPES[0], size)
    sinks = torch.linspace(-3, 8, 9)
    sinks[4] = -torch.inf
    out = chunks.attend(query, keys, values, window=20, scale=None, sinks=sinks)
    torch.testing.assert_close(out.double(), by_torch(query, keys, values, 20, None, sinks), rtol=1e-4, atol=1e-5)


def test_a_long_context_does_not_wear_down(chunks):
    """100,000 equal weights: the sum over keys is one of blocks, whose roundings do not pile up."""
    num, length = 100_000, 6
    query, keys = torch.zeros(2, length, 16), torch.zeros(num, 1, 16)
    values = torch.full((num, 1, 16), 0.1)
    out = chunks.attend(query, keys, values, window=0, scale=None, sinks=None)
    torch.testing.assert_close(out, torch.full((length, 2, 16), 0.1), rtol=5e-5, atol=0)


def test_strides_of_a_models_tensors_and_of_latents(chunks):
    base = random(1, 70, 4, 48, seed=4)
    query = base.transpose(1, 2)[0]  # [heads, c, dim], heads inside tokens
    rows = random(200, 1, 48, seed=5)
    values = rows[..., :32]
    assert not query.is_contiguous()
    out = chunks.attend(query, rows, values, window=0, scale=None, sinks=None)
    torch.testing.assert_close(out.double(), by_torch(query, rows, values), rtol=1e-4, atol=1e-5)


def test_threads_change_no_bit(chunks):
    query, keys, values = tensors(SHAPES[0], (300, 200))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(chunks.attend(query, keys, values, window=0, scale=None, sinks=None))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_nothing_outside_the_rows_is_read(chunks):
    query, keys, values = tensors(SHAPES[0], (10, 20))
    room = [torch.full((90, *t.shape[1:]), torch.nan) for t in (keys, values)]
    for place, t in zip(room, (keys, values), strict=True):
        place[30:60] = t
    expected = chunks.attend(query, keys, values, window=0, scale=None, sinks=None)
    own = chunks.attend(query, *(place[30:60] for place in room), window=0, scale=None, sinks=None)
    assert torch.equal(own, expected)


def test_nan_and_large_scores_go_the_way_of_ieee(chunks):
    query, keys, values = tensors(SHAPES[0], (0, 70))
    query[0, 5, 3] = torch.nan
    out = chunks.attend(query, keys, values, window=0, scale=None, sinks=None)
    assert out[5, 0].isnan().all() and not out[:5].isnan().any() and not out[5, 1:].isnan().any()
    query, keys, values = tensors(SHAPES[0], (0, 70))
    out = chunks.attend(query * 1e4, keys, values, window=0, scale=None, sinks=None)
    torch.testing.assert_close(out.double(), by_torch(query * 1e4, keys, values), rtol=1e-3, atol=1e-5)


def test_what_torch_does(chunks):
    query, keys, values = tensors(SHAPES[0], (3, 5))
    options = {"window": 0, "scale": None, "sinks": None}
    assert chunks.attend(query.double(), keys, values, **options) is None
    assert chunks.attend(query.bfloat16(), keys, values, **options) is None
    assert chunks.attend(query, keys.bfloat16(), values.bfloat16(), **options) is None
    assert chunks.attend(query, keys, values[..., : LANES - 1], **options) is None
    assert chunks.attend(query[:8], keys, values, **options) is None
    assert chunks.attend(query, keys, values, window=0, scale=None, sinks=torch.zeros(3)) is None
