"""Weight matrices in the layouts that kernel_code.py reads.

"float32"; "bfloat16" for weights that are bfloat16 numbers; "int8", 32 weights of a row sharing a scale; "int4", 32
sharing a scale and an offset. Many checkpoints are one of the last three spelt out as float32 (those trained in
bfloat16, those imported from GGUF), and then a product with the small form has the same bits as one with the large.
Knows matrices, no models. Used by kernel_product.py and kernels.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from common.engine.kernel_code import CHUNK_BYTES, ROWS, STEPS
from common.engine.kernel_llvm import LANES

# From small to large; float32 holds everything.
FORMATS = ("int4", "int8", "bfloat16", "float32")
GROUP = STEPS["int8"]
# Largest magnitude of a level in the symmetric block formats of GGUF: Q8_0, Q5_0, Q4_0. Their scales are float16.
_LEVELS = (127, 16, 8)
_TINY = torch.finfo(torch.float32).tiny
_SLAB = 1 << 18  # weights packed or unpacked at a time: temporaries stay in the cache
_SAMPLE = 32 * ROWS  # rows that tell quickly whether a format is worth a try


class InexactError(ValueError):
    """The format cannot hold these weights without changing them."""


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [num_rows, num_cols]. `data` is uint8 [tiles, chunks, chunk bytes], padded with zeros."""

    format: str
    data: torch.Tensor
    num_rows: int
    num_cols: int

    @classmethod
    def pack(cls, weight: torch.Tensor, format_: str, *, can_round: bool = False) -> PackedWeight:
        """A packed copy of float32 `weight` [N, K]; with `can_round`, "int8" takes the nearest levels.

        Raises:
            InexactError: the format would change the weights, or they are not finite and so have no levels.
        """
        rows, cols = weight.shape
        step = STEPS[format_]
        chunks = -(-cols // step)
        data = torch.empty(-(-rows // ROWS), chunks, CHUNK_BYTES[format_], dtype=torch.uint8)
        size = _slab_rows(cols)
        for start in range(0, rows, size):
            slab = weight[start : start + size]
            tiles = -(-len(slab) // ROWS)
            if slab.shape != (tiles * ROWS, chunks * step):
                slab = functional.pad(slab, (0, chunks * step - cols, 0, tiles * ROWS - len(slab)))
            target = data[start // ROWS : start // ROWS + tiles]
            tiled = slab.reshape(tiles, ROWS, chunks, step)
            if format_ == "int8":
                _pack_int8(tiled, target, can_round)
            else:
                _PACK[format_](tiled, target)
        return cls(format_, data, rows, cols)

    @classmethod
    def exact(cls, weight: torch.Tensor) -> PackedWeight:
        """Float32 `weight` [N, K] in the smallest format that changes nothing."""
        for format_ in FORMATS[:-1]:
            try:
                cls.pack(weight[:_SAMPLE], format_)
                return cls.pack(weight, format_)
            except InexactError:
                continue
        return cls.pack(weight, FORMATS[-1])

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, float32 [n, K]; `numbers` is int64 [n] within [0, num_rows)."""
        tiles, row = numbers // ROWS, numbers % ROWS
        return _ROWS[self.format](self.data[tiles], row).flatten(1)[:, : self.num_cols]

    def dense(self) -> torch.Tensor:
        """The matrix as the kernels see it, float32 [N, K]: a copy."""
        numbers = torch.split(torch.arange(self.num_rows), _slab_rows(self.num_cols))
        return torch.cat([self.rows(part) for part in numbers])


def _slab_rows(cols: int) -> int:
    return max(ROWS, _SLAB // cols // ROWS * ROWS)


# Below, `weight` is float32 [tiles, ROWS, chunks, step]; `target` and `chunks` are uint8 [tiles or n, chunks, bytes].


def _pack_float32(weight: torch.Tensor, target: torch.Tensor) -> None:
    _typed(target, torch.float32, ROWS, LANES).copy_(weight.transpose(1, 2))


def _pack_bfloat16(weight: torch.Tensor, target: torch.Tensor) -> None:
    bits = weight.view(torch.int32)
    if (bits & 0xFFFF).any():
        raise InexactError("the weights are not exact in bfloat16")
    pairs = (bits >> 16).view(*bits.shape[:3], 2, LANES)
    _typed(target, torch.int16, ROWS, LANES, 2).copy_(pairs.permute(0, 2, 1, 4, 3))


def _pack_int8(weight: torch.Tensor, target: torch.Tensor, can_round: bool) -> None:
    peak = weight.abs().amax(3)
    if not peak.isfinite().all():
        raise InexactError("the weights are not finite")
    scale = peak / _LEVELS[0] if can_round else _exact_scale(weight, peak)
    levels = (weight / scale.clamp_min(_TINY)[..., None]).round_().clamp_(-_LEVELS[0], _LEVELS[0])
    _typed(target[..., ROWS * 4 :], torch.int8, ROWS, GROUP).copy_(levels.transpose(1, 2))
    _typed(target[..., : ROWS * 4], torch.uint8, ROWS, 4).copy_(_as_bytes(scale))


def _exact_scale(weight: torch.Tensor, peak: torch.Tensor) -> torch.Tensor:
    scale, is_open = torch.zeros_like(peak), torch.ones_like(peak, dtype=torch.bool)
    for levels in _LEVELS:
        tried = (peak / levels).half().float()
        found = (weight / tried.clamp_min(_TINY)[..., None]).round_().mul_(tried[..., None])
        is_same = (found == weight).all(3)
        scale = torch.where(is_same & is_open, tried, scale)
        is_open &= ~is_same
        if not is_open.any():
            return scale
    raise InexactError("the weights are not exact in int8")


def _pack_int4(weight: torch.Tensor, target: torch.Tensor) -> None:
    low, high = weight.aminmax(dim=3)
    scale = ((high - low) / 15).half().float()  # as in GGUF's Q4_1; times a level of 4 bits it is exact
    levels = ((weight - low[..., None]) / scale.clamp_min(_TINY)[..., None]).round_().clamp_(0, 15)
    if not torch.equal(levels * scale[..., None] + low[..., None], weight):
        raise InexactError("the weights are not exact in int4")
    halves = levels.to(torch.uint8).view(*levels.shape[:3], -1, 2, LANES)
    both = halves[..., 0, :] | (halves[..., 1, :] << 4)
    _typed(target[..., ROWS * 8 :], torch.uint8, ROWS, GROUP // 2 // LANES, LANES).copy_(both.transpose(1, 2))
    _typed(target[..., : ROWS * 4], torch.uint8, ROWS, 4).copy_(_as_bytes(scale))
    _typed(target[..., ROWS * 4 : ROWS * 8], torch.uint8, ROWS, 4).copy_(_as_bytes(low))


def _rows_float32(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return _typed(chunks, torch.float32, ROWS, LANES)[torch.arange(len(row)), :, row]


def _rows_bfloat16(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    pairs = _typed(chunks, torch.int16, ROWS, LANES, 2)[torch.arange(len(row)), :, row]
    return (pairs.transpose(2, 3).to(torch.int32) << 16).view(torch.float32)


def _rows_int8(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    at = torch.arange(len(row))
    scale = _typed(chunks[..., : ROWS * 4].contiguous(), torch.float32, ROWS)[at, :, row]
    levels = _typed(chunks[..., ROWS * 4 :], torch.int8, ROWS, GROUP)[at, :, row]
    return levels.float() * scale[..., None]


def _rows_int4(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    at = torch.arange(len(row))
    scale = _typed(chunks[..., : ROWS * 4].contiguous(), torch.float32, ROWS)[at, :, row]
    low = _typed(chunks[..., ROWS * 4 : ROWS * 8].contiguous(), torch.float32, ROWS)[at, :, row]
    both = _typed(chunks[..., ROWS * 8 :], torch.uint8, ROWS, GROUP // 2 // LANES, LANES)[at, :, row]
    levels = torch.stack([both & 15, both >> 4], 3).flatten(2).float()
    return levels * scale[..., None] + low[..., None]


def _typed(data: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The last dimension's bytes as [*shape] of `dtype`."""
    typed = data.view(dtype)
    return typed.view(*typed.shape[:2], *shape)


def _as_bytes(values: torch.Tensor) -> torch.Tensor:
    """[tiles, ROWS, chunks] as uint8 [tiles, chunks, ROWS, 4]."""
    return values.transpose(1, 2).contiguous().view(torch.uint8).unflatten(2, (ROWS, 4))  # type: ignore[no-any-return,no-untyped-call]


_PACK = {"float32": _pack_float32, "bfloat16": _pack_bfloat16, "int4": _pack_int4}
_ROWS = {"float32": _rows_float32, "bfloat16": _rows_bfloat16, "int8": _rows_int8, "int4": _rows_int4}
