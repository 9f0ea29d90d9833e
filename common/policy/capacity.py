"""What a pair of sites can serve: the closed form of the Prefill-as-a-Service paper (arXiv 2604.15039, section 3.4).

Three stages with unlimited queues between them: prefill at the remote site behind its egress, prefill at decoded's own
site, decode. Equations (3) to (8) give each stage's rate, the throughput, and the threshold and split of own nodes that
are best. No queueing, no transfer, no round trip: times to first token of it are bare prefill. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from common.policy.costs import StateSize
from common.policy.lengths import Lengths

Seconds = Callable[[float], float]


@dataclass(frozen=True, slots=True)
class Plant:
    """What there is, in the paper's symbols.

    Attributes:
        remote_s, own_s: T_prefill of one node at the remote site, and at decoded's own site, by uncached tokens.
        state: S_kv.
        num_remote: N_prfaas.
        num_own: N_p + N_d, divided by `solve`.
        decode_rps: requests per second of one decoding node, BS_max / (T_decode L_out).
        egress_bps: B_out.
        codec_ratio: encoded by raw bytes of what crosses.
    """

    remote_s: Seconds
    own_s: Seconds
    state: StateSize
    num_remote: float
    num_own: int
    decode_rps: float
    egress_bps: float = math.inf
    codec_ratio: float = 1.0


@dataclass(frozen=True, slots=True)
class Solution:
    """One way to run a plant, and what it yields.

    `theta_*_rps` are the rates of equations (3) to (5), `throughput_rps` is equation (6). `duty` is the part of the
    time that a stage works at that throughput.
    """

    threshold_tokens: float
    num_prefill: float
    num_decode: float
    offloaded: float
    mean_long_tokens: float
    mean_short_tokens: float
    theta_remote_rps: float
    theta_own_rps: float
    theta_decode_rps: float
    throughput_rps: float
    egress_bps: float

    @property
    def duty(self) -> dict[str, float]:
        """Of each stage that has anything to do, by name."""
        load = {
            "remote_prefill": (self.throughput_rps * self.offloaded, self.theta_remote_rps),
            "own_prefill": (self.throughput_rps * (1 - self.offloaded), self.theta_own_rps),
            "decode": (self.throughput_rps, self.theta_decode_rps),
        }
        return {name: asked / rate for name, (asked, rate) in load.items() if rate and not math.isinf(rate)}

    @property
    def bottleneck(self) -> str:
        """The stage with the highest duty."""
        return max(self.duty, key=lambda name: self.duty[name], default="none")


class Model:
    """A plant under one distribution of lengths. `is_exact` takes the mean of T over the lengths, E[T(L)], where the
    paper takes T of the mean length, T(E[L]): the mean is what a busy node really needs (prefill grows faster than the
    length, so it is more).
    """

    def __init__(self, plant: Plant, lengths: Lengths, *, is_exact: bool = False) -> None:
        self.plant, self.lengths, self.is_exact = plant, lengths, is_exact
        self._remote_sums = lengths.sums(plant.remote_s) if is_exact else []
        self._own_sums = lengths.sums(plant.own_s) if is_exact else []

    def at(self, threshold: float, num_prefill: float, num_decode: float) -> Solution:
        """Equations (3) to (6) for one threshold (0 offloads all, inf none) and one split of own nodes."""
        plant = self.plant
        short, long = self.lengths.split(threshold)
        remote_s, own_s = self._mean_s(threshold)
        long_bits = 8.0 * plant.codec_ratio * plant.state.num_bytes(long.mean) if long.share else 0.0
        compute = _ratio(plant.num_remote, remote_s)
        theta_remote = min(compute, _ratio(plant.egress_bps, long_bits)) if long.share else 0.0
        theta_own = _ratio(num_prefill, own_s) if short.share else 0.0
        theta_decode = num_decode * plant.decode_rps
        bounds = [theta_decode]
        bounds += [theta_remote / long.share] if long.share else []
        bounds += [theta_own / short.share] if short.share else []
        throughput = min(bounds)
        return Solution(
            threshold, num_prefill, num_decode, long.share, long.mean, short.mean, theta_remote, theta_own,
            theta_decode, throughput, throughput * long.share * long_bits,
        )  # fmt: skip

    def _mean_s(self, threshold: float) -> tuple[float, float]:
        """Mean seconds of an offloaded request at a remote node, of the others at an own one; 0 for none."""
        short, long = self.lengths.split(threshold)
        if not self.is_exact:
            remote = self.plant.remote_s(long.mean) if long.share else 0.0
            return remote, self.plant.own_s(short.mean) if short.share else 0.0
        at = self.lengths.index(threshold)
        below = self._remote_sums[at - 1] if at else 0.0
        remote = (self._remote_sums[-1] - below) / long.share if long.share else 0.0
        return remote, self._own_sums[at - 1] / short.share if short.share else 0.0

    def best_threshold(self, num_prefill: float, num_decode: float) -> Solution:
        """Equation (7): the remote rate per offloaded request rises with the threshold, the own one falls; they cross
        once, found by halving. Thresholds are lengths of the distribution, or 0.
        """
        steps = [0.0, *self.lengths.lengths]
        low, high = 0, len(steps) - 1
        while high - low > 1:
            middle = (low + high) // 2
            one = self.at(steps[middle], num_prefill, num_decode)
            own, remote = _per_request(one)
            low, high = (middle, high) if remote < own else (low, middle)
        ends = (self.at(steps[low], num_prefill, num_decode), self.at(steps[high], num_prefill, num_decode))
        return max(ends, key=lambda s: (s.throughput_rps, min(_per_request(s))))

    def solve(self) -> Solution:
        """Equations (7) and (8) together: the best threshold of every split of own nodes, and the best of those."""
        splits = range(0 if self.plant.num_remote else 1, self.plant.num_own)
        return max(
            (self.best_threshold(n, self.plant.num_own - n) for n in splits), key=lambda s: s.throughput_rps
        )  # fmt: skip

    def homogeneous(self, num_nodes: int) -> Solution:
        """Own nodes alone, the best split: nothing is offloaded."""
        return max(
            (self.at(math.inf, n, num_nodes - n) for n in range(1, num_nodes)), key=lambda s: s.throughput_rps
        )  # fmt: skip

    def naive(self) -> Solution:
        """Everything is offloaded, own nodes only decode."""
        return self.at(0.0, 0, self.plant.num_own)

    def bare_ttft(self, threshold: float, parts: Sequence[float] = (0.9,)) -> tuple[float, list[float]]:
        """(mean, quantiles) of the prefill seconds of a request alone on its node: what the paper calls TTFT."""
        at, lengths, weights = self.lengths.index(threshold), self.lengths.lengths, self.lengths.weights
        seconds = [self.plant.own_s(n) for n in lengths[:at]] + [self.plant.remote_s(n) for n in lengths[at:]]
        mean = sum(s * w for s, w in zip(seconds, weights, strict=True))
        spread = Lengths.weighted(zip(seconds, weights, strict=True))
        return mean, [spread.quantile(part) for part in parts]


def _ratio(amount: float, each: float) -> float:
    return amount / each if each else math.inf


def _per_request(solution: Solution) -> tuple[float, float]:
    """(own, remote): the throughput that each prefill stage alone would allow."""
    own_share = 1 - solution.offloaded
    own = solution.theta_own_rps / own_share if own_share > 0 else math.inf
    return own, solution.theta_remote_rps / solution.offloaded if solution.offloaded else math.inf
