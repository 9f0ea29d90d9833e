"""`decodectl plan`"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common.ctl import Context, Verb
from common.ctl_render import table
from common.errors import EXIT_USAGE


def _arguments(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("scenario", nargs="?", metavar="FILE", help="JSON: nodes, model, link, workload, SLO")
    source.add_argument("--example", choices=["paper"], help="the paper's case study instead of a file")
    parser.add_argument("--print-scenario", action="store_true", help="print the example as a file to start from")
    parser.add_argument("--no-simulation", action="store_true", help="closed form only; at once")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts too")


def _run(context: Context) -> int:
    args = context.args
    from common.sim import plan as planner
    from common.sim.scenario import EXAMPLES, scenario

    try:
        data = EXAMPLES[args.example] if args.example else _read(Path(args.scenario))
        if args.print_scenario:
            sys.stdout.write(json.dumps(data, indent=2) + "\n")
            return 0
        question = scenario(data, Path(args.scenario).parent if args.scenario else Path())
        answer = planner.plan(question, simulates=not args.no_simulation)
        if args.html:
            Path(args.html).write_text(planner.html(question, answer), "utf-8")
    except OSError as e:
        sys.stderr.write(f"{context.prog} plan: {e.filename}: {e.strerror or e}\n")
        return EXIT_USAGE
    except ValueError as e:
        sys.stderr.write(f"{context.prog} plan: {e}\n")
        return EXIT_USAGE
    except (ArithmeticError, RecursionError, TypeError) as e:
        # Numbers that are each within limits, but not together: what they are is for whoever wrote the file to find.
        name = args.scenario or args.example
        sys.stderr.write(f"{context.prog} plan: {name} cannot be planned with, {type(e).__name__}: {e}\n")
        return EXIT_USAGE
    return context.show(answer, plan_text(answer))


def _read(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{path} is no JSON: {e}") from e
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a scenario is a JSON object, not {type(data).__name__}")
    return data


def plan_text(answer: dict[str, Any]) -> str:
    """The tables, the duty of each stage, and whether it pays."""
    from common.sim.tables import tables, three

    told, advice = answer["closed_form"]["prfaas"], answer["advice"]
    parts = [f"warning: {text}" for text in answer["warnings"]]
    for title, header, rows in tables(answer):
        cells = [{name or "way": cell for name, cell in zip(header, row, strict=True)} for row in rows]
        parts += [title, table(cells), ""]
    duty = ", ".join(f"{name} {part:.0%}" for name, part in told["duty"].items())
    parts.append(f"duty at saturation: {duty}; the bottleneck is {told['bottleneck']}")
    parts += [_saturation_text(way, one, three) for way, one in answer.get("saturation", {}).items()]
    for way, one in answer.get("simulated", {}).items():
        if one["offered_rps"] > one["throughput_rps"]:
            parts.append(
                f"warning: {way}: {three(one['offered_rps'])} req/s are offered (arrivals.load), more than the"
                f" {three(one['throughput_rps'])} of simulated saturation: times may grow for as long as the run lasts"
            )
    quicker = advice["quicker_remote_from_tokens"]
    parts.append(
        f"a remote site {'pays' if advice['pays'] else 'does not pay: ' + advice['why_not']}; throughput"
        f" {advice['gain_over_homogeneous']:+.0%} over the homogeneous nodes, {advice['gain_at_equal_cost']:+.0%} over"
        f" {advice['equal_cost_nodes']} own nodes of the same cost;"
        + (f" quicker from {quicker} tokens on" if quicker is not None else " not quicker for the longest prompts")
    )
    return "\n".join(parts)


def _saturation_text(way: str, one: dict[str, Any], three: Callable[[float], str]) -> str:
    text = (
        f"saturation, {way}: simulated {three(one['simulated_rps'])}, E[T(L)] {three(one['closed_form_mean_rps'])}"
        f" req/s ({one['difference']:+.1%})"
    )
    return f"{text}; probable cause: {one['probable_cause']}" if one["probable_cause"] else text


VERB = Verb(
    "plan",
    "threshold, roles and times to expect, from profiles and a workload",
    "Solve the paper's equations for a scenario and simulate it with the router that decoded runs: threshold, split\n"
    "of nodes between prefill and decode, throughput, times, goodput, egress, duty of each stage, and when a remote\n"
    "site does not pay. No daemon is needed. `decodectl plan --example paper --print-scenario` shows the format;\n"
    "`own` and `remote` may name files of `decodectl profile --out` and `prefillctl profile --out` instead.\n"
    'docs/policies.md, "Planning", lists every key of a scenario with its unit and default.',
    _run,
    _arguments,
    False,
)
