"""What the machine can do, measured through the daemons' own HTTP answers: the input of solver, policies and simulator.

Prompts of a ladder of lengths, each alone, computed at either side; streams side by side; a prompt beside streams.
Knows nothing of workloads. Called by __main__.py.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.serving.client import Answer, Ask, ask_all, ask_in_turn
from benchmarks.serving.site import VARIANTS, Site
from common.policy.costs import DecodeCost, DecodeFit, StateSize
from common.policy.profile import Curve, NodeProfile

NEAR, FAR = (next(v for v in VARIANTS if v.name == name) for name in ("homogeneous", "remote-only"))
LADDER_OUTPUT = 8
ROWS = (1, 2, 4, 8)
ROW_PROMPT, ROW_OUTPUT = 48, 32
MIXED_ROWS, QUIET_STEPS = 3, 24
Prompts = Callable[[int], Sequence[int]]


@dataclass(frozen=True, slots=True)
class Measured:
    """In seconds, bytes and bits per second; medians over requests, means over steps.

    Attributes:
        remote_points, own_points: (prompt tokens computed, seconds) at prefilld and at decoded.
        decode: seconds of a step of a batch; `context` is the prompt length of a row at which nothing else was seen.
        slowdown, stretch: how many times as long local prefill takes beside running streams, and their steps meanwhile.
        remote_lead_s, own_lead_s: what a request takes until its first token beside computing, sending and one step.
        import_s: what taking in state costs streams at decoded for each raw byte, from beside it and over the link.
        link_bps: what state crosses the emulated link at; `rtt_s` its round trip.
    """

    remote_points: list[tuple[float, float]]
    own_points: list[tuple[float, float]]
    decode: DecodeCost
    slowdown: float
    stretch: float
    state: StateSize
    codec_ratio: float
    remote_lead_s: float
    own_lead_s: float
    link_bps: float
    rtt_s: float
    max_rows: int
    import_s: tuple[float, float]

    @property
    def remote(self) -> NodeProfile:
        return NodeProfile("prefilld", Curve(self.remote_points))

    @property
    def own(self) -> NodeProfile:
        return NodeProfile("decoded", Curve(self.own_points), self.decode, self.max_rows)

    def own_ttft_s(self, num_prompt: int) -> float:
        """Of a prompt alone at decoded."""
        return self.own_lead_s + self.own.prefill(num_prompt - 1) + self.decode.step_s(1, num_prompt)

    def facts(self) -> dict[str, Any]:
        """For JSON; `remote_tokens_per_s` and `own_tokens_per_s` are at each length of the ladder."""
        rates = {
            f"{side}_tokens_per_s": [[n, round(n / s, 1)] for n, s in points]
            for side, points in (("remote", self.remote_points), ("own", self.own_points))
        }
        return asdict(self) | rates


def measure(site: Site, prompts: Prompts, ladder: Sequence[int], repeats: int = 2) -> Measured:
    """`prompts` gives token ids of text that was not used before."""
    site.use(NEAR)
    _ask(site, [Ask(prompts(ladder[-1] // 2), 4, 0.0, route) for route in ("remote", "local")])
    there, here = (
        _ask(site, [Ask(prompts(n), LADDER_OUTPUT, 0.0, route) for _ in range(repeats) for n in ladder])
        for route in ("remote", "local")
    )
    decode = _decode(site, prompts, here)
    state, ratio = _state(there)
    remote, own = (_points(answers) for answers in (there, here))
    slowdown, stretch = _mixed(site, prompts, ladder[len(ladder) // 2], Curve(own), decode)
    leads = [_lead_s(answers, decode) for answers in (there, here)]

    def import_s() -> float:
        curves = Curve(remote), Curve(own)
        return _import_s([_late_s(site, prompts, ladder[-1] // 2, curves, decode) for _ in range(repeats)])

    near_s = import_s()
    site.use(FAR)
    link_bps = site.link_bps("far")
    return Measured(
        remote, own, decode, slowdown, stretch, state, ratio, *leads, link_bps, site.rtt_s, site.hardware.max_batch,
        (near_s, import_s()),
    )  # fmt: skip


def _ask(site: Site, asks: Sequence[Ask]) -> list[Answer]:
    return _all_ok(site.talk(lambda url: ask_in_turn(url, asks)))


def _together(site: Site, asks: Sequence[Ask]) -> list[Answer]:
    return _all_ok(site.talk(lambda url: ask_all(url, asks)))


def _all_ok(answers: list[Answer]) -> list[Answer]:
    for answer in answers:
        if not answer.is_ok:
            raise RuntimeError(f"a request of the profile failed: {answer.outcome}")
    return answers


def _points(answers: Sequence[Answer]) -> list[tuple[float, float]]:
    """Medians by length; a longer prompt that took less by chance counts as taking as long."""
    by_length: dict[int, list[float]] = {}
    for answer in answers:
        by_length.setdefault(answer.num_prompt - 1, []).append(answer.timing["prefill_s"])
    points, most = [], 0.0
    for length, seconds in sorted(by_length.items()):
        most = max(most, statistics.median(seconds))
        points.append((float(length), most))
    return points


def _lead_s(answers: Sequence[Answer], decode: DecodeCost) -> float:
    rest = [a.ttft_s - a.timing["prefill_s"] - decode.step_s(1, a.num_prompt) for a in answers]
    return max(0.0, statistics.median(rest))


def _decode(site: Site, prompts: Prompts, alone: Sequence[Answer]) -> DecodeCost:
    """Steps of the ladder's prompts show what context costs, those of streams side by side what rows do."""
    fit = DecodeFit()
    for answer in alone:
        fit.observe(1, answer.num_prompt, statistics.fmean(_gaps([answer])))
    for rows in ROWS:
        answers = _together(site, [Ask(prompts(ROW_PROMPT), ROW_OUTPUT, 0.0, "local") for _ in range(rows)])
        start, stop = max(a.first_token_at for a in answers), min(a.done_at for a in answers)
        if found := _gaps(answers, start, stop):
            fit.observe(rows, rows * (ROW_PROMPT + ROW_OUTPUT // 2), statistics.fmean(found))
    cost = fit.cost
    if cost is None:
        raise RuntimeError("no decode step was seen")
    return cost


def _gaps(answers: Sequence[Answer], start: float = 0.0, stop: float = float("inf")) -> list[float]:
    """Seconds between tokens of one stream, within a time. Their mean counts, not the median: a process that is held to
    a part of a core runs and stands still by turns, and tokens reach the client in twos and threes.
    """
    return [b - a for answer in answers for a, b in pairwise(answer.stamps) if start <= a and b <= stop]


def _mixed(site: Site, prompts: Prompts, length: int, own: Curve, decode: DecodeCost) -> tuple[float, float]:
    """(slowdown, stretch): a prompt that arrives while streams run, which go on until it is computed."""
    starts_s = 2 * MIXED_ROWS * own(ROW_PROMPT) + QUIET_STEPS * decode.step_s(MIXED_ROWS)
    num_output = 3 * QUIET_STEPS + math.ceil(4 * own(length) / decode.step_s(MIXED_ROWS))
    asks = [Ask(prompts(ROW_PROMPT), num_output, 0.0, "local") for _ in range(MIXED_ROWS)]
    *streams, late = _together(site, [*asks, Ask(prompts(length), 2, starts_s, "local")])
    began, ended = late.first_token_at - late.timing["prefill_s"], late.first_token_at
    before, meanwhile = _gaps(streams, 0.0, began), _gaps(streams, began, ended)
    if not before or not meanwhile or min(a.done_at for a in streams) < ended:
        raise RuntimeError("the streams beside which a prompt was computed ended before it")
    stretch = statistics.fmean(meanwhile) / statistics.fmean(before)
    return max(1.0, late.timing["prefill_s"] / own(length - 1)), max(1.0, stretch)


def _import_s(seen: Sequence[tuple[float, int]]) -> float:
    """For each byte, of the seconds by which streams were late and the bytes that came meanwhile."""
    return max(0.0, sum(seconds for seconds, _ in seen) / sum(num for _, num in seen))


def _late_s(
    site: Site, prompts: Prompts, length: int, sides: tuple[Curve, Curve], decode: DecodeCost
) -> tuple[float, int]:
    """By how much streams are late (or by chance early) after the state of a prompt has come, and its raw bytes."""
    remote, own = sides
    starts_s = 2 * MIXED_ROWS * own(ROW_PROMPT) + QUIET_STEPS * decode.step_s(MIXED_ROWS)
    num_output = 3 * QUIET_STEPS + math.ceil((starts_s + 3 * remote(length)) / decode.step_s(MIXED_ROWS))
    asks = [Ask(prompts(ROW_PROMPT), num_output, 0.0, "local") for _ in range(MIXED_ROWS)]
    *streams, late = _together(site, [*asks, Ask(prompts(length), 2, starts_s, "remote")])
    if min(a.done_at for a in streams) < late.first_token_at:
        raise RuntimeError("the streams beside which state was taken in ended before it")
    lost = []
    for stream in streams:
        before = statistics.fmean(_gaps([stream], 0.0, late.arrived_at))
        meanwhile = _gaps([stream], late.arrived_at, late.first_token_at)
        lost.append(sum(meanwhile) - before * len(meanwhile))
    return statistics.fmean(lost), late.report["raw_bytes"]


def _state(there: Sequence[Answer]) -> tuple[StateSize, float]:
    """Raw bytes by length rise at one rate below the window of layers that have one, and at another above it: the two
    shortest and the two longest prompts show both.
    """
    raw = sorted({(a.num_prompt - 1, a.report["raw_bytes"]) for a in there})
    (x0, y0), (x1, y1), (x2, y2), (x3, y3) = raw[0], raw[1], raw[-2], raw[-1]
    steep, flat = (y1 - y0) / (x1 - x0), (y3 - y2) / (x3 - x2)
    fixed, top = y0 - steep * x0, y3 - flat * x3
    windowed = steep - flat
    # Without such layers both are the same line, but for rounding.
    if windowed < 1e-3 * steep:
        state = StateSize(max(0.0, fixed), flat)
    else:
        state = StateSize(max(0.0, fixed), flat, windowed, (top - fixed) / windowed)
    return state, sum(a.report["wire_bytes"] for a in there) / sum(a.report["raw_bytes"] for a in there)
