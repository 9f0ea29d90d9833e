"""A sequence put aside for others comes back and goes on as if nothing had happened, whatever its layers keep."""

from __future__ import annotations

import asyncio

import pytest

from common.engine.runner import Runner
from common.engine.state import SlotState
from common.errors import RequestFailed
from tests.engine.families import FAMILIES

# Latents and recurrent state; windows; recurrent state and rows in one layer; inputs of convolutions.
CHOSEN = ["KimiLinear", "Gemma3Text", "FalconH1", "Lfm2"]


@pytest.mark.parametrize("parks", [True, False])
@pytest.mark.parametrize("family", CHOSEN)
async def test_preempted_sequences_resume_exactly(tools, family, parks):
    backend = tools.tiny_backend(FAMILIES[family].model(), 20, max_batch=2, parks=parks)
    await backend.start()
    try:
        low = [tools.request(tools.prompt(30 + i), max_tokens=40) for i in range(2)]
        high = [tools.request(tools.prompt(9 + i), max_tokens=5, priority=1) for i in range(3)]
        alone = [tools.ids(await tools.local(backend, r)) for r in (*low, *high)]
        assert backend.worker.scheduler.num_preemptions == 0

        running = [asyncio.create_task(tools.local(backend, r)) for r in low]
        while backend.stats().num_running < 2:
            await asyncio.sleep(0)
        urgent = await asyncio.gather(*(tools.local(backend, r) for r in high))
        assert not all(task.done() for task in running)
        outputs = [*(await asyncio.gather(*running)), *urgent]
        assert [tools.ids(out) for out in outputs] == alone
        assert backend.worker.scheduler.num_preemptions >= 2
        await tools.until_idle(backend)
    finally:
        await backend.close()


@pytest.mark.parametrize("victim", ["row", "joint chunk", "chunk"])
async def test_no_memory_for_a_moving_window_ends_that_request_alone(tools, monkeypatch, victim):
    backend = tools.tiny_backend(FAMILIES["Gemma3Text"].model(), 20, token_budget=8, max_batch=4)
    await backend.start()
    try:
        others = tools.request(tools.prompt(3), max_tokens=60)
        expected = tools.ids(await tools.local(backend, others))
        steady = asyncio.create_task(tools.local(backend, others))
        while backend.stats().num_running < 1:
            await asyncio.sleep(0)
        spared, allocate = backend.worker.scheduler._running[0].slot, SlotState._allocate

        def without_memory(slot, spec):
            if slot is not spared and hasattr(slot, "_layers"):  # it moves its window
                raise RuntimeError("out of memory")
            return allocate(slot, spec)

        if victim == "chunk":
            monkeypatch.setattr(Runner, "takes_chunks", False)
        length = 30 if victim == "row" else 120
        monkeypatch.setattr(SlotState, "_allocate", without_memory)
        with pytest.raises(RequestFailed, match="no memory"):
            await tools.local(backend, tools.request(tools.prompt(length), max_tokens=60))
        assert tools.ids(await steady) == expected
        await tools.until_idle(backend)
    finally:
        await backend.close()


async def test_two_choices_that_cannot_come_back_end_their_request_alone(tools, monkeypatch):
    backend = tools.tiny_backend(FAMILIES["Gemma3Text"].model(), 20, max_batch=2, parks=True)
    await backend.start()
    try:
        low = asyncio.create_task(tools.local(backend, tools.request(tools.prompt(30), max_tokens=60, num_choices=2)))
        while backend.stats().num_running < 2:
            await asyncio.sleep(0)
        allocate = SlotState._allocate

        def without_memory(slot, spec):
            if slot._parked:
                raise RuntimeError("out of memory")
            return allocate(slot, spec)

        monkeypatch.setattr(SlotState, "_allocate", without_memory)
        high = tools.request(tools.prompt(9), max_tokens=5, priority=1, num_choices=2)
        assert len(tools.ids(await tools.local(backend, high))) >= 1
        with pytest.raises(RequestFailed, match="no memory to bring back"):
            await low
        await tools.until_idle(backend)
        assert tools.ids(await tools.local(backend, tools.request(tools.prompt(9), max_tokens=3)))
    finally:
        await backend.close()
