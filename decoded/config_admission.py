"""decoded's configuration of who is let in: caps, deadlines, priority classes, and the targets that goodput counts.

Called by config.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated

from common.config import MAX_STATE_BYTES, NAME
from common.config_types import Array, Bound, Duration, Problem, Section, Size, key, required
from common.policy.views import ServiceClass
from common.units import MIB

MAX_CLASSES = 16


class ClassConfig(Section):
    """A priority class."""

    name: str = required("What X-Prfaas-Class, key file and metrics call it.", pattern=NAME)
    priority: int = key(0, "Higher ones go first and take over rows of the batch.", ge=-1000, le=1000)
    share: float = required("Part of all service it is sure of, above 0 to 1.", gt=0, le=1)


class AdmissionConfig(Section):
    """Past these a request is refused with 429 or 503 and a time to come back. Changes by reload."""

    max_running_requests: int = key(
        32,
        "Requests admitted at the same time. With classes: those of lower priority are not counted against one.",
        ge=1,
        le=65536,
    )
    max_queued_requests: int = key(
        128,
        "Requests waiting to be admitted. Each class has its share of that room to itself; with API keys, one key gets"
        " 8/9 of what its class has at most.",
        ge=0,
        le=1 << 20,
    )
    max_queued_tokens: int = key(400_000, "Prompt tokens waiting to be admitted.", ge=0)
    large_prompt_tokens: int = key(
        32_768, "Longer prompts are refused while the queue is fuller than large_queue_share; shorter ones wait.", ge=1
    )
    large_queue_share: float = key(0.5, "Part of the queue, by requests or by tokens, 0 to 1.", ge=0, le=1)
    max_state_bytes: Size = key(
        MAX_STATE_BYTES, "State memory of all admitted requests; each counts prompt plus its output limit.", ge=1 * MIB
    )
    deadline: Bound = key(
        math.inf,
        'Until the first token, of requests without the header X-Prfaas-Deadline; "inf" is none. One that is not'
        " expected to keep it is refused at once, one that has not kept it is ended, with 503.",
        ge=0.001,
    )
    retry_after: Duration = key(1.0, "What Retry-After tells a refused client, rounded up to seconds.", ge=0, le=3600)
    classes: Annotated[tuple[ClassConfig, ...], Array] = key(
        (),
        "Priority classes, one [[admission.classes]] table each with `name`, `priority` and `share`. A request says its"
        " class with the header X-Prfaas-Class; an API key with a class after it in http.api_key_file is always of that"
        " one; all others are of the first. While a class has requests it gets its share of all service (prompt and"
        " output tokens); what is left goes by priority. Shares add up to 1 at most. None: all are equal.",
    )

    @property
    def service_classes(self) -> tuple[ServiceClass, ...]:
        """As the policy has them."""
        return tuple(ServiceClass(c.name, c.priority, c.share) for c in self.classes)

    def check(self) -> Iterator[Problem]:
        """Contradictions between keys."""
        names = [c.name for c in self.classes]
        for n, name in enumerate(names):
            if name in names[:n]:
                yield Problem((f"admission.classes[{n}].name", "admission.classes"), f"{name!r} is used twice")
        if len(names) > MAX_CLASSES:
            yield Problem(("admission.classes",), f"{len(names)} classes; at most {MAX_CLASSES} are allowed")
        if (total := sum(c.share for c in self.classes)) > 1 + 1e-9:
            yield Problem(("admission.classes",), f"the shares add up to {total:g}; at most 1 can be guaranteed")


class SloConfig(Section):
    """Targets of a request: metrics count how many met them (goodput), and `ttft` says what is done first. No request
    is refused or ended for them. Changes by reload, for requests that come then.
    """

    ttft: Bound = key(
        math.inf,
        'From arrival to the first token; "inf" is any time. Routing looks for a way that keeps it, and prompts that'
        " can still meet it are computed and sent first. The deadline that a request brings counts instead.",
        gt=0,
    )
    tpot: Bound = key(
        math.inf,
        "Between two tokens, in the mean of a choice: (last - first) / (tokens - 1); the slowest choice counts.",
        gt=0,
    )
