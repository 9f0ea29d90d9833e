"""Facts of a decision as JSON and back."""

from __future__ import annotations

import json

import pytest

from common.policy.costs import PrefillCost
from common.policy.views import LocalView, PeerView, RequestView, record, replayed

REQUEST = RequestView("r", 10, 9, failed_peers=("a",), ttft_slo_s=2.0)
PEERS = [PeerView("b", True, cost=PrefillCost(0.1, 1e-3)), PeerView("c", False, "draining")]
LOCAL = LocalView(cost=PrefillCost(0.0, 2e-3, 1e-9), num_rows=3)


def test_facts_come_back_as_they_were():
    assert replayed(json.loads(json.dumps(record(REQUEST, PEERS, LOCAL)))) == (REQUEST, PEERS, LOCAL)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda facts: facts.pop("local"),
        lambda facts: facts["peers"][0].update(colour="red"),
        lambda facts: facts["request"].update(colour="red"),
        lambda facts: facts["local"].update(cost={"price": 1}),
    ],
)
def test_other_facts_are_refused(spoil):
    facts = record(REQUEST, PEERS, LOCAL)
    spoil(facts)
    with pytest.raises(ValueError, match="not a recorded decision"):
        replayed(facts)
