"""`make bench-serving`: routing policies measured on real daemons, and the simulator held against that.

One prefilld with a core to itself, one decoded with a part of another, an emulated link between them. What they can do
is measured first; from that come the load, the tuned threshold and the simulation. Then, in rounds, every variant once:

    homogeneous   all prompts at prefilld, which stands beside decoded: the same two shares of CPU without the slow link
    remote-only   all prompts at prefilld, behind the link
    local-only    all prompts at decoded
    threshold     the paper's rule, tuned by its solver over the measured profiles
    adaptive      the least predicted time and price within the SLO "fixed"

Every variant gets the same prompts at the same instants, on the same warm processes; prefix caches are off. Goodput
counts answers within an SLO: first token within three times what decoded takes for it alone, for the mean prompt
("fixed") or for the prompt's own length ("3x"), both with tokens at a quarter of a lone stream's pace or better.
Needs root, /dev/net/tun, two cores and a writable CPU cgroup; `--quick` needs none of these and pretends.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.cli import NAMED, make_parser
from benchmarks.cluster import prfaas_home
from benchmarks.engine.machine import facts
from benchmarks.serving import report
from benchmarks.serving.client import Answer, Ask, ask_all, ask_in_turn
from benchmarks.serving.load import Load, Texts, asks, requests, slos, solve
from benchmarks.serving.profile import Measured, measure
from benchmarks.serving.simulate import simulate
from benchmarks.serving.site import VARIANTS, Hardware, Site, Variant, running

# Of the fake engine: what makes a run of seconds.
FAKE = {
    "prefilld": {"prefill_tokens_per_s": 8000.0},
    "decoded": {"prefill_tokens_per_s": 3000.0, "decode_tokens_per_s": 100.0},
}
WARM_UP = (("remote", 512), ("remote", 1024), ("local", 256), ("local", 512))


def compare(site: Site, prompts: Texts, args: argparse.Namespace) -> dict[str, Any]:
    """Everything of one model: profile, load, rounds, simulation."""
    load = Load(args.mu, args.sigma, args.low, args.high, args.outputs, args.cv, args.load, args.seconds, args.seed)
    measured = measure(site, prompts, ladder(load), args.repeats)
    solved = solve(measured, load)
    rate_rps = load.share * solved.throughput_rps
    asked = requests(load, rate_rps)
    wanted = slos(measured, load)
    chosen = [v for v in VARIANTS if v.name in args.variants]
    told = {
        "load": asdict(load),
        "measured": measured.facts(),
        "solved": asdict(solved),
        "offered_rps": rate_rps,
        "num_requests": len(asked),
        "slo": {name: {"ttft_mean_prompt_s": s.ttft_s(round(load.lengths.mean)), "tpot_s": s.tpot_s}
                for name, s in wanted.items()},
    }  # fmt: skip
    say(opening(told, measured))
    threshold, slo_s, offered_s = solved.threshold_tokens, wanted["fixed"].ttft_s(0), asked[-1].arrived_at
    sim = {v.name: report.figures(simulate(measured, v, threshold, slo_s, asked), offered_s, wanted) for v in chosen}
    fixed = asks(asked, prompts)
    runs = []
    for number in range(args.rounds):
        for variant in chosen[number % len(chosen) :] + chosen[: number % len(chosen)]:
            site.use(variant, threshold, slo_s)
            runs.append(one_run(site, variant, fixed, prompts) | {"round": number})
            ok = [a for a in runs[-1]["answers"] if a.is_ok]
            runs[-1]["figures"] = report.figures(ok, offered_s, wanted)
            say(f"round {number + 1}, {variant.name}: {runs[-1]['outcomes']}, " + brief(runs[-1]["figures"]))
    real = {v.name: report.medians([r["figures"] for r in runs if r["variant"] == v.name]) for v in chosen}
    parts = {name: report.deviations(real[name], sim[name]) for name in real}
    for run in runs:
        run["answers"] = [report.record(a) for a in run["answers"]]
    return told | {"runs": runs, "real": real, "simulated": sim, "simulated_over_measured": parts}


def ladder(load: Load) -> list[int]:
    """Lengths at which prefill is measured: doubling from the shortest prompt to the longest."""
    found = [load.low]
    while found[-1] * 2 < load.high:
        found.append(found[-1] * 2)
    return [*found, load.high]


def one_run(site: Site, variant: Variant, fixed: Sequence[Ask], prompts: Texts) -> dict[str, Any]:
    """A variant under the load, after a few requests by which it learns what is new."""
    first = [Ask(prompts(length), 4, 0.0, route) for route, length in WARM_UP]
    site.talk(lambda url: ask_in_turn(url, first))
    load_before = os.getloadavg()[0]
    answers: list[Answer] = site.talk(lambda url: ask_all(url, fixed))
    return {
        "variant": variant.name,
        "load_before": round(load_before, 2),
        "outcomes": report.outcomes(answers),
        "answers": answers,
    }


def opening(told: dict[str, Any], measured: Measured) -> str:
    """What was measured, and what follows from it."""
    solved, decode = told["solved"], measured.decode
    return "\n".join(
        [
            "prefill, tokens/s by length: "
            + "; ".join(f"{side} " + ", ".join(f"{n:.0f}: {n / s:.0f}" for n, s in points)
                        for side, points in (("prefilld", measured.remote_points), ("decoded", measured.own_points))),
            f"decode step, ms: {1e3 * decode.base_s:.1f} + {1e3 * decode.per_row_s:.2f} a row + "
            f"{1e6 * decode.per_context_s:.1f} a thousand tokens of context",
            f"local prefill beside streams: {measured.slowdown:.2f} times as long, their steps {measured.stretch:.2f}",
            f"state: {measured.state}, {measured.codec_ratio:.3f} of it on the wire; link {measured.link_bps / 1e6:.1f}"
            f" Mbit/s, round trip {1e3 * measured.rtt_s:.0f} ms",
            "taking in state costs streams, ns a byte: "
            + ", ".join(f"{1e9 * s:.1f} {side}" for side, s in zip(("near", "far"), measured.import_s, strict=True)),
            f"besides, ms: {1e3 * measured.remote_lead_s:.0f} remote, {1e3 * measured.own_lead_s:.0f} local",
            f"solved: threshold {solved['threshold_tokens']:.0f} tokens, {solved['throughput_rps']:.2f} req/s;"
            f" offered {told['offered_rps']:.2f} req/s, {told['num_requests']} requests",
        ]
    )  # fmt: skip


def brief(found: dict[str, float]) -> str:
    """One line."""
    return ", ".join(f"{report.NAMES[name]} {found[name]:.2f}" for name in report.SHOWN)


def closing(told: dict[str, Any]) -> str:
    """The tables."""
    near, total = report.within(told["simulated_over_measured"], 0.15)
    return "\n\n".join(
        [
            "measured, medians over the rounds:\n" + report.table(told["real"]),
            "simulated over the measured profiles:\n" + report.table(told["simulated"]),
            "simulated against measured:\n" + report.table(told["simulated_over_measured"], are_parts=True),
            f"{near} of {total} comparisons within 15 %",
        ]
    )


def say(text: str) -> None:
    """To whoever watches."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = make_parser("make bench-serving ARGS='...'", __doc__ or "")
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma3-270m"], help=NAMED)
    parser.add_argument("--variants", nargs="+", default=[v.name for v in VARIANTS], choices=[v.name for v in VARIANTS])
    parser.add_argument("--rounds", type=int, default=2, help="each has every variant once")
    parser.add_argument("--seconds", type=float, default=90.0, help="of arrivals in a run")
    parser.add_argument("--load", type=float, default=0.8, help="offered, as a part of what the solver finds possible")
    parser.add_argument("--cv", type=float, default=3.0, help="of the intervals between arrivals: 1 is Poisson")
    parser.add_argument("--mu", type=float, default=6.0, help="of the log of prompt tokens: half are below e^mu")
    parser.add_argument("--sigma", type=float, default=1.0, help="of the log of prompt tokens")
    parser.add_argument("--low", type=int, default=64, help="fewest prompt tokens")
    parser.add_argument("--high", type=int, default=3000, help="most prompt tokens")
    parser.add_argument("--outputs", type=int, default=16, help="tokens of an answer")
    parser.add_argument("--rate", type=float, default=150.0, help="of the link in Mbit/s")
    parser.add_argument("--rtt", type=float, default=20.0, help="its round trip in ms")
    parser.add_argument("--decoded-cores", type=float, default=0.4, help="decoded's part of a core; prefilld has one")
    parser.add_argument("--repeats", type=int, default=2, help="of each length in the profile")
    parser.add_argument("--seed", type=int, default=1, help="of lengths and arrivals")
    parser.add_argument("--quick", action="store_true", help="the fake engine on loopback, a few seconds, no root")
    parser.add_argument("--json", type=Path, metavar="FILE", help="everything, every request too")
    args = parser.parse_args(argv)
    if args.quick:
        args.models, args.rounds, args.repeats, args.seconds = ["fake"], min(args.rounds, 1), 1, min(args.seconds, 3.0)
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """Print tables; the exit code is 1 when a request was not answered."""
    args = options(argv)
    found: dict[str, Any] = {
        "machine": facts(sorted(os.sched_getaffinity(0))),
        "options": {k: str(v) for k, v in vars(args).items()},
    }
    for name in args.models:
        model = None if args.quick else prfaas_home() / "models" / name
        prompts = (
            Texts(random.Random(1).choices(range(3, 20_000), k=200_000)) if model is None else Texts.of(str(model))
        )
        hardware = Hardware(model, args.decoded_cores, args.rate, args.rtt)
        say(f"\n{name}")
        with running(hardware, fake=FAKE if args.quick else None) as site:
            found[name] = compare(site, prompts, args)
        say(closing(found[name]))
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
    runs = [run for name in args.models for run in found[name]["runs"]]
    return 0 if all(set(run["outcomes"]) == {"ok"} for run in runs) else 1


if __name__ == "__main__":
    sys.exit(main())
