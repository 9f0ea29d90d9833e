"""Figures of a run, real or simulated, their medians over rounds, and how far apart the two are.

Called by __main__.py.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.serving.client import Answer
from common.sim.report import Slo, percentiles
from common.sim.workload import SimRequest

COMPARED = (
    "throughput_rps", "goodput_fixed_rps", "goodput_around_rps", "goodput_3x_rps", "ttft_mean_s", "ttft_p50_s",
    "ttft_p90_s",
)  # fmt: skip
SHOWN = (*COMPARED, "ttft_p99_s", "tpot_p50_s", "offloaded", "edge")
PARTS = ("offloaded", "edge")
# Goodput "around" is the mean over the fixed SLO times each of these: at one SLO a few requests decide.
AROUND = np.geomspace(0.8, 1.25, 21)
EDGE = 0.05
NAMES = {
    "throughput_rps": "req/s", "goodput_fixed_rps": "good, fixed", "goodput_around_rps": "around",
    "goodput_3x_rps": "good, 3x", "ttft_mean_s": "TTFT mean", "ttft_p50_s": "P50", "ttft_p90_s": "P90",
    "ttft_p99_s": "P99", "tpot_p50_s": "TPOT", "offloaded": "offloaded", "edge": "edge",
}  # fmt: skip


def figures(
    done: Sequence[Answer] | Sequence[SimRequest], offered_s: float, slos: Mapping[str, Slo]
) -> dict[str, float]:
    """Of requests that were answered; rates are per second of serving, goodput per second of offering. `edge` is the
    part of them that are within 5 % of the limit of the SLO "fixed".
    """
    if not done:
        raise ValueError("not one request was answered")
    ttft, tpot = [r.ttft_s for r in done], [r.tpot_s for r in done]
    seconds = max(r.done_at for r in done) - min(r.arrived_at for r in done)
    found = {"throughput_rps": len(done) / seconds, "ttft_mean_s": float(np.mean(ttft))}
    found |= {f"goodput_{name}_rps": sum(map(slo.is_met, done)) / offered_s for name, slo in slos.items()}
    used = np.array([_used(r, slos["fixed"]) for r in done])
    found |= {"goodput_around_rps": float(np.mean(used[:, None] <= AROUND)) * len(done) / offered_s}
    found |= {"edge": float(np.mean(abs(used - 1.0) <= EDGE))}
    found |= {f"ttft_{p}_s": v for p, v in percentiles(ttft).items()}
    found |= {f"tpot_{p}_s": v for p, v in percentiles(tpot).items()}
    return found | {"offloaded": sum(map(_is_remote, done)) / len(done)}


def _used(request: Answer | SimRequest, slo: Slo) -> float:
    """What part of its SLO a request takes: the larger one of TTFT and TPOT."""
    return max(request.ttft_s / slo.ttft_s(request.num_prompt), request.tpot_s / slo.tpot_s)


def _is_remote(request: Answer | SimRequest) -> bool:
    return request.report["route"] == "remote" if isinstance(request, Answer) else request.place == "remote"


def outcomes(answers: Sequence[Answer]) -> dict[str, int]:
    """How many ended how; exactly one for each request."""
    return dict(Counter(a.outcome for a in answers))


def medians(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Of each figure over the rounds."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def deviations(real: Mapping[str, float], simulated: Mapping[str, float]) -> dict[str, float | None]:
    """Simulated over measured, less one; None where nothing was measured."""
    return {name: simulated[name] / real[name] - 1 if real[name] else None for name in COMPARED}


def table(rows: Mapping[str, Mapping[str, float | None]], *, are_parts: bool = False) -> str:
    """Markdown, a line for each variant."""
    columns = COMPARED if are_parts else SHOWN
    lines = ["| | " + " | ".join(NAMES[name] for name in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for variant, row in rows.items():
        lines.append(f"| {variant} | " + " | ".join(_cell(name, row[name], are_parts) for name in columns) + " |")
    return "\n".join(lines)


def _cell(name: str, value: float | None, is_part: bool) -> str:
    if value is None:
        return "-"
    if is_part:
        return f"{value:+.0%}"
    return f"{value:.0%}" if name in PARTS else f"{value:.3f}" if name.startswith("tpot") else f"{value:.2f}"


def within(parts: Mapping[str, Mapping[str, float | None]], bound: float) -> tuple[int, int]:
    """(how many of the comparisons are within the bound, of how many)."""
    found = [abs(v) <= bound for row in parts.values() for v in row.values() if v is not None]
    return sum(found), len(found)


def record(answer: Answer) -> dict[str, Any]:
    """One request for JSON."""
    told = {"num_prompt": answer.num_prompt, "arrived_at": round(answer.arrived_at, 4), "outcome": answer.outcome}
    if not answer.is_ok:
        return told
    names = ("route", "reason", "raw_bytes", "wire_bytes", "timing")
    times = {"ttft_s": round(answer.ttft_s, 4), "done_at": round(answer.done_at, 4), "tpot_s": round(answer.tpot_s, 5)}
    return told | times | {name: answer.report[name] for name in names if name in answer.report}
