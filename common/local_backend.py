"""Backend over an engine in this process: turns requests and prefill tasks into sequences, and outputs into iterators.

Lives on the event loop. Knows the worker and the scheduler's sequences; no torch, no sockets, no HTTP. Used by both
daemons, with the torch engine or the fake one behind it.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

from common.backend import BackendStats, DecodeStep, Generation, PrefillJob, PrefillTask
from common.errors import EngineDead, RequestFailed
from common.layout import BLOCK_TOKENS, ModelInfo
from common.local_generation import LocalGeneration
from common.local_outputs import Outputs
from common.local_prefill import LocalPrefill
from common.request import Request
from common.sched.executor import Executor
from common.sched.prefix_index import STATE
from common.sched.sequence import Sequence
from common.state_cache import Offer, StateCache
from common.state_parts import export
from common.worker import EngineWorker, Factory, WorkerOptions


class LocalBackend:
    """An engine on its own thread, as the daemons see it (common/backend.py has the contract)."""

    info: ModelInfo

    def __init__(
        self,
        factory: Factory,
        options: WorkerOptions,
        make_cache: Callable[[ModelInfo], StateCache | None] = lambda _info: None,
    ) -> None:
        self.worker = EngineWorker(factory, options)
        self.executor: Executor
        self.cache: StateCache | None = None
        self.owners: dict[Outputs[Any], None] = {}  # told in the order in which they came
        self.ids = itertools.count(1)
        self._make_cache = make_cache
        self._death: EngineDead | None = None

    async def start(self) -> None:
        """Build the engine on its thread. Raises StartupError."""
        await self.worker.start(self._died)
        self.executor = self.worker.executor
        facts = self.executor.facts
        numerics = dict(facts.numerics, chunk_tokens=str(self.worker.options.chunk_tokens))
        self.info = dataclasses.replace(facts, numerics=numerics)
        self.cache = self._make_cache(self.info)
        if self.cache is not None:
            await self.cache.start()
            self.worker.on_state = self._state_is_there

    async def close(self) -> None:
        """Stop the engine thread; whatever runs ends with EngineDead."""
        await self.worker.close()
        if self.cache is not None:
            await self.cache.close()

    async def open(self, request: Request) -> Generation:
        """Find what is cached of the prompt, and reserve state memory for the request and its choices.

        Raises:
            RequestFailed: the prompt can never be served (too long, token ids out of range).
            EngineDead: the engine thread is gone.
        """
        self._check_alive()
        self._check_prompt(request.prompt_tokens, self.info.max_context - 1)
        found = None
        if self.cache is not None and request.uses_cache and request.prompt_logprobs is None:
            salt, last = request.tenant.encode(), request.num_prompt_tokens - 1
            found = await self.cache.look_up(request.prompt_tokens, salt, last)
        return LocalGeneration(self, request, found)

    def prefill(self, task: PrefillTask) -> PrefillJob:
        """Queue the computation of a prompt's state. Raises as `open`."""
        self._check_alive()
        self._check_prompt(task.tokens, self.info.max_context)
        if not 0 <= task.start < len(task.tokens):
            raise RequestFailed(f"start = {task.start} is outside the task's {len(task.tokens)} tokens")
        return LocalPrefill(self, task)

    def state_bytes(self, num_tokens: int, num_choices: int = 1) -> int:
        """State memory that a request of so many tokens reserves."""
        num = min(max(num_tokens, 1), self.info.max_context)
        return num_choices * sum(self.executor.slot_bytes(num).values())

    def stats(self) -> BackendStats:
        """A snapshot; cheap, and empty before the engine has started."""
        worker = self.worker
        if not hasattr(worker, "scheduler"):
            return BackendStats(is_alive=False)
        scheduler = worker.scheduler
        return BackendStats(
            num_running=scheduler.num_running,
            num_rows=scheduler.num_rows,
            num_prefilling=scheduler.num_prefilling,
            num_waiting=scheduler.num_waiting,
            state_bytes=scheduler.accounts.totals(),
            num_steps=worker.num_steps,
            num_prompt_tokens=worker.num_prompt_tokens,
            num_output_tokens=worker.num_output_tokens,
            num_preemptions=scheduler.num_preemptions,
            alone_tokens=scheduler.budget.alone_tokens,
            alone_s=scheduler.budget.alone_s,
            mixed_tokens=scheduler.budget.mixed_tokens,
            mixed_s=scheduler.budget.mixed_s,
            mixed_chunk_tokens=scheduler.budget.last_tokens,
            last_progress_at=worker.last_progress_at,
            is_warm=worker.is_warm,
            is_alive=worker.is_alive,
        )

    def take_decode_steps(self) -> list[DecodeStep]:
        """Those since the last call, the latest MAX_DECODE_STEPS at least."""
        steps = self.worker.decode_steps
        return [steps.popleft() for _ in range(len(steps))]

    def set_max_stretch(self, max_stretch: float) -> None:
        """Read by the engine thread at its next step."""
        if hasattr(self.worker, "scheduler"):
            self.worker.scheduler.budget.max_stretch = max_stretch

    def _check_alive(self) -> None:
        if self._death is not None:
            raise EngineDead(str(self._death))

    def _check_prompt(self, tokens: tuple[int, ...], limit: int) -> None:
        if not 1 <= len(tokens) <= limit:
            raise RequestFailed(
                f"the prompt has {len(tokens)} tokens; between 1 and {limit} fit the model's context "
                f"of {self.info.max_context}"
            )
        if min(tokens) < 0 or max(tokens) >= self.info.vocab_size:
            raise RequestFailed(
                f"the prompt's token ids span {min(tokens)} to {max(tokens)}; the model's are 0 to "
                f"{self.info.vocab_size - 1}"
            )

    def _died(self, error: EngineDead) -> None:
        self._death = error
        for owner in list(self.owners):
            owner.push(error)

    def _state_is_there(self, seq: Sequence, stop: int, is_point: bool) -> None:
        """On the engine thread: take views of a sequence's state, for the cache to copy."""
        start = seq.num_offered // BLOCK_TOKENS * BLOCK_TOKENS
        last = stop if is_point else stop // BLOCK_TOKENS * BLOCK_TOKENS
        if is_point:  # its rows may have been offered, and its recurrent state not
            start = min(start, (last - 1) // BLOCK_TOKENS * BLOCK_TOKENS)
        seq.num_offered, seq.point_at = stop, stop if is_point else seq.point_at
        if self.cache is None or last <= start:
            return
        groups = [g for g in self.cache.groups.values() if is_point or g.group != STATE]
        try:
            exports = {g.group: found for g in groups if (found := export(seq.slot, g, start, last)) is not None}
        except RequestFailed:
            return  # it was freed meanwhile
        tokens = tuple(seq.tokens[seq.num_prompt_tokens : stop])
        self.worker.call(self._offer, (seq.owner, tokens, Offer(start, last, exports, is_point)))

    def _offer(self, offered: tuple[object, tuple[int, ...], Offer]) -> None:
        owner, tokens, offer = offered
        prefixes = owner.prefixes if isinstance(owner, Outputs) else None
        if self.cache is not None and prefixes is not None:
            self.cache.offer(prefixes.extended(tokens) if tokens else prefixes, offer)
