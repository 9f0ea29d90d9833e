"""What to plan for, as JSON has it: nodes, model, path, workload, SLO. Checked here, field by field.

`PAPER` is the case study of the Prefill-as-a-Service paper (arXiv 2604.15039, section 4) as an example: its Table 5 for
the remote node; for the own node, of which it prints no profile, the quadratic that its homogeneous column implies.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from common.policy.costs import StateSize
from common.policy.lengths import Lengths
from common.policy.profile import NodeProfile, node_profile, number, state_size, table
from common.sim.caches import BlockCache
from common.sim.links import tcp_bps
from common.sim.traces import Trace, read_trace
from common.sim.workload import BLOCK_TOKENS, Shape, log_normal, retrieval, sessions
from common.units import parse_duration, parse_rate

PAPER: dict[str, Any] = {
    "name": "paper",
    # Straight through the first and last point of Table 5: 190.8 MiB at 1K and 2316.3 MiB at 128K tokens.
    "state": {"fixed_bytes": 182_515_000, "bytes_per_token": 17_549},
    "remote": {
        "name": "8 x H200",
        "prefill": {"points": [[1000, 0.44], [8000, 0.72], [32000, 1.84], [128000, 7.40]]},
    },
    "own": {
        "name": "8 x H20",
        "prefill": {"constant_s": 0.451, "per_token_s": 1.317e-4, "per_square_s": 2.91e-10},
        "decode": {"base_s": 0.025, "max_rows": 20},
    },
    "num_remote": 4,
    "num_own": 8,
    "num_homogeneous": 12,
    "price_ratio": 2.0,
    "link": {"rate": "100Gbit/s", "rtt": "10ms"},
    "workload": {"kind": "log-normal", "mu": 9.9, "sigma": 1.0, "low": 128, "high": 128_000, "num_output": 1024},
    "arrivals": {"load": 0.8, "cv": 1.0, "num_requests": 6000},
    "slo": {"ttft": "10s", "tpot": "25ms"},
}
EXAMPLES = {"paper": PAPER}
_SEED = 1


@dataclass(frozen=True, slots=True)
class Scenario:
    """A plan's question. `lengths` are of uncached tokens; `num_homogeneous` own nodes are the baseline without a
    remote site; `egress_bps` is what connections get of the link, loss taken off, and `rate_changes` (instant, the same
    from then on) are simulated only; `load` is the part of the predicted throughput at which times are simulated.
    Intervals between arrivals vary by `cv`, and the rate swings by `swing` over `period_s`; or they come as at
    `instants`, faster or slower.
    """

    name: str
    remote: NodeProfile
    own: NodeProfile
    state: StateSize
    num_remote: int
    num_own: int
    num_homogeneous: int
    price_ratio: float
    egress_bps: float
    rate_changes: tuple[tuple[float, float], ...]
    rtt_s: float
    codec_ratio: float
    shapes: tuple[Shape, ...]
    lengths: Lengths
    mean_output: float
    load: float
    cv: float
    swing: float
    period_s: float
    instants: tuple[float, ...]
    cache_tokens: float
    ttft_slo_s: float
    tpot_slo_s: float


def scenario(data: Mapping[str, Any], folder: Path = Path()) -> Scenario:
    """Check and complete; `folder` is where relative paths start.

    Raises:
        ValueError: naming the field.
        OSError: the trace or a profile cannot be read.
    """
    data = _with_profiles(data, folder)
    link, slo, arrivals, asked = (table(data, key) for key in ("link", "slo", "arrivals", "workload"))
    count = _whole(arrivals, "num_requests", "arrivals", 6000, low=100)
    cache_tokens = number(data, "cache_tokens", "plan", 0.0)
    trace = read_trace(folder / str(asked.get("path", ""))) if asked.get("kind") == "trace" else None
    shapes = tuple(_shapes(asked, count, trace))
    own = node_profile(table(data, "own"))
    if own.decode is None:
        raise ValueError("own.decode is missing: decoded's own nodes generate the tokens")
    num_remote, num_own = _whole(data, "num_remote", "plan"), _whole(data, "num_own", "plan", low=2)
    return Scenario(
        name=str(data.get("name", "plan")),
        remote=node_profile(table(data, "remote")),
        own=own,
        state=state_size(table(data, "state")),
        num_remote=num_remote,
        num_own=num_own,
        num_homogeneous=_whole(data, "num_homogeneous", "plan", num_remote + num_own, low=2),
        price_ratio=number(data, "price_ratio", "plan", 2.0),
        egress_bps=_egress_bps(link, "link"),
        rate_changes=_rate_changes(link),
        rtt_s=_unit(link, "rtt", "link", parse_duration, "0"),
        codec_ratio=number(link, "codec_ratio", "link", 1.0),
        shapes=shapes,
        lengths=_lengths(asked, shapes, cache_tokens),
        mean_output=float(np.mean([s.num_output for s in shapes])),
        load=number(arrivals, "load", "arrivals", 0.8),
        cv=number(arrivals, "cv", "arrivals", 1.0),
        swing=_swing(arrivals),
        period_s=_unit(arrivals, "period", "arrivals", parse_duration, "24h"),
        instants=_instants(arrivals, count, trace),
        cache_tokens=cache_tokens,
        ttft_slo_s=_unit(slo, "ttft", "slo", parse_duration, "10s"),
        tpot_slo_s=_unit(slo, "tpot", "slo", parse_duration, "50ms"),
    )


def _with_profiles(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Nodes that name a file of `prefillctl profile` or `decodectl profile`, read; state is theirs if not told."""
    whole = dict(data)
    for key in ("own", "remote"):
        if isinstance(path := data.get(key), str):
            whole[key] = _read_profile(folder / path, key)
    nodes = [node for key in ("own", "remote") if isinstance(node := whole.get(key), Mapping)]
    models = [(m.get("name"), m.get("digest")) for node in nodes if isinstance(m := node.get("model"), Mapping)]
    if len({digest for _, digest in models}) > 1:
        named = " and ".join(repr(name) for name, _ in models)
        raise ValueError(f"own and remote are profiles of different models, {named}: measure both with the same one")
    known = [node["state"] for node in nodes if "state" in node]
    if "state" not in whole and known:
        whole["state"] = known[0]
    return whole


def _read_profile(path: Path, key: str) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{key}: {path} is no profile: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{key}: {path} is no profile: it holds no JSON object but {type(found).__name__}")
    return found


def uncached_lengths(shapes: Sequence[Shape], cache_tokens: float) -> list[int]:
    """What is left to compute of each prompt when they come in this order to one cache of that size."""
    cache = BlockCache(cache_tokens, BLOCK_TOKENS)
    left = []
    for shape in shapes:
        left.append(max(0, shape.num_prompt - 1 - cache.match(shape.blocks)))
        cache.add(shape.blocks)
    return left


def _shapes(workload: Mapping[str, Any], count: int, trace: Trace | None) -> list[Shape]:
    kind, rng = workload.get("kind"), np.random.default_rng(_SEED)
    if trace is not None:
        return trace.repeated(count)
    output = _whole(workload, "num_output", "workload", 256, low=1)
    if kind == "log-normal":
        mu, sigma = (number(workload, key, "workload") for key in ("mu", "sigma"))
        low, high = (_whole(workload, key, "workload", low=1) for key in ("low", "high"))
        return log_normal(count, rng, mu=mu, sigma=sigma, low=low, high=high, num_output=output)
    if kind == "retrieval":
        return retrieval(count, rng, num_output=output)
    if kind == "sessions":
        return sessions(count, rng, num_output=output)
    raise ValueError(f'workload.kind must be "log-normal", "trace", "retrieval" or "sessions", not {kind!r}')


def _egress_bps(link: Mapping[str, Any], where: str) -> float:
    """What TCP gets of a link by its rate, loss and round trip, with so many data links."""
    rate_bps, rtt_s = _unit(link, "rate", where, parse_rate), _unit(link, "rtt", where, parse_duration, "0")
    loss = number(link, "loss", where, 0.0)
    if loss >= 1:
        raise ValueError(f"{where}.loss must be below 1, not {loss}: it is a part of the packets")
    return tcp_bps(rate_bps, rtt_s, loss, _whole(link, "data_links", where, 4, low=1))


def _rate_changes(link: Mapping[str, Any]) -> tuple[tuple[float, float], ...]:
    """Each of link.changes has `at` and whatever is other from then on; the rest is as in `link`."""
    told = link.get("changes", [])
    if not isinstance(told, list) or not all(isinstance(each, Mapping) for each in told):
        raise ValueError(f"link.changes must be a list of objects, not {told!r:.80}")
    changes = []
    for n, each in enumerate(told):
        where = f"link.changes[{n}]"
        changes.append((_unit(each, "at", where, parse_duration), _egress_bps({**link, **each}, where)))
    if changes != sorted(changes, key=lambda change: change[0]):
        raise ValueError("link.changes must be in the order of their `at`")
    return tuple(changes)


def _swing(arrivals: Mapping[str, Any]) -> float:
    swing = number(arrivals, "swing", "arrivals", 0.0)
    if swing >= 1:
        raise ValueError(f"arrivals.swing must be below 1, not {swing}: the rate cannot fall below zero")
    return swing


def _instants(arrivals: Mapping[str, Any], count: int, trace: Trace | None) -> tuple[float, ...]:
    """Those of the trace with arrivals.as_recorded; none otherwise."""
    if not arrivals.get("as_recorded", False):
        return ()
    if trace is None:
        raise ValueError('arrivals.as_recorded needs workload.kind = "trace"')
    if count > len(trace.instants):
        raise ValueError(f"arrivals.num_requests = {count}, but the trace has {len(trace.instants)}")
    return trace.instants[:count]


def _lengths(workload: Mapping[str, Any], shapes: Sequence[Shape], cache_tokens: float) -> Lengths:
    """Exact where the distribution is known, else the histogram."""
    if workload.get("kind") == "log-normal":
        return Lengths.log_normal(*(workload[key] for key in ("mu", "sigma", "low", "high")))
    return Lengths.of(uncached_lengths(shapes, cache_tokens))


def _whole(data: Mapping[str, Any], key: str, where: str, default: int | None = None, low: int = 0) -> int:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{where}.{key} must be a whole number >= {low}, not {value!r}")
    return value


def _unit(data: Mapping[str, Any], key: str, where: str, parse: Any, default: str | None = None) -> float:
    try:
        return float(parse(data.get(key, default)))
    except ValueError as e:
        raise ValueError(f"{where}.{key}: {e}") from e
