"""`make bench-transport`: the transport alone against iperf3, plain sockets, Mooncake's transfer engine and NIXL.

State is ready at once (ends.py), so that nothing but sessions, sockets and the kernel is measured. The second part
needs root and /dev/net/tun. Prints tables, and writes what was measured as JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from benchmarks.engine import machine
from benchmarks.transport import loopback, peers, wide
from benchmarks.wan.wan import is_available
from common.net.tuning import best_congestion_control


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, prog="make bench-transport ARGS="
    )
    defaults = "(default: %(default)s)"
    parser.add_argument("--rounds", type=int, default=5, help=f"turns of each sender {defaults}")
    parser.add_argument("--requests", type=int, default=16, help=f"of 64 MiB each, on loopback {defaults}")
    parser.add_argument("--seconds", type=float, default=20, help=f"of steady traffic on each link {defaults}")
    parser.add_argument("--links", type=int, default=4, help=f"data links on wide-area links {defaults}")
    parser.add_argument("--only", choices=["loopback", "wide"], help="one part alone (default: both)")
    parser.add_argument("--no-peers", action="store_true", help="without other transfer engines")
    parser.add_argument("--paths", nargs="+", type=int, metavar="N", help="numbers of wide-area links (default: all)")
    parser.add_argument("--out", type=Path, default=Path("transport.json"), help=f"file to write {defaults}")
    args = parser.parse_args(argv)
    document: dict[str, Any] = {"machine": machine.facts(()), "loopback": [], "wide": []}
    others = [] if args.no_peers else peers.make_ready(lambda line: print(line, file=sys.stderr))
    if args.only != "wide":
        document["loopback"] = loopback.measure(args.rounds, args.requests, seconds=3, peers=others)
        args.out.write_text(json.dumps(document, indent=1))
        print(loopback_text(document["loopback"]), flush=True)
    if args.only != "loopback" and not is_available():
        print("wide-area links are left out: they need root and /dev/net/tun", file=sys.stderr)
    elif args.only != "loopback":
        control = best_congestion_control() or "cubic"
        print(f"\n{args.links} data links, {control}; prfaas / plain sockets", flush=True)
        for path in wide.PATHS if args.paths is None else [wide.PATHS[n] for n in args.paths]:
            records = wide.measure(
                path,
                num_links=args.links,
                congestion_control=control,
                seconds=args.seconds,
                rounds=args.rounds,
                peers=[peer for peer in others if peer.is_default],
            )
            document["wide"] += records
            print(wide_text(path, records), flush=True)
            args.out.write_text(json.dumps(document, indent=1))
    args.out.write_text(json.dumps(document, indent=1))
    return 0


def loopback_text(records: list[dict[str, Any]]) -> str:
    """A line per sender: medians over the rounds, and the median of the paired ratios."""
    lines = []
    names = list(dict.fromkeys(r["sender"] for r in records))
    for name in names:
        own = [r for r in records if r["sender"] == name]
        speed, out, come = (
            statistics.median(r[key] for r in own) for key in ("gb_per_s", "sender_s_per_gb", "receiver_s_per_gb")
        )
        lines.append(f"{name:13} {speed:5.2f} GB/s, CPU s/GB {out:.2f} sending {come:.2f} receiving")
    pairs = {(r["round"], r["sender"]): r["gb_per_s"] for r in records}
    for name in names:
        ratios = [pairs[n, "prfaas"] / pairs[n, name] for n in {r["round"] for r in records}]
        if name != "prfaas":
            lines.append(f"prfaas / {name:13} {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})")
    return "\n".join(lines)


def wide_text(path: wide.Path, records: list[dict[str, Any]]) -> str:
    """One line: steady goodput, resent beyond the loss, queueing; medians of the transfers."""
    both = []
    for name in ("prfaas", "sockets"):
        own = [r for r in records if r["sender"] == name]
        first = next(r for r in own if "steady_mbit" in r)
        small, large = (statistics.median(r[key] for r in own) for key in ("small_s", "large_s"))
        both.append((first["steady_mbit"], first["resent"], first["queueing_ms"], small, large))
    parts = [
        "steady {:.1f}/{:.1f} Mbit/s",
        "resent {:.2%}/{:.2%}",
        "queue {:.0f}/{:.0f} ms",
        "4 MiB {:.3f}/{:.3f} s",
        "32 MiB {:.2f}/{:.2f} s",
    ]
    own = f"{path.name:24} " + "  ".join(
        p.format(*pair) for p, pair in zip(parts, zip(*both, strict=True), strict=True)
    )
    others = [r for r in records if r["sender"] not in ("prfaas", "sockets")]
    return "\n".join([own, *(f"{'':24} {r['sender']}: {_transfers(r)}" for r in others)])


def _transfers(record: dict[str, Any]) -> str:
    names = {"small_s": "4 MiB", "large_s": "32 MiB"}
    done = [f"{title} {record[key]:.2f} s" for key, title in names.items() if key in record]
    return ", ".join([*done, *([record["error"]] if "error" in record else [])])


if __name__ == "__main__":
    sys.exit(main())
