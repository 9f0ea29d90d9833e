"""The simulator itself: time jumps, processes die and stand still, the network keeps TCP's promises and no others."""

from __future__ import annotations

import asyncio
import errno
import time
from typing import Any

import pytest

from tests.faultsim import engine
from tests.faultsim.campaign import REQUIRED, Campaign
from tests.faultsim.faults import _ACTIONS, CACHE_KINDS, KINDS
from tests.faultsim.nodes import Tally
from tests.faultsim.transport import Way
from tests.faultsim.world import World

NEAR, FAR = "10.0.2.0", "10.0.1.0"


class Ear:
    """A protocol that keeps what it hears."""

    def __init__(self) -> None:
        self.heard, self.lost, self.ended = bytearray(), [], False
        self.pauses: list[bool] = []
        self.transport: Any = None
        self._buffer = bytearray(64)

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        transport.set_write_buffer_limits(high=1000)

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self._buffer)

    def buffer_updated(self, num_bytes: int) -> None:
        self.heard += self._buffer[:num_bytes]

    def eof_received(self) -> None:
        self.ended = True

    def connection_lost(self, error: Exception | None) -> None:
        self.lost.append(error)

    def pause_writing(self) -> None:
        self.pauses.append(True)

    def resume_writing(self) -> None:
        self.pauses.append(False)


class Lab:
    """Two processes, `near` connecting to `far`."""

    def __init__(self, **way: Any) -> None:
        self.world = World(7, is_coarse=False)
        self.net, self.loop = self.world.net, self.world.loop
        self.path = Way(**{"latency_s": 0.01, "split": 0.0} | way)
        self.net.way = lambda a, b: self.path
        self.near, self.far = self.world.process("near", NEAR), self.world.process("far", FAR)
        self.ears: list[Ear] = []
        self.in_process(self.far, lambda: self.net.listen(self.far, self._accept, FAR, 1))

    def _accept(self) -> Ear:
        self.ears.append(Ear())
        return self.ears[-1]

    def in_process(self, process: Any, call: Any) -> Any:
        return process.context.run(call)

    def start(self, process: Any, coro: Any) -> asyncio.Task[Any]:
        return self.in_process(process, lambda: self.loop.create_task(coro))

    def until(self, seconds: float) -> None:
        ends_at = self.world.now + seconds
        self.loop.at(ends_at, int, context=self.net.world)
        self.loop.run(lambda: self.world.now >= ends_at)

    def connected(self) -> tuple[Ear, Ear]:
        task = self.start(self.near, self.loop.create_connection(Ear, FAR, 1))
        self.until(0.1)
        return task.result()[1], self.ears[-1]


def test_time_jumps_and_timers_keep_their_order():
    lab, seen = Lab(), []
    began = time.monotonic()
    for delay_s in (3600.0, 0.5, 7200.0):
        lab.in_process(lab.near, lambda d=delay_s: lab.loop.call_later(d, seen.append, d))
    lab.in_process(lab.near, lambda: lab.loop.call_later(1.0, seen.append, "cancelled").cancel())
    lab.until(8000.0)
    assert seen == [0.5, 3600.0, 7200.0] and time.monotonic() - began < 5


def test_a_killed_process_does_nothing_more_and_a_stopped_one_does_it_later():
    lab, seen = Lab(), []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(1.0)
            seen.append((name, round(lab.world.now - 1000.0, 1)))
        finally:
            seen.append(f"{name} left")

    lab.start(lab.near, work("near"))
    lab.start(lab.far, work("far"))
    lab.until(0.5)
    lab.near.is_dead = True
    lab.world.stop(lab.far, 3.0)
    lab.until(5.0)
    assert seen == [("far", 3.5), "far left"]


def test_clocks_of_two_processes_have_nothing_in_common():
    lab = Lab()
    read = [lab.in_process(p, lab.loop.monotonic) - lab.world.now for p in (lab.near, lab.far)]
    assert abs(read[0] - read[1]) > 1 and read == [lab.near.clock_s, lab.far.clock_s]


def test_bytes_arrive_whole_and_in_order_whatever_the_cuts():
    lab = Lab(split=0.5, jitter_s=0.05, burst=100, capacity=300, rate=1e5)
    ear, other = lab.connected()
    sent = bytes(range(256)) * 8
    for begin in range(0, len(sent), 100):
        lab.in_process(lab.near, lambda b=begin: ear.transport.write(sent[b : b + 100]))
    lab.until(5.0)
    assert other.heard == sent
    assert ear.pauses == [True, False], "1,000 bytes of buffer were full, and had room again"


def test_what_is_written_is_taken_when_it_leaves():
    """By reference, as uvloop does: a buffer that is changed too early shows."""
    lab = Lab()
    ear, other = lab.connected()
    data = bytearray(b"before")
    lab.in_process(lab.near, lambda: ear.transport.write(memoryview(data)))
    data[:] = b"after!"
    lab.until(1.0)
    assert other.heard == b"after!"


def test_the_end_comes_behind_everything_that_was_written():
    lab = Lab(rate=1000.0)
    ear, other = lab.connected()
    lab.in_process(lab.near, lambda: (ear.transport.write(b"x" * 500), ear.transport.close()))
    lab.until(3.0)
    assert other.heard == b"x" * 500 and other.ended and other.lost == [None] and ear.lost == [None]


def test_a_cut_loses_what_is_on_the_way_and_both_ends_hear_of_it():
    lab = Lab(latency_s=0.2)
    task = lab.start(lab.near, lab.loop.create_connection(Ear, FAR, 1))
    lab.until(2.0)
    ear, other = task.result()[1], lab.ears[-1]
    lab.in_process(lab.near, lambda: ear.transport.write(b"lost"))
    lab.until(0.1)
    lab.net.cut(lab.net.connections[0])
    lab.until(1.0)
    assert not other.heard
    assert [type(e.lost[0]) for e in (ear, other)] == [ConnectionResetError] * 2


def test_a_silent_flow_tells_nobody_and_fills_up():
    lab = Lab(capacity=2000)
    ear, other = lab.connected()
    lab.net.silence(lab.net.connections[0], ("client",))
    lab.in_process(lab.near, lambda: ear.transport.write(b"x" * 5000))
    lab.until(100.0)
    assert not other.heard and not other.lost and ear.pauses == [True]
    assert ear.transport.get_write_buffer_size() == 3000


def test_a_partition_holds_bytes_back_and_loses_none():
    lab = Lab()
    ear, other = lab.connected()
    lab.net.apart.add(frozenset((NEAR, FAR)))
    lab.in_process(lab.near, lambda: ear.transport.write(b"late"))
    lab.until(10.0)
    assert not other.heard
    lab.net.rejoin(frozenset((NEAR, FAR)))
    lab.until(1.0)
    assert other.heard == b"late"


@pytest.mark.parametrize("is_silent", [False, True])
def test_a_killed_process_resets_its_peers_unless_the_machine_is_off(is_silent):
    lab = Lab()
    ear, _ = lab.connected()
    lab.far.is_dead = True
    lab.net.process_died(lab.far, is_silent=is_silent)
    if is_silent:
        lab.net.hosts_off.add(FAR)
    lab.in_process(lab.near, lambda: ear.transport.write(b"hello?"))
    lab.until(60.0)
    assert len(ear.lost) == (0 if is_silent else 1)


@pytest.mark.parametrize(
    ("trouble", "error"),
    [
        (lambda net: net.refusing.add(FAR), errno.ECONNREFUSED),
        (lambda net: net.listeners.clear(), errno.ECONNREFUSED),
        (lambda net: net.dropping_syn.add(FAR), errno.ETIMEDOUT),
        (lambda net: net.hosts_off.add(FAR), errno.ETIMEDOUT),
        (lambda net: net.local_errnos.update(near=errno.EMFILE), errno.EMFILE),
    ],
)
def test_connects_that_come_to_nothing(trouble, error):
    lab = Lab()
    trouble(lab.net)
    task = lab.start(lab.near, lab.loop.create_connection(Ear, FAR, 1))
    lab.until(20.0)
    found = task.exception()
    assert isinstance(found, OSError) and found.errno == error


def test_a_damaged_byte_is_one_bit_and_known_to_be():
    lab = Lab()
    ear, other = lab.connected()
    connection = lab.net.connections[0]
    ear.transport.out.flip_after = 3
    lab.in_process(lab.near, lambda: ear.transport.write(bytes(8)))
    lab.until(1.0)
    assert [i for i, b in enumerate(other.heard) if b] == [3] and other.heard[3].bit_count() == 1
    assert connection.is_damaged


def test_a_busy_wait_does_not_hang_the_simulation():
    lab = Lab()

    async def spin() -> None:
        while True:
            await asyncio.sleep(0)

    lab.start(lab.near, spin())
    with pytest.raises(TimeoutError, match="no end after"):
        lab.until(1e9)


def test_an_exception_in_a_callback_is_a_violation():
    lab = Lab()
    lab.in_process(lab.near, lambda: lab.loop.call_soon(lambda: 1 / 0))
    lab.until(1.0)
    assert "ZeroDivisionError" in lab.world.violation


def test_the_reference_notices_one_wrong_byte():
    model, tokens = engine.Model(window_layers=1), tuple(range(3, 43))
    source, _ = engine._expected_slot(model, tokens, 0)
    slot = engine._prototype(model).new_slot(40)
    slot.prepare_import(40)
    for layer, (first, stop) in engine.layout_of(model).required_segments(0, 40).items():
        for ours, right in zip(
            slot.writable(first, stop, (layer,)), source.exported(first, stop, (layer,)), strict=True
        ):
            ours[:] = right
    assert not engine.wrong_rows(model, slot, tokens, 0, 40)
    slot.writable(39, 40, (1,))[0][0] ^= 1
    assert "layer 1" in engine.wrong_rows(model, slot, tokens, 0, 40)
    assert not engine.is_poisoned(slot)
    engine.poison(slot)
    assert engine.is_poisoned(slot)


def test_a_campaign_that_saw_nothing_misses_everything():
    campaign = Campaign()
    assert campaign.missing() == list(REQUIRED)
    campaign.counts.update(REQUIRED)
    assert not campaign.missing()
    campaign.failures[3] = "why"
    again = Campaign.from_json(campaign.to_json())
    assert again == campaign


def test_every_fault_is_there_and_required():
    assert set(_ACTIONS) == {*KINDS, *CACHE_KINDS}
    assert {f"fault: {kind}" for kind in _ACTIONS} <= set(REQUIRED)


def test_tally_counts_by_label():
    tally = Tally()
    tally.requests.labels("remote", "ok").inc()
    tally.requests.labels("local", "ok").inc(2)
    tally.other.inc()
    assert tally.total("requests") == 3 and tally.counts["requests", "local", "ok"] == 2
