"""The router over live objects: what it believes of them, and how its loops turn that into thresholds and shares."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.backend import BackendStats, DecodeStep
from common.linkfacts import sane
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.costs import DecodeCost, PrefillCost
from common.policy.profile import NodeProfile, Polynomial
from common.policy.views import Demand
from common.request import Request, RequestReport, SamplingParams
from decoded.learned import LEAST_SHARE, Learned, told_cost, told_share
from decoded.router import INITIAL_THRESHOLD, Router
from decoded.settings import DispatchSettings
from tests.net.rig import model_info

COST = {"prefill_constant_s": 0.02, "prefill_per_token_s": 2e-4, "prefill_per_square_s": 0.0}
PATH = {"path_capacity_bps": 80e6, "path_goodput_bps": 1e6, "path_confidence": 1.0, "path_loss": 0.0}


def peer(name: str, **load: float) -> SimpleNamespace:
    return SimpleNamespace(
        name=name, host="10.0.0.1", state="ready", reason="", num_streams=0, rtt_s=0.01, load={**COST, **PATH, **load}
    )


class Site:
    """All that a router asks of a dispatcher."""

    def __init__(self, *peers: SimpleNamespace, **settings) -> None:
        self.clients, self.active, self.trace = list(peers), {}, None
        self.settings = DispatchSettings("adaptive", None, 2, 30.0, 30.0, **settings)
        self.info = model_info()
        self.admission = AdmissionController(AdmissionLimits(8, 8, 1 << 20, 1 << 30, max_rows=4))
        self.backend = self
        self.facts, self.steps, self.stretch = BackendStats(alone_tokens=1000, alone_s=1.0), [], 0.0
        self.router = Router(self)

    def peers(self):
        return self.clients

    def peer_tokens(self, name, prefixes, limit):
        return 0

    def stats(self):
        return self.facts

    def take_decode_steps(self):
        steps, self.steps = self.steps, []
        return steps

    def set_max_stretch(self, stretch):
        self.stretch = stretch

    def learn(self) -> None:
        """Decode steps of 10 ms and 2 ms a row; answers of 50 tokens."""
        self.steps = [DecodeStep(n, 100 * n, 0.01 + 0.002 * n) for n in (1, 2, 3, 4) for _ in range(10)]
        for _ in range(20):
            self.router.learned.ended(RequestReport("r", num_prompt_tokens=500), 50)

    def ask(self, num_tokens: int, **kw):
        return self.router.route(Request("r", tuple(range(num_tokens)), SamplingParams(max_tokens=4)), **kw)


def test_what_a_peer_tells_of_its_speed_is_taken():
    assert told_cost(COST) == PrefillCost(0.02, 2e-4, 0.0)
    assert told_cost({"prefill_tokens_per_s": 500.0}) == PrefillCost(0.0, 1 / 500)
    assert told_cost({}) is None


def test_an_own_profile_is_believed_from_the_start_and_without_one_the_first_prompt_that_is_long_enough():
    learned = Learned()
    learned.prefilled(RequestReport("r", num_prompt_tokens=16), 5.0)
    assert learned.local_cost(1000.0) == PrefillCost(0.0, 1e-3)
    learned.prefilled(RequestReport("r", num_prompt_tokens=101), 5.0)
    assert learned.local_cost(1000.0).seconds(0, 100) == pytest.approx(5.0)
    known = Learned(NodeProfile("n", Polynomial(0.1, 1e-3), DecodeCost(0.01)))
    assert known.local_cost(0.0) == PrefillCost(0.1, 1e-3, 0.0)
    assert known.decode_cost == DecodeCost(0.01, 0.0, 0.0)


def test_short_prompts_stay_and_long_ones_go_and_both_are_predicted():
    site = Site(peer("far"))
    assert site.ask(20).route == "local"
    decision = site.ask(5000)
    assert (decision.peer, decision.reason) == ("far", "adaptive")
    told = decision.terms["alternatives"]
    assert told["local"]["prefill_s"] == pytest.approx(4.999)
    assert told["far"]["prefill_s"] == pytest.approx(0.02 + 4999 * 2e-4, abs=1e-3)
    assert decision.predicted_ttft_s == pytest.approx(told["far"]["ttft_s"], abs=1e-3)


def test_a_peer_that_has_told_no_speed_is_taken_to_be_like_the_others():
    newcomer = peer("new")
    newcomer.load = {}
    site = Site(peer("far", num_queued_tokens=50_000.0), newcomer)
    decision = site.ask(5000)
    assert (decision.peer, decision.reason) == ("new", "adaptive")
    assert decision.terms["peers"]["new"] == "usable, taken to be as fast as the others"
    assert decision.terms["peers"]["far"] == "usable"
    alone = Site(newcomer).ask(5000)
    assert alone.reason == "above_threshold"
    assert alone.terms["peers"]["new"] == "usable, its speed is not known yet"


def test_a_full_batch_is_waited_for_wherever_the_prompt_is_computed():
    site = Site(peer("far"))
    site.learn()
    site.router.control(1.0)
    before = site.ask(20).predicted_ttft_s
    site.facts = BackendStats(alone_tokens=1000, alone_s=1.0, num_rows=4, num_running=5)
    # Two ahead of it, each 50 tokens of 18 ms, over four rows.
    assert site.ask(20).predicted_ttft_s == pytest.approx(before + 2 * 50 * 0.018 / 4, rel=0.15)


def test_the_threshold_is_solved_once_enough_is_known():
    site = Site(peer("far"))
    site.router.control(1.0)
    for n in range(150):
        site.ask(100 + 40 * n)
    site.router.control(2.0)
    assert site.router.threshold_tokens == INITIAL_THRESHOLD
    assert site.router.rules.exchange_tokens is None
    site.learn()
    site.router.control(3.0)
    assert site.router.allocation is not None
    assert site.router.threshold_tokens == site.router.rules.exchange_tokens != INITIAL_THRESHOLD
    # Five times as fast over there: more tokens go than stay.
    assert 300 < site.router.threshold_tokens < 4000
    site.settings.threshold_tokens = 77.0
    assert site.router.threshold_tokens == 77.0


def test_a_path_that_becomes_narrow_moves_the_threshold_up():
    thresholds = []
    for bps in (80e6, 2e6):
        site = Site(peer("far", path_capacity_bps=bps))
        for n in range(150):
            site.ask(100 + 40 * n)
        site.learn()
        site.router.control(1.0)
        thresholds.append(site.router.threshold_tokens)
    assert thresholds[1] > 1.5 * thresholds[0]


def solved(*peers: SimpleNamespace, **settings) -> Site:
    """A site that has seen enough."""
    site = Site(*peers, **settings)
    for n in range(150):
        site.ask(100 + 40 * n)
    site.learn()
    site.router.control(1.0)
    return site


def test_what_others_use_of_peers_moves_the_threshold_up_and_what_can_be_served_down():
    alone = solved(peer("far"), peer("far2"))
    shared = solved(peer("far", compute_share=0.5), peer("far2", compute_share=0.5))
    assert shared.router.shares == {"far": 0.5, "far2": 0.5}
    assert shared.router.threshold_tokens > 1.1 * alone.router.threshold_tokens
    assert shared.router.allocation.now.throughput_rps < alone.router.allocation.now.throughput_rps
    one = solved(peer("far"))
    assert shared.router.threshold_tokens == one.router.threshold_tokens, "two halves are one"
    told = shared.ask(5000).terms
    assert told["peers"]["far"] == "usable, others leave 50% of its time"
    # What others have queued is in the queue that it tells.
    assert told["alternatives"]["far"]["ttft_s"] == alone.ask(5000).terms["alternatives"]["far"]["ttft_s"]


def test_a_budget_of_a_peer_counts_as_its_path_does():
    narrow, budget = solved(peer("far", path_capacity_bps=2e6)), solved(peer("far", egress_bps=2e6))
    assert budget.router.threshold_tokens == narrow.router.threshold_tokens
    unseen = solved(peer("far", egress_bps=2e6, path_capacity_bps=0.0))
    assert unseen.router.threshold_tokens == narrow.router.threshold_tokens


def test_own_nodes_that_others_use_too_do_less_of_what_stays():
    alone = solved(peer("beside"), peer("far"), own_peers=frozenset({"beside"}))
    shared = solved(peer("beside", compute_share=0.5), peer("far"), own_peers=frozenset({"beside"}))
    assert shared.router.threshold_tokens < alone.router.threshold_tokens


def test_a_share_that_cannot_be_is_bounded():
    for told, share in ((7.0, 1.0), (1e15, 1.0), (0.0, LEAST_SHARE), (5e-324, LEAST_SHARE), (0.4, 0.4)):
        assert told_share(sane({"compute_share": told})) == share
    for lie in (-1.0, 1e300):
        assert told_share(sane({"compute_share": lie})) == 1.0
    assert told_share({}) == 1.0


def test_local_prefill_is_held_back_only_while_decoding_needs_its_part():
    site = Site(peer("far"), max_stretch=3.0)
    site.learn()
    for now in (1.0, 2.0):
        for n in range(150):
            site.ask(100 + 4 * n)
        site.router.control(now)
    assert site.router.max_stretch == 3.0 and site.stretch == 0.0, "nobody knows yet how many come"
    for _ in range(3000):
        site.ask(100)
    site.router.control(70.0)
    assert site.router.arrival_rps > site.router.allocation.now.throughput_rps
    share = site.router.allocation.local_share
    assert site.stretch == pytest.approx(min(3.0, max(1.25, 1 / (1 - share))))


def test_own_peers_share_the_work_that_stays():
    site = Site(peer("beside"), peer("far"), own_peers=frozenset({"beside"}))
    site.settings.mode, site.settings.threshold_tokens = "threshold", 1000.0
    assert site.ask(900).peer == "beside"
    assert site.ask(3000).peer == "far"


def demand(num_tokens: int) -> Demand:
    return Demand("r", num_tokens, 1)


def test_forecasts_count_what_waits_and_what_is_usually_cached():
    site = Site(peer("far"))
    alone = site.router.forecast_s(demand(5001), 0)
    assert alone == pytest.approx(1.05, rel=0.1)
    # 5,000 tokens are 1.02 s there and 5 s here: together 5,900 a second.
    assert site.router.forecast_s(demand(5001), 59_000) == pytest.approx(alone + 10.0, rel=0.05)
    for _ in range(100):
        site.ask(1001, num_held_tokens=900)
    assert site.router.forecast_s(demand(5001), 0) < 0.6 * alone


def test_a_forecast_knows_where_the_mode_lets_it_go():
    site = Site(peer("far"))
    site.settings.mode, site.settings.threshold_tokens = "threshold", 10_000.0
    assert site.router.forecast_s(demand(5001), 0) == pytest.approx(5.0, rel=0.1)
    site.settings.mode = "remote-only"
    assert site.router.forecast_s(demand(5001), 0) == pytest.approx(1.05, rel=0.1)
    site.facts, site.router._forecast_at = BackendStats(), 0.0
    site.settings.mode = "local-only"
    assert site.router.forecast_s(demand(5001), 0) is None


ABSURD = (
    {"prefill_per_square_s": 1e300},
    {"prefill_constant_s": 1e308, "prefill_per_token_s": 1e308},
    {"prefill_tokens_per_s": 5e-324},
    {"num_queued_tokens": 1e308, "num_queued": 1e308, "num_running": 1e308},
    {"path_capacity_bps": 5e-324},
    {"compute_share": 0.0, "egress_bps": 5e-324},
    {"compute_share": 1e15, "egress_bps": 1e15},
    {"path_capacity_bps": 1e308, "path_goodput_bps": -1.0, "chunk_tokens": 1e300},
)


@pytest.mark.parametrize("lie", ABSURD, ids=lambda lie: next(iter(lie)))
@pytest.mark.parametrize("is_cost_told", [True, False])
def test_absurd_words_of_a_peer_hurt_nobody(lie, is_cost_told):
    far = peer("far")
    told = far.load if is_cost_told else PATH
    far.load = sane({**told, **lie})
    site = Site(far)
    for tokens in (2, 500, 15_000):
        decision = site.ask(tokens)
        assert decision.predicted_ttft_s is None or decision.predicted_ttft_s < 1e9
        forecast_s = site.router.forecast_s(demand(tokens), 10_000)
        assert forecast_s is None or 0 < forecast_s < 1e12
    site.learn()
    for now in (1.0, 2.0, 70.0):
        site.router.control(now)
    nowhere = Site(far)
    nowhere.facts = BackendStats()
    assert nowhere.router.forecast_s(demand(500), 10_000) is None or is_cost_told
