"""Admission: every gate, who goes first, deadlines, and the books under whatever happens."""

from __future__ import annotations

import heapq
import random
from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from common.errors import InvalidRequest, Overloaded
from common.policy import promises
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.views import Demand, ServiceClass


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


def test_one_place_in_the_queue_is_one_place():
    c = controller(running=1, queued=1)
    assert [offer_or_gate(c, Demand(f"{n}", 10, 10)) for n in range(6)] == ["running", "queued"] + [
        "queued_requests"
    ] * 4


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


def test_nor_does_another_class_take_the_memory_that_it_waits_for():
    c = of_class(running=100, state=1000)
    c.offer(Demand("first", 10, 600, service_class="low"))
    assert c.offer(Demand("large", 10, 600, service_class="high")) == "queued"
    # Its class has had nothing yet, the low one has: it is the large one's turn.
    assert c.queue.head().request_id == "large"
    assert c.offer(Demand("small", 10, 100, service_class="low")) == "queued"
    assert c.release("first") == ["large", "small"]


def test_service_is_what_requests_took_not_what_they_might_have():
    """Both tenants may put out 1,000 tokens; those of one end after ten."""
    c = AdmissionController(AdmissionLimits(1, 1000, 10**9, 10**9))
    spent: Counter[str] = Counter()
    for n in range(300):
        for tenant in ("brief", "long"):
            c.offer(Demand(f"{tenant}{n}", 10, 1, 1000, tenant=tenant))
    for _ in range(200):
        (request_id,) = c.running
        tenant = request_id.rstrip("0123456789")
        num_output = 10 if tenant == "brief" else 1000
        spent[tenant] += 10 + num_output
        c.release(request_id, 0.0, num_output)
    assert spent["brief"] == pytest.approx(spent["long"], rel=0.5), "by number they would be 1 to 50"


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


CLASSES = (ServiceClass("high", 10, 0.6), ServiceClass("low", 0, 0.2))


def of_class(running=2, queued=10, rows=0, state=1 << 40, **limits) -> AdmissionController:
    return AdmissionController(AdmissionLimits(running, queued, 10**6, state, max_rows=rows, classes=CLASSES, **limits))


def test_a_higher_class_does_not_wait_for_running_ones_of_lower_classes():
    c = of_class(running=4)
    assert [c.offer(Demand(f"low{n}", 10, 10, service_class="low")) for n in range(5)] == ["running"] * 4 + ["queued"]
    high = [c.offer(Demand(f"high{n}", 10, 10, service_class="high")) for n in range(5)]
    assert high == ["running"] * 3 + ["queued"] * 2, "one slot of four is left to the low ones, a fifth at least"
    assert c.release("high0") == ["high3"], "the low one waits: as many run as may"
    assert [c.release(f"low{n}") for n in range(4)] == [[], [], [], ["low4"]], "3 high ones and a low one"
    assert c.release("low4") == ["high4"]


@pytest.mark.parametrize("num_slots", [4, 7, 12, 40])
@pytest.mark.parametrize("has_rows", [False, True])
def test_a_lower_class_gets_its_share_of_the_slots(num_slots, has_rows):
    """Both have requests all the time, each lasts as long as it costs; high ones hold every slot at first."""
    rng = random.Random(num_slots)
    c = of_class(running=num_slots, queued=1000, rows=num_slots if has_rows else 0)
    costs, ends, served, num = {}, [], Counter(), 0

    def begin(ids, now):
        for name in ids:
            heapq.heappush(ends, (now + costs[name], name))

    def offer(name, now):
        nonlocal num
        num += 1
        request_id = f"{name}{num}"
        costs[request_id] = rng.randint(50, 500)
        if c.offer(Demand(request_id, costs[request_id], 1, service_class=name), now) == "running":
            begin([request_id], now)
        begin(c.pump(now), now)

    for name in ("high", "low"):
        for _ in range(2 * num_slots):
            offer(name, 0.0)
    while num < 4000:
        now, request_id = heapq.heappop(ends)
        name = request_id.rstrip("0123456789")
        served[name] += costs[request_id]
        begin(c.release(request_id, now, 0), now)
        offer(name, now)
        assert len(c.running) >= num_slots, "no slot is idle while requests wait"
    assert served["low"] / served.total() >= 0.19
    assert served["high"] / served.total() >= 0.55


def test_lower_classes_keep_their_rows_of_the_batch():
    c = of_class(running=100, rows=10, queued=100)
    for n in range(12):
        assert c.offer(Demand(f"low{n}", 10, 10, service_class="low")) == "running"
    answers = [c.offer(Demand(f"high{n}", 10, 10, service_class="high")) for n in range(12)]
    assert answers == ["running"] * 8 + ["queued"] * 4, "two rows of ten are left to the low ones, a fifth"
    for n in range(12):
        c.release(f"low{n}")
    assert not c.queue, "with no low one about, all of the batch"


def test_nobody_is_admitted_to_wait_for_a_row_while_higher_classes_wait():
    c = of_class(running=12, rows=8, queued=100)
    for n in range(20):
        for name in ("low", "high"):
            c.offer(Demand(f"{name}{n}", 10, 10, service_class=name))
            c.pump()
    running = Counter(d.service_class for d in c.running.values())
    assert running["high"] + running["low"] >= 8, "every row has somebody"
    while running["low"] > 3:  # they came before the high ones
        c.release(next(n for n in c.running if n.startswith("low")))
        running = Counter(d.service_class for d in c.running.values())
    assert running == {"high": 6, "low": 3}, "rows 6 and 2, and the low one's third slot of twelve"


def test_room_in_the_queue_that_others_are_sure_of_is_not_given_away():
    c = of_class(running=1, queued=10)
    c.offer(Demand("first", 10, 10, service_class="high"))
    flood = [offer_or_gate(c, Demand(f"low{n}", 10, 10, service_class="low")) for n in range(20)]
    assert flood == ["queued"] * 4 + ["queued_requests"] * 16, "0.6 of the queue are the high class's"
    rest = [offer_or_gate(c, Demand(f"high{n}", 10, 10, service_class="high")) for n in range(20)]
    assert rest.count("queued") == 6


def test_a_tenant_that_floods_leaves_room_for_others():
    c = controller(running=1, queued=90, tokens=10**9, state=10**9)
    flood = [offer_or_gate(c, Demand(f"a{n}", 10, 10, tenant="a")) for n in range(200)]
    assert flood.count("queued") == 80 and flood[-1] == "tenant_requests"
    assert offer_or_gate(c, Demand("b", 10, 10, tenant="b")) == "queued"
    assert c.release("a0") == ["b"], "it does not wait for all of them"
    assert [offer_or_gate(c, Demand(f"{n}", 10, 10)) for n in range(3)] == ["queued"] * 3, "nobody's are not counted"


def offer_or_gate(c: AdmissionController, demand: Demand, now: float = 0.0) -> str:
    try:
        return c.offer(demand, now)
    except Overloaded as e:
        return e.gate


def test_large_prompts_are_refused_before_small_ones():
    limits = AdmissionLimits(1, 10, 10**6, 10**9, large_prompt_tokens=1000, large_queue_share=0.5)
    c = AdmissionController(limits)
    answers = [offer_or_gate(c, Demand(f"large{n}", 1001, 1)) for n in range(10)]
    assert answers == ["running"] + ["queued"] * 6 + ["large_prompt"] * 3
    assert offer_or_gate(c, Demand("small", 1000, 1)) == "queued"
    with pytest.raises(Overloaded, match=r"1001 against a limit of 1000 \(admission\.large_prompt_tokens\)"):
        c.offer(Demand("another", 1001, 1))


def timed(deadline_s: float | None, name: str = "x", tokens: int = 100) -> Demand:
    return Demand(name, tokens, 1, deadline_s=deadline_s, deadline_setting="X-Prfaas-Deadline")


def test_a_deadline_that_the_prompt_alone_passes_is_refused_at_once():
    c = AdmissionController(AdmissionLimits(2, 10, 10**6, 10**9), forecast=lambda d, before: d.num_prompt_tokens / 100)
    with pytest.raises(Overloaded) as e:
        c.offer(timed(9.9, tokens=1000))
    body = (e.value.gate, e.value.value, e.value.limit, e.value.setting, e.value.status)
    assert body == ("deadline", 10.0, 9.9, "X-Prfaas-Deadline", 503)
    assert not c.running and not c.queue
    assert c.offer(timed(10.1, tokens=1000)) == "running"


@pytest.fixture
def certain(monkeypatch):
    """Predictions of waits are taken at their word."""
    monkeypatch.setattr(promises, "FIRST_DOUBT", 0.0)
    monkeypatch.setattr(promises, "LEAST_DOUBT", 0.0)


def test_before_anything_was_measured_the_prompts_before_it_count(certain):
    c = AdmissionController(
        AdmissionLimits(1, 10, 10**6, 10**9), forecast=lambda d, before: (before + d.num_prompt_tokens) / 100
    )
    c.offer(timed(None, "a"))
    c.offer(timed(None, "b", tokens=500))
    assert offer_or_gate(c, timed(5.5)) == "deadline"
    assert offer_or_gate(c, timed(6.5)) == "queued"


def test_waiting_is_predicted_from_how_fast_the_queue_was_seen_to_drain(certain):
    """One request at a time, one a second; nobody knows what computing a prompt takes."""
    c = AdmissionController(AdmissionLimits(1, 100, 10**6, 10**9))
    for n in range(30):
        c.offer(timed(None, f"{n}"), 0.0)
    for n in range(20):
        c.release(f"{n}", float(n + 1), 0)
    assert len(c.queue) == 9
    assert offer_or_gate(c, timed(9.0, "early"), 20.5) == "deadline"
    assert offer_or_gate(c, timed(11.0, "late"), 20.5) == "queued"
    assert offer_or_gate(c, timed(11.0, "stuck"), 40.0) == "deadline", "nothing has started for twenty seconds"


def test_what_was_predicted_by_nobody_says_nothing_of_predictions():
    known = []
    c = AdmissionController(
        AdmissionLimits(4, 10, 10**6, 10**9), forecast=lambda d, before: known[0] if known else None
    )
    for n in range(4):
        assert c.offer(timed(None, f"{n}"), 0.0) == "running"
        c.note_ttft(f"{n}", 10.0 * (n + 1))
        c.release(f"{n}", 10.0 * (n + 1))
    known.append(3.5)
    assert offer_or_gate(c, timed(3.4, "x"), 100.0) == "deadline"
    assert offer_or_gate(c, timed(4.0, "y"), 100.0) == "running"


def test_a_margin_that_lets_nobody_in_does_not_last():
    """Ten requests took 50 s longer than was thought; from then on all is well again."""
    c = AdmissionController(AdmissionLimits(1, 100, 10**6, 10**9), forecast=lambda d, before: 0.1)
    for n in range(10):
        assert c.offer(timed(None, f"slow{n}")) == "running"
        c.note_ttft(f"slow{n}", 50.0)
        c.release(f"slow{n}")
    answers = [offer_or_gate(c, timed(10.0, f"{n}")) for n in range(300)]
    first = answers.index("running")
    assert first > 10, "a margin is not forgotten at once"


def test_errors_of_many_tenants_are_not_kept_for_ever(monkeypatch):
    monkeypatch.setattr(promises, "MAX_ERRORS", 10)
    c = AdmissionController(AdmissionLimits(1, 100, 10**6, 10**9))
    for n in range(50):
        c.offer(Demand(f"{n}", 1, 1, tenant=f"t{n}"))
        c.note_ttft(f"{n}", 1.0)
        c.release(f"{n}")
    assert len(c.promises._errors) == 10


def test_a_high_class_is_not_thought_to_wait_for_a_low_one(certain):
    c = of_class(running=1, queued=1000)
    for n in range(30):
        c.offer(Demand(f"high{n}", 100, 1, service_class="high"), 0.0)
    for n in range(29):
        c.release(f"high{n}", float(n + 1), 0)
    for n in range(100):
        c.offer(Demand(f"low{n}", 100, 1, service_class="low"), 30.0)
    assert offer_or_gate(c, Demand("h", 100, 1, service_class="high", deadline_s=3.0), 30.0) == "queued"
    assert offer_or_gate(c, Demand("l", 100, 1, service_class="low", deadline_s=30.0), 30.0) == "deadline"


def test_other_classes_by_reload_keep_the_books():
    c = of_class(running=2, rows=4)
    for n in range(6):
        c.offer(Demand(f"{n}", 10, 10, service_class=("high", "low")[n % 2]))
    num_running, state = len(c.running), c.state_bytes
    c.set_limits(AdmissionLimits(1, 10, 100, 1000, classes=(ServiceClass("other", 0, 1.0),)))
    assert (len(c.running), c.state_bytes, len(c.queue)) == (num_running, state, 6 - num_running)
    todo = list(c.running)
    while todo:
        todo += c.release(todo.pop(), 1.0, 5)
    assert (c.state_bytes, len(c.queue), len(c.running), c.num_queued_tokens) == (0, 0, 0, 0)


class Books(RuleBasedStateMachine):
    """Whatever is offered has one outcome, caps hold, and nothing waits that could run."""

    def __init__(self) -> None:
        super().__init__()
        self.limits = AdmissionLimits(3, 6, 500, 100, max_rows=4, classes=CLASSES)
        self.c = AdmissionController(self.limits, forecast=lambda d, before: (before + d.num_prompt_tokens) / 50)
        self.now, self.num, self.waiting = 0.0, 0, set[str]()
        self.outcomes: Counter[str] = Counter()

    @rule(
        tokens=st.integers(1, 300), state=st.integers(1, 120), name=st.sampled_from(["high", "low"]),
        tenant=st.sampled_from(["", "a", "b"]), deadline=st.none() | st.floats(0.1, 60.0), output=st.integers(0, 50),
    )  # fmt: skip
    def offer(self, tokens, state, name, tenant, deadline, output):
        self.num += 1
        demand = Demand(f"{self.num}", tokens, state, output, 1, name, tenant, deadline, "admission.deadline")
        before = (len(self.c.queue), set(self.c.running))
        try:
            answer = self.c.offer(demand, self.now)
        except (Overloaded, InvalidRequest) as e:
            assert isinstance(e, InvalidRequest) == (state > 100)
            assert (len(self.c.queue), set(self.c.running)) == before, "a refusal leaves no trace"
            self.outcomes["refused"] += 1
            return
        assert (demand.request_id in self.c.running) == (answer == "running")
        if answer == "queued":
            self.waiting.add(demand.request_id)
        self._started(self.c.pump(self.now))

    @rule(seconds=st.floats(0.0, 10.0))
    def wait(self, seconds):
        self.now += seconds

    @rule(which=st.integers(0, 100), num_output=st.none() | st.integers(0, 50))
    def end(self, which, num_output):
        if self.c.running:
            name = sorted(self.c.running)[which % len(self.c.running)]
            self._started(self.c.release(name, self.now, num_output))
            self.outcomes["served"] += 1

    @rule(which=st.integers(0, 100))
    def leave(self, which):
        if self.waiting:
            name = sorted(self.waiting)[which % len(self.waiting)]
            self.waiting.remove(name)
            self._started(self.c.release(name, self.now))
            self.outcomes["left"] += 1

    def _started(self, names):
        assert set(names) <= self.waiting and len(set(names)) == len(names)
        self.waiting -= set(names)

    @invariant()
    def books_agree(self):
        c, limits = self.c, self.limits
        assert self.num == self.outcomes.total() + len(self.waiting) + len(c.running)
        assert len(c.queue) == len(self.waiting) <= limits.max_queued_requests
        assert c.state_bytes == sum(d.state_bytes for d in c.running.values()) <= limits.max_state_bytes
        running = Counter(d.service_class for d in c.running.values())
        assert running["high"] <= limits.max_running_requests
        # Low ones may have started before high ones came; a high one does not wait for them.
        assert running["low"] <= limits.max_running_requests
        assert c.pump(self.now) == [], "nothing waits that could run"
        assert c.running or not c.queue, "an idle node has no queue"
        assert set(c.promises.made) <= self.waiting | set(c.running), "nothing is kept of those that have ended"


TestBooks = Books.TestCase


def test_whoever_could_not_be_judged_is_not_left_behind():
    def forecast(demand: Demand, num_before: int) -> float:
        if demand.request_id == "a":
            raise ZeroDivisionError
        return 0.0

    c = AdmissionController(AdmissionLimits(2, 2, 100, 1000), forecast=forecast)
    with pytest.raises(ZeroDivisionError):
        c.offer(Demand("a", 10, 10, deadline_s=1.0))
    assert (len(c.queue), len(c.running), c.num_queued_tokens, c.state_bytes) == (0, 0, 0, 0)
    assert offer(c, "b") == "running"
