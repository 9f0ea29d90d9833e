"""The parts of a remote prefill's time: they add up to it whatever arrived before what."""

from __future__ import annotations

import pytest

from common.net.options import TransferReport
from common.request import RequestReport
from decoded.remote import record_transfer

SENT_AT = 100.0


def parts(**instants: float) -> tuple[float, float, float]:
    """(remote queue, prefill, transfer) of a transfer whose last byte came 1 s after it was asked for."""
    zeros = dict.fromkeys(("requested_at", "first_chunk_at", "first_byte_at", "prefill_ended_at", "verified_at"), 0.0)
    transfer = TransferReport(1, 1, "raw", 1, 1, verified_tokens=1, last_byte_at=SENT_AT + 1.0, **(zeros | instants))
    report = RequestReport("r")
    record_transfer(report, transfer, SENT_AT)
    return report.timing.remote_queue_s, report.timing.prefill_s, report.timing.transfer_s


def test_parts_join_at_accepted():
    found = parts(accepted_at=SENT_AT + 0.1, remote_queue_s=0.2, prefill_s=0.5)
    assert found == pytest.approx((0.3, 0.5, 0.2))


@pytest.mark.parametrize(
    ("accepted_s", "queue_s", "prefill_s", "expected"),
    [
        (0.9, 0.2, 0.5, (0.5, 0.5, 0.0)),  # data links overtook the control link
        (0.1, 0.2, 1.5, (0.0, 1.0, 0.0)),  # the peer's clock runs fast
        (5.0, 0.0, 0.5, (0.5, 0.5, 0.0)),  # Accepted came after the state
    ],
)
def test_parts_add_up_where_accepted_was_held_up(accepted_s, queue_s, prefill_s, expected):
    found = parts(accepted_at=SENT_AT + accepted_s, remote_queue_s=queue_s, prefill_s=prefill_s)
    assert found == pytest.approx(expected) and sum(found) == pytest.approx(1.0)
