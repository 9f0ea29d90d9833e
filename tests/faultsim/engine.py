"""The fake engine (common/fake.py) on a thread that is only pretended, and what its state and tokens must be.

The real LocalBackend, EngineWorker and Scheduler run; a step takes virtual time, and what it hands out while it
computes comes to the event loop at the instant at which the real thread would have handed it out.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.random  # not at first use: that draws from `secrets`

from common.errors import EngineDead
from common.fake import FakeExecutor, FakeOptions, FakeSlot
from common.layout import BLOCK_TOKENS, ModelInfo, StateLayout
from common.local_backend import LocalBackend
from common.local_outputs import LocalSource
from common.request import SamplingParams
from common.sched.sequence import Sequence
from common.state_cache import StateCache
from common.state_parts import group_layouts
from common.worker import EngineWorker, WorkerOptions
from tests.faultsim.loop import SimLoop

VOCAB = 1000
MAX_CONTEXT = 512


@dataclass(frozen=True)
class Model:
    """A layout. `is_plain`: its rows compress, so that segments travel as zstd."""

    num_layers: int = 2
    window_layers: int = 0
    window: int = 12
    head_dim: int = 8
    kv_dtype: str = "float32"
    is_plain: bool = False
    chunk_tokens: int = 32


@cache
def _prototype(model: Model) -> FakeExecutor:
    options = FakeOptions(
        num_layers=model.num_layers,
        num_heads=1,
        head_dim=model.head_dim,
        window_layers=model.window_layers,
        window=model.window,
        kv_dtype=model.kv_dtype,
        vocab_size=VOCAB,
        max_context=MAX_CONTEXT,
        room=model.chunk_tokens,
    )
    executor = FakeExecutor(options)
    if model.is_plain:
        executor._noise = np.zeros_like(executor._noise)
    return executor


def layout_of(model: Model) -> StateLayout:
    return _prototype(model).facts.layout


class _Wake:
    """The event that wakes the engine's thread: here it has the thread's next turn scheduled."""

    def __init__(self, worker: SimWorker) -> None:
        self._worker = worker

    def set(self) -> None:
        self._worker.wake()

    def clear(self) -> None:
        """There is nothing to forget."""

    def wait(self, timeout: float | None = None) -> bool:
        self._worker.is_waiting = True
        return True  # its engine needs no warm-up, for which alone the real one waits with a timeout


class SimWorker(EngineWorker):
    """Turns of the real worker as callbacks. Each ends when its thread would come to an end of it."""

    def __init__(self, factory: Callable[[], Any], options: WorkerOptions, loop: SimLoop) -> None:
        super().__init__(factory, options)
        self._sim = loop
        self._wake: Any = _Wake(self)
        self.is_waiting = True

    async def start(self, on_death: Callable[[EngineDead], None]) -> None:
        self._loop: Any = asyncio.get_running_loop()
        self._on_death = on_death
        self._build()
        self.is_alive = True

    async def close(self) -> None:
        if self.is_alive:
            self._is_closing, self.is_alive = True, False
            self.call(self._on_death, EngineDead("the engine is closed"))

    def wake(self) -> None:
        if self.is_waiting and not self._is_closing:
            self.is_waiting = False
            self._sim.at(self._sim.now + 5e-5, self._one_turn)

    def _one_turn(self) -> None:
        if self._is_closing:
            return
        self._sim.engine_s = 0.0
        try:
            self._turn()
        finally:
            took_s, self._sim.engine_s = self._sim.engine_s, 0.0
        if not self.is_waiting:
            self._sim.at(self._sim.now + took_s + 1e-5, self._one_turn)

    def call(self, function: Callable[[Any], None], argument: Any) -> None:
        self._sim.at(self._sim.now + self._sim.engine_s, function, argument)


def make_backend(
    loop: SimLoop,
    model: Model,
    *,
    prefill_tokens_per_s: float,
    decode_tokens_per_s: float = 50.0,
    cache_blocks: int = 0,
) -> LocalBackend:
    """A backend that is not started yet. `cache_blocks`: so many blocks fit its prefix cache, 0: it has none."""
    prototype = _prototype(model)

    def sleep(seconds: float) -> None:
        loop.engine_s += seconds

    executor = copy.copy(prototype)
    executor.options = replace(
        prototype.options, prefill_tokens_per_s=prefill_tokens_per_s, decode_tokens_per_s=decode_tokens_per_s
    )
    executor._clock, executor._sleep = loop.monotonic, sleep
    options = WorkerOptions(chunk_tokens=model.chunk_tokens, segment_bytes=1 << 14)

    def make_cache(info: ModelInfo) -> StateCache | None:
        limits = {g.group: cache_blocks * BLOCK_TOKENS * sum(g.row_bytes) for g in group_layouts(info.layout).values()}
        return StateCache(info.layout, limits) if cache_blocks else None

    backend = LocalBackend(lambda: executor, options, make_cache)
    backend.worker = SimWorker(lambda: executor, options, loop)
    return backend


# ---- what must come out


@lru_cache(256)
def _expected_slot(model: Model, tokens: tuple[int, ...], num_more: int) -> tuple[FakeSlot, tuple[int, ...]]:
    """A slot that holds the state of these tokens, computed at once, and the tokens that follow."""
    prototype = _prototype(model)
    slot = FakeSlot(layout_of(model), len(tokens) + num_more + 1, room=len(tokens) + num_more + 1)
    seq = Sequence(0, None, list(tokens), slot, SamplingParams(max_tokens=num_more, temperature=0.0))
    for layer in range(len(layout_of(model).states)):
        prototype._write(seq, layer, 0, len(tokens))
    out = []
    for _ in range(num_more):
        out.append(prototype._decode_row(seq).token_id)
        seq.tokens.append(out[-1])
    return slot, tuple(out)


def source_of(model: Model, tokens: tuple[int, ...]) -> LocalSource:
    """The state of these tokens, as a decoded holds it that has them."""
    return LocalSource(layout_of(model), _expected_slot(model, tokens, 0)[0], model.chunk_tokens, 1 << 14)


def expected_tokens(model: Model, prompt: tuple[int, ...], num_output: int) -> tuple[int, ...]:
    """Greedy output, whatever the route."""
    return _expected_slot(model, prompt, num_output)[1]


def wrong_rows(model: Model, slot: FakeSlot, tokens: tuple[int, ...], start: int, stop: int) -> str:
    """ "" when the slot holds what a continuation at `stop` needs beyond [0, start), else where it does not."""
    source, layout = _expected_slot(model, tokens, 0)[0], layout_of(model)
    for layer, (first, last) in layout.required_segments(start, stop).items():
        ours, right = slot.writable(first, last, (layer,)), source.exported(first, last, (layer,))
        if any(bytes(a) != bytes(b) for a, b in zip(ours, right, strict=True)):
            return f"layer {layer}, rows [{first}, {last})"
    return ""


def poison(slot: FakeSlot) -> None:
    """Write over everything, as the next user of the memory would."""
    for layer in slot._rows:
        for tensor in layer:
            tensor.fill(0xEE)


def is_poisoned(slot: FakeSlot) -> bool:
    return all(bool((tensor == 0xEE).all()) for layer in slot._rows for tensor in layer)
