"""Products of one tensor with packed weight matrices: what calls the machine code of kernel_code.py.

Threads are torch's own, as many as `torch.get_num_threads()` says. Knows matrices, no models. Used by kernels.py.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import functional

from common.engine.kernel_code import PLAN, ROWS, SEGMENT, STEPS, UNPACK_FROM, Kernels
from common.engine.kernel_llvm import MIN_PARALLEL
from common.engine.kernel_weights import PackedWeight
from common.engine.tape import recording

SCRATCH_BYTES = 128 << 10  # one block unpacked to float32: stays in a core's second-level cache
MAX_BLOCK_ROWS = 48
_NOTHING = torch.empty(0)


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
        self._scratch_bytes = block * row_bytes
        self._unpack_from = UNPACK_FROM[first.format]
        counts = [-(-size // block) for size in self.sizes]
        plan = dict(zip(PLAN, (sum(counts), block, first.data.shape[1], self._scratch_bytes), strict=True))
        slots = list(plan.values())
        for weight, bias, count in zip(weights, self._biases, counts, strict=True):
            values = (weight.data.data_ptr(), bias.data_ptr(), weight.num_rows, count)
            slots += dict(zip(SEGMENT, values, strict=True)).values()
        self._plan = (ctypes.c_int64 * len(slots))(*slots)
        self._plan_at = ctypes.addressof(self._plan)
        self._total = sum(self.sizes)
        self._min_parallel = -(-MIN_PARALLEL // (self._total * self._padded))

    def __deepcopy__(self, _memo: Any) -> Product:
        # Nothing in it changes, and the plan holds addresses.
        return self

    def __call__(self, x: torch.Tensor) -> list[torch.Tensor]:
        """x W^T + bias, [..., num_rows] for every matrix; x is float32 [..., K] on the CPU, of any strides.

        Raises:
            TypeError: x is of another dtype, on another device, or wants a gradient.
            ValueError: x has another number of columns.
        """
        tape = recording()
        if tape is None:
            return self._compute(x)
        with tape.native(self.bind, [x]) as outs:
            outs += self._compute(x)
        return outs

    def bind(self, x: torch.Tensor, *outs: torch.Tensor) -> Callable[[], object]:
        """The same call for good: from x to `outs` as they lie in memory, one after the other."""
        num_x = x.numel() // self.num_cols
        threads, scratch = self._threads(num_x), _shared.take(self._scratch_size(num_x))
        is_plain = self.num_cols == self._padded and x.is_contiguous()
        given = x if is_plain else _shared.rows(num_x, self.num_cols, self._padded)
        addresses = (given.data_ptr(), self._padded, num_x, outs[0].data_ptr(), scratch.data_ptr(), threads)
        run = functools.partial(self._run, self._plan_at, *addresses)
        target = given[:, : self.num_cols].view(x.shape) if not is_plain else None

        def call(_kept: torch.Tensor = scratch) -> None:
            if target is not None:
                target.copy_(x)
            run()

        return run if is_plain and not scratch.numel() else call

    def _compute(self, x: torch.Tensor) -> list[torch.Tensor]:
        if not (x.dtype is torch.float32 and x.is_cpu) or x.requires_grad:
            raise TypeError(f"the kernels compute float32 on the CPU without gradients, not {x.dtype} on {x.device}")
        *shape, cols = x.shape
        if cols != self.num_cols:
            raise ValueError(f"x has {cols} columns, the weights have {self.num_cols}")
        num_x, stride = x.numel() // cols, self._padded
        if cols != stride:
            x = functional.pad(x, (0, stride - cols)).contiguous()
        elif not x.is_contiguous():
            x = x.contiguous()
        scratch = self._scratch(num_x)
        if len(self.sizes) == 1:
            outs = [torch.empty(*shape, self.sizes[0])]
        else:
            outs = _parts(torch.empty(num_x * self._total), shape, self.sizes)
        if num_x:
            addresses = (x.data_ptr(), stride, num_x, outs[0].data_ptr(), scratch.data_ptr())
            self._run(self._plan_at, *addresses, self._threads(num_x))
        return outs

    def _threads(self, num_x: int) -> int:
        return torch.get_num_threads() if num_x >= self._min_parallel else 1

    def _scratch(self, num_x: int) -> torch.Tensor:
        size = self._scratch_size(num_x)
        return torch.empty(size, dtype=torch.uint8) if size else _NOTHING

    def _scratch_size(self, num_x: int) -> int:
        """Bytes for unpacked blocks, one for each thread; none for few rows."""
        return self._threads(num_x) * self._scratch_bytes if num_x >= self._unpack_from else 0


class _Shared(threading.local):
    """Memory that bound calls use one after the other: all those that a thread makes, whatever forward they are of."""

    def __init__(self) -> None:
        self._scratch = _NOTHING
        self._rows: dict[tuple[int, int], torch.Tensor] = {}

    def take(self, num_bytes: int) -> torch.Tensor:
        """At least `num_bytes`; who holds a smaller one from earlier keeps it."""
        if num_bytes > self._scratch.numel():
            self._scratch = torch.empty(num_bytes, dtype=torch.uint8)
        return self._scratch if num_bytes else _NOTHING

    def rows(self, num: int, cols: int, padded: int) -> torch.Tensor:
        """[num, padded] with zeros from column `cols` on; the others are anybody's."""
        found = self._rows.get((cols, padded))
        if found is None or len(found) < num:
            found = self._rows[cols, padded] = torch.zeros(max(num, 16), padded)
        return found[:num]


_shared = _Shared()


def _parts(out: torch.Tensor, shape: list[int], sizes: list[int]) -> list[torch.Tensor]:
    """Consecutive parts of `out`, each contiguous [*shape, size]: one torch call per part."""
    counts = [math.prod(shape[i:]) for i in range(len(shape) + 1)]
    parts, start = [], 0
    for size in sizes:
        parts.append(out.as_strided((*shape, size), (*(n * size for n in counts[1:]), 1), start))
        start += counts[0] * size
    return parts
