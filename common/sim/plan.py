"""The answer to a scenario: closed form and simulation side by side, whether a remote site pays, and charts.

Called by `decodectl plan` and benchmarks/paper. `closed_form` is the paper's (T of the mean length), `closed_form_mean`
takes the mean of T; times to first token of both are bare prefill, those of `simulated` hold waiting and transfer too.
"""

from __future__ import annotations

import math
from html import escape
from typing import Any

from common.policy.capacity import Model, Plant, Solution
from common.policy.routing import Mode
from common.sim.charts import Series, html_table, line_chart, page
from common.sim.runs import FAR_OFF, probable_cause, saturated, simulated
from common.sim.scenario import Scenario, warnings
from common.sim.tables import tables

_MODES: tuple[tuple[str, Mode], ...] = (
    ("prfaas", "threshold"),
    ("homogeneous", "local-only"),
    ("naive", "remote-only"),
    # With the roles that the closed form finds for the threshold.
    ("adaptive", "adaptive"),
)


def plan(question: Scenario, *, simulates: bool = True) -> dict[str, Any]:
    """Everything as JSON has it. Rates are requests, or bits, per second; `inf` never occurs (null stands for it)."""
    exact = solutions(question, is_exact=True)
    out: dict[str, Any] = {
        "name": question.name,
        "warnings": warnings(question),
        "mean_uncached_tokens": question.lengths.mean,
        "mean_context_tokens": question.mean_context,
        "closed_form": _facts(question, solutions(question)),
        "closed_form_mean": _facts(question, exact),
        "advice": advice(question, exact),
    }
    if simulates:
        out["simulated"], out["saturation"] = {}, {}
        for way, mode in _MODES:
            roles = "prfaas" if way == "adaptive" else way
            if roles in exact:
                most = _saturation(question, exact[roles], mode)
                out["saturation"][way] = most
                told = simulated(question, exact[roles], mode)
                out["simulated"][way] = told | {"throughput_rps": most["simulated_rps"]}
    return out


def _saturation(question: Scenario, solved: Solution, mode: Mode) -> dict[str, Any]:
    """The most that could be served when simulated, beside what the closed form has."""
    found = saturated(question, solved, mode)
    off = found.throughput_rps / solved.throughput_rps - 1
    return {
        "closed_form_mean_rps": solved.throughput_rps,
        "simulated_rps": found.throughput_rps,
        "difference": off,
        "probable_cause": probable_cause(question, solved, found) if abs(off) > FAR_OFF else None,
        "egress_bps": found.egress_bps,
        "offloaded": found.offloaded,
        "duty": found.duty,
        "bottleneck": found.bottleneck,
    }


def plant(question: Scenario, egress_bps: float | None = None) -> Plant:
    """The closed form's view of a scenario."""
    return Plant(
        question.remote.prefill,
        question.own.prefill,
        question.state,
        question.num_remote,
        question.num_own,
        question.own.decode_rps(question.mean_output, question.mean_context),
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
        why = "computing there and the transfer take longer than computing here, for the longest prompts too"
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
    """From which length on the state of prompts is here sooner from an idle remote node than from an idle own one."""
    found = None
    lengths = question.lengths.lengths
    for length in reversed(lengths[:: max(1, len(lengths) // 2000)] if question.num_remote else []):
        link_s = 8 * question.codec_ratio * question.state.num_bytes(length) / question.egress_bps
        if max(question.remote.prefill(length), link_s) + question.rtt_s >= question.own.prefill(length):
            break
        found = int(length)
    return found


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
    parts = [f"<p><strong>Warning:</strong> {escape(text)}</p>" for text in answer["warnings"]]
    for title, header, rows in tables(answer):
        parts.append(f"<h2>{escape(title)}</h2>{html_table(header, rows)}")
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
