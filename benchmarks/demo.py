"""`make demo`: two daemons, a short and a long prompt, the routes they took and what it cost."""

from __future__ import annotations

import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

from benchmarks.cli import make_parser
from benchmarks.cluster import WITH_CACHE, Cluster, prfaas_home, running_cluster
from common.request import Timing

_SHORT = "In one sentence, why is the sky blue?"
_QUESTION = "\n\nIn one sentence, what is the text above about?"
_PARTS = tuple(part.name for part in fields(Timing) if part.name != "ttft_s")


def long_text(num_words: int = 1500) -> str:
    """Real English prose: this project's own licence, as long as wanted."""
    root = Path(__file__).resolve().parent.parent
    words = (root / "LICENSE").read_text().split()
    return " ".join(words[:num_words])


def main(argv: list[str] | None = None) -> int:
    """Run the demo; 0 when the short prompt stayed local and the long one went to the peer."""
    parser = make_parser("make demo ARGS='...'", __doc__)
    parser.add_argument(
        "--model", type=Path, default=prfaas_home() / "models" / "smollm2-135m-instruct", help="model directory"
    )
    parser.add_argument("--max-tokens", type=int, default=48, help="output tokens of each prompt")
    args = parser.parse_args(argv)
    _say(f"starting prefilld and decoded with {args.model.name}")
    started = time.monotonic()
    with running_cluster(args.model, decoded=WITH_CACHE, prefilld=WITH_CACHE) as cluster:
        _say(f"both ready after {time.monotonic() - started:.1f} s; HTTP at {cluster.url}")
        routes = [
            ask(cluster, "short prompt", _SHORT, args.max_tokens),
            ask(cluster, "long prompt", long_text() + _QUESTION, args.max_tokens),
        ]
        statuses = cluster.stop()
    _say(f"stopped, exit statuses {statuses}")
    if routes != ["local", "remote"] or any(statuses.values()):
        _say(f"unexpected: routes {routes}")
        return 1
    return 0


def ask(cluster: Cluster, title: str, prompt: str, max_tokens: int) -> str:
    """One chat completion, printed with its route and timing; returns the route."""
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "temperature": 0}
    sent_at = time.monotonic()
    reply = cluster.post("/v1/chat/completions", body, {"X-Prfaas-Timing": "1"})
    took = time.monotonic() - sent_at
    show(title, reply, took)
    return str(reply["prfaas"]["route"])


def show(title: str, reply: dict[str, Any], took_s: float) -> None:
    """Print one answer for people."""
    info, usage = reply["prfaas"], reply["usage"]
    timing = info["timing"]
    _say(
        f"\n{title}: {usage['prompt_tokens']} prompt tokens, {usage['completion_tokens']} output tokens, {took_s:.2f} s"
    )
    _say(f"  answer   {reply['choices'][0]['message']['content'].strip()!r}")
    where = f"{info['route']}" + (f" at {info['peer']}" if info["peer"] else "")
    _say(f"  route    {where} ({info['reason']}; {info['uncached_tokens']} uncached tokens)")
    _say(
        f"  TTFT     {timing['ttft_s']:.3f} s = " + " + ".join(f"{p[:-2]} {timing[p]:.3f}" for p in _PARTS if timing[p])
    )
    if info["raw_bytes"]:
        ratio = info["wire_bytes"] / info["raw_bytes"]
        state = f"{info['raw_bytes']:,} bytes raw, {info['wire_bytes']:,} on the wire"
        _say(f"  state    {state} ({info['codec']}, ratio {ratio:.2f})")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
