"""Many seeds: what happened over all of them, and what must have happened or the run has tested too little."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.faultsim.faults import CACHE_KINDS, KINDS
from tests.faultsim.scenario import Result, simulate

ROOT = Path(__file__).resolve().parents[2]
MAX_FAILURES = 5
REQUIRED = (
    *(f"fault: {kind}" for kind in dict.fromkeys(KINDS + CACHE_KINDS)),
    *(f"outcome: bare {o}" for o in ("ok", "LinkLost", "PeerCancelled", "PeerDraining", "PeerInvalid", "PeerShed")),
    *(f"outcome: bare {o}" for o in ("PeerTimeout", "RequestDamaged", "StaleHandle", "TransferIncomplete")),
    *(f"outcome: whole {o}" for o in ("ok", "cancelled", "NoPeer", "Draining")),
    *(f"path: cancelled in {phase}" for phase in ("IDLE", "REQUESTED", "ACCEPTED", "STREAMING", "COMPLETING")),
    *(f"path: cancelled while {stage}" for stage in ("queued", "prefill", "decoding")),
    *(f"path: lease ended at {end}" for end in ("decoded", "prefilld")),
    *(f"path: refused {code}" for code in ("damaged", "draining", "invalid", "shed", "stale_handle")),
    *(f"path: traced {event}" for event in ("segment_ready", "segment_encoded", "piece_written", "segment_acked")),
    "outcome: bare TransferTimeout",
    "path: a silent drop noticed by heartbeat",
    "path: a decoded is told anew what a cache holds",
    "path: a full cache gave something up",
    "path: a verified prefix is left of a failure",
    "path: a pushed prefix was taken",
    "path: a pushed prefix was taken behind what was cached",
    "path: found in the cache of a decoded",
    "path: found in the cache of a prefilld",
    "path: no push was wanted, less was cached",
    "path: no push was wanted, more was cached",
    "path: a whole request's prefix was pushed",
    "path: another instance came back while streams waited",
    "path: asked again after the control link was lost",
    "path: damaged bytes found by a frame's checksum",
    "path: fallback to local prefill",
    "path: gone: its port refuses",
    "path: given up after repeated faults",
    "path: handshake given up",
    "path: local error reported as such",
    "path: prefill paused for want of acknowledgements",
    "path: remote state became tokens",
    "path: resent after a data link was lost",
    "path: resume accepted",
    "path: resume refused as stale",
    "path: served by another peer",
    "path: served by the same peer, asked again",
    "path: stream failed timeout",
    "path: survived what must be survived",
    "path: transport paused",
)
"""What a campaign of 10,000 seeds has to see, each at least once."""
RARE = ("path: all was verified and COMPLETE never came", "path: resumed again by the handle before")
"""What one of 200,000 has to see as well."""
_MANY = 100_000


@dataclass
class Campaign:
    """What came of a range of seeds."""

    num_seeds: int = 0
    num_steps: int = 0
    virtual_s: float = 0.0
    cpu_s: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[int, str] = field(default_factory=dict)

    def add(self, other: Campaign) -> None:
        """Take over what another one has."""
        self.num_seeds += other.num_seeds
        self.num_steps += other.num_steps
        self.virtual_s += other.virtual_s
        self.cpu_s += other.cpu_s
        self.counts += other.counts
        self.failures |= other.failures

    def missing(self) -> list[str]:
        """What it should have seen and has not."""
        wanted = REQUIRED + (RARE if self.num_seeds >= _MANY else ())
        return [name for name in wanted if not self.counts[name]]

    def table(self) -> str:
        """For people."""
        num = max(1, self.num_seeds)
        head = (
            f"{self.num_seeds} seeds, {len(self.failures)} with a violation; "
            f"a seed: {1000 * self.cpu_s / num:.1f} ms of CPU, {self.num_steps / num:.0f} steps, "
            f"{self.virtual_s / num:.1f} virtual s"
        )
        return "\n".join([head, *(f"{self.counts[name]:9d}  {name}" for name in sorted(self.counts))])

    def to_json(self) -> str:
        """All of it, in one line."""
        return json.dumps(self.__dict__)

    @staticmethod
    def from_json(text: str) -> Campaign:
        """The inverse."""
        facts = json.loads(text)
        failures = {int(seed): why for seed, why in facts.pop("failures").items()}
        return Campaign(**facts | {"counts": Counter(facts["counts"]), "failures": failures})


def run(seeds: Iterable[int]) -> Campaign:
    """In this process, one after the other; ends early after a few violations."""
    out, began = Campaign(), time.process_time()
    gc.collect()
    gc.freeze()  # what is there now is not looked at every time
    for seed in seeds:
        if out.num_seeds % 50 == 49:
            gc.collect()
        result = simulate(seed)
        out.num_seeds += 1
        out.num_steps += result.num_steps
        out.virtual_s += result.virtual_s
        out.counts += result.counts
        if result.violation:
            out.failures[seed] = result.violation
            if len(out.failures) >= MAX_FAILURES:
                break
    gc.unfreeze()
    out.cpu_s = time.process_time() - began
    return out


def run_in_processes(first: int, stop: int, num_processes: int) -> Campaign:
    """The same seeds shared out over processes of their own."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.faultsim", f"{first + n}:{stop}:{num_processes}", "--json"],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(num_processes)
    ]
    out = Campaign()
    try:
        for process in processes:
            text, _ = process.communicate()
            if not text.strip():
                raise RuntimeError(f"a process of the campaign ended with {process.returncode} and said nothing")
            out.add(Campaign.from_json(text))
    finally:
        for process in processes:
            process.kill()
    return out


def report(seed: int, result: Result, num_events: int) -> str:
    """What is printed of a failing seed: how to have it again, the step, and what came before."""
    world = result.world
    return "\n".join(
        [
            f"seed {seed}, step {world.loop.step}: {result.violation}",
            f"the last {num_events} events (step, virtual seconds, what):",
            world.tail(num_events),
            f"trace {world.trace_hash}; again with: python -m tests.faultsim {seed}",
        ]
    )
