"""The answer to a scenario: closed form and simulation side by side, whether a remote site pays, and charts.

Called by `decodectl plan` and benchmarks/paper. `closed_form` is the paper's (T of the mean length), `closed_form_mean`
takes the mean of T; times to first token of both are bare prefill, those of `simulated` hold waiting and transfer too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from common.policy.adaptive import WEIGHTS, Weights
from common.policy.capacity import Model, Plant, Solution
from common.policy.routing import Mode, Rules
from common.sim.charts import Series, html_table, line_chart, page
from common.sim.cluster import Cluster
from common.sim.report import Slo, summary
from common.sim.scenario import Scenario
from common.sim.site import Deployment
from common.sim.traces import Trace
from common.sim.workload import Shape, SimRequest, arrive

_MODES: tuple[tuple[str, Mode], ...] = (
    ("prfaas", "threshold"),
    ("homogeneous", "local-only"),
    ("naive", "remote-only"),
    # With the roles that the closed form finds for the threshold.
    ("adaptive", "adaptive"),
)
_SEED = 2


def plan(question: Scenario, *, simulates: bool = True) -> dict[str, Any]:
    """Everything as JSON has it. Rates are requests, or bits, per second; `inf` never occurs (null stands for it)."""
    exact = solutions(question, is_exact=True)
    out: dict[str, Any] = {
        "name": question.name,
        "mean_uncached_tokens": question.lengths.mean,
        "closed_form": _facts(question, solutions(question)),
        "closed_form_mean": _facts(question, exact),
        "advice": advice(question, exact),
    }
    if simulates:
        out["simulated"], out["saturation"] = {}, {}
        for way, mode in _MODES:
            roles = "prfaas" if way == "adaptive" else way
            if roles in exact:
                rps, most = saturated_rps(question, exact[roles], mode), exact[roles].throughput_rps
                facts = {"closed_form_mean_rps": most, "simulated_rps": rps, "difference": rps / most - 1}
                out["saturation"][way] = facts
                out["simulated"][way] = simulated(question, exact[roles], mode) | {"throughput_rps": rps}
    return out


def plant(question: Scenario, egress_bps: float | None = None) -> Plant:
    """The closed form's view of a scenario."""
    return Plant(
        question.remote.prefill,
        question.own.prefill,
        question.state,
        question.num_remote,
        question.num_own,
        question.own.decode_rps(question.mean_output),
        question.egress_bps if egress_bps is None else egress_bps,
        question.codec_ratio,
    )


def solutions(question: Scenario, *, is_exact: bool = False) -> dict[str, Solution]:
    """The best of each way to run it that there are nodes for."""
    model = Model(plant(question), question.lengths, is_exact=is_exact)
    out = {"prfaas": model.solve(), "homogeneous": model.homogeneous(question.num_homogeneous)}
    return out | ({"naive": model.naive()} if question.num_remote else {})


def _facts(question: Scenario, solved: dict[str, Solution]) -> dict[str, Any]:
    model = Model(plant(question), question.lengths)
    out = {}
    for way, one in solved.items():
        mean_s, (p90_s,) = model.bare_ttft(one.threshold_tokens)
        out[way] = {
            "throughput_rps": one.throughput_rps,
            "threshold_tokens": None if math.isinf(one.threshold_tokens) else one.threshold_tokens,
            "num_prefill": one.num_prefill,
            "num_decode": one.num_decode,
            "ttft_mean_s": mean_s,
            "ttft_p90_s": p90_s,
            "egress_bps": one.egress_bps,
            "offloaded": one.offloaded,
            "mean_long_tokens": one.mean_long_tokens,
            "theta_rps": [one.theta_remote_rps, one.theta_own_rps, one.theta_decode_rps],
            "duty": one.duty,
            "bottleneck": one.bottleneck,
        }
    return out


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
    """One run at `load` of the predicted throughput; `throughput_rps` is then what was offered."""
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
        **{name: told[name] for name in ("throughput_rps", "goodput_rps", "slo_met", "egress_bps", "offloaded")},
    }


def _arrivals(question: Scenario, rate_rps: float) -> list[SimRequest]:
    if question.instants:
        recorded_rps = len(question.instants) / (question.instants[-1] or 1.0)
        return Trace(question.shapes, question.instants).requests(rate_rps / recorded_rps)
    rng = np.random.default_rng(_SEED)
    return arrive(
        question.shapes, rate_rps, rng, cv=question.cv, swing=question.swing, period_s=question.period_s
    )  # fmt: skip


def saturated_rps(question: Scenario, solved: Solution, mode: Mode) -> float:
    """Requests per second with always as many in the system as it can work on: the end of one is the start of the next.

    The first quarter of the run, while queues and batches fill, and its end, while they empty, are left out.
    """
    window = 2 * question.own.max_rows * max(1, int(solved.num_decode)) + 40
    requests = _chained(question.shapes, window)
    done = Cluster(deployment(question, solved), rules(mode, solved)).run(requests)
    ends = [r.done_at for r in done]
    first, last = len(ends) // 4, len(ends) - window
    if last - first < len(ends) // 4:
        raise ValueError(f"arrivals.num_requests = {len(ends)} is too few to fill the nodes: {4 * window} or more")
    return (last - first) / (ends[last] - ends[first])


def _chained(shapes: Sequence[Shape], window: int) -> list[SimRequest]:
    requests = [shape.request(n) for n, shape in enumerate(shapes)]
    for one, following in zip(requests, requests[window:], strict=False):
        one.next.append((0.0, following))
    return requests[:window]


def advice(question: Scenario, solved: dict[str, Solution]) -> dict[str, Any]:
    """Whether a remote site pays, by throughput at equal cost and by the length from which it is quicker."""
    equal = round(question.num_remote * question.price_ratio + question.num_own)
    model = Model(plant(question), question.lengths, is_exact=True)
    baseline, ours = model.homogeneous(equal).throughput_rps, solved["prfaas"]
    gain = ours.throughput_rps / baseline - 1
    quicker = quicker_from(question)
    if not question.num_remote or not ours.offloaded:
        why = "nothing would be offloaded"
    elif quicker is None:
        why = "the transfer takes longer than the remote node saves, at every length"
    elif gain <= 0:
        why = f"{equal} own nodes cost the same and serve more"
    else:
        why = ""
    return {
        "pays": not why,
        "why_not": why,
        "quicker_remote_from_tokens": quicker,
        "equal_cost_nodes": equal,
        "equal_cost_rps": baseline,
        "gain_at_equal_cost": gain,
        "gain_over_homogeneous": ours.throughput_rps / solved["homogeneous"].throughput_rps - 1,
    }


def quicker_from(question: Scenario) -> int | None:
    """The shortest prompt whose state is here sooner from an idle remote node than from an idle own one."""
    if not question.num_remote:
        return None
    for length in question.lengths.lengths[:: max(1, len(question.lengths.lengths) // 2000)]:
        link_s = 8 * question.codec_ratio * question.state.num_bytes(length) / question.egress_bps
        if max(question.remote.prefill(length), link_s) + question.rtt_s < question.own.prefill(length):
            return int(length)
    return None


def sweeps(question: Scenario) -> dict[str, list[tuple[float, float]]]:
    """Throughput by threshold at the best split, and by split at the best threshold (the paper's Figures 5b and 5a)."""
    model, best = Model(plant(question), question.lengths), solutions(question)["prfaas"]
    top = min(3 * best.threshold_tokens, question.lengths.quantile(0.999)) if best.offloaded else 0
    steps = [top * n / 60 for n in range(1, 61)] if top else []
    by_threshold = [(t / 1000, model.at(t, best.num_prefill, best.num_decode).throughput_rps) for t in steps]
    splits = range(1, question.num_own)
    by_split = [
        (float(n), model.at(best.threshold_tokens, n, question.num_own - n).throughput_rps) for n in splits
    ]  # fmt: skip
    return {"by_threshold": by_threshold, "by_num_prefill": by_split}


def html(question: Scenario, answer: dict[str, Any]) -> str:
    """A page with the tables and charts of an answer."""
    curves = sweeps(question)
    parts = [html_table(*table(answer))]
    if curves["by_threshold"]:
        best = answer["closed_form"]["prfaas"]
        mark = [((best["threshold_tokens"] or 0) / 1000, best["throughput_rps"])]
        lines = [Series("closed form", curves["by_threshold"]), Series("optimum", mark, is_dots=True)]
        parts.append(line_chart("Throughput by threshold", "threshold, thousand tokens", "requests/s", lines))
    lines = [Series("closed form", curves["by_num_prefill"])]
    parts.append(line_chart("Throughput by own prefill nodes", "own prefill nodes", "requests/s", lines))
    if "simulated" in answer:
        names = ("p50", "p90", "p99")
        shown = [
            Series(way, [(float(p[1:]), one[f"ttft_{p}_s"]) for p in names]) for way, one in answer["simulated"].items()
        ]
        parts.append(line_chart("Simulated time to first token", "percentile", "seconds", shown))
    return page(f"Plan: {question.name}", parts)


def table(answer: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """(header, rows) for people: one row per way and method."""
    header = ["", "req/s", "threshold", "Np/Nd", "TTFT mean", "P50", "P90", "P99", "goodput", "SLO met", "Gbit/s"]
    rows = []
    for method, label in (("closed_form", "closed form"), ("closed_form_mean", "E[T(L)]"), ("simulated", "simulated")):
        for way, one in answer.get(method, {}).items():
            threshold = one["threshold_tokens"]
            rows.append(
                [f"{label}, {way}", f"{one['throughput_rps']:.2f}", "-" if threshold is None else f"{threshold:.0f}"]
                + [f"{one['num_prefill']:g}/{one['num_decode']:g}"]
                + [_seconds(one, key) for key in ("ttft_mean_s", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s")]
                + [f"{one['goodput_rps']:.2f}" if "goodput_rps" in one else ""]
                + [f"{one['slo_met']:.1%}" if "slo_met" in one else ""]
                + [f"{one['egress_bps'] / 1e9:.1f}"]
            )
    return header, rows


def _seconds(facts: dict[str, Any], key: str) -> str:
    return f"{facts[key]:.2f}" if key in facts else ""
