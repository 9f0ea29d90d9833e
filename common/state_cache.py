"""A daemon's prefix cache: state of prompts and generations in memory, and behind it on disk.

    offer   what an engine computed or a peer sent     -> copied in a worker thread -> found by later prompts
    hold    the longest prefix a prompt can go on from -> pinned, read from disk if it is there -> `fill` writes a slot

Books are in common/sched/prefix_cache.py, bytes in state_parts.py and disk_parts.py. Lives on the event loop; `fill`
runs in worker threads. Knows slots, no engine, no requests. Used by common/local_backend.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar

from common.backend import ComputedSegment, StateSource
from common.disk_parts import DiskPart, PartFiles
from common.errors import RequestFailed, StateDamaged
from common.layout import BLOCK_TOKENS, StateLayout
from common.logs import Damper
from common.sched.executor import Slot
from common.sched.prefix_cache import PrefixCache
from common.sched.prefix_index import ROWS, STATE, WINDOW, Entry, Found, Needs
from common.sched.prefixes import Prefixes
from common.sched.tier import Part, Tier
from common.state_parts import Bytes, Export, cut, group_layouts, pieces, put

log = logging.getLogger(__name__)
T = TypeVar("T")
KINDS = {ROWS: "rows", WINDOW: "window", STATE: "recurrent"}
"""What people call the groups: full and latent rows, rows of windows, recurrent state."""
# Longer prompts are hashed in a thread: a microsecond a block.
_LONG_TOKENS = 8192
# Entries booked before others get a turn of the event loop, and bytes that may wait to be written to disk.
_BATCH, _MAX_WRITING = 64, 256 << 20
# Parts copied in one go, and what a stopping daemon spends on writing memory to disk.
_NUM_COPIED, _MAX_FLUSH_S = 16, 10.0
# Failures to write are logged once in so long.
_TELL_S = 10.0


@dataclass(slots=True)
class CacheCounts:
    """Since the start. Tokens are prompt tokens up to the last one."""

    num_lookups: int = 0
    num_hits: int = 0
    looked_up_tokens: int = 0
    hit_tokens: int = 0
    stored_bytes: dict[str, int] = field(default_factory=dict)
    evicted_bytes: dict[str, int] = field(default_factory=dict)
    num_not_stored: int = 0
    disk_written_bytes: int = 0
    disk_read_bytes: int = 0
    num_disk_errors: int = 0
    num_damaged: int = 0


@dataclass(frozen=True, slots=True)
class Offer:
    """State that was computed or verified: for each group, what there is of it up to `stop`.

    `is_point`: the sequence may be continued at exactly `stop`, so that a tail and recurrent state are kept there.
    """

    start: int
    stop: int
    exports: Mapping[int, Export]
    is_point: bool


@dataclass(slots=True)
class Hold:
    """Parts of [0, num_tokens) of a prompt, in memory until `release`."""

    num_tokens: int
    parts: list[tuple[Part, Bytes]]
    pinned: list[tuple[Tier, Part]]
    cache: PrefixCache

    def release(self) -> None:
        """They are not needed any more. Idempotent."""
        pinned, self.pinned, self.parts = self.pinned, [], []
        self.cache.release(pinned)


@dataclass(frozen=True, slots=True)
class LookUp:
    """What was found of a prompt. At `split_at` (0: nowhere) it leaves a path that others took without leaving state
    there to go on from: a point worth keeping.
    """

    prefixes: Prefixes
    hold: Hold | None
    split_at: int


class StateCache:
    """The prefix cache of one daemon. `limits` and `disk_limits`: bytes by group (ROWS, WINDOW, STATE)."""

    def __init__(
        self,
        layout: StateLayout,
        limits: Mapping[int, int],
        *,
        disk_limits: Mapping[int, int] | None = None,
        files: PartFiles | None = None,
    ) -> None:
        self.groups, self._layout = group_layouts(layout), layout
        self.books = PrefixCache(Needs.of(layout), limits, disk_limits if files is not None else None)
        self.counts = CacheCounts()
        self.on_change: Callable[[], None] = _nothing
        self._files = files
        self._threads = ThreadPoolExecutor(1, thread_name_prefix="state-cache")
        self._tasks: set[asyncio.Task[None]] = set()
        self._writing_bytes = 0
        self._told = Damper(_TELL_S)

    async def start(self) -> None:
        """Take over what an earlier process left on disk."""
        if self._files is None:
            return
        for found in await self._in_thread(lambda files: list(files.scan()), self._files):
            group = self.groups.get(found.group)
            first = found.first or (group.first_row(found.entry) if group is not None else 0)
            is_ours = group is not None and found.num_bytes == group.num_bytes(found.entry, first)
            part = (
                self._reserve(self.books.disk, found.entry, found.group, found.num_bytes, found.first)
                if is_ours
                else None
            )
            if part is not None:
                self.books.commit(self.books.disk, part, found)
                continue
            if not is_ours:
                self.counts.num_damaged += 1
                log.warning("removing a part of the cache that is cut off or too long", extra={"path": str(found.path)})
            self._files.remove(found)
        self.counts.num_damaged += self._files.num_refused

    async def close(self) -> None:
        """Write what fits to disk, and stop."""
        await self.settle()
        if self._files is not None:
            # Beginnings first: without them the rest is worth nothing.
            for part in sorted(self.books.memory, key=lambda p: p.entry.stop):
                self._demote(part)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_MAX_FLUSH_S):
                    await self.settle()
        self._threads.shutdown(wait=True, cancel_futures=True)

    async def settle(self) -> None:
        """Until nothing is being copied or written."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def prefixes(self, tokens: Sequence[int], salt: bytes) -> Prefixes:
        """The names of a prompt's prefixes."""
        if len(tokens) < _LONG_TOKENS:
            return Prefixes(tokens, salt)
        return await asyncio.to_thread(Prefixes, tokens, salt)

    def find(self, prompt: Prefixes, limit: int) -> Found:
        """How much of [0, limit) is held."""
        return self.books.find(prompt, limit)

    async def look_up(self, tokens: Sequence[int], salt: bytes, limit: int) -> LookUp:
        """Pin the longest prefix up to `limit` that a prompt can go on from, and have it in memory."""
        prompt = await self.prefixes(tokens, salt)
        first = found = self.find(prompt, limit)
        held: Hold | None = None
        while found.num_tokens and held is None:
            held = await self._hold(prompt, found.num_tokens)
            if held is None:  # damaged on disk, and given up
                found = self.find(prompt, limit)
        counts = self.counts
        counts.num_lookups += 1
        counts.looked_up_tokens += limit
        counts.num_hits += held is not None
        counts.hit_tokens += held.num_tokens if held is not None else 0
        is_branch = STATE in self.groups and first.num_row_tokens > found.num_tokens
        return LookUp(prompt, held, first.num_row_tokens if is_branch else 0)

    def fill(self, hold: Hold, slot: Slot, target: int) -> None:
        """Write to a slot what a continuation at `target` reads of the prefix. For any thread; the slot is held.

        Raises:
            RequestFailed: the slot is gone.
        """
        needs = self.books.needs
        for part, data in hold.parts:
            if part.group != STATE or target == hold.num_tokens:
                wanted_from = needs.window_from(target) if part.group == WINDOW else 0
                put(slot, self.groups[part.group], (self._first(part), part.entry.stop), data, wanted_from)

    def source(self, hold: Hold) -> StateSource:
        """What is held, to be sent to somebody who has less."""
        return _HeldState(self, hold)

    def parts_for(self, hold: Hold, wanted: tuple[int, int]) -> Iterator[ComputedSegment]:
        """What whoever holds [0, wanted[0]) needs to go on at wanted[1], the end of the hold."""
        for part, data in reversed(hold.parts):
            group, span = self.groups[part.group], (self._first(part), part.entry.stop)
            for start, stop, layers, views in pieces(self._layout, group, span, data, wanted):
                yield ComputedSegment(start, stop, layers, views, 0.0)

    def offer(self, prompt: Prefixes, offer: Offer) -> None:
        """Keep what is not held yet of a sequence's state. Its views are read until a worker thread has copied them."""
        self._run(self._store(prompt, offer))

    def clear(self) -> int:
        """Forget all of it, on disk too; answers how many parts. Who holds some keeps it."""
        for part in self.books.disk:
            self._remove_file(part)
        num = self.books.clear()
        self.on_change()
        return num

    # ---- in

    async def _store(self, prompt: Prefixes, offer: Offer) -> None:
        memory, todo = self.books.memory, []
        for number, entry in enumerate(self._entries(prompt, offer)):
            if number % _BATCH == _BATCH - 1:
                await asyncio.sleep(0)
            for group, source in offer.exports.items():
                layout = self.groups[group]
                start = layout.first_in(source, entry)
                first = 0 if start == layout.first_row(entry) else start
                if start is None or first is None or not self.books.wants(entry, group, first):
                    continue
                part = self._reserve(memory, entry, group, layout.num_bytes(entry, start), first)
                if part is None:
                    self.counts.num_not_stored += 1
                    if group == ROWS:
                        break
                    continue
                todo.append((part, source))
        for first in range(0, len(todo), _NUM_COPIED):
            some = todo[first : first + _NUM_COPIED]
            for (part, _), payload in zip(some, await self._in_thread(self._cut, some), strict=True):
                if payload is None:
                    log.warning("no memory for a part of the prefix cache", extra={"num_bytes": part.num_bytes})
                    self.books.abandon(memory, part)
                else:
                    self.books.commit(memory, part, payload)
                    _add(self.counts.stored_bytes, part)
        self.on_change()

    def _cut(self, parts: list[tuple[Part, Export]]) -> list[Bytes | None]:
        found: list[Bytes | None] = []
        for part, source in parts:
            try:
                found.append(cut(source, self.groups[part.group], part.entry, self._first(part)))
            except MemoryError:
                found.append(None)
        return found

    def _entries(self, prompt: Prefixes, offer: Offer) -> list[Entry]:
        stop = offer.stop if offer.is_point else offer.stop // BLOCK_TOKENS * BLOCK_TOKENS
        return list(self.books.entries(prompt, stop, offer.start))

    def _first(self, part: Part) -> int:
        return part.first or self.groups[part.group].first_row(part.entry)

    def _reserve(self, tier: Tier, entry: Entry, group: int, num_bytes: int, first: int = 0) -> Part | None:
        part, gone = self.books.reserve(tier, entry, group, num_bytes, first)
        for each in gone:
            _add(self.counts.evicted_bytes, each)
            if tier is self.books.disk:
                self._remove_file(each)
            else:
                self._demote(each)
        return part

    # ---- out

    async def _hold(self, prompt: Prefixes, num_tokens: int) -> Hold | None:
        needs = self.books.needs
        first = {ROWS: 0, WINDOW: needs.window_from(num_tokens), STATE: 0}
        pinned = self.books.use(prompt, num_tokens, {group: first[group] for group in self.groups})
        if pinned is None:
            return None
        hold = Hold(num_tokens, [], pinned, self.books)
        is_whole = False
        try:
            for tier, part in pinned:
                payload = part.payload
                if isinstance(payload, DiskPart):
                    payload = await self._read(tier, part, payload)
                if payload is None:
                    return None
                hold.parts.append((part, payload))
            is_whole = True
        finally:
            if not is_whole:
                hold.release()
        return hold

    async def _read(self, tier: Tier, part: Part, found: DiskPart) -> Bytes | None:
        """From disk, and back into memory for the next one."""
        if self._files is None:
            return None
        try:
            payload = await self._in_thread(self._files.read, found)
        except StateDamaged as e:
            log.warning("cached state is damaged and will be computed again: %s", e)
            self.counts.num_damaged += 1
            self.books.abandon(tier, part)
            self.on_change()
            return None
        self.counts.disk_read_bytes += part.num_bytes
        again = self._reserve(self.books.memory, part.entry, part.group, part.num_bytes, part.first)
        if again is not None:
            self.books.commit(self.books.memory, again, payload)
        return payload

    # ---- disk

    def _demote(self, part: Part) -> None:
        """Memory gave it up, or the process ends: to disk, unless too much waits to be written already."""
        payload = part.payload
        there = self.books.disk.get(part.entry.name, part.group)
        if self._files is None or payload is None or (there is not None and there.first <= part.first):
            return
        if self._writing_bytes > _MAX_WRITING and not part.is_held:
            self.counts.num_not_stored += 1
            return
        to = self._reserve(self.books.disk, part.entry, part.group, part.num_bytes, part.first)
        if to is not None:
            self.books.commit(self.books.disk, to, payload)
            self._run(self._write(self._files, to, payload))

    async def _write(self, files: PartFiles, to: Part, payload: Bytes) -> None:
        self._writing_bytes += to.num_bytes
        try:
            found = await self._in_thread(files.write, to.entry, to.group, to.first, payload)
        except OSError as e:
            self._note_disk_error(e)
            self.books.abandon(self.books.disk, to)
            self.on_change()
            return
        finally:
            self._writing_bytes -= to.num_bytes
        if to.is_held:
            to.payload = found
            self.counts.disk_written_bytes += to.num_bytes
        else:
            files.remove(found)

    def _note_disk_error(self, error: OSError) -> None:
        """A full disk fails every part."""
        self.counts.num_disk_errors += 1
        if (num_held := self._told.admit("disk")) is not None:
            log.warning("state could not be written and is given up: %s", error, extra={"num_before": num_held})

    def _remove_file(self, part: Part) -> None:
        if self._files is not None and isinstance(part.payload, DiskPart):
            self._threads.submit(self._files.remove, part.payload)

    # ---- threads and tasks

    async def _in_thread(self, function: Callable[..., T], *args: object) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def _run(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            asyncio.get_running_loop().call_exception_handler(
                {"message": "the prefix cache failed", "exception": error}
            )


class _HeldState:
    """A hold as the source of a push (the StateSource protocol); parts go out while they are pinned."""

    def __init__(self, cache: StateCache, hold: Hold) -> None:
        self._cache, self._hold = cache, hold

    def segments(self, num_tokens: int, held: int = 0) -> Iterator[ComputedSegment]:
        """All that a continuation at `num_tokens` needs beyond [0, held)."""
        if num_tokens != self._hold.num_tokens:
            raise RequestFailed(f"{num_tokens} tokens are asked for, {self._hold.num_tokens} were found in the cache")
        return self._cache.parts_for(self._hold, (held, num_tokens))


def _add(totals: dict[str, int], part: Part) -> None:
    kind = KINDS[part.group]
    totals[kind] = totals.get(kind, 0) + part.num_bytes


def _nothing() -> None:
    """Nobody wants to know."""
