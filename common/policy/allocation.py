"""Who does what at decoded's own site: the part of its time that goes to prefill, and the best split of nodes.

In the paper's words N_p + N_d is decoded's own site; prefill nodes there and the part of decoded's own time that local
prefill gets make up N_p. The slow loop of section 3.4.3, equations (7) and (8). Pure; called by whoever routes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from common.policy.capacity import Model, Plant, Solution
from common.policy.lengths import Lengths

# decoded's time is divided in steps of this size, and keeps this part for decoding whatever happens.
SHARE_STEP, MOST_SHARE = 0.05, 0.9
# A change of roles must gain this much, or two nearly equal splits would take turns.
MIN_GAIN = 0.05


@dataclass(frozen=True, slots=True)
class Allocation:
    """What to do, and what to tell people.

    Attributes:
        local_share: part of decoded's time for local prefill, with the nodes in the roles they have.
        now: what the roles as they are can serve at that share.
        best: what the best split of own nodes could.
        advice: a sentence; "" when the roles are right.
    """

    local_share: float
    now: Solution
    best: Solution
    advice: str


def allocate(plant: Plant, lengths: Lengths, num_prefill: float, num_decode: int) -> Allocation:
    """`num_prefill` own nodes only prefill and `num_decode` are decodeds, which do both. Of nodes that others use too
    what these leave counts; such nodes' roles are not decoded's to change, so there is no advice then.

    Raises:
        ValueError: no decoded.
    """
    if num_decode < 1:
        raise ValueError("an own site without a decoded generates nothing")
    model = Model(plant, lengths, is_exact=True)
    steps = range(round(MOST_SHARE / SHARE_STEP) + 1)
    found = [(SHARE_STEP * n, _at(model, num_prefill, num_decode, SHARE_STEP * n)) for n in steps]
    # The least share of those that serve the most: what decode keeps shortens the time between tokens.
    share, now = max(found, key=lambda pair: (round(pair[1].throughput_rps, 6), -pair[0]))
    whole = replace(plant, num_own=int(num_prefill) + num_decode)
    is_alone = num_prefill == int(num_prefill)
    best = Model(whole, lengths, is_exact=True).solve() if is_alone and whole.num_own > 1 else now
    gain = best.throughput_rps / now.throughput_rps - 1 if now.throughput_rps else 0.0
    advice = ""
    if gain >= MIN_GAIN:
        advice = (
            f"{best.num_prefill:g} prefill and {best.num_decode:g} decode nodes would serve {gain:.0%} more than"
            f" {num_prefill:g} and {num_decode}; {now.bottleneck} is the bottleneck"
        )
    return Allocation(share, now, best, advice)


def _at(model: Model, num_prefill: float, num_decode: int, share: float) -> Solution:
    return model.best_threshold(num_prefill + share * num_decode, (1 - share) * num_decode)
