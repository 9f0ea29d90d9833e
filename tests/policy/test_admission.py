import pytest

from common.errors import InvalidRequest, Overloaded
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.views import Demand


def controller(running=2, queued=2, tokens=100, state=1000) -> AdmissionController:
    return AdmissionController(AdmissionLimits(running, queued, tokens, state))


def offer(c: AdmissionController, name: str, tokens=10, state=10) -> str:
    return c.offer(Demand(name, tokens, state))


def test_runs_then_queues_then_sheds_with_the_setting_named():
    c = controller()
    assert [offer(c, n) for n in "abcd"] == ["running", "running", "queued", "queued"]
    with pytest.raises(Overloaded) as e:
        offer(c, "e")
    assert (e.value.gate, e.value.value, e.value.limit, e.value.status) == ("queued_requests", 2, 2, 429)
    assert e.value.setting == "admission.max_queued_requests"


def test_release_starts_in_order_of_arrival():
    c = controller(running=1)
    for n in "abc":
        offer(c, n)
    assert c.release("a") == ["b"]
    assert c.release("c") == []
    assert c.release("b") == []
    assert (c.num_queued_tokens, c.state_bytes, len(c.running), len(c.queue)) == (0, 0, 0, 0)


def test_queued_tokens_gate_but_one_long_prompt_may_wait():
    c = controller(running=1)
    offer(c, "a")
    assert offer(c, "long", tokens=5000) == "queued"
    with pytest.raises(Overloaded) as e:
        offer(c, "b")
    assert e.value.gate == "queued_tokens"


def test_state_memory_holds_the_next_back_without_overtaking():
    c = controller()
    offer(c, "a", state=600)
    assert offer(c, "b", state=600) == "queued"
    assert offer(c, "small", state=10) == "queued"
    assert c.release("a") == ["b", "small"]
    assert c.state_bytes == 610


def test_limits_that_shrank_do_not_block_the_queue_for_ever():
    c = controller()
    offer(c, "a", state=900)
    offer(c, "b", state=900)
    offer(c, "c", state=10)
    c.limits = AdmissionLimits(2, 2, 100, 800)
    assert c.release("a") == ["b"]
    assert c.release("b") == ["c"]


def test_what_can_never_fit_is_invalid():
    with pytest.raises(InvalidRequest, match=r"1001 B of state, more than admission\.max_state_bytes = 1000B"):
        offer(controller(), "a", state=1001)


def test_release_of_an_unknown_request_changes_nothing():
    c = controller()
    offer(c, "a")
    assert c.release("zzz") == []
    assert len(c.running) == 1
