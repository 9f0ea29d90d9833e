"""Sends hot prefixes to prefillds that lack them while nobody needs the way there, within a budget.

Otherwise the first long prompt behind each would wait for a push, or compute again what decoded has. A replica is an
ordinary prefill of one token behind the prefix, whose state is pushed first (protocol.md, Prefill). Owned by
service.py.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable

from common.backend import Generation
from common.errors import PdError
from common.hosts import is_loopback
from common.net.pool import PeerClient
from common.policy.fallback import FallbackBudget
from common.policy.routing import ABUNDANT
from common.request import Request, SamplingParams
from common.sched.hot_prefixes import Hot
from decoded.background import Background
from decoded.dispatch import Dispatcher
from decoded.remote import start_remote
from decoded.views import LOOPBACK_BPS

log = logging.getLogger(__name__)
# The longest that one replica may take, and for how long the budget is saved up.
TIMEOUT_S, BURST_S = 60.0, 30.0
# Behind everything that somebody waits for.
PRIORITY = -1000


class Replicator(Background):
    """Runs until closed. `share`: the part of a path that replicas may take on average; 0 sends none."""

    def __init__(self, dispatcher: Dispatcher, share: Callable[[], float]) -> None:
        super().__init__()
        self._dispatcher, self._share = dispatcher, share
        self._budgets: dict[str, FallbackBudget] = {}
        self._numbers = itertools.count()

    async def turn(self) -> None:
        """One replica to each peer that may be sent something."""
        for client in self._dispatcher.peers():
            if self._may_send(client):
                await self._send_one(client)

    def _may_send(self, client: PeerClient) -> bool:
        """Whether the peer, the way there and decoded have nothing better to do, and the budget has something left."""
        dispatcher, load = self._dispatcher, client.load
        if not self._share() or dispatcher.is_draining or dispatcher.settings.push == "never":
            return False
        if dispatcher.settings.mode == "local-only" or client.state != "ready":
            return False
        capacity, goodput = load.get("path_capacity_bps", 0.0), load.get("path_goodput_bps", 0.0)
        path_bps = LOOPBACK_BPS if is_loopback(client.host) else capacity
        is_busy = client.num_streams or load.get("num_queued_tokens", 0) or goodput >= ABUNDANT * path_bps > 0
        if is_busy or not path_bps or len(dispatcher.admission.queue):
            return False
        rate = self._share() * path_bps / 8
        budget = self._budgets.setdefault(client.name, FallbackBudget(rate, BURST_S * rate))
        budget.set_rate(rate, BURST_S * rate)
        return budget.can_take(time.monotonic())

    async def _send_one(self, client: PeerClient) -> None:
        dispatcher, ratio = self._dispatcher, self._dispatcher.router.learned.codec_ratio(client.name)
        found = next(dispatcher.hot.candidates(lambda p, limit: dispatcher.peer_tokens(client.name, p, limit)), None)
        if found is None:
            return
        hot, held = found
        num_bytes = dispatcher.info.layout.transfer_bytes(held, hot.num_tokens)
        self._budgets[client.name].take(int(ratio * num_bytes), time.monotonic())
        result = "error"
        try:
            async with asyncio.timeout(TIMEOUT_S):
                result = await self._replicate(client, hot, held)
        except (PdError, TimeoutError) as e:
            log.info("a hot prefix was not replicated: %s", e, extra={"peer": client.name, "error": type(e).__name__})
        finally:
            dispatcher.metrics.replications.labels(client.name, result).inc()
        if result == "ok":
            dispatcher.metrics.replicated_tokens.labels(client.name).inc(hot.num_tokens - held)
            facts = {"num_tokens": hot.num_tokens, "num_held": held, "num_uses": hot.num_uses}
            log.info("hot prefix replicated", extra={"peer": client.name, **facts})
        else:
            dispatcher.hot.forget(hot)

    async def _replicate(self, client: PeerClient, hot: Hot, held: int) -> str:
        """ "ok", or "gone" when decoded itself no longer has it."""
        dispatcher = self._dispatcher
        name = f"replica-{next(self._numbers)}"
        # The last token of a prompt is not sent: the one behind the prefix stands for it.
        request = Request(
            name, (*hot.tokens, hot.tokens[-1]), SamplingParams(max_tokens=1), priority=PRIORITY, tenant=hot.tenant
        )
        generation: Generation = await dispatcher.backend.open(request)
        try:
            if generation.num_cached_tokens != hot.num_tokens:
                return "gone"
            attempt = start_remote(
                client,
                generation,
                request,
                start=hot.num_tokens,
                held=held,
                now=time.monotonic(),
                progress_timeout_s=dispatcher.settings.progress_timeout_s,
                has_alternative=lambda: True,
            )
            report = await attempt.wait()
            dispatcher.metrics.pushed_bytes.labels(client.name).inc(report.pushed_bytes)
            return "ok"
        finally:
            generation.cancel()
