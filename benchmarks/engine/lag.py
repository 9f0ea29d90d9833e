"""`make bench-lag`: does decoded stay responsive, and do running streams keep their pace, while a long prompt is
prefilled locally?

Streams run flat out (before), then a long prompt arrives (meanwhile). Printed for both: the event loop's lag p50 / p99
from decoded's own metric (a timer due every 50 ms), ITL p50 / p99 of the streams, their ratios, and the prefill rate
reached at that token budget, which is what the cost model should reckon with.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.cli import NAMED, make_parser
from benchmarks.cluster import prfaas_home
from benchmarks.engine.cells import Figures, run_mixed
from benchmarks.engine.client import Client, get_ready
from benchmarks.engine.engines import ENGINES, Setting, make_server
from benchmarks.engine.options import MODELS, merge_overrides, override
from benchmarks.engine.stats import Spread, histogram_percentile
from benchmarks.engine.workload import Cell, Prompts, Sizes

METRIC = "prfaas_event_loop_lag_seconds"
Buckets = dict[float, float]


def lag_buckets(text: str) -> Buckets:
    """Cumulative counts by upper bound, in seconds, from the text of /metrics."""
    found = re.findall(rf'^{METRIC}_bucket\{{le="([^"]+)"\}} (\S+)$', text, re.MULTILINE)
    return {float(bound): float(count) for bound, count in found}


def between(first: Buckets, last: Buckets) -> Buckets:
    """What was counted in between."""
    return {bound: last[bound] - first[bound] for bound in last}


async def measure(client: Client, prompts: Prompts, sizes: Sizes, number: int) -> Figures:
    """ITL, rate and lag of one run. Raises BadAnswer."""
    seen: dict[str, Buckets] = {}

    async def look(moment: str) -> None:
        seen[moment] = lag_buckets(await client.get("/metrics"))

    figures = await run_mixed(client, prompts, sizes, number, at=look)
    for name, first, last in (("quiet_lag", "running", "sending"), ("lag", "sending", "done")):
        counts = between(seen[first], seen[last])
        figures |= {f"{name}_p{n}_s": histogram_percentile(counts, n / 100) for n in (50, 99)}
        figures[f"{name}_samples"] = counts[float("inf")]
    return figures


def lines(model: str, rounds: Sequence[Figures], sizes: Sizes) -> list[str]:
    """For people: medians over the rounds, and the range of what has a target."""

    def ms(name: str) -> str:
        return f"{spread(name).median * 1e3:.1f}"

    def spread(name: str) -> Spread:
        found = Spread.of([r[name] for r in rounds])
        if found is None:
            raise ValueError("no rounds")
        return found

    def range_of(name: str, digits: int = 2, scale: float = 1.0) -> str:
        low, mid, high = (v * scale for v in (spread(name).low, spread(name).median, spread(name).high))
        return f"{mid:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"

    return [
        f"{model}: {sizes.num_streams} streams, prompt of {sizes.long_prompt} tokens, {len(rounds)} rounds",
        f"  event loop lag, ms   before p50 {ms('quiet_lag_p50_s')} p99 {ms('quiet_lag_p99_s')}"
        f"   meanwhile p50 {ms('lag_p50_s')} p99 {range_of('lag_p99_s', 1, 1e3)}",
        f"  ITL, ms              before p50 {ms('quiet_itl_p50_s')} p99 {ms('quiet_itl_p99_s')}"
        f"   meanwhile p50 {ms('itl_p50_s')} p99 {range_of('itl_p99_s', 1, 1e3)}",
        f"  ITL, times           p50 over p50 {range_of('itl_p50_ratio')}   p99 over p99 {range_of('itl_p99_ratio')}"
        f"   p99 over p50 before {range_of('itl_worst_ratio')}",
        f"  local prefill meanwhile {range_of('prefill_tokens_per_s', 0)} tokens/s, TTFT {range_of('ttft_s')} s;"
        f" the streams made {range_of('meanwhile_tokens_per_s', 1)} tokens/s",
    ]


def run(model: Path, setting: Setting, num_rounds: int) -> list[Figures]:
    """Start decoded once and measure `num_rounds` times, after one that does not count."""
    with tempfile.TemporaryDirectory(prefix="prfaas-") as folder:
        server = make_server(ENGINES["ours"], model, setting, Path(folder))
        server.start(timeout_s=300)
        try:
            return asyncio.run(_rounds(server.url, Prompts(model), setting.sizes, num_rounds))
        finally:
            server.stop()


async def _rounds(url: str, prompts: Prompts, sizes: Sizes, num_rounds: int) -> list[Figures]:
    async with Client(url) as client:
        await client.stream(prompts.take(300, (0, "warm", 0)), 16)
        await get_ready(url)
        return [await measure(client, prompts, sizes, number) for number in range(num_rounds)]


def main(argv: list[str] | None = None) -> int:
    """Print the figures of each model; with --out also write them all."""
    parser = make_parser("make bench-lag ARGS='...'", __doc__)
    parser.add_argument("--models", nargs="+", default=list(MODELS), help=NAMED)
    parser.add_argument(
        "--rounds", type=int, default=3, help="starts of decoded for each model; figures are medians over them"
    )
    parser.add_argument("--streams", type=int, default=4, help="streams that run when the long prompt arrives")
    parser.add_argument("--tokens", type=int, default=4000, help="length of the long prompt in tokens")
    parser.add_argument("--quiet-tokens", type=int, default=64, help="output tokens of each stream before it arrives")
    parser.add_argument("--cpus", type=int, nargs="+", help="core numbers for decoded (default: all that are allowed)")
    parser.add_argument(
        "--set",
        type=override,
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="a key of decoded's configuration; may be given again",
    )
    parser.add_argument("--out", type=Path, help="file to write all figures to, as JSON")
    args = parser.parse_args(argv)
    sizes = Sizes(num_streams=args.streams, long_prompt=args.tokens, quiet_output=args.quiet_tokens)
    cpus = tuple(args.cpus or sorted(os.sched_getaffinity(0)))
    setting = Setting(prfaas_home() / "bench", cpus, (Cell("mixed"),), sizes, merge_overrides(args.set))
    results: dict[str, Any] = {}
    for name in args.models:
        results[name] = run(prfaas_home() / "models" / name, setting, args.rounds)
        sys.stdout.write("\n".join(lines(name, results[name], sizes)) + "\n")
        sys.stdout.flush()
    if args.out is not None:
        args.out.write_text(json.dumps({"sizes": vars(sizes), "ours": setting.ours, "rounds": results}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
