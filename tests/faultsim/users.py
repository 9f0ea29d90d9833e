"""What users ask of a decoded, and what they make of the answers: tokens, or state alone as the net layer gives it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

from common.errors import PdError, PeerCancelled, PeerError, TransferError
from common.fake import FakeSlot
from common.layout import StateLayout
from common.local_outputs import LocalSink
from common.net.options import RemoteRequest
from common.net.pool import PeerClient
from common.request import Request, SamplingParams, TokenOutput
from common.sched.prefixes import Prefixes
from tests.faultsim import engine
from tests.faultsim.loop import Process
from tests.faultsim.nodes import Decoded

_PATIENCE_S = 60.0


@dataclass
class Want:
    """One request. "whole": through the dispatcher to tokens, whatever it takes; "bare": one remote prefill.

    `after_s` counts from when decoded is asked, `cancel_s` from when a peer is ready. `outcomes` has what came of it.
    """

    name: str
    kind: str
    decoded: int = 0
    peer: int = 0
    after_s: float = 0.0
    num_tokens: int = 40
    start: int = 0
    deadline_s: float | None = None
    due_s: float | None = None
    cancel_s: float | None = None
    num_output: int = 1
    codec: str = "raw"
    pushes: bool = False
    stem: int | None = None
    """Prompts of one stem begin alike; None: like none of another length."""
    tenant: str = ""
    tokens: tuple[int, ...] = ()
    process: Process | None = None
    asked_at: float = 0.0
    ended_at: float = 0.0
    is_cancelled: bool = False
    outcomes: list[str] = field(default_factory=list)
    slot: FakeSlot | None = None
    sink: Sink | None = None
    report: Any = None
    pushed_bytes: int = 0
    peers: tuple[str, ...] = ()
    """Of a whole one: where it was sent, one after the other."""

    @property
    def is_over(self) -> bool:
        """It has an outcome, or nobody is left to have one."""
        return bool(self.outcomes) or (self.process is not None and self.process.is_dead)


class Sink(LocalSink):
    """Counts what lands."""

    def __init__(self, slot: FakeSlot, layout: StateLayout) -> None:
        super().__init__(slot)
        self._layout, self.landed_bytes = layout, 0

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        super().landed(start, stop, layers)
        self.landed_bytes += self._layout.segment_bytes(start, stop, layers)


class User:
    """Whoever sent one request to one incarnation of a decoded."""

    def __init__(self, node: Decoded, want: Want) -> None:
        self.node, self.want, self.world, self.model = node, want, node.world, node.plan.model
        want.process = node.process
        num, first = want.num_tokens, want.num_tokens if want.stem is None else want.stem
        want.tokens = tuple((first * 31 + i * 7 + i * i) % (engine.VOCAB - 3) + 3 for i in range(num + 1))
        node.task(self._serve)

    async def _serve(self) -> None:
        want, world = self.want, self.world
        try:
            await asyncio.sleep(want.after_s)
            await self._until_ready()
            want.asked_at = world.now
            world.trace("ask", want.name, want.kind, want.num_tokens)
            outcome = await (self._whole() if want.kind == "whole" else self._bare())
        except TimeoutError:
            outcome = "never ready"
        except Exception as e:  # noqa: BLE001 - whatever it is, nobody may get it
            outcome = type(e).__name__
            world.fail(f"{want.name}: {e!r}")
        want.ended_at = world.now
        want.outcomes.append(outcome)
        world.trace("outcome", want.name, outcome)

    async def _until_ready(self) -> None:
        async with asyncio.timeout(_PATIENCE_S):
            while not any(c.state == "ready" for c in self.node.clients()):
                await asyncio.sleep(0.05)

    # ---- tokens

    async def _whole(self) -> str:
        want, check = self.want, self.world.check
        sampling = SamplingParams(max_tokens=want.num_output, temperature=0.0, ignore_eos=True)
        request = Request(want.name, want.tokens, sampling, deadline_s=want.deadline_s, tenant=want.tenant)
        right, out = list(engine.expected_tokens(self.model, want.tokens, want.num_output)), []
        try:
            active = self.node.dispatcher.submit(request, arrived_at=self.world.loop.monotonic())
            if want.cancel_s is not None:
                self.world.loop.call_later(want.cancel_s, self._cancel_whole, active)
            async for output in active:
                if isinstance(output, TokenOutput):
                    out.append(output.token_id)
                    check(out == right[: len(out)], f"{want.name}: a wrong token, {out} of {right}")
        except PdError as e:
            return type(e).__name__
        want.report = active.report
        want.peers = tuple(d["peer"] for d in active.decisions if d["route"] == "remote")
        want.pushed_bytes = sum(d.get("pushed_bytes", 0) for d in active.decisions)
        if active.report.outcome == "cancelled":
            check(want.is_cancelled, f"{want.name} was cancelled by nobody")
            return "cancelled"
        check(out == right, f"{want.name}: ended well with {out} of {right}")
        return "ok"

    def _cancel_whole(self, active: Any) -> None:
        self.want.is_cancelled = True
        self.world.trace("cancel", self.want.name, active.stage)
        self.world.count(f"path: cancelled while {active.stage.split()[0]}")
        active.cancel()

    # ---- state

    async def _bare(self) -> str:
        want = self.want
        slot = want.slot = self.node.backend.executor.new_slot(want.num_tokens)  # type: ignore[assignment]
        assert isinstance(slot, FakeSlot)
        slot.prepare_import(want.num_tokens)
        sink = want.sink = Sink(slot, engine.layout_of(self.model))
        client = self._client()
        held = self._held(client)
        pushes = want.pushes and held < want.start
        request = RemoteRequest(
            want.name,
            want.tokens[:-1],
            want.start,
            deadline_s=want.deadline_s,
            due_s=want.due_s,
            codecs=(want.codec,),
            tenant_salt=want.tenant.encode(),
            pushes=pushes,
            held=held if pushes else 0,
        )
        source = engine.source_of(self.model, want.tokens[: want.start]) if pushes else None
        try:
            prefill = client.prefill(request, sink, source)
        except (PeerError, TransferError) as e:
            engine.poison(slot)
            return f"not asked: {type(e).__name__}"
        if want.cancel_s is not None:
            self.world.loop.call_later(want.cancel_s, self._cancel_bare, prefill)
        reached, outcome = await self._wait(prefill)
        wrong = engine.wrong_rows(self.model, slot, want.tokens[:-1], want.start, reached)
        self.world.check(not wrong, f"{want.name}: {outcome} with verified state that is not the source's: {wrong}")
        # The memory belongs to somebody else from here on.
        engine.poison(slot)
        return outcome

    def _held(self, client: PeerClient) -> int:
        """What the peer has of what is held here, as far as is known."""
        want = self.want
        prefixes = Prefixes(want.tokens[:-1], want.tenant.encode())
        return self.node.peers.directory.num_cached_tokens(client.name, prefixes, want.start)

    def _client(self) -> PeerClient:
        clients = self.node.clients()
        ready = [c for c in clients if c.state == "ready"] or clients
        return next((c for c in ready if c.name == f"p{self.want.peer}"), ready[0])

    async def _wait(self, prefill: Any) -> tuple[int, str]:
        """How far the verified state reaches, and how it ended."""
        want, world, node = self.want, self.world, self.node
        try:
            want.report = await prefill.wait()
        except (PeerError, TransferError) as e:
            want.report = prefill.report
            if want.report.verified_tokens > want.start:
                world.count("path: a verified prefix is left of a failure")
            is_by_us = want.is_cancelled or node.is_closed or node.has_reloaded
            world.check(is_by_us or not isinstance(e, PeerCancelled), f"{want.name}: {e!r}, by nobody")
            world.trace("why", want.name, str(e)[:100])
            return want.report.verified_tokens, type(e).__name__
        assert want.sink is not None
        asked = engine.layout_of(self.model).transfer_bytes(want.start, want.num_tokens)
        landed = want.sink.landed_bytes
        world.check(landed == asked, f"{want.name}: {landed} of {asked} bytes landed")
        return want.num_tokens, "ok"

    def _cancel_bare(self, prefill: Any) -> None:
        if not self.want.outcomes:
            phase = prefill._stream.phase.name
            self.want.is_cancelled = True
            self.world.trace("cancel", self.want.name, phase)
            self.world.count(f"path: cancelled in {phase}")
            prefill.cancel()
