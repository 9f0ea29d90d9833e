"""Work that decoded does now and then beside its requests: a turn every so often until it is closed.

Subclassed by probing.py and replicate.py; owned by service.py. A turn that fails is logged and does not end it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

log = logging.getLogger(__name__)


class Background:
    """Calls `turn` every `turn_s` seconds, one after the other."""

    turn_s = 1.0

    def __init__(self) -> None:
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Stop; a turn under way is cancelled."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def turn(self) -> None:
        """What is to be done."""
        raise NotImplementedError

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self.turn_s)
            try:
                await self.turn()
            except Exception:
                log.exception("work in the background failed, it goes on: %s", type(self).__name__)
