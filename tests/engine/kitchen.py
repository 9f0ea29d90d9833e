"""Backends with a prefix cache for tests, of any kind, and what is asked of them."""

from __future__ import annotations

import asyncio
from typing import Any

from common.fake import FakeExecutor, FakeOptions
from common.layout import ModelInfo
from common.local_backend import LocalBackend
from common.sched.prefix_index import ROWS, STATE, WINDOW
from common.state_cache import StateCache
from common.worker import WorkerOptions
from tests.engine.families import FAMILIES
from tests.engine.families import WINDOW as TINY_WINDOW

AMPLE = {ROWS: 1 << 28, WINDOW: 1 << 28, STATE: 1 << 28}
RECURRENT = ("KimiLinear", "Qwen3_5Text", "FalconH1", "Lfm2")
MODELS: dict[str, Any] = {}


class Kitchen:
    """Makes backends of one kind, with a cache or without."""

    def __init__(self, kind: str, tools: Any) -> None:
        self.kind, self._tools = kind, tools
        self._open: list[LocalBackend] = []

    @property
    def is_recurrent(self) -> bool:
        return self.kind in RECURRENT

    async def backend(self, limits: dict[int, int] | None = None, chunk_tokens: int = 32, **more: Any) -> LocalBackend:
        def make_cache(info: ModelInfo) -> StateCache | None:
            return None if limits is None else StateCache(info.layout, limits, **more)

        if self.kind == "fake":
            sizes = {"num_layers": 4, "window_layers": 2, "window": TINY_WINDOW, "vocab_size": 320, "max_context": 512}
            options = FakeOptions(0, 0, room=chunk_tokens, **sizes)
            made = LocalBackend(lambda: FakeExecutor(options), WorkerOptions(chunk_tokens=chunk_tokens))
        else:
            if self.kind not in MODELS:
                MODELS[self.kind] = (
                    FAMILIES[self.kind].model() if self.kind != "Llama" else self._tools.tiny_model("Llama")
                )
            made = self._tools.tiny_backend(MODELS[self.kind], chunk_tokens)
        made._make_cache = make_cache
        await made.start()
        self._open.append(made)
        return made

    async def close(self) -> None:
        for backend in self._open:
            await backend.close()


async def run(backend: LocalBackend, request: Any, tools: Any) -> tuple[int, list[list[int]]]:
    """Tokens found in the cache, and the tokens of each choice; returns when the cache has taken what it keeps."""
    generation = await backend.open(request)
    generation.compute()
    outputs = [output async for output in generation]
    await kept(backend, tools)
    return generation.num_cached_tokens, [tools.ids(outputs, choice) for choice in range(request.num_choices)]


async def kept(backend: LocalBackend, tools: Any) -> None:
    await tools.settled(backend)
    await asyncio.sleep(0)
    if backend.cache is not None:
        await backend.cache.settle()


def num_computed(backend: LocalBackend) -> int:
    return backend.stats().num_prompt_tokens


class Discard:
    """Somewhere for state to go."""

    def __init__(self, backend: LocalBackend) -> None:
        self._layout = backend.info.layout

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        specs = [self._layout.states[n] for n in layers]
        return tuple(
            memoryview(bytearray((stop - start if s.is_rows else 1) * t.row_bytes)) for s in specs for t in s.tensors
        )

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """Gone."""
