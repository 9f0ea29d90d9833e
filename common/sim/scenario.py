"""What to plan for, as JSON has it: nodes, model, path, workload, SLO. Checked here, field by field.

`PAPER` is the case study of the Prefill-as-a-Service paper (arXiv 2604.15039, section 4) as an example: its Table 5 for
the remote node; for the own node, of which it prints no profile, the quadratic that its homogeneous column implies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.policy.costs import StateSize
from common.policy.fields import POSITIVE, Fields, Limits, json_object
from common.policy.lengths import Lengths
from common.policy.profile import NodeProfile, node_profile, state_size
from common.sim.links import tcp_bps
from common.sim.prompts import arrivals, prompts
from common.sim.workload import Shape
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
KEYS = (
    "name", "own", "remote", "state", "num_remote", "num_own", "num_homogeneous", "price_ratio", "cache_tokens", "link",
    "workload", "arrivals", "slo",
)  # fmt: skip
_CHANGE_KEYS = ("rate", "rtt", "loss", "data_links")
LINK_KEYS = (*_CHANGE_KEYS, "codec_ratio", "changes")
SLO_KEYS = ("ttft", "tpot")
_MAX_NODES = 10_000
_BELOW_ONE = Limits(0.0, 1.0, is_high_open=True)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A plan's question. `lengths` are of uncached tokens; `num_homogeneous` own nodes are the baseline without a
    remote site; `egress_bps` is what connections get of the link, loss taken off, and `rate_changes` (instant, the same
    from then on) are simulated only; `load` is the part of the predicted throughput at which times are simulated.
    Intervals between arrivals vary by `cv`, and the rate swings by `swing` over `period_s`; or they come as at
    `instants`, faster or slower. `mean_context` is the tokens of a row that decodes, its prompt and half its answer.
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
    mean_context: float
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
        ValueError: naming the field that is missing, unknown or wrong, or the file that cannot be read.
    """
    plan = Fields(_with_profiles(data, folder), "", KEYS)
    link, slo = plan.table("link", LINK_KEYS), plan.table("slo", SLO_KEYS)
    cache_tokens = plan.number("cache_tokens", default=0.0)
    asked, when = prompts(plan, folder, cache_tokens), arrivals(plan)
    own = node_profile(plan.get("own"), "own", is_strict=True)
    if own.decode is None:
        raise ValueError("own.decode is missing: decoded's own nodes generate the tokens")
    num_remote, num_own = plan.whole("num_remote", 0, _MAX_NODES), plan.whole("num_own", 2, _MAX_NODES)
    return Scenario(
        name=plan.text("name", "plan"),
        remote=node_profile(plan.get("remote"), "remote", is_strict=True),
        own=own,
        state=state_size(plan.get("state")),
        num_remote=num_remote,
        num_own=num_own,
        num_homogeneous=plan.whole("num_homogeneous", 2, 2 * _MAX_NODES, max(2, num_remote + num_own)),
        price_ratio=plan.number("price_ratio", Limits(0.0, 100.0, is_low_open=True), 2.0),
        egress_bps=_egress_bps(link),
        rate_changes=_rate_changes(link),
        rtt_s=link.unit("rtt", parse_duration, default="0"),
        codec_ratio=link.number("codec_ratio", POSITIVE, 1.0),
        shapes=asked.shapes,
        lengths=asked.lengths,
        mean_output=asked.mean_output,
        mean_context=asked.mean_context,
        load=when.load,
        cv=when.cv,
        swing=when.swing,
        period_s=when.period_s,
        instants=asked.instants,
        cache_tokens=cache_tokens,
        ttft_slo_s=slo.unit("ttft", parse_duration, POSITIVE, "10s"),
        tpot_slo_s=slo.unit("tpot", parse_duration, POSITIVE, "50ms"),
    )


def warnings(question: Scenario) -> list[str]:
    """What people should know of a scenario that can be planned for all the same.

    Prompts beyond the model's context are not refused: public traces have a few that a smaller model would not take,
    and the rest of the plan is of use. They are not left out either, since that would change what was asked.
    """
    known = {name: node.max_context for name, node in (("own", question.own), ("remote", question.remote))}
    limit = min((tokens for tokens in known.values() if tokens), default=None)
    beyond = [s.num_prompt for s in question.shapes if limit and s.num_prompt > limit]
    if not beyond:
        return []
    names = " and ".join(name for name, tokens in known.items() if tokens)
    return [
        f"{len(beyond)} of {len(question.shapes)} prompts (up to {max(beyond)} tokens) are longer than the {limit}"
        f" tokens that the model takes (model.max_context of {names}): their times are extrapolated, and the daemons"
        " refuse such prompts"
    ]


def _with_profiles(data: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Nodes that name a file of `prefillctl profile` or `decodectl profile`, read; state is theirs if not told."""
    whole = dict(data)
    for key in ("own", "remote"):
        if isinstance(path := data.get(key), str):
            whole[key] = _read_profile(folder / path, key)
    nodes = [node for key in ("own", "remote") if isinstance(node := whole.get(key), Mapping)]
    told = [Fields(m, f"{key}.model") for key in ("own", "remote") if (m := _model(whole.get(key))) is not None]
    if len({model.text("digest") for model in told if model.data.get("digest") is not None}) > 1:
        named = " and ".join(repr(model.data.get("name")) for model in told)
        raise ValueError(f"own and remote are profiles of different models, {named}: measure both with the same one")
    known = [node["state"] for node in nodes if "state" in node]
    if "state" not in whole and known:
        whole["state"] = known[0]
    return whole


def _model(node: object) -> Mapping[str, Any] | None:
    model = node.get("model") if isinstance(node, Mapping) else None
    return model if isinstance(model, Mapping) else None


def _read_profile(path: Path, key: str) -> Mapping[str, Any]:
    try:
        return json_object(path.read_text("utf-8"))
    except OSError as e:
        raise ValueError(f"{key}: {path} cannot be read: {e.strerror or e}") from e
    except ValueError as e:
        raise ValueError(f"{key}: {path} is no profile: {e}") from e


def _egress_bps(link: Fields) -> float:
    """What TCP gets of a link by its rate, loss and round trip, with so many data links."""
    rate_bps, rtt_s = link.unit("rate", parse_rate, POSITIVE), link.unit("rtt", parse_duration, default="0")
    return tcp_bps(rate_bps, rtt_s, link.number("loss", _BELOW_ONE, 0.0), link.whole("data_links", 1, 1024, 4))


def _rate_changes(link: Fields) -> tuple[tuple[float, float], ...]:
    """Each of link.changes has `at` and whatever is other from then on; the rest is as in `link`."""
    told = link.get("changes", [])
    if not isinstance(told, list) or not all(isinstance(each, Mapping) for each in told):
        raise ValueError(f"link.changes must be a list of objects, not {told!r:.80}")
    changes = []
    for n, each in enumerate(told):
        change = Fields(each, f"link.changes[{n}]", ("at", *_CHANGE_KEYS))
        whole = Fields({**link.data, **each}, change.where)
        changes.append((change.unit("at", parse_duration), _egress_bps(whole)))
    if changes != sorted(changes, key=lambda change: change[0]):
        raise ValueError("link.changes must be in the order of their `at`")
    return tuple(changes)
