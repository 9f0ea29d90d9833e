"""What is asked for: the same prompts at the same instants for every variant and for the simulator.

Lengths are log-normal between two bounds and arrivals come in bursts (common/sim/workload.py); the rate is a part of
what the paper's closed form finds possible over the measured profiles, and so is the threshold. Called by __main__.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.serving.client import Ask
from benchmarks.serving.profile import Measured
from benchmarks.text import real_text
from common.policy.allocation import allocate
from common.policy.capacity import Plant, Solution
from common.policy.lengths import Lengths
from common.sim.report import Slo
from common.sim.workload import SimRequest, arrive, log_normal
from common.text.tokenizer import Tokenizer

CHARACTERS = 450_000


@dataclass(frozen=True, slots=True)
class Load:
    """`share` of what is possible, for so many seconds. Prompt tokens are log-normal (mu, sigma) within [low, high]."""

    mu: float
    sigma: float
    low: int
    high: int
    num_output: int
    cv: float
    share: float
    seconds: float
    seed: int

    @property
    def lengths(self) -> Lengths:
        return Lengths.log_normal(self.mu, self.sigma, self.low, self.high)


class Texts:
    """Token ids that no prompt had before: real text, from the beginning again when it is over."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at, self._num_laps = list(tokens), 0, 0

    @classmethod
    def of(cls, model: str) -> Texts:
        """Real text in a model's tokens."""
        return cls(Tokenizer.load(model).encode(real_text(CHARACTERS)))

    def __call__(self, num_tokens: int) -> list[int]:
        if self._at + num_tokens > len(self._tokens):
            self._num_laps += 1
            self._at = self._num_laps  # so that prompts do not begin where others began
        self._at += num_tokens
        return self._tokens[self._at - num_tokens : self._at]


def solve(measured: Measured, load: Load) -> Solution:
    """The paper's optimum, with decoded's time divided between prefill and decode (equations 6 and 7). Local prefill
    counts as it is beside streams: less quick than alone even for its part of the time.
    """
    own, share = measured.own, 1 - 1 / measured.stretch if measured.stretch > 1 else 1.0
    beside = max(1.0, measured.slowdown * share)
    plant = Plant(
        measured.remote.prefill,
        lambda tokens: beside * own.prefill(tokens),
        measured.state,
        1,
        1,
        own.decode_rps(load.num_output, load.lengths.mean),
        measured.link_bps,
        measured.codec_ratio,
    )
    return allocate(plant, load.lengths, 0, 1).now


def requests(load: Load, rate_rps: float) -> list[SimRequest]:
    """In order of arrival; the mean rate is exactly the one asked for, however the bursts fall."""
    rng = np.random.default_rng(load.seed)
    count = max(2, round(load.seconds * rate_rps))
    shapes = log_normal(
        count, rng, mu=load.mu, sigma=load.sigma, low=load.low, high=load.high, num_output=load.num_output
    )
    found = arrive(shapes, rate_rps, rng, cv=load.cv)
    first, last = found[0].arrived_at, found[-1].arrived_at
    for one in found:
        one.arrived_at = (one.arrived_at - first) * (count - 1) / rate_rps / (last - first)
    return found


def asks(found: Sequence[SimRequest], prompts: Texts) -> list[Ask]:
    """The same for the real daemons."""
    return [Ask(prompts(one.num_prompt), one.num_output, one.arrived_at) for one in found]


def slos(measured: Measured, load: Load) -> dict[str, Slo]:
    """First token within three times what decoded alone takes: for the mean prompt, or for the prompt's own length.
    Both with tokens at a quarter of the pace of a lone stream, which local prefill beside it may cost at most.
    """
    tpot_s = 4 * measured.decode.step_s(1, load.lengths.mean)
    fixed_s = 3 * measured.own_ttft_s(round(load.lengths.mean))
    return {
        "fixed": Slo(lambda _: fixed_s, tpot_s),
        "3x": Slo(lambda tokens: 3 * measured.own_ttft_s(tokens), tpot_s),
    }
