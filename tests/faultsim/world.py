"""What one simulated run has: loop, network, trace, counts, and the verdict."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterable
from typing import Any

from tests.faultsim import engine
from tests.faultsim.loop import START_AT, Process, SimLoop
from tests.faultsim.network import Network


class World:
    """One seed's world. `fail` keeps the first violation and stops the run."""

    def __init__(self, seed: int, *, is_coarse: bool) -> None:
        self.seed = seed
        self.rng = random.Random(seed * 4 + 1)
        self.secrets = random.Random(seed * 4 + 2)
        self.counts: Counter[str] = Counter()
        self.events: list[tuple[Any, ...]] = []
        self.violation = ""
        self.damage_next, self.num_damages = "", 0
        self.model = engine.Model()
        self.has_caches = self.clear_next = False
        self.processes: list[Process] = []
        self.loop = SimLoop(seed * 4 + 3, self._on_error, is_coarse=is_coarse)
        self.net = Network(self.loop, seed * 4, self.trace, self.counts)

    @property
    def now(self) -> float:
        return self.loop.now

    def trace(self, kind: str, *facts: Any) -> None:
        self.events.append((self.loop.step, self.loop.now, kind, *facts))

    def count(self, what: str, num: int = 1) -> None:
        """Something happened that the whole run must have seen."""
        self.counts[what] += num

    def fail(self, why: str) -> None:
        if not self.violation:
            self.violation, self.loop.is_stopped = why, True
            self.trace("VIOLATION", why)

    def check(self, is_right: bool, why: str) -> None:
        if not is_right:
            self.fail(why)

    def process(self, name: str, host: str) -> Process:
        process = Process(name, host, self.rng.uniform(0.0, 1e5))
        self.processes.append(process)
        return process

    def stop(self, process: Process, seconds: float) -> None:
        """SIGSTOP, and SIGCONT after so long."""
        self.loop.stop_process(process)
        process.stopped_s += seconds
        self.loop.at(self.now + seconds, self.loop.resume_process, process, context=self.net.world)

    @property
    def trace_hash(self) -> str:
        state = hashlib.sha256()
        for event in self.events:
            state.update(repr(event).encode())
        return state.hexdigest()[:32]

    def tail(self, num: int = 60) -> str:
        return "\n".join(lines(self.events[-num:]))

    def _on_error(self, context: dict[str, Any]) -> None:
        error = context.get("exception")
        self.fail(f"the loop's exception handler: {context.get('message')}: {error!r}")
        while error is not None and error.__traceback__ is not None:
            frames = []
            at = error.__traceback__
            while at is not None:
                frames.append(f"{at.tb_frame.f_code.co_filename.rpartition('/')[2]}:{at.tb_lineno}")
                at = at.tb_next
            self.trace("raised", repr(error), " ".join(frames[-6:]))
            error = error.__cause__


def lines(events: Iterable[tuple[Any, ...]]) -> Iterable[str]:
    for step, now, kind, *facts in events:
        yield f"{step:6d} {now - START_AT:11.6f}  {kind:10s} {' '.join(map(str, facts))}"
