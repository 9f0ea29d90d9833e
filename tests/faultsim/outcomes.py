"""How a request may end: which outcome needs which cause, and which faults may cost no request at all."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

from tests.faultsim import engine, faults
from tests.faultsim.users import Want

if TYPE_CHECKING:
    from tests.faultsim.scenario import Scenario

_DAMAGE = {"damage", "damage_message", "damage_often"}
_REFUSED = ("PeerShed", "PeerDraining", "PeerInvalid", "RequestDamaged")
"""Said instead of Accepted, and never after it."""
_ANY: set[str] = set()
_CAUSES: dict[str, set[str]] = {
    "RequestDamaged": _DAMAGE,
    "TransferIncomplete": _DAMAGE,
    "PeerDraining": {"drain"},
    "not asked: PeerDraining": {"drain"},
    "Draining": {"restart_decoded"},
    "EngineDead": {"restart_decoded"},
    "PeerEngineFailed": {"restart_prefilld"},
    "TransferTimeout": {"deadline"},
    "LinkLost": _ANY,
    "not asked: LinkLost": _ANY,
    "StaleHandle": _ANY,
    "PeerTimeout": _ANY,
    "never ready": _ANY,
}
_OF_WHOLE = ("ok", "cancelled", "NoPeer", "Draining", "Overloaded", "EngineDead", "never ready")


class Outcomes:
    """Judges every request once all is over."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario, self.world, self.plan = scenario, scenario.world, scenario.plan

    def check(self) -> None:
        """One outcome each, the right one, and no byte after it."""
        for want in self.scenario.wants:
            self.world.check(len(want.outcomes) <= 1, f"{want.name}: outcomes {want.outcomes}")
            for outcome in want.outcomes:
                self._count(want, outcome)
                self._check_cause(want, outcome)
                self._check_survival(want, outcome)
                self._check_deadline(want)
                if outcome == "ok":
                    self._check_report(want)
                if want.slot is not None:
                    self.world.check(engine.is_poisoned(want.slot), f"{want.name}: bytes came after the outcome")

    def _count(self, want: Want, outcome: str) -> None:
        self.world.count(f"outcome: {want.kind} {outcome}")
        if want.kind == "whole" and outcome == "ok":
            if want.pushed_bytes:
                self.world.count("path: a whole request's prefix was pushed")
            if want.report.route == "local":
                self.world.count("path: fallback to local prefill")
            elif len(set(want.peers)) > 1:
                self.world.count("path: served by another peer")
            elif len(want.peers) > 1:
                self.world.count("path: served by the same peer, asked again")

    def _check_cause(self, want: Want, outcome: str) -> None:
        check, name = self.world.check, f"{want.name}: {outcome}"
        if outcome in _CAUSES:
            happened = {*self.scenario.faults.struck, *(("deadline",) if want.deadline_s is not None else ())}
            causes = _CAUSES[outcome] or happened
            check(bool(happened & causes), f"{name}, and all that happened is {sorted(happened)}")
        if want.kind == "whole":
            check(outcome in _OF_WHOLE, f"{name} is no way for a request to end")
        if outcome in _REFUSED:
            is_push = want.pushes and outcome == "RequestDamaged"
            check(is_push or not want.report.accepted_at, f"{name} after it was accepted")
        check(outcome != "PeerInvalid" or want.start == want.num_tokens, name)

    def _check_survival(self, want: Want, outcome: str) -> None:
        """Faults that the protocol mends within lease and patience cost no request."""
        struck, scenario = self.scenario.faults.struck, self.scenario
        silence_s = 2.5 * scenario.heartbeat_s * sum(kind.startswith("silent") for kind in struck)
        away_s = silence_s + 3.0 * len(struck)
        # The ends may find out one after the other.
        is_patient = scenario.lease_s >= away_s + silence_s and self.plan.progress_timeout_s > away_s
        is_mended = all(kind in faults.MENDED for kind in struck)
        if want.is_cancelled or want.deadline_s is not None or not is_patient or not is_mended:
            return
        self.world.count("path: survived what must be survived", len(struck))
        fine = {"ok", "NoPeer"} if want.start < want.num_tokens else {"PeerInvalid"}
        fine |= {"PeerShed", "not asked: PeerShed"}
        if struck:
            fine |= {"not asked: LinkLost"}
        self.world.check(outcome in fine, f"{want.name}: {outcome} after no more than {struck}")

    def _check_deadline(self, want: Want) -> None:
        if want.deadline_s is not None and want.kind == "bare" and want.process is not None:
            late_s = want.ended_at - want.asked_at - want.deadline_s
            # The deadline's timer, and the threads that may still write to the sink.
            spare_s = 0.02 + 2 * self.world.loop.executor_s + want.process.stopped_s
            self.world.check(late_s <= spare_s, f"{want.name}: {late_s:.3f} s after its deadline")

    def _check_report(self, want: Want) -> None:
        """Instants in order; bytes no more than were sent; parts of the time to the first token that add up to it."""
        report, check = want.report, self.world.check
        if want.kind == "bare" and want.sink is not None:
            marks = (report.requested_at, report.accepted_at, report.first_chunk_at, report.prefill_ended_at)
            check(marks[0] > 0 and list(marks) == sorted(marks), f"{want.name}: instants {marks}")
            marks = (report.requested_at, report.first_byte_at, report.last_byte_at, report.verified_at)
            check(list(marks) == sorted(marks), f"{want.name}: instants {marks}")
            check(report.verified_tokens == want.num_tokens, f"{want.name}: {report.verified_tokens} tokens")
            check(report.raw_bytes == want.sink.landed_bytes, f"{want.name}: {report.raw_bytes} raw bytes")
            sent = self.scenario.watch.sent_bytes[want.name]
            check(0 < report.wire_bytes <= sent, f"{want.name}: {report.wire_bytes} bytes came, {sent} were sent")
            pushed = self.scenario.watch.pushed_bytes[want.name]
            check(report.pushed_bytes <= pushed, f"{want.name}: {report.pushed_bytes} bytes taken, {pushed} pushed")
        elif want.kind == "whole":
            parts = asdict(report.timing)
            ttft_s = parts.pop("ttft_s")
            check(abs(sum(parts.values()) - ttft_s) < 0.02, f"{want.name}: {ttft_s:.4f} s are not {parts}")
