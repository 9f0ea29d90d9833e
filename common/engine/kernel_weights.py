"""Weight matrices in the layout that kernel_code.py reads, and the products with them.

Formats: "float32"; "bfloat16", for weights that are exactly bfloat16 numbers (half the bytes, the same results bit for
bit); "int8", 32 weights of a row sharing a float32 scale. Knows matrices, no models. Used by kernels.py.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from common.engine.kernel_code import CHUNK_BYTES, LANES, PLAN, ROWS, SEGMENT, STEPS, UNPACK_FROM, Kernels

SCRATCH_BYTES = 128 << 10  # one block unpacked to float32: stays in a core's second-level cache
MAX_BLOCK_ROWS = 48
# Below so many multiplications, waking a second thread costs more than it saves.
MIN_PARALLEL = 1 << 17
_SLAB = ROWS * 1024  # rows packed or unpacked at a time, so that temporaries stay small


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix [num_rows, num_cols]. `data` is uint8 [tiles, chunks, chunk bytes], padded with zeros."""

    format: str
    data: torch.Tensor
    num_rows: int
    num_cols: int

    @classmethod
    def pack(cls, weight: torch.Tensor, format_: str) -> PackedWeight:
        """A packed copy of float32 `weight` [N, K].

        Raises:
            ValueError: the weights are not exact in bfloat16, or not finite and so have no int8 scale.
        """
        rows, cols = weight.shape
        chunks = -(-cols // STEPS[format_])
        data = torch.empty(-(-rows // ROWS), chunks, CHUNK_BYTES[format_], dtype=torch.uint8)
        for start in range(0, rows, _SLAB):
            slab = weight[start : start + _SLAB]
            tiles, width = -(-len(slab) // ROWS), chunks * STEPS[format_]
            if slab.shape != (tiles * ROWS, width):
                slab = functional.pad(slab, (0, width - cols, 0, tiles * ROWS - len(slab)))
            target = data[start // ROWS : start // ROWS + tiles]
            _PACK[format_](slab.reshape(tiles, ROWS, chunks, STEPS[format_]), target)
        return cls(format_, data, rows, cols)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Rows of the matrix, float32 [n, K]; `numbers` is int64 [n] within [0, num_rows)."""
        tiles, row = numbers // ROWS, numbers % ROWS
        return _ROWS[self.format](self.data[tiles], row).flatten(1)[:, : self.num_cols]

    def dense(self) -> torch.Tensor:
        """The matrix as the kernels see it, float32 [N, K]: a copy."""
        numbers = torch.split(torch.arange(self.num_rows), _SLAB)
        return torch.cat([self.rows(part) for part in numbers])


def is_bfloat16(weight: torch.Tensor) -> bool:
    """Whether every float32 weight is a bfloat16 number."""
    return all(not (slab.contiguous().view(torch.int32) & 0xFFFF).any() for slab in torch.split(weight, _SLAB))


def _pack_float32(weight: torch.Tensor, target: torch.Tensor) -> None:
    _typed(target, torch.float32, ROWS, LANES).copy_(weight.transpose(1, 2))


def _pack_bfloat16(weight: torch.Tensor, target: torch.Tensor) -> None:
    bits = weight.view(torch.int32)
    if (bits & 0xFFFF).any():
        raise ValueError("the weights are not exact in bfloat16")
    pairs = (bits >> 16).view(*bits.shape[:3], 2, LANES)
    _typed(target, torch.int16, ROWS, LANES, 2).copy_(pairs.permute(0, 2, 1, 4, 3))


def _pack_int8(weight: torch.Tensor, target: torch.Tensor) -> None:
    scale = weight.abs().amax(3) / 127
    if not scale.isfinite().all():
        raise ValueError("the weights are not finite")
    levels = (weight / scale.clamp_min(torch.finfo(torch.float32).tiny)[..., None]).round_().clamp_(-127, 127)
    _typed(target[..., ROWS * 4 :], torch.int8, ROWS, STEPS["int8"]).copy_(levels.transpose(1, 2))
    target[..., : ROWS * 4].copy_(scale.transpose(1, 2).contiguous().view(torch.uint8))


def _rows_float32(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return _typed(chunks, torch.float32, ROWS, LANES)[torch.arange(len(row)), :, row]


def _rows_bfloat16(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    pairs = _typed(chunks, torch.int16, ROWS, LANES, 2)[torch.arange(len(row)), :, row]
    return (pairs.transpose(2, 3).to(torch.int32) << 16).view(torch.float32)


def _rows_int8(chunks: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    at = torch.arange(len(row))
    scale = chunks[..., : ROWS * 4].contiguous().view(torch.float32)[at, :, row]
    levels = _typed(chunks[..., ROWS * 4 :], torch.int8, ROWS, STEPS["int8"])[at, :, row]
    return levels.float() * scale[..., None]


def _typed(data: torch.Tensor, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """The last dimension's bytes as [*shape] of `dtype`."""
    typed = data.view(dtype)
    return typed.view(*typed.shape[:2], *shape)


_PACK = {"float32": _pack_float32, "bfloat16": _pack_bfloat16, "int8": _pack_int8}
_ROWS = {"float32": _rows_float32, "bfloat16": _rows_bfloat16, "int8": _rows_int8}


class Product:
    """Products of one x with several matrices of the same format and width, in one call. Safe on several threads."""

    def __init__(
        self, kernels: Kernels, weights: Sequence[PackedWeight], biases: Sequence[torch.Tensor | None]
    ) -> None:
        """`biases` are float32 [num_rows] each.

        Raises:
            ValueError: the formats or widths differ.
        """
        first = weights[0]
        if any((w.format, w.num_cols) != (first.format, first.num_cols) for w in weights):
            raise ValueError("matrices of one product have the same format and number of columns")
        self.weights = tuple(weights)
        self.num_cols = first.num_cols
        self.sizes = [w.num_rows for w in weights]
        self._run = kernels.entries[first.format]
        self._biases = [
            torch.zeros(w.num_rows) if bias is None else bias.detach().contiguous()
            for w, bias in zip(weights, biases, strict=True)
        ]
        self._padded = first.data.shape[1] * STEPS[first.format]
        row_bytes = self._padded * 4
        block = max(ROWS, min(MAX_BLOCK_ROWS, SCRATCH_BYTES // row_bytes // ROWS * ROWS))
        self._scratch_bytes = block * row_bytes if first.format != "float32" else 0
        counts = [-(-size // block) for size in self.sizes]
        plan = dict(zip(PLAN, (sum(counts), block, first.data.shape[1], self._scratch_bytes), strict=True))
        slots = list(plan.values())
        for weight, bias, count in zip(weights, self._biases, counts, strict=True):
            values = (weight.data.data_ptr(), bias.data_ptr(), weight.num_rows, count)
            slots += dict(zip(SEGMENT, values, strict=True)).values()
        self._plan = (ctypes.c_int64 * len(slots))(*slots)
        self._plan_at = ctypes.addressof(self._plan)
        self._min_parallel = -(-MIN_PARALLEL // (sum(self.sizes) * self._padded))

    def __deepcopy__(self, _memo: Any) -> Product:
        # Nothing in it changes, and the plan holds addresses.
        return self

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x W^T + bias for every matrix; x is float32 [M, K] on the CPU."""
        num_x, cols = x.shape
        if cols != self.num_cols:
            raise ValueError(f"x has {cols} columns, the weights have {self.num_cols}")
        if cols != self._padded:
            x = functional.pad(x, (0, self._padded - cols))
        elif x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(num_x * sum(self.sizes))
        threads = torch.get_num_threads() if num_x >= self._min_parallel else 1
        scratch = None
        if num_x >= UNPACK_FROM and self._scratch_bytes:
            scratch = torch.empty(threads * self._scratch_bytes, dtype=torch.uint8)
        if num_x:
            at = scratch.data_ptr() if scratch is not None else 0
            self._run(self._plan_at, x.data_ptr(), x.stride(0), num_x, out.data_ptr(), at, threads)
        if len(self.sizes) == 1:
            return [out.view(num_x, self.sizes[0])]
        parts = torch.split(out, [num_x * size for size in self.sizes])
        return [part.view(num_x, size) for part, size in zip(parts, self.sizes, strict=True)]
