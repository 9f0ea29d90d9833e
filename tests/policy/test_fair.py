"""The fair queue: order, shares, nobody starved, nothing lost, and how much work an operation is."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.policy.fair import FairQueue
from common.policy.views import Demand, ServiceClass

CLASSES = (ServiceClass("high", 10, 0.5), ServiceClass("mid", 5, 0.2), ServiceClass("low", 0, 0.1))
MAX_COST = 1000


def demand(name: str, tokens: int = 10, service_class: str = "", tenant: str = "") -> Demand:
    return Demand(name, tokens, 0, service_class=service_class, tenant=tenant)


def push(queue: FairQueue, each: Demand) -> None:
    queue.push(each, each.num_prompt_tokens)


def test_tenants_take_turns_by_cost_and_keep_their_order():
    queue = FairQueue()
    for n in range(4):
        push(queue, demand(f"a{n}", 30, tenant="a"))
    for n in range(6):
        push(queue, demand(f"b{n}", 10, tenant="b"))
    order = [queue.pop().demand.request_id for _ in range(10)]
    assert [n for n in order if n[0] == "a"] == ["a0", "a1", "a2", "a3"]
    assert [n for n in order if n[0] == "b"] == [f"b{n}" for n in range(6)]
    assert order[:5].count("b" + "0") == 1 and sum(n[0] == "b" for n in order[:5]) == 3, "three of b for one of a"


def test_who_comes_late_is_owed_nothing_and_owes_nothing():
    queue = FairQueue()
    for n in range(200):
        push(queue, demand(f"a{n}", 10, tenant="a"))
    for _ in range(100):
        queue.pop()
    for n in range(10):
        push(queue, demand(f"b{n}", 10, tenant="b"))
    assert Counter(queue.pop().demand.tenant for _ in range(20)) == {"a": 10, "b": 10}


def test_priority_goes_first_but_for_the_guarantees():
    queue = FairQueue(CLASSES)
    for n in range(1000):
        for name in ("low", "high", "mid"):
            push(queue, demand(f"{name}{n}", 10, name))
    served = Counter(queue.pop().demand.service_class for _ in range(1000))
    assert served == {
        "high": pytest.approx(700, abs=2),
        "mid": pytest.approx(200, abs=2),
        "low": pytest.approx(100, abs=2),
    }


def test_spare_service_is_not_held_against_the_guarantee():
    """A class that had everything while others were idle has its share from the moment at which they come."""
    queue = FairQueue(CLASSES)
    for n in range(2000):
        push(queue, demand(f"mid{n}", 10, "mid"))
    for _ in range(1000):
        queue.pop()
    for n in range(1000):
        push(queue, demand(f"high{n}", 10, "high"))
    served = Counter(queue.pop().demand.service_class for _ in range(500))
    assert served["mid"] == pytest.approx(100, abs=2)


def test_equal_priorities_share_what_nobody_is_sure_of():
    queue = FairQueue((ServiceClass("a", 0, 0.2), ServiceClass("b", 0, 0.1)))
    for n in range(900):
        push(queue, demand(f"a{n}", 10, "a"))
        push(queue, demand(f"b{n}", 10, "b"))
    served = Counter(queue.pop().demand.service_class for _ in range(900))
    assert served["a"] == pytest.approx(600, abs=5), "as their shares are"


def test_what_was_charged_too_much_comes_back():
    """Two tenants whose requests are expected to cost the same; those of one end after a tenth of it."""
    queue = FairQueue()
    for n in range(500):
        push(queue, demand(f"short{n}", 100, tenant="short"))
        push(queue, demand(f"long{n}", 100, tenant="long"))
    spent: Counter[str] = Counter()
    for _ in range(220):
        charge = queue.pop()
        cost = 10 if charge.demand.tenant == "short" else 100
        spent[charge.demand.tenant] += cost
        queue.settle(charge, cost)
    assert spent["short"] == pytest.approx(spent["long"], abs=200)


def test_what_comes_back_while_nothing_waits_is_no_credit():
    queue = FairQueue()
    push(queue, demand("first", 1000, tenant="a"))
    first = queue.pop()
    for n in range(20):
        push(queue, demand(f"b{n}", 100, tenant="b"))
        if n < 10:
            queue.pop()
    queue.settle(first, 0.0)
    for n in range(10):
        push(queue, demand(f"a{n}", 100, tenant="a"))
    assert Counter(queue.pop().demand.tenant for _ in range(10)) == {"a": 5, "b": 5}


def test_other_classes_by_reload_lose_nothing():
    queue = FairQueue(CLASSES)
    for n in range(30):
        push(queue, demand(f"{n}", 10, ("high", "mid", "low")[n % 3], tenant=f"t{n % 2}"))
    queue.reclassify((ServiceClass("low", 3, 0.5), ServiceClass("new", 1, 0.5)))
    assert (len(queue), queue.num_tokens) == (30, 300)
    assert {queue.pop().demand.request_id for _ in range(30)} == {f"{n}" for n in range(30)}


@pytest.mark.parametrize("share", [0.1, 0.3])
def test_what_was_charged_before_a_reload_is_settled_against_nothing_that_came_after(share):
    queue = FairQueue(CLASSES)
    push(queue, demand("long", 1000, "high"))
    charge = queue.pop()
    queue.reclassify((ServiceClass("high", 10, 1 - share), ServiceClass("low", 0, share)))
    queue.settle(charge, 5.0)
    assert queue.served == 0.0
    for n in range(100):
        push(queue, demand(f"h{n}", 10, "high"))
        push(queue, demand(f"l{n}", 10, "low"))
    served = Counter(queue.pop().demand.service_class for _ in range(100))
    assert served["low"] == pytest.approx(100 * share, abs=2)


names = st.sampled_from(["high", "mid", "low", "unheard of"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("push"), names, st.integers(0, 4), st.integers(1, MAX_COST)),
        st.tuples(st.just("pop"), st.floats(0.0, 2.0)),
        st.tuples(st.just("remove"), st.integers(0, 200)),
    ),
    max_size=200,
)


@given(steps)
def test_nothing_is_lost_doubled_or_overtaken_within_a_tenant(script):
    queue, waiting, lines, count = FairQueue(CLASSES), {}, {}, 0
    for step, *args in script:
        if step == "push":
            name, tenant, tokens = args
            each = demand(f"{count}", tokens, name, f"t{tenant}")
            count += 1
            push(queue, each)
            waiting[each.request_id] = each
            line = lines.setdefault((queue.class_of(name).facts.name, each.tenant), [])
            line.append(each.request_id)
        elif step == "pop" and waiting:
            head = queue.head()
            charge = queue.pop()
            assert charge.demand is head, "whoever is the head is popped"
            each = waiting.pop(charge.demand.request_id)
            line = lines[queue.class_of(each.service_class).facts.name, each.tenant]
            assert line.pop(0) == each.request_id, "first come, first served"
            queue.settle(charge, args[0] * charge.cost)
        elif step == "remove":
            found = queue.remove(f"{args[0]}")
            assert (found is not None) == (f"{args[0]}" in waiting)
            if found is not None:
                del waiting[found.request_id]
                lines[queue.class_of(found.service_class).facts.name, found.tenant].remove(found.request_id)
        assert len(queue) == len(waiting)
        assert queue.num_tokens == sum(d.num_prompt_tokens for d in waiting.values())
        assert (queue.head() is None) == (not waiting), "something that waits is always on offer"
    assert {queue.pop().demand.request_id for _ in range(len(queue))} == set(waiting)


@given(st.integers(0, 2**32), st.integers(1, 4), st.lists(st.integers(1, 100), min_size=2, max_size=4))
def test_shares_hold_over_any_backlog_and_nobody_starves(seed, num_tenants, weights):
    """Costs at random; all classes and tenants have requests all the time."""
    rng, total = random.Random(seed), sum(weights) * 1.25
    classes = tuple(ServiceClass(f"c{n}", -n, w / total) for n, w in enumerate(weights))
    queue, served, by_tenant = FairQueue(classes), Counter(), Counter()
    for facts in classes:
        for n in range(400):
            push(queue, demand(f"{facts.name}-{n}", rng.randint(1, MAX_COST), facts.name, f"t{n % num_tenants}"))
    while all(queue.classes[c.name].tenants.num_of(f"t{t}") for c in classes for t in range(num_tenants)):
        charge = queue.pop()
        served[charge.demand.service_class] += charge.cost
        by_tenant[charge.demand.service_class, charge.demand.tenant] += charge.cost
        for facts in classes:
            lag = facts.share * served.total() - served[facts.name]
            assert lag <= MAX_COST * (len(classes) + 1), "a guarantee lags by a few requests, whatever was served"
    for facts in classes:
        shares = [by_tenant[facts.name, f"t{t}"] for t in range(num_tenants)]
        assert max(shares) - min(shares) <= 2 * MAX_COST, (
            "tenants of a class differ by two requests at most (SFQ, theorem 1)"
        )


def calls(function) -> int:
    """Calls that a function makes, of Python and of C."""
    num = 0

    def count(frame, event, arg):
        nonlocal num
        num += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return num


@pytest.mark.parametrize("num_tenants", [1, 100_000])
def test_an_operation_takes_as_many_steps_with_a_hundred_thousand_queued(num_tenants):
    def work(num: int) -> int:
        """Most calls that any one operation makes when `num` requests wait."""
        queue = FairQueue(CLASSES)
        for n in range(num):
            push(queue, demand(f"{n}", 1 + n % 97, CLASSES[n % 3].name, f"t{n % num_tenants}"))
        most = 0
        for n in range(200):
            new = demand(f"new{n}", 5, CLASSES[n % 3].name, f"t{n % num_tenants}")
            most = max(most, calls(lambda new=new: push(queue, new)))
            most = max(most, calls(lambda new=new: queue.cost_before(new)))
            most = max(most, calls(lambda n=n: queue.remove(f"{num // 2 + n}")))
            most = max(most, calls(lambda: queue.settle(queue.pop(), 3.0)))
        return most

    small, large = work(1000), work(100_000)
    assert large <= small + 40, f"{small} calls with 1,000 queued, {large} with 100,000"
