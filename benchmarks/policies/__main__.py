"""Goodput and times of `adaptive`, `threshold`, `local-only` and `remote-only`, simulated, over a matrix of cells.

    python -m benchmarks.policies --traces FOLDER [--requests 4000] [--load 0.9] [--json FILE] [--markdown FILE]

FOLDER holds mooncake_conversation.jsonl and azure_code_2023.csv. Ten minutes or so on one core.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.policies.cells import CVS, IN_ORDER, LINKS_GBPS, POLICIES, SLOS, WORKLOADS, Cell, run, tuned
from common.policy.adaptive import WEIGHTS, Weights


def measure(cell: Cell, weights: Weights) -> dict[str, Any]:
    """All policies in one cell."""
    best, roles, rate_rps = tuned(cell)
    outcomes = {policy: run(cell, policy, weights) for policy in POLICIES}
    goodput = {
        slo: {policy: next(o.goodput[slo] for o in found if slo in o.goodput) for policy, found in outcomes.items()}
        for slo in SLOS
    }
    return {
        "workload": cell.workload,
        "gbps": cell.gbps,
        "cv": cell.cv,
        "offered_rps": rate_rps,
        "threshold_tokens": best.threshold_tokens,
        "roles": f"{best.num_prefill:g}/{best.num_decode:g}",
        "local_roles": f"{roles['local-only'].num_prefill:g}/{roles['local-only'].num_decode:g}",
        "binds": "link" if best.egress_bps > 0.98e9 * cell.gbps else "compute",
        "goodput_rps": goodput,
        "runs": {policy: [asdict(o) for o in found] for policy, found in outcomes.items()},
    }


def markdown(cells: list[dict[str, Any]]) -> str:
    """Goodput by cell and SLO, then percentiles of the time to first token."""
    what = "t, roles, binds | offered | SLO | adaptive | threshold | gain | in order | local | remote |"
    lines = [f"| workload | Gbit/s | CV | {what}", "|---" * 12 + "|"]
    for cell in cells:
        for slo in SLOS:
            rps = cell["goodput_rps"][slo]
            tuned_to = f"{cell['threshold_tokens']:.0f}, {cell['roles']}, {cell['binds']}"
            values = [*_where(cell), tuned_to, f"{cell['offered_rps']:.2f}", slo]
            values += [f"{rps['adaptive']:.2f}", f"{rps['threshold']:.2f}", f"{gain(cell, slo):+.0%}"]
            values.append(f"{rps[IN_ORDER]:.2f}")
            values += [f"{rps['local-only']:.2f}", f"{rps['remote-only']:.2f}"]
            lines.append("| " + " | ".join(values) + " |")
    what = "adaptive (10s) | (3x) | threshold | in order (10s) | (3x) | local-only | remote-only |"
    lines += ["", f"| workload | Gbit/s | CV | {what}", "|---" * 10 + "|"]
    for cell in cells:
        shown = [_percentiles(one) for policy in POLICIES for one in cell["runs"][policy]]
        lines.append("| " + " | ".join([*_where(cell), *shown]) + " |")
    return "\n".join(lines)


def _where(cell: dict[str, Any]) -> list[str]:
    return [cell["workload"], f"{cell['gbps']:g}", f"{cell['cv']:g}"]


def gain(cell: dict[str, Any], slo: str, over: str = "threshold") -> float:
    """Of adaptive's goodput over another's."""
    rps = cell["goodput_rps"][slo]
    return float(rps["adaptive"] / rps[over] - 1)


def _percentiles(outcome: dict[str, Any]) -> str:
    return " / ".join(f"{outcome['ttft'][p]:.1f}" for p in ("p50", "p90", "p99"))


def verdict(cells: list[dict[str, Any]]) -> str:
    """How many cells are won, and which are not."""
    same = [gain(c, slo, IN_ORDER) for c in cells for slo in SLOS]
    gains = {(c["workload"], c["gbps"], c["cv"], slo): gain(c, slo) for c in cells for slo in SLOS}
    tight = {(c["workload"], c["gbps"], c["cv"], s) for c in cells for s in SLOS if "link" in c["binds"]}
    tight |= {key for key in gains if key[0] == "shift"}
    lost = {key: g for key, g in gains.items() if g < 0}
    clear = sum(gains[key] >= 0.1 for key in tight)
    lines = [
        f"adaptive >= threshold in {len(gains) - len(lost)} of {len(gains)} cells",
        f"by 10 % or more in {clear} of the {len(tight)} where the link binds or the mix shifts",
    ]
    lines.append(
        f"over the threshold with the same order: >= in {sum(g >= 0 for g in same)} of {len(same)}, by 10 % or more in"
        f" {sum(g >= 0.1 for g in same)}, median {median(same):+.1%}"
    )
    for (name, gbps, cv, slo), g in sorted(lost.items(), key=lambda item: item[1]):
        lines.append(f"  lost: {name}, {gbps:g} Gbit/s, CV {cv:g}, SLO {slo}: {g:+.1%}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(prog="benchmarks.policies", description=__doc__)
    parser.add_argument("--traces", type=Path, required=True, metavar="FOLDER")
    parser.add_argument("--requests", type=int, default=4000, metavar="N", help="in each run (4000)")
    parser.add_argument("--load", type=float, default=0.9, help="offered, as a part of what the roles can serve (0.9)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workloads", nargs="+", default=list(WORKLOADS), choices=WORKLOADS)
    parser.add_argument("--links", nargs="+", type=float, default=list(LINKS_GBPS), metavar="GBPS")
    parser.add_argument("--price", type=float, default=WEIGHTS.price, help="weight of prices, 0 for none")
    parser.add_argument("--no-order", action="store_true", help="compute and send as the paper's system does")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    args = parser.parse_args()
    weights = Weights(args.price)
    started, cells = time.monotonic(), []
    for name in args.workloads:
        for gbps in args.links:
            for cv in CVS:
                cell = Cell(name, gbps, cv, args.load, args.requests, args.traces, args.seed, not args.no_order)
                cells.append(measure(cell, weights))
                told = ", ".join(f"{slo} {gain(cells[-1], slo):+.0%}" for slo in SLOS)
                print(f"{name:10s} {gbps:4g} Gbit/s CV {cv:g}: {told}", file=sys.stderr, flush=True)
    print(verdict(cells))
    print(f"{time.monotonic() - started:.0f} s")
    if args.json:
        args.json.write_text(json.dumps(cells, indent=1))
    if args.markdown:
        args.markdown.write_text(markdown(cells) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
