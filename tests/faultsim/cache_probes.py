"""Watches prefix caches: nothing is found that was not there, and nobody goes on from other state than was cached.

A process knows what it has computed or received since it began, tenant by tenant: tokens, while the caches have names.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from typing import Any

from common.local_prefill import LocalPrefill
from common.sched.prefixes import Prefixes
from common.state_cache import LookUp, Offer, StateCache
from tests.faultsim import engine
from tests.faultsim.loop import PROCESS
from tests.faultsim.world import World


def here() -> str:
    """The process that runs."""
    process = PROCESS.get()
    return process.name if process is not None else "?"


class CacheWatch:
    """What every process may find."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._offered: dict[tuple[str, bytes], list[bytes]] = {}
        """Sequences whose state was offered to the cache of a process, by the name of the tenant's empty prefix."""
        self._salts: dict[bytes, bytes] = {}

    def offered(self, prompt: Prefixes, offer: Offer) -> None:
        """State goes to the cache of this process."""
        tokens = bytes(prompt._bytes[: 4 * offer.stop])
        self._offered.setdefault((here(), prompt.block(0)), []).append(tokens)

    def looked_up(self, tokens: Any, salt: bytes, found: LookUp) -> None:
        """A prompt begins with what this process had of this tenant, if with anything."""
        world, root = self.world, found.prefixes.block(0)
        world.check(self._salts.setdefault(root, salt) == salt, f"tenants {salt!r} and {self._salts[root]!r} are one")
        if found.hold is None:
            return
        wanted = array("I", tokens[: found.hold.num_tokens]).tobytes()
        is_known = any(each.startswith(wanted) for each in self._offered.get((here(), root), ()))
        world.check(is_known, f"{here()}: {found.hold.num_tokens} tokens are cached that were never there")
        world.count(f"path: found in the cache of a {'prefilld' if here()[0] == 'p' else 'decoded'}")

    def begins(self, job: Any, num_cached: int, *, wants_push: bool) -> None:
        """prefilld knows where it begins: what it goes on from must be there."""
        seq, task = job._seq, job._task
        wrong = engine.wrong_rows(self.world.model, seq.slot, task.tokens, 0, num_cached) if not wants_push else ""
        self.world.check(not wrong, f"prefilld goes on from wrong cached state: {wrong}")
        if task.is_pushed and not wants_push:
            self.world.count(f"path: no push was wanted, {'less' if num_cached < task.held else 'more'} was cached")


def _offers(watch: CacheWatch, real: Callable[..., None]) -> Callable[..., None]:
    def offer(self: StateCache, prompt: Prefixes, offer: Offer) -> None:
        watch.offered(prompt, offer)
        real(self, prompt, offer)

    return offer


def _looks_up(watch: CacheWatch, real: Callable[..., Any]) -> Callable[..., Any]:
    async def look_up(self: StateCache, tokens: Any, salt: bytes, limit: int) -> LookUp:
        found: LookUp = await real(self, tokens, salt, limit)
        watch.looked_up(tokens, salt, found)
        return found

    return look_up


def _begins(watch: CacheWatch, real: Callable[..., None]) -> Callable[..., None]:
    def begin(self: LocalPrefill, num_cached: int, *, wants_push: bool) -> None:
        watch.begins(self, num_cached, wants_push=wants_push)
        real(self, num_cached, wants_push=wants_push)

    return begin


def wrappers(world: World) -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """(class, method, what to do around it)."""
    watch = CacheWatch(world)
    yield StateCache, "offer", _offers(watch, StateCache.offer)
    yield StateCache, "look_up", _looks_up(watch, StateCache.look_up)
    yield LocalPrefill, "_begin", _begins(watch, LocalPrefill._begin)
