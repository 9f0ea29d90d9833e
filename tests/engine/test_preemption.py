"""A sequence put aside for others comes back and goes on as if nothing had happened, whatever its layers keep."""

from __future__ import annotations

import asyncio

import pytest

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
