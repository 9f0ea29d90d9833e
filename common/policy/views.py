"""Frozen facts that policies look at. The daemons build them from live objects, the simulator from simulated ones."""

from __future__ import annotations

from dataclasses import dataclass

from common.request import Route


@dataclass(frozen=True, slots=True)
class PeerView:
    """One prefill peer as the router sees it."""

    name: str
    is_usable: bool
    why_not: str = ""
    num_streams: int = 0
    num_queued_tokens: int = 0


@dataclass(frozen=True, slots=True)
class RequestView:
    """What routing needs to know of a request. `num_uncached_tokens` counts prompt tokens whose state must be computed
    before the last prompt token, that is of [0, n-1).
    """

    request_id: str
    num_prompt_tokens: int
    num_uncached_tokens: int
    wants_prompt_logprobs: bool = False
    forced_route: Route | None = None
    failed_peers: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ServiceClass:
    """A priority class. `share` is the part of all service (prompt and output tokens) that it is sure of while it has
    requests; what is left goes by `priority`, higher first.
    """

    name: str = "default"
    priority: int = 0
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request asks of a node: prompt tokens to compute and bytes of state memory to hold.

    Attributes:
        max_output_tokens: of all its choices together.
        num_rows: sequences it brings into the batch.
        service_class: "" or an unknown name is the first class.
        tenant: whose request it is; "" when nobody knows.
        deadline_s: seconds from arrival within which its first token must be out; `deadline_setting` said so.
        waited_s: seconds since it arrived.
    """

    request_id: str
    num_prompt_tokens: int
    state_bytes: int
    max_output_tokens: int = 0
    num_rows: int = 1
    service_class: str = ""
    tenant: str = ""
    deadline_s: float | None = None
    deadline_setting: str = ""
    waited_s: float = 0.0
