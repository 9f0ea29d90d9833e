"""Is transfer hidden behind compute? A long prompt over an emulated link, against the bound of a perfect pipeline.

    B = max over segments i of (ready_i + encoded bytes from i on / rate) + RTT

with ready_i the recorded instant at which the layers of segment i had run, from the sending of the request. Beside it:
the prefill alone (same engine, same cores, no transfer) and all bytes at the link rate. Also the share of chunks whose
first layer group was on the socket before the last layer group of the chunk was computed; and the same with codec
"raw", and with a prefilld that sends nothing before all is computed (late_prefilld.py). Needs root and /dev/net/tun.
"""

from __future__ import annotations

import http.client
import itertools
import json
import secrets
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cli import NAMED, make_parser
from benchmarks.cluster import Cluster, make_cluster, prfaas_home
from benchmarks.text import real_text
from benchmarks.wan.wan import ADDRESS, Wan

VARIANTS = ("overlap", "raw", "late")


@dataclass(frozen=True)
class Result:
    """One request's figures; seconds and bytes."""

    num_tokens: int
    ttft_s: float
    bound_s: float
    prefill_alone_s: float
    wire_bytes: int
    raw_bytes: int
    rate_bps: float
    overlap_share: float
    timing: dict[str, float]

    @property
    def ratio(self) -> float:
        """TTFT over the bound."""
        return self.ttft_s / self.bound_s

    def lines(self) -> list[str]:
        """For people."""
        return [
            f"prompt {self.num_tokens} tokens, state {self.raw_bytes:,} bytes raw, {self.wire_bytes:,} on the wire",
            f"TTFT {self.ttft_s:.3f} s / B {self.bound_s:.3f} s = {self.ratio:.3f}",
            f"prefill alone {self.prefill_alone_s:.3f} s, bytes / rate {self.wire_bytes * 8 / self.rate_bps:.3f} s",
            f"first layer group on the socket before the last was computed: {self.overlap_share:.0%} of chunks",
            "parts " + ", ".join(f"{k[:-2]} {v:.3f}" for k, v in self.timing.items() if v),
        ]


def wan_cluster(wan: Wan, folder: Path, model: Path, engine: dict[str, Any] | None = None) -> Cluster:
    """A prefilld at end A and a decoded at end B, each with the trace on; not started."""
    key = folder / "key"
    key.touch(mode=0o600)
    key.write_text(secrets.token_hex(32))
    extra = {"engine": engine or {}, "security": {"key_file": str(key)}}
    traced = {"log": {"trace_file": str(folder / "prefilld.trace")}}
    cluster = make_cluster(folder, model, decoded=extra, prefilld={**extra, **traced})
    prefilld = cluster.prefillds[0]
    prefilld.config["listen"] = {"host": ADDRESS["A"], "port": 7400}
    cluster.decoded.config["peers"] = [{"name": "far", "address": f"{ADDRESS['A']}:7400"}]
    prefilld.prefix, cluster.decoded.prefix = tuple(wan.command("A")), tuple(wan.command("B"))
    return cluster


def measure(wan: Wan, cluster: Cluster, num_tokens: int) -> Result:
    """One request there, one here, and the bound from the trace."""
    prompt = prompt_of(wan, cluster, num_tokens)
    here = ask(wan, cluster, prompt, "local")
    there = ask(wan, cluster, prompt, "remote")
    time.sleep(1.0)
    trace = Path(cluster.prefillds[0].config["log"]["trace_file"])
    events = [
        e for e in map(json.loads, trace.read_text().splitlines()) if e["request_id"] == there["info"]["request_id"]
    ]
    rate_bps = wan.rate_mbit * 1e6
    return Result(
        num_tokens=num_tokens,
        ttft_s=there["ttft_s"],
        bound_s=bound(events, there["sent_at"], rate_bps) + 2 * wan.delay_ms / 1e3,
        prefill_alone_s=here["info"]["timing"]["prefill_s"],
        wire_bytes=there["info"]["wire_bytes"],
        raw_bytes=there["info"]["raw_bytes"],
        rate_bps=rate_bps,
        overlap_share=overlap_share(events),
        timing=there["info"]["timing"],
    )


def bound(events: list[dict[str, Any]], sent_at: float, rate_bps: float) -> float:
    """max over i of (ready_i + bytes from i on / rate), in seconds after `sent_at`."""
    ready = {_rows(e): e["at"] for e in events if e["event"] == "segment_computed"}
    encoded = [(e["no"], e["encoded_bytes"], ready[_rows(e)]) for e in events if e["event"] == "segment_encoded"]
    total, worst = 0, 0.0
    for _, num_bytes, ready_at in sorted(encoded, reverse=True):
        total += num_bytes
        worst = max(worst, ready_at - sent_at + total * 8 / rate_bps)
    return worst


def overlap_share(events: list[dict[str, Any]]) -> float:
    """Share of chunks whose first segment was written before their last one was computed."""
    chunks = [e for e in events if e["event"] == "chunk_done"]
    good = 0
    for chunk in chunks:
        inside = [e for e in events if chunk["start"] <= e.get("start", -1) and e.get("stop", 0) <= chunk["stop"]]
        computed = [e["at"] for e in inside if e["event"] == "segment_computed"]
        written = [e["at"] for e in inside if e["event"] == "piece_written"]
        good += bool(written) and min(written) < max(computed)
    return good / len(chunks)


def ask(wan: Wan, cluster: Cluster, prompt: list[int], route: str) -> dict[str, Any]:
    """One streamed completion by a client beside decoded; its own clock's TTFT and the report."""
    port = cluster.decoded.config["http"]["port"]
    body = json.dumps({"prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True})
    headers = {"Content-Type": "application/json", "X-Prfaas-Timing": "1", "X-Prfaas-Route": route}

    def talk() -> dict[str, Any]:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=900)
        link.connect()
        sent_at = time.monotonic()
        link.request("POST", "/v1/completions", body, headers)
        reply = link.getresponse()
        first_at, info = 0.0, None
        for line in reply:
            if line.startswith(b"data: {"):
                first_at = first_at or time.monotonic()
                info = json.loads(line[6:]).get("prfaas") or info
        if info is None:
            raise RuntimeError(f"no completion: status {reply.status}\n{cluster.decoded.log_tail()}")
        return {"sent_at": sent_at, "ttft_s": first_at - sent_at, "info": info}

    return wan.call("B", talk)


def prompt_of(wan: Wan, cluster: Cluster, num_tokens: int) -> list[int]:
    """Token ids of real text."""
    from common.text.tokenizer import Tokenizer

    tokenizer = Tokenizer.load(cluster.decoded.config["model"]["path"])
    return tokenizer.encode(real_text(num_tokens * 8))[:num_tokens]


def run(
    model: Path,
    *,
    rate_mbit: float,
    rtt_ms: float,
    num_tokens: int,
    engine: dict[str, Any] | None = None,
    variant: str = "overlap",
) -> Result:
    """Bring link and daemons up, measure once, take everything down. `variant` is one of VARIANTS."""
    with Wan(rate_mbit, rtt_ms / 2) as wan, tempfile.TemporaryDirectory(prefix="prfaas-") as name:
        cluster = wan_cluster(wan, Path(name), model, engine)
        if variant == "raw":
            for daemon in cluster.daemons:
                daemon.config.setdefault("stream", {})["codec"] = "raw"
        if variant == "late":
            cluster.prefillds[0].program = "benchmarks.late_prefilld"
        try:
            cluster.start()
            cluster.wait_warm()
            return measure(wan, cluster, num_tokens)
        finally:
            cluster.stop()


def _rows(event: dict[str, Any]) -> tuple[int, int, tuple[int, ...]]:
    return event["start"], event["stop"], tuple(event["layers"])


def main(argv: list[str] | None = None) -> int:
    """Print the figures of every case."""
    parser = make_parser("python -m benchmarks.overlap", __doc__)
    parser.add_argument("--models", nargs="+", default=["smollm2-135m-instruct", "gemma3-270m"], help=NAMED)
    parser.add_argument("--tokens", type=int, default=3000, help="prompt length in tokens")
    parser.add_argument("--rates", type=float, nargs="+", default=[50.0], help="of the emulated link in Mbit/s")
    parser.add_argument("--variants", nargs="+", default=["overlap"], choices=VARIANTS, help="what to compare")
    parser.add_argument("--rtt", type=float, default=20.0, help="its round trip in ms")
    parser.add_argument("--kv-dtypes", nargs="+", default=["float32"], help="engine.kv_dtype at both ends, a case each")
    args = parser.parse_args(argv)
    cases = itertools.product(args.models, args.kv_dtypes, args.rates, args.variants)
    for model, kv_dtype, rate, variant in cases:
        path = prfaas_home() / "models" / model
        engine = {"kv_dtype": kv_dtype}
        result = run(path, rate_mbit=rate, rtt_ms=args.rtt, num_tokens=args.tokens, engine=engine, variant=variant)
        title = f"{model}, kv {kv_dtype}, {rate:g} Mbit/s, RTT {args.rtt:g} ms, {variant}"
        sys.stdout.write("\n  ".join([title, *result.lines()]) + "\n")
        sys.stdout.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
