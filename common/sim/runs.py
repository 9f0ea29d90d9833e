"""The simulated half of a plan: times at an offered load, and the most that can be served.

Where that most is far from the closed form, `probable_cause` says what of the run differs from what the form takes for
granted. Called by plan.py and the benchmarks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from common.policy.adaptive import WEIGHTS, Weights
from common.policy.capacity import Solution
from common.policy.routing import Mode, Rules
from common.sim.cluster import Cluster
from common.sim.report import Slo, summary
from common.sim.scenario import Scenario
from common.sim.site import Deployment
from common.sim.traces import Trace
from common.sim.workload import Shape, SimRequest, arrive

FAR_OFF = 0.15
"""A simulated saturation that differs by a larger part from the closed form is explained."""
# What counts as different in an explanation, and as busy all the time: while queues fill and empty, nobody is.
_NOTABLE, _BUSY = 0.05, 0.9
_SEED = 2


@dataclass(frozen=True, slots=True)
class Saturated:
    """A run with always as many requests in the system as it can work on. `duty`, by stage, and egress are
    over the whole run.
    """

    throughput_rps: float
    egress_bps: float
    offloaded: float
    mean_computed_tokens: float
    duty: dict[str, float]

    @property
    def bottleneck(self) -> str:
        """The stage that was busy most of the time."""
        return max(self.duty, key=lambda name: self.duty[name])


def deployment(question: Scenario, solved: Solution) -> Deployment:
    """The nodes of one way, in the roles that the closed form found; none remote where nothing is offloaded."""
    return Deployment(
        question.remote,
        question.own,
        question.state,
        0 if math.isinf(solved.threshold_tokens) else question.num_remote,
        int(solved.num_prefill),
        int(solved.num_decode),
        question.egress_bps,
        question.rtt_s,
        question.rate_changes,
        codec_ratio=question.codec_ratio,
        cache_tokens=(question.cache_tokens, question.cache_tokens),
    )


def rules(mode: Mode, solved: Solution, weights: Weights = WEIGHTS) -> Rules:
    """How the router decides at what the closed form found."""
    return Rules(mode, solved.threshold_tokens, 2, solved.threshold_tokens, weights)


def simulated(question: Scenario, solved: Solution, mode: Mode) -> dict[str, Any]:
    """One run at `load` of the predicted throughput; `throughput_rps` is what was answered of `offered_rps`."""
    slo = Slo(lambda _: question.ttft_slo_s, question.tpot_slo_s)
    cluster = Cluster(deployment(question, solved), rules(mode, solved), ttft_slo=slo.ttft_s)
    done = cluster.run(_arrivals(question, question.load * solved.throughput_rps))
    told = summary(done, cluster.link.num_bytes, slo)
    ttft = told["ttft_s"]
    threshold = solved.threshold_tokens
    return {
        "load": question.load,
        "threshold_tokens": None if math.isinf(threshold) or mode == "adaptive" else threshold,
        "num_prefill": solved.num_prefill,
        "num_decode": solved.num_decode,
        "ttft_mean_s": ttft["mean"],
        "duty": cluster.hardware.duty(max(r.done_at for r in done)),
        **{f"ttft_{p}_s": ttft[p] for p in ("p50", "p90", "p99")},
        **{f"tpot_{p}_s": told["tpot_s"][p] for p in ("p50", "p90", "p99")},
        **{
            name: told[name]
            for name in ("offered_rps", "throughput_rps", "goodput_rps", "slo_met", "egress_bps", "offloaded")
        },
    }


def _arrivals(question: Scenario, rate_rps: float) -> list[SimRequest]:
    if question.instants:
        recorded_rps = len(question.instants) / (question.instants[-1] or 1.0)
        return Trace(question.shapes, question.instants).requests(rate_rps / recorded_rps)
    rng = np.random.default_rng(_SEED)
    return arrive(
        question.shapes, rate_rps, rng, cv=question.cv, swing=question.swing, period_s=question.period_s
    )  # fmt: skip


def saturated(question: Scenario, solved: Solution, mode: Mode) -> Saturated:
    """The end of each request is the start of the next.

    The rate leaves out the first quarter of the run, while queues and batches fill, and its end, while they empty.

    Raises:
        ValueError: too few requests for that.
    """
    window = 2 * question.own.max_rows * max(1, int(solved.num_decode)) + 40
    cluster = Cluster(deployment(question, solved), rules(mode, solved))
    done = cluster.run(_chained(question.shapes, window))
    ends = [r.done_at for r in done]
    first, last = len(ends) // 4, len(ends) - window
    if last - first < len(ends) // 4:
        raise ValueError(f"arrivals.num_requests = {len(ends)} is too few to fill the nodes: {2 * window + 2} or more")
    rps = (last - first) / (ends[last] - ends[first])
    return Saturated(
        throughput_rps=rps,
        egress_bps=8 * cluster.link.num_bytes / ends[-1],
        offloaded=sum(r.place == "remote" for r in done) / len(done),
        mean_computed_tokens=sum(r.num_computed for r in done) / len(done),
        duty=cluster.hardware.duty(ends[-1]),
    )


def _chained(shapes: Sequence[Shape], window: int) -> list[SimRequest]:
    requests = [shape.request(n) for n, shape in enumerate(shapes)]
    for one, following in zip(requests, requests[window:], strict=False):
        one.next.append((0.0, following))
    return requests[:window]


def probable_cause(question: Scenario, solved: Solution, found: Saturated) -> str:
    """Why a saturated run differs from the closed form, by the first thing in which it differs from what that has."""
    ours, theirs = found.mean_computed_tokens, question.lengths.mean
    stage, busy = found.bottleneck, found.duty[found.bottleneck]
    if question.rate_changes and solved.offloaded:
        return "the closed form leaves out link.changes"
    if abs(ours / theirs - 1) > _NOTABLE and question.cache_tokens:
        return (
            f"prompts had {ours:.0f} tokens to compute in the mean, {theirs:.0f} in the closed form: several are"
            " computed at once, and turns of a session do not wait for answers, so they find other things cached"
        )
    if abs(ours / theirs - 1) > _NOTABLE:
        return (
            f"the simulated prompts have {ours:.0f} tokens in the mean, the distribution {theirs:.0f}: more"
            " arrivals.num_requests bring them together"
        )
    if abs(found.offloaded - solved.offloaded) > _NOTABLE:
        return f"the router offloaded {found.offloaded:.0%} of the requests, the closed form {solved.offloaded:.0%}"
    if busy < _BUSY:
        return (
            f"no stage was busy all the time ({stage} most, {busy:.0%}): requests queue at one stage while another"
            " waits, or arrivals.num_requests are too few to fill the nodes for long"
        )
    if question.cache_tokens:
        return (
            f"{stage} was busy all the time: tokens behind a cached prefix cost more than as many alone, and the closed"
            " form knows only the uncached ones"
        )
    return f"{stage} was busy all the time, with other times per request than in the closed form's mean"
