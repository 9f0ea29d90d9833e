"""Which link gets the next piece: none that would hold it up."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from common.linkfacts import LinkPlan
from common.net.striping import fill_in_turn, is_behind

KB = 1 << 10


def link(bps: float | None, queued: int = 0, room: int = 1 << 20, is_held: bool = True) -> SimpleNamespace:
    made = SimpleNamespace(queued_bytes=queued, plan=LinkPlan(bps, None, room) if is_held else None, took=0)
    made.is_writable = True
    return made


@pytest.mark.parametrize(
    ("own", "others", "waiting", "behind"),
    [
        (link(10e6), [link(10e6)], 0, False),
        (link(1e6), [link(10e6)], 0, True),  # 2 s here, 0.2 s there
        (link(1e6), [link(10e6)], 4 << 20, False),  # all the rest takes longer anyway
        (link(1e6), [link(10e6, 3 << 20)], 0, False),  # the other one is busy for longer
        (link(10e6, 512 * KB), [link(10e6)], 0, True),
        (link(1e6), [link(None)], 0, False),  # nobody knows what that one can do
        (link(1e6), [link(10e6, is_held=False)], 0, False),
        (link(None), [link(10e6)], 0, False),
    ],
)
def test_who_would_hold_a_piece_up(own, others, waiting, behind):
    assert is_behind(own, [own, *others], 256 * KB, waiting) is behind


def run(links: list[SimpleNamespace], num_pieces: int) -> list[int]:
    """Pieces taken by each link."""
    left = [num_pieces]

    def send(to: SimpleNamespace) -> bool:
        if not left[0]:
            return False
        left[0] -= 1
        to.took += 1
        to.queued_bytes += 256 * KB
        to.is_writable = to.queued_bytes < to.plan.queue_bytes
        return True

    fill_in_turn(links, send, lambda: (left[0], 256 * KB))
    return [each.took for each in links]


def test_the_last_pieces_go_where_they_are_done_first():
    assert run([link(1e6), link(11e6), link(11e6)], 2) == [0, 1, 1]
    assert run([link(1e6), link(11e6)], 1) == [0, 1]
    assert run([link(1e6)], 1) == [1], "alone it takes all"


def test_a_slow_link_helps_while_there_is_much_to_send():
    assert run([link(1e6), link(11e6, room=512 * KB)], 60)[0] > 0


def test_whoever_is_soonest_is_never_left_out():
    for queued in (0, 300 * KB, 900 * KB):
        links = [link(3e6, queued), link(5e6), link(7e6, queued // 2)]
        assert sum(not is_behind(each, links, 256 * KB, 0) for each in links) >= 1
        assert sum(run(links, 3)) == 3
