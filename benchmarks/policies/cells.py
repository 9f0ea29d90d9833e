"""The cells of the comparison: workloads, links, arrivals, and one simulated run of a policy in one of them.

The hardware is the paper's case study (common/sim/scenario.py). Roles and threshold are what the paper's solver finds
for the cell's link and lengths; `adaptive` gets the same roles, the baselines the best roles for themselves. The
baselines are the paper's system: prompts are computed one after the other, and all states share the path evenly.
`adaptive` is the daemons', which compute and send first what can be in time (common/sched/deadlines.py); `threshold in
order` is the paper's rule with that.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from common.policy.adaptive import WEIGHTS, Weights
from common.policy.capacity import Model, Solution
from common.policy.lengths import Lengths
from common.policy.routing import Mode
from common.sim.cluster import Cluster
from common.sim.plan import plant
from common.sim.prompts import uncached_lengths
from common.sim.report import Slo, percentiles, span_s
from common.sim.runs import deployment, rules
from common.sim.scenario import PAPER, Scenario, scenario
from common.sim.traces import read_trace
from common.sim.workload import Shape, arrive, log_normal, retrieval

WORKLOADS = ("log-normal", "mooncake", "azure", "shift", "retrieval")
LINKS_GBPS = (100, 12, 8, 5, 2)
CVS = (1.0, 3.0)
SLOS = ("10s", "3x")
IN_ORDER = "threshold in order"
POLICIES = ("adaptive", "threshold", IN_ORDER, "local-only", "remote-only")
_MODES: dict[str, Mode] = {
    "adaptive": "adaptive", "threshold": "threshold", IN_ORDER: "threshold",
    "local-only": "local-only", "remote-only": "remote-only",
}  # fmt: skip
_ORDERED = ("adaptive", IN_ORDER)
_SHARING = 16  # limits.max_running_requests of a prefilld
CACHE_TOKENS = 20e6
TPOT_S = 0.025
PAPER_CASE = scenario(PAPER)


def slo(name: str) -> Slo:
    """10 seconds, or three times what the prompt takes alone on an own node."""
    own = PAPER_CASE.own.prefill
    limits: dict[str, Callable[[int], float]] = {"10s": lambda _: 10.0, "3x": lambda tokens: 3 * own(tokens)}
    return Slo(limits[name], TPOT_S)


@dataclass(frozen=True, slots=True)
class Workload:
    """Shapes in order, the distribution of what is left to compute (of all, and of each part where the mix shifts), the
    mean output, and the room of each site's prefix cache.
    """

    name: str
    shapes: tuple[Shape, ...]
    lengths: Lengths
    parts: tuple[Lengths, ...]
    mean_output: float
    cache_tokens: float


@dataclass(frozen=True, slots=True)
class Cell:
    """Where policies are compared; without an order everything is computed and sent as in the paper's system."""

    workload: str
    gbps: float
    cv: float
    load: float
    num_requests: int
    traces: Path
    seed: int = 1
    has_order: bool = True


@dataclass(frozen=True, slots=True)
class Outcome:
    """One policy in one cell. `goodput` is by SLO, in requests per second of offering."""

    policy: str
    goodput: dict[str, float]
    met: dict[str, float]
    ttft: dict[str, float]
    offloaded: float
    offered_rps: float


@cache
def workload(name: str, count: int, traces: Path, seed: int) -> Workload:
    """Made once for all cells."""
    rng = np.random.default_rng(seed)
    caches = 0.0
    if name == "log-normal":
        shapes = log_normal(count, rng)
    elif name == "shift":
        half = count // 2
        shapes = log_normal(half, rng, mu=8.9) + log_normal(count - half, rng, mu=10.3)
    elif name == "retrieval":
        shapes, caches = retrieval(count, rng), CACHE_TOKENS
    else:
        file = {"mooncake": "mooncake_conversation.jsonl", "azure": "azure_code_2023.csv"}[name]
        shapes, caches = read_trace(traces / file).repeated(count), CACHE_TOKENS
    left = uncached_lengths(shapes, caches)
    parts = (left[: count // 2], left[count // 2 :]) if name == "shift" else (left,)
    lengths = Lengths.of(left), tuple(map(Lengths.of, parts))
    return Workload(name, tuple(shapes), *lengths, float(np.mean([s.num_output for s in shapes])), caches)


@cache
def tuned(cell: Cell) -> tuple[Solution, dict[str, Solution], float]:
    """(the paper's optimum, the roles of each policy, requests per second offered).

    Where the mix shifts, threshold and roles are the best for the whole of it, and what is offered is what those roles
    could serve in the worse part with that part's own best threshold.
    """
    load, this = _workload(cell), plant(_case(cell))
    model = Model(this, load.lengths)
    best = model.solve()
    roles = {
        "threshold": best, IN_ORDER: best, "adaptive": best,
        "local-only": model.homogeneous(this.num_own), "remote-only": model.naive(),
    }  # fmt: skip
    most = min(
        Model(this, part, is_exact=True).best_threshold(best.num_prefill, best.num_decode).throughput_rps
        for part in load.parts
    )
    return best, roles, cell.load * most


def _workload(cell: Cell) -> Workload:
    return workload(cell.workload, cell.num_requests, cell.traces, cell.seed)


def _case(cell: Cell) -> Scenario:
    """The paper's, with the cell's link and outputs."""
    load = _workload(cell)
    return replace(PAPER_CASE, egress_bps=cell.gbps * 1e9, mean_output=load.mean_output, cache_tokens=load.cache_tokens)


def run(cell: Cell, policy: str, weights: Weights = WEIGHTS, slo_names: tuple[str, ...] = SLOS) -> list[Outcome]:
    """One run, or one for each SLO where the policy, or the order of sending, looks at it."""
    best, roles, rate_rps = tuned(cell)
    names = [(name,) for name in slo_names] if policy in _ORDERED else [slo_names]
    return [_one(cell, policy, roles[policy], best, rate_rps, weights, told) for told in names]


def _one(
    cell: Cell, policy: str, roles: Solution, best: Solution, rate_rps: float, weights: Weights,
    slo_names: tuple[str, ...],
) -> Outcome:  # fmt: skip
    looks_at = slo(slo_names[0]).ttft_s if policy in _ORDERED else None
    is_ordered = policy in _ORDERED and cell.has_order
    sharing = _SHARING if is_ordered else 1
    sites = replace(deployment(_case(cell), roles), sends_in_order=is_ordered, max_sharing=(sharing, sharing))
    cluster = Cluster(sites, rules(_MODES[policy], best, weights), ttft_slo=looks_at)
    requests = arrive(_workload(cell).shapes, rate_rps, np.random.default_rng(cell.seed + 100), cv=cell.cv)
    done = cluster.run(requests)
    met = {name: sum(map(slo(name).is_met, done)) for name in slo_names}
    return Outcome(
        policy,
        {name: count / span_s(done) for name, count in met.items()},
        {name: count / len(done) for name, count in met.items()},
        percentiles([r.ttft_s for r in done]),
        sum(r.place == "remote" for r in done) / len(done),
        len(done) / span_s(done),
    )
