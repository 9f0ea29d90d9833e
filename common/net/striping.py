"""Which data link gets the next piece: any with room, in turn, unless another would be done with it sooner.

Knows links as what waits at them and how fast they may send. Used by both ends of a session.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from common.net.link import Link

# So much later than by another link a piece may be there: less is noise.
BEHIND_S = 0.05


def fill_in_turn(
    links: Iterable[Link], send_next: Callable[[Link], bool], waiting: Callable[[], tuple[int, int]] | None = None
) -> None:
    """Give every link with room something to send, in turn, until `send_next` has nothing.

    `waiting` answers how many pieces wait, and the bytes of one: with it a link that would be behind gets none.
    """
    links = list(links)
    left = [link for link in links if link.is_writable]
    num_pieces, piece_bytes = waiting() if waiting is not None and left and len(links) > 1 else (0, 0)
    while left:
        for link in list(left):
            if piece_bytes and is_behind(link, links, piece_bytes, num_pieces * piece_bytes):
                left.remove(link)
                continue
            if not send_next(link):
                return
            num_pieces = max(0, num_pieces - 1)
            if not link.is_writable:
                left.remove(link)


def is_behind(link: Link, links: list[Link], piece_bytes: int, waiting_bytes: int) -> bool:
    """Whether a link would be done with a piece later than another, and than all links with all that waits.

    Earliest completion first (Lim et al., "ECF: An MPTCP Path Scheduler to Manage Heterogeneous Paths", CoNEXT 2017),
    by the rates that links are held to; False where one is not held. The last piece must not lie on the slowest link.
    """
    queues = [(each.queued_bytes, each.plan.pacing_bps) for each in links if each.plan is not None]
    own = link.plan.pacing_bps if link.plan is not None else None
    if not own or len(queues) < len(links) or any(not pace for _, pace in queues):
        return False
    soonest_s = min(8 * (queued + piece_bytes) / pace for queued, pace in queues if pace)
    queued_bytes, total_bps = sum(queued for queued, _ in queues), sum(pace for _, pace in queues if pace)
    all_s = 8 * (waiting_bytes + queued_bytes) / total_bps
    return 8 * (link.queued_bytes + piece_bytes) / own > max(soonest_s, all_s) + BEHIND_S
