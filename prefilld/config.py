"""prefilld's configuration: the shared sections and its own."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, ClassVar

from pydantic import AfterValidator

from common.config import MAX_CONNECTIONS_WHY, MAX_STATE_BYTES, SharedConfig, check_bind
from common.config_security import SecurityConfig
from common.config_types import Array, Problem, Rate, Section, Size, key
from common.hosts import is_certificate_name
from common.units import MIB


class ListenConfig(Section):
    """Where decodeds connect to."""

    host: str = key(
        "127.0.0.1",
        'Address to bind; "0.0.0.0" and "::" are all addresses. Beyond loopback security.key_file is needed, or'
        ' security.mode = "tls".',
        min_length=1,
    )
    port: int = key(7400, "TCP port; 0 takes a free one.", ge=0, le=65535)


class HttpConfig(Section):
    """Metrics, health and read-only status over HTTP: /metrics, /livez, /readyz, /version. No key is asked for."""

    host: str = key("127.0.0.1", "Address to bind.", min_length=1)
    port: int = key(7480, "TCP port; 0 takes a free one.", ge=0, le=65535)
    max_connections: int = key(128, MAX_CONNECTIONS_WHY, ge=1, le=1 << 20)


class LimitsConfig(Section):
    """Past these a request is refused with a time to come back. Changes by reload."""

    max_running_requests: int = key(
        16, "Requests whose chunks take turns. More share the engine finer and hold more state.", ge=1, le=4096
    )
    max_queued_requests: int = key(
        64,
        "Requests waiting for a turn. decodeds (by node.name) take turns, and one alone gets 8/9 of that room at most.",
        ge=0,
        le=1 << 20,
    )
    max_queued_tokens: int = key(
        200_000, "Uncached prompt tokens waiting: divided by the prefill speed it is the longest wait.", ge=0
    )
    max_prompt_tokens: int = key(0, "Longest prompt taken; 0 is the model's context.", ge=0)
    max_state_bytes: Size = key(
        MAX_STATE_BYTES, "State memory of all requests together, computed and not yet acknowledged.", ge=1 * MIB
    )


def _name(text: str) -> str:
    if not is_certificate_name(text):
        raise ValueError("must be a host name or an IP address")
    return text


class PrefillSecurityConfig(SecurityConfig):
    """How decodeds prove who they are, and whether others can read what is sent: docs/security.md. But for the mode,
    files and names are read again by reload, for new connections."""

    allowed_names: Annotated[tuple[Annotated[str, AfterValidator(_name)], ...], Array] = key(
        (),
        'Names of which a decoded\'s certificate must have one, for mode "tls"; [] takes every certificate that a CA of'
        " ca_file signed.",
    )

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        if self.allowed_names and self.mode != "tls":
            message = f'is not used with security.mode = "{self.mode}": remove it'
            yield Problem(("security.allowed_names", "security.mode"), message)


class EgressConfig(Section):
    """How much of the network the state of prompts may take. Changes by reload.

    A path that shows a queue is held just below what it carries anyway; these are bounds below that. Neither does
    anything for decodeds on loopback: there is no network.
    """

    max_bps: Rate = key(math.inf, 'Bits per second to all decodeds together, as "200Mbit/s"; "inf" is no limit.', gt=0)
    share: float = key(
        1.0,
        "Part of what each decoded's path carries, 0.01 at least; below 1 leaves the rest to others. It holds once that"
        " is known, which takes a transfer that the path held up; until then `prefillctl peers` says so.",
        ge=0.01,
        le=1.0,
    )


class PrefillConfig(SharedConfig):
    """The root of prefilld's configuration."""

    daemon: ClassVar[str] = "prefilld"
    security: PrefillSecurityConfig = PrefillSecurityConfig()
    listen: ListenConfig = ListenConfig()
    http: HttpConfig = HttpConfig()
    limits: LimitsConfig = LimitsConfig()
    egress: EgressConfig = EgressConfig()

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        is_guarded = self.security.is_authenticated
        or_else = ' or security.mode = "tls"'
        yield from check_bind("listen.host", self.listen.host, is_guarded, "security.key_file", or_else)
        same_host = self.listen.host == self.http.host
        if same_host and self.listen.port == self.http.port != 0:
            yield Problem(("http.port", "listen.port"), f"{self.http.port} is already taken by listen.port")
