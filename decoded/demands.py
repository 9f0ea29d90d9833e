"""What a request asks of this node: its class, its deadline, its state memory. Decides nothing. Used by dispatch.py."""

from __future__ import annotations

from dataclasses import replace
from math import inf

from common.errors import InvalidRequest
from common.policy.fair import FairQueue
from common.policy.views import Demand
from common.request import Request


def classify(request: Request, queue: FairQueue, default_deadline_s: float, target_s: float) -> tuple[Request, str]:
    """The request with its class, that one's priority and its deadline (None: none), and who has set the deadline.

    Due it is by a deadline of its own, else within `target_s` (slo.ttft) or the default deadline.

    Raises:
        InvalidRequest: there is no such class.
    """
    name = request.service_class
    if name and name not in queue.classes:
        raise InvalidRequest(
            f"X-Prfaas-Class is {name[:80]!r}; the classes of this server are {', '.join(queue.classes)}.",
            "X-Prfaas-Class",
            "unknown_class",
        )
    facts = queue.class_of(name).facts
    setting = "admission.deadline" if request.deadline_s is None else "X-Prfaas-Deadline"
    deadline_s = default_deadline_s if request.deadline_s is None else request.deadline_s
    due_s = min(default_deadline_s, target_s) if request.deadline_s is None else request.deadline_s
    return replace(
        request,
        service_class=facts.name,
        priority=facts.priority,
        deadline_s=None if deadline_s == inf else deadline_s,
        due_s=None if due_s == inf else due_s,
    ), setting


def demand_of(request: Request, state_bytes: int, deadline_setting: str, waited_s: float) -> Demand:
    """What a classified request asks for; it arrived `waited_s` ago."""
    return Demand(
        request.request_id,
        request.num_prompt_tokens,
        state_bytes,
        max_output_tokens=request.sampling.max_tokens * request.num_choices,
        num_rows=request.num_choices,
        service_class=request.service_class,
        tenant=request.tenant,
        deadline_s=request.deadline_s,
        deadline_setting=deadline_setting,
        waited_s=waited_s,
    )
