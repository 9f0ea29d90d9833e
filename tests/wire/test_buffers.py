"""Buffers are used again, never by two, and not more of them than allowed are kept."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.buffers import MIN_BYTES, BufferPool, join_into

MIB = 1 << 20


@pytest.mark.parametrize("num_bytes", [0, 1, MIN_BYTES - 1, MIN_BYTES, MIB, MIB + 16, MIB + 64, MIB + 65, 8 * MIB + 16])
def test_a_buffer_has_the_size_that_was_asked_for(num_bytes):
    pool = BufferPool()
    first = pool.take(num_bytes)
    assert len(first) == num_bytes and not first.readonly
    pool.give_back(first)
    again = pool.take(num_bytes)
    assert (again.obj is first.obj) == (num_bytes >= MIN_BYTES) and len(again) == num_bytes


def test_a_piece_and_its_sealed_form_share_buffers():
    pool = BufferPool()
    sealed = pool.take(MIB + 16)
    pool.give_back(sealed)
    assert pool.take(MIB).obj is sealed.obj


def test_nobody_gets_what_another_one_has():
    pool = BufferPool()
    held = [pool.take(MIB) for _ in range(5)]
    assert len({id(view.obj) for view in held}) == 5
    for view in held:
        pool.give_back(view)
    assert len({id(pool.take(MIB).obj) for _ in range(5)}) == 5


def test_what_is_kept_is_bounded():
    pool = BufferPool(max_spare_bytes=3 * MIB)
    for view in [pool.take(MIB) for _ in range(10)]:
        pool.give_back(view)
    assert 2 * MIB <= pool.spare_bytes <= 3 * MIB


@pytest.mark.parametrize(
    "other", [b"bytes", memoryview(b"view"), memoryview(bytearray(MIB)), memoryview(bytearray(100))]
)
def test_what_is_not_of_the_pool_is_forgotten(other):
    pool = BufferPool()
    pool.give_back(other)
    assert pool.spare_bytes == 0


def test_many_threads():
    pool = BufferPool()

    def work(n: int) -> bool:
        for _ in range(200):
            view = pool.take(MIN_BYTES)
            view[:8] = n.to_bytes(8, "big")
            if bytes(view[:8]) != n.to_bytes(8, "big"):
                return False
            pool.give_back(view)
        return True

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(16)))


@given(st.lists(st.binary(max_size=50), max_size=6))
def test_join(parts):
    out = bytearray(sum(map(len, parts)) + 3)
    join_into(parts, memoryview(out))
    assert bytes(out) == b"".join(parts) + bytes(3)
