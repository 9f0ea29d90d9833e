"""Who holds how much state memory. Plain bookkeeping beside the slots themselves, checked against them when idle.

Written by the engine thread; `totals` may be read from any thread. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Iterable

from common.sched.sequence import Sequence


class IntegrityError(AssertionError):
    """The books do not agree with what is held: a bug of ours."""


class SlotAccounts:
    """Memory by sequence id and layer kind."""

    def __init__(self) -> None:
        self._held: dict[int, dict[str, int]] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._held

    def reserve(self, seq: Sequence) -> None:
        """Book the memory of a sequence's slot. A sequence is booked once."""
        if seq.seq_id in self._held:
            raise IntegrityError(f"sequence {seq.seq_id} is booked twice")
        self._held[seq.seq_id] = dict(seq.slot.num_bytes)

    def rebook(self, seq: Sequence) -> None:
        """The slot holds other memory than before (it was parked or came back). Raises IntegrityError if not booked."""
        if seq.seq_id not in self._held:
            raise IntegrityError(f"sequence {seq.seq_id} is booked anew but was not booked")
        self._held[seq.seq_id] = dict(seq.slot.num_bytes)

    def release(self, seq: Sequence) -> None:
        """Free the slot and its booking. Raises IntegrityError when there is none."""
        if self._held.pop(seq.seq_id, None) is None:
            raise IntegrityError(f"sequence {seq.seq_id} is released but not booked")
        seq.slot.free()

    def totals(self) -> dict[str, int]:
        """Bytes by layer kind. list() of a dict is atomic, so other threads may ask."""
        totals: dict[str, int] = {}
        for held in list(self._held.values()):
            for kind, num in held.items():
                totals[kind] = totals.get(kind, 0) + num
        return totals

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Every live sequence is booked with exactly what its slot holds, and nothing else is."""
        live = {seq.seq_id: seq.slot.num_bytes for seq in sequences}
        if live != self._held:
            raise IntegrityError(f"slots hold {live}, booked are {self._held}")
