"""decodectl's verbs, answered from the live objects of the service."""

from __future__ import annotations

import dataclasses
import math
import re
import time
from collections import Counter
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, Protocol

from common.cachemetrics import cache_handlers
from common.daemon import Handler
from common.errors import ControlError, PdError
from common.release import version
from common.request import RequestReport
from common.wiring import security_status
from decoded.active import ActiveRequest
from decoded.dispatch import Dispatcher

_MAX_THRESHOLD = 10**9
LINK_BENCH_TIMEOUT_S = 60.0

if TYPE_CHECKING:
    from decoded.service import DecodeService


class Explainable(Protocol):
    """A request in flight, or what is kept of a finished one."""

    @property
    def stage(self) -> str:
        """Where it is."""

    @property
    def decisions(self) -> list[dict[str, Any]]:
        """Every routing decision with its terms."""

    @property
    def report(self) -> RequestReport:
        """What happened to it."""

    @property
    def num_output_tokens(self) -> int:
        """Over all choices."""


def handlers(service: DecodeService) -> dict[str, Handler]:
    """Verb -> coroutine of params."""

    async def status(_: dict[str, Any]) -> Any:
        return status_facts(service)

    async def peers(_: dict[str, Any]) -> Any:
        return service.peers.facts()

    async def requests(_: dict[str, Any]) -> Any:
        now = time.monotonic()
        return [request_facts(a, now) for a in service.dispatcher.active.values()]

    async def version_facts(_: dict[str, Any]) -> Any:
        return service.dispatcher.version()

    async def drain(_: dict[str, Any]) -> Any:
        service.set_draining(True)
        return status_facts(service)

    async def resume(_: dict[str, Any]) -> Any:
        service.set_draining(False)
        return status_facts(service)

    async def threshold(params: dict[str, Any]) -> Any:
        if (value := params.get("threshold")) is not None:
            service.set_threshold(parse_threshold(value))
        return threshold_facts(service.dispatcher)

    async def explain(params: dict[str, Any]) -> Any:
        return explain_facts(service, str(params.get("request_id", "")))

    async def link_bench(params: dict[str, Any]) -> Any:
        return await link_facts(service, params)

    return {
        "status": status,
        "peers": peers,
        "link_bench": link_bench,
        "profile": service.profiler.run,
        "requests": requests,
        "version": version_facts,
        "drain": drain,
        "resume": resume,
        "threshold": threshold,
        "explain": explain,
        **cache_handlers(lambda: service.backend.cache),
    }


async def link_facts(service: DecodeService, params: dict[str, Any]) -> dict[str, Any]:
    """What `decodectl link bench` shows. Raises ControlError."""
    name, num_bytes = str(params.get("peer", "")), params.get("num_bytes")
    client = service.dispatcher.client(name)
    if client is None:
        known = ", ".join(p.name for p in service.peers.clients()) or "none"
        raise ControlError(f"there is no peer {name[:64]!r}; configured: {known}")
    if not isinstance(num_bytes, int) or isinstance(num_bytes, bool):
        raise ControlError(f"num_bytes {num_bytes!r:.40} is not a number of bytes")
    try:
        found = await client.measure(num_bytes, LINK_BENCH_TIMEOUT_S)
    except PdError as e:
        raise ControlError(f"the links to {name} could not be measured: {e}") from e
    status = client.status()
    return {
        "peer": name,
        "goodput_bps": round(found.goodput_bps),
        "num_bytes": num_bytes,
        "seconds": round(found.seconds, 4),
        "num_data_links": status["num_data_links"],
        "rtt_s": status["rtt_s"],
    }


def number(value: float) -> float | int | str:
    """JSON has no infinity."""
    return "inf" if math.isinf(value) else int(value) if value == int(value) else value


_NO_USE = {
    "adaptive": "a threshold that was set decides only while no speed is known",
    "local-only": "no threshold is looked at",
    "remote-only": "no threshold is looked at",
}


def threshold_facts(dispatcher: Dispatcher) -> dict[str, Any]:
    """The threshold now; with "auto" what it is made of."""
    router, controller = dispatcher.router, dispatcher.router.controller
    facts: dict[str, Any] = {"threshold_tokens": number(round(router.threshold_tokens, 1))}
    if dispatcher.settings.threshold_tokens is None:
        facts |= {"is_auto": True, "is_solved": controller.solution is not None, "factor": round(controller.factor, 3)}
    elif dispatcher.settings.mode != "threshold":
        facts["note"] = f"routing.mode is {dispatcher.settings.mode}: {_NO_USE[dispatcher.settings.mode]}"
    return facts


def routing_facts(dispatcher: Dispatcher) -> dict[str, Any]:
    """How requests are routed, and what both sites could serve."""
    router, found = dispatcher.router, dispatcher.router.allocation
    facts = {"mode": dispatcher.settings.mode, **threshold_facts(dispatcher)}
    facts |= {"arrival_rps": round(router.arrival_rps, 3), "max_stretch": round(router.max_stretch, 3)}
    facts |= {"peer_shares": {name: round(share, 3) for name, share in router.shares.items()}}
    if found is None:
        return facts
    return facts | {
        "can_serve_rps": round(found.now.throughput_rps, 3),
        "bottleneck": found.now.bottleneck,
        "duty": {stage: round(duty, 3) for stage, duty in found.now.duty.items()},
        "local_share": round(found.local_share, 3),
        "best_num_prefill": found.best.num_prefill,
        "best_num_decode": found.best.num_decode,
        "best_rps": round(found.best.throughput_rps, 3),
        "advice": found.advice,
    }


def parse_threshold(value: object) -> float | None:
    """A token count from 0 to 10**9, "inf", or "auto" (None). Raises ControlError."""
    text = str(value)
    if text == "auto":
        return None
    if text == "inf":
        return math.inf
    # Python refuses to read numbers of thousands of digits.
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) <= _MAX_THRESHOLD):
        raise ControlError(
            f"threshold {text[:40]!r} is not a token count from 0 to {_MAX_THRESHOLD}, nor inf, nor auto"
        )
    return float(text)


def status_facts(service: DecodeService) -> dict[str, Any]:
    """What `decodectl status` shows."""
    dispatcher, stats, info = service.dispatcher, service.backend.stats(), service.backend.info
    is_ready, why = dispatcher.readiness()
    has_chat = service.tokenizer.has_chat_template
    state = "ready"
    if dispatcher.is_draining:
        state = "draining" if dispatcher.active else "drained"
    return {
        "daemon": "decoded",
        "node": service.config.node.name,
        "version": version(),
        "state": state,
        "is_ready": is_ready,
        "why": why,
        **({"warning": service.warning} if service.warning else {}),
        "uptime_s": round(time.monotonic() - service.started_at, 3),
        "model": {**info.facts, "chat": has_chat},
        "security": security_status(service.peers.end.security, time.time()),
        "routing": routing_facts(dispatcher),
        "num_peers_ready": sum(c.state == "ready" for c in service.peers.clients()),
        "num_peers": len(service.peers),
        "num_running": len(dispatcher.admission.running),
        "num_queued": len(dispatcher.admission.queue),
        "classes": class_facts(dispatcher),
        "num_queued_tokens": dispatcher.admission.num_queued_tokens,
        "admitted_state_bytes": dispatcher.admission.state_bytes,
        "state_bytes": dict(stats.state_bytes),
        "is_warm": stats.is_warm,
        "num_batch_rows": stats.num_rows,
        "num_waiting_for_a_row": stats.num_running - stats.num_rows,
        "num_output_tokens": stats.num_output_tokens,
        "num_preemptions": stats.num_preemptions,
        "alone_prefill_tokens_per_s": round(stats.alone_tokens_per_s, 1),
        "mixed_prefill_tokens_per_s": round(stats.mixed_tokens_per_s, 1),
        "mixed_chunk_tokens": stats.mixed_chunk_tokens,
    }


def class_facts(dispatcher: Dispatcher) -> list[dict[str, Any]]:
    """A line for each priority class, higher ones first."""
    queues = sorted(dispatcher.admission.queue.classes.values(), key=lambda q: -q.facts.priority)
    running = Counter(d.service_class for d in dispatcher.admission.running.values())
    waits: dict[str, float] = {}
    now = time.monotonic()
    for active in dispatcher.active.values():
        if active.stage == "queued":
            name = active.request.service_class
            waits[name] = max(waits.get(name, 0.0), active.queue_s(now))
    return [
        {
            "class": q.facts.name,
            "priority": q.facts.priority,
            "share": q.facts.share,
            "num_running": running[q.facts.name],
            "num_queued": q.tenants.num_requests,
            "longest_wait_s": round(waits.get(q.facts.name, 0.0), 3),
        }
        for q in queues
    ]


def request_facts(active: ActiveRequest, now: float) -> dict[str, Any]:
    """One line of `decodectl requests`."""
    report = active.report
    return {
        "request_id": report.request_id,
        "stage": active.shown_stage,
        "route": report.route,
        "peer": report.peer,
        "class": active.request.service_class,
        "tenant": active.request.tenant[:8],
        "num_prompt_tokens": report.num_prompt_tokens,
        "num_output_tokens": active.num_output_tokens,
        "wait_s": round(active.queue_s(now), 3),
        "age_s": round(now - active.arrived_at, 3),
    }


def explain_facts(service: DecodeService, request_id: str) -> Any:
    """Why a request went where it went and what came of it; a list when the id is that of a list of prompts.

    The id may be that of a response, with its prefix. Raises ControlError for an unknown one.
    """
    known: dict[str, Explainable] = {**service.dispatcher.records, **service.dispatcher.active}
    for name in (request_id, re.sub(r"^(chat)?cmpl-", "", request_id)):
        if name in known:
            return _explain_one(known[name])
        if listed := _prompts_of(name, known):
            return [_explain_one(active) for active in listed]
    raise ControlError(
        f"no request {request_id!r} is in flight or remembered (finished ones are, until newer ones push them out or"
        " decoded restarts); ids are in the response's `id`, in its header X-Request-Id, in the log and in"
        " `decodectl requests`"
    )


def _prompts_of(name: str, known: dict[str, Explainable]) -> list[Explainable]:
    """The requests of a list of prompts, in order: the API numbers their ids."""
    return [known[key] for key in takewhile(known.__contains__, (f"{name}-{n}" for n in count()))]


def _explain_one(active: Explainable) -> dict[str, Any]:
    return {
        "stage": active.stage,
        "decisions": active.decisions,
        "report": dataclasses.asdict(active.report),
        "num_output_tokens": active.num_output_tokens,
    }
