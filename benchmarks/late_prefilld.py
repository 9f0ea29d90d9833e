"""prefilld without overlap, for overlap.py to compare with: nothing of a state leaves before all of it is computed.

python -m benchmarks.late_prefilld --config FILE
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from typing import Any

from prefilld.__main__ import main
from prefilld.stream import StreamHandler

_pump = StreamHandler._pump


class Held:
    """A job whose items are given out once it has ended."""

    def __init__(self, job: Any) -> None:
        self._job = job

    def __getattr__(self, name: str) -> Any:
        return getattr(self._job, name)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for item in [item async for item in self._job]:
            yield item


async def _pump_late(self: StreamHandler, stream: Any, job: Any, record: Any) -> None:
    await _pump(self, stream, Held(job), record)


if __name__ == "__main__":
    StreamHandler._pump = _pump_late  # type: ignore[method-assign]
    sys.exit(main())
