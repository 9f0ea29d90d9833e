"""Credit: limits never shrink, the minimum always holds, the shared part is not passed, nobody waits in a circle."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire.credit import CreditPool


def test_first_stream_gets_the_shared_window():
    pool = CreditPool(1000, 100)
    assert pool.open(1) == 1000
    assert pool.landed(1, 10) == 1010


def test_second_stream_gets_its_minimum_until_the_first_gives_way():
    pool = CreditPool(1000, 100)
    pool.open(1)
    assert pool.open(2) == 100
    assert pool.landed(1, 600) == 1100, "a share of 500 each: the first only gets what its window lacks"
    assert pool.landed(2, 50) == 550 and pool.outstanding_bytes == 1000


def test_closing_gives_back():
    pool = CreditPool(1000, 100)
    pool.open(1)
    pool.open(2)
    pool.close(1)
    assert pool.refresh() == {2: 1000}
    assert pool.limit(1) == 0 and pool.landed(1, 5) == 0


def test_reserve_larger_than_the_shared_part():
    pool = CreditPool(10, 100)
    assert [pool.open(i) for i in range(5)] == [100] * 5
    assert pool.landed(3, 100) == 200


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 500), st.data())
def test_any_history_keeps_the_promises(shared, reserve, data):
    pool = CreditPool(shared, reserve)
    landed: dict[int, int] = {}
    seen: dict[int, int] = {}
    for step in range(data.draw(st.integers(1, 60))):
        choice = data.draw(st.sampled_from(["open", "land", "close"]))
        if choice == "open":
            landed[step] = 0
            seen[step] = pool.open(step)
        elif landed:
            stream = data.draw(st.sampled_from(sorted(landed)))
            if choice == "close":
                pool.close(stream)
                del landed[stream], seen[stream]
                pool.refresh()
            else:
                num = data.draw(st.integers(0, pool.limit(stream) - landed[stream]))
                landed[stream] += num
                pool.landed(stream, num)
        for stream, num in landed.items():
            limit = pool.limit(stream)
            assert limit >= seen[stream], "a limit never shrinks"
            assert limit >= num + reserve, "the head of the queue always fits"
            seen[stream] = limit
        assert pool.outstanding_bytes <= shared + reserve * len(landed)
