"""Attention of a chunk in one call of the machine code of kernel_chunk.py. Engine thread only; float32 on the CPU.

What the kernel does not do (`attend` gives None) is left to torch. Knows tensors, no slots and no models. Made by the
runner, used by attention.py and decode_rows.py.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass

import torch

from common.engine.kernel_chunk import CALL, UNIT_ROWS, Attend, chunk_kernel, scratch_floats
from common.engine.kernel_llvm import LANES, MIN_PARALLEL

_RECORD = struct.Struct(f"={len(CALL)}q")


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """What calls for one chunk and layers of one shape have in common. `num`: tokens up to the chunk's last."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int
    num: int
    length: int

    @property
    def is_served(self) -> bool:
        """Whether the kernel computes such a layer."""
        return self.value_dim % LANES == 0 and self.heads % self.kv_heads == 0

    @property
    def threads(self) -> int:
        """How many are worth it."""
        seen = min(self.num, self.window + self.length) if self.window else self.num
        return torch.get_num_threads() if self.length * seen * self.heads * self.key_dim >= MIN_PARALLEL else 1


class ChunkAttention:
    """The kernel and its memory."""

    def __init__(self, attend: Attend) -> None:
        self._attend = attend
        self._record = (ctypes.c_int64 * len(CALL))()
        self._at = ctypes.addressof(self._record)
        self._scratch = torch.empty(0)
        self._no_sinks = torch.empty(0)

    @classmethod
    def make(cls) -> ChunkAttention | None:
        """None where there are no kernels."""
        made = chunk_kernel()
        return None if made is None else cls(made[0])

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        window: int,
        scale: float | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """The last c of n tokens attend to all of them up to themselves; with a window, to the last `window`.

        query [heads, c, key dim], keys [n, kv heads, key dim], values [n, kv heads, value dim]; `sinks` [heads]: extra
        scores that take weight and give nothing. Returns [c, heads, value dim], or None when this is not something that
        the kernel does.
        """
        heads, length, key_dim = query.shape
        num, kv_heads, value_dim = values.shape
        sizes = ChunkSizes(heads, kv_heads, key_dim, value_dim, window, num, length)
        if not _is_plain(query, keys, values) or not sizes.is_served:
            return None
        if sinks is None:
            sinks = self._none(heads)
        elif not _is_plain(sinks) or sinks.numel() != heads:
            return None
        out = torch.empty(length, heads, value_dim)
        # The first row of keys stands for position 0: only distances count.
        places = (
            keys.data_ptr(), keys.stride(0), keys.stride(1), values.data_ptr(), values.stride(0), values.stride(1),
            query.data_ptr(), query.stride(1), query.stride(0), sinks.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        self.run(sizes, key_dim**-0.5 if scale is None else scale, places)
        return out

    def run(self, sizes: ChunkSizes, scale: float, places: tuple[int, ...]) -> None:
        """Attend from and to addresses, in the order of CALL: keys of position 0 and their strides to `out`."""
        group = sizes.heads // sizes.kv_heads
        unit_tokens = min(sizes.length, max(1, UNIT_ROWS // group))
        size = scratch_floats(unit_tokens * group, sizes.key_dim, sizes.value_dim)
        threads = sizes.threads
        if self._scratch.numel() < threads * size:
            self._scratch = torch.empty(threads * size)
        [scale_bits] = struct.unpack("<I", struct.pack("<f", scale))
        _RECORD.pack_into(
            self._record, 0, 0, 0, -(-sizes.length // unit_tokens) * sizes.kv_heads, sizes.kv_heads, group,
            sizes.key_dim, sizes.value_dim, sizes.window, scale_bits, sizes.num - sizes.length, sizes.length,
            unit_tokens, *places, self._scratch.data_ptr(), size,
        )  # fmt: skip
        self._attend(self._at, threads)

    def _none(self, heads: int) -> torch.Tensor:
        if self._no_sinks.numel() < heads:
            self._no_sinks = torch.full((heads,), -torch.inf)
        return self._no_sinks


def _is_plain(*tensors: torch.Tensor) -> bool:
    return all(t.dtype is torch.float32 and t.is_cpu and t.stride(-1) == 1 for t in tensors)
