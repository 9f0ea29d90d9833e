"""What the simulation has found, each as a short script in which every rule of the simulation must hold."""

from __future__ import annotations

from dataclasses import replace

import pytest

from common.net.options import LinkOptions
from tests.faultsim import engine
from tests.faultsim.draw import Script
from tests.faultsim.faults import Fault
from tests.faultsim.mutants import broken
from tests.faultsim.nodes import Plan
from tests.faultsim.scenario import Result, simulate
from tests.faultsim.transport import Way
from tests.faultsim.users import Want

OPTIONS = LinkOptions(
    data_links=2, heartbeat_s=2.0, lease_s=8.0, piece_bytes=4096, connect_timeout_s=2.5, reconnect_min_s=0.05
)
PLAN = Plan(options=OPTIONS, server_options=OPTIONS, model=engine.Model(head_dim=32))
SLOW = Way(latency_s=0.08, rate=300e3, burst=1400)


def at(number: int, kind: str, for_s: float = 0.1, *, is_from_start: bool = False) -> Fault:
    """A fault when bytes have arrived so many times, counted from when the first request was sent."""
    return Fault(kind, number, 0.0, for_s, is_from_start)


def played(*faults: Fault, want: Want, way: Way = SLOW, plan: Plan = PLAN) -> Result:
    """A script in which every rule holds; three times, with other jitter."""
    for seed in range(3):
        result = simulate(seed, Script(plan, ways=[way], wants=[want], faults=list(faults)))
        assert not result.violation, f"seed {seed}, {faults}: {result.violation}\n{result.world.tail()}"
    return result


@pytest.mark.parametrize("number", range(2, 14))
def test_state_that_comes_between_the_end_of_the_control_link_and_that_of_its_data_links(number):
    """It was taken for a breach of the protocol where Accepted had not arrived, and cost the request."""
    stop, cut = at(number, "stop_decoded", 3.0), at(number, "cut_control")
    result = played(stop, cut, want=Want("r", "bare", num_tokens=100))
    assert not result.counts["outcome: bare TransferIncomplete"]


@pytest.mark.parametrize("number", range(8, 32, 2))
def test_connect_that_is_given_up_in_the_turn_in_which_it_is_done(number):
    """Its link stayed open beside the one that was opened instead."""
    played(at(number, "stop_decoded", 2.6, is_from_start=True), want=Want("r", "whole"))


@pytest.mark.parametrize("number", [3, 9])
def test_bytes_of_the_error_frame_that_ends_a_link_are_counted(number):
    """decoded's `bytes_out` was short of them."""
    played(at(number, "silent_drop"), want=Want("r", "whole", num_tokens=100))


@pytest.mark.parametrize("number", range(4, 20, 4))
def test_no_lease_timer_is_left_of_a_client_that_was_replaced(number):
    """It held everything known of the client until it ran out."""
    options = replace(OPTIONS, lease_s=30.0)
    plan = replace(PLAN, options=options, server_options=options)
    played(at(number, "kill_decoded", 0.2), want=Want("r", "bare", num_tokens=100), plan=plan)


@pytest.mark.parametrize("latency_s", [0.0005, 0.03])
def test_parts_of_the_time_to_the_first_token_where_state_overtakes_the_control_link(latency_s):
    """Accepted came after the state it announces, and the parts came to more than the whole."""
    way = Way(latency_s=latency_s, jitter_s=10 * latency_s)
    for num_tokens in (1, 5, 30):
        played(want=Want("r", "whole", num_tokens=num_tokens), way=way)


@pytest.mark.parametrize("rate", [30e3, 1e8])
def test_staged_bytes_where_encoding_is_slower_than_computing(rate):
    """Only chunks were paused: what was computed meanwhile was encoded and staged all the same."""
    plan = replace(PLAN, max_staged_bytes=4096, prefill_tokens_per_s=20000.0)
    want = Want("r", "bare", num_tokens=150)
    script = Script(plan, ways=[replace(SLOW, rate=rate)], wants=[want], executor_s=0.05, inline_bytes=0)
    result = simulate(0, script)
    assert not result.violation, f"{result.violation}\n{result.world.tail()}"
    assert result.counts["path: prefill paused for want of acknowledgements"]


PUSHED = Want("r", "bare", num_tokens=150, start=120, pushes=True)


@pytest.mark.parametrize("kind", ["cut_control", "cut_all", "cut_data"])
@pytest.mark.parametrize("number", range(2, 20, 3))
def test_a_cut_while_a_prefix_is_pushed_costs_no_request(kind, number):
    result = played(at(number, kind), want=PUSHED)
    assert result.counts["outcome: bare ok"] and result.counts["path: a pushed prefix was taken"]


@pytest.mark.parametrize("is_sealed", [False, True])
def test_a_prefix_that_comes_slowly_is_not_given_up(is_sealed):
    """Sealed pieces, which are opened elsewhere, did not count: after 2 s the stream was ended."""
    small = replace(OPTIONS, credit_bytes=4096, max_segment_bytes=4096)
    plan = replace(PLAN, options=small, server_options=small, is_sealed=is_sealed, progress_timeout_s=2.0)
    result = played(want=PUSHED, way=replace(SLOW, rate=20e3), plan=plan)
    assert result.counts["outcome: bare ok"] and result.counts["path: a pushed prefix was taken"]
    assert result.world.now > 1004


def test_a_push_that_is_not_repeated_after_resume_is_found():
    """It matters only where a control link is lost in the middle of one, which few seeds show."""
    with broken("a push is not repeated after Resume"):
        scripts = (Script(PLAN, ways=[SLOW], wants=[PUSHED], faults=[at(n, "cut_control")]) for n in range(2, 20))
        assert any(simulate(0, script).violation for script in scripts)


def leaving(seed: int) -> Result:
    """One of two peers, of which both hold prefixes, leaves by reload and comes back."""
    wants = [Want(f"r{n}", "bare", peer=n, num_tokens=100) for n in range(2)]
    wants.append(Want("later", "whole", after_s=3.0))
    faults = [Fault("peer_leaves", None, 2.0, 0.2)]
    plan = replace(PLAN, cache_blocks=64)
    return simulate(seed, Script(plan, num_prefillds=2, ways=[SLOW, SLOW], wants=wants, faults=faults))


def test_what_a_peer_held_is_forgotten_when_it_leaves():
    """Or it would count until whoever comes back by its name tells what it holds."""
    results = [leaving(seed) for seed in range(3)]
    assert not [r.violation for r in results if r.violation]
    assert all(r.counts["fault: peer_leaves"] for r in results)
    with broken("a peer that left is not forgotten"):
        assert all("counts as holding" in leaving(seed).violation for seed in range(3))
