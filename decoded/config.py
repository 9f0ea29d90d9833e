"""decoded's configuration: the shared sections and its own."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator

from common.config import MAX_CONNECTIONS_WHY, NAME, SharedConfig, check_bind, read_lines, unreadable
from common.config_types import Array, Bound, Duration, FilePath, Problem, Section, Size, Threshold, When, key, required
from common.errors import ConfigError, StartupError
from common.hosts import is_certificate_name, is_loopback
from common.units import GIB, KIB, MIB
from common.wire.lossy import LOSSY
from decoded.api.contract import read_api_key
from decoded.codec_report import obstacle
from decoded.config_admission import AdmissionConfig, SloConfig


def split_address(address: str) -> tuple[str, int]:
    """Host and port of "host:port" or "[v6]:port".

    Raises:
        ValueError: not of that form, or a port outside 1 to 65535.
    """
    host, colon, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    elif ":" in host:
        raise ValueError('an IPv6 address needs brackets: "[::1]:7400"')
    if not colon or not host or any(c.isspace() or c in "/@" for c in host):
        raise ValueError('must be "host:port", for example "10.0.0.7:7400"')
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= 65535):
        raise ValueError(f"port {port!r} is not between 1 and 65535")
    return host, int(port)


def _address(text: str) -> str:
    split_address(text)
    return text


def _tls_name(text: str) -> str:
    if text and not is_certificate_name(text):
        raise ValueError("must be a host name or an IP address")
    return text


class HttpConfig(Section):
    """The OpenAI API, health and metrics."""

    host: str = key("127.0.0.1", "Address to bind. Beyond loopback http.api_key_file is needed.", min_length=1)
    port: int = key(8000, "TCP port; 0 takes a free one.", ge=0, le=65535)
    api_key_file: FilePath = key(
        None,
        'File with one API key per line, not readable by others; "" asks for no key, allowed only on loopback. The name'
        " of a priority class may stand after a key, with a space between: its requests are of that class. With"
        " keys every route but /livez and /readyz wants one. The file is read again by reload: a key that is new in it"
        " works from then on, one that is gone gets 401; requests in flight end as they would have. To name a"
        " first file, another one or none needs a restart.",
    )
    allow_route_override: bool = key(
        False, "Obey the header X-Prfaas-Route: local | remote. For tests: it lets clients pass by routing."
    )
    default_max_tokens: int = key(2048, "Output tokens of a request that names no limit.", ge=1)
    max_body_bytes: Size = key(32 * MIB, "Longest request body.", ge=1 * KIB, le=1 * GIB)
    max_bulk_bodies: int = key(
        8, "Bodies above 512 KiB taken in at the same time; each may be max_body_bytes long.", ge=1, le=1024
    )
    max_total_body_bytes: Size = key(
        256 * MIB,
        "Request bodies in memory together, from their first byte until they are tokenised; past it clients get 503.",
        ge=1 * KIB,
    )
    max_connections: int = key(512, MAX_CONNECTIONS_WHY, ge=1, le=1 << 20)
    sse_comment: Duration = key(
        2.0,
        "A stream silent for so long gets a comment, so that proxies keep it open and dead clients show.",
        ge=0.1,
        le=60,
    )


class PeerConfig(Section):
    """A prefilld. Peers may join and leave by reload."""

    name: str = required("What logs, metrics and answers call it: letters, digits, '.', '_' and '-'.", pattern=NAME)
    address: Annotated[str, AfterValidator(_address)] = required('"host:port" of its [listen].')
    site: Literal["remote", "own"] = key(
        "remote",
        '"own" stands beside decoded, on its network: prompts that stay at this site go there as well as to decoded'
        ' itself. "remote" is behind the slow path.',
    )
    tls_name: Annotated[str, AfterValidator(_tls_name)] = key(
        "",
        'What its certificate must be for, with security.mode = "tls" and only then; "" is the host of the address.',
    )

    @property
    def host(self) -> str:
        """Host of the address, without brackets."""
        return split_address(self.address)[0]

    @property
    def port(self) -> int:
        """Port of the address."""
        return split_address(self.address)[1]


class RoutingConfig(Section):
    """Where prompts are prefilled. Changes by reload."""

    mode: Literal["threshold", "adaptive", "local-only", "remote-only"] = key(
        "adaptive",
        '"threshold" compares uncached prompt tokens; "adaptive" the predicted times to first token here and at every'
        " peer and what each costs other requests, and decides by the threshold until both sides' speed is known; the"
        " others are for comparison.",
    )
    threshold_tokens: Threshold = key(
        None,
        'Uncached prompt tokens above which prefill goes remote: 0 sends all, "inf" none. "auto": 1000 until the speeds'
        " of both sides are known and 100 requests were seen; then solved every minute from their lengths, and raised"
        " meanwhile when the far side cannot keep up. decodectl status and metrics show it.",
    )
    push: Literal["auto", "always", "never"] = key(
        "auto",
        "Whether state that decoded holds of a prompt (cached, or left of a remote prefill that failed) and the peer"
        ' lacks is sent to it, which computes it otherwise. "auto": where the first token then comes sooner.',
    )
    replicate_share: float = key(
        0.05,
        "Part of the path to a peer, on average, that may be used while it is idle to send it prefixes that many"
        " prompts share, which decoded has cached and the peer lacks. 0 sends none.",
        ge=0,
        le=1,
    )
    probe_interval: Bound = key(
        10.0,
        "The known capacity of a peer's path that carries nothing may be so old before a second's worth of bytes that"
        " mean nothing is asked of the peer to see it again; while it stays the same, six times as old. Once after"
        ' connecting it is seen in the same way, except on loopback. "inf" never asks.',
        ge=1,
    )


class FallbackConfig(Section):
    """Local prefill of what should have gone remote, bounded so that it cannot swamp decoding. Changes by reload."""

    local_prefill_tokens_per_s: float = key(
        2000.0,
        "Prompt tokens per second that may fall back to local prefill; past it clients get 503. 0 allows none.",
        ge=0,
    )
    burst_tokens: int = key(
        8000,
        "Prompt tokens that may fall back at once after a quiet time. While any of them is left one more prompt, of any"
        " length, is taken whole; what it overdraws is paid off at the rate above before the next (503 until then).",
        ge=0,
    )
    attempts: int = key(2, "Peers tried for one request before it falls back.", ge=1, le=16)


class BatchConfig(Section):
    """The running batch."""

    max_batch: int = key(16, "Sequences in one decode step.", ge=1, le=4096)
    token_budget: int = key(
        0, "Prompt tokens of local prefill mixed into one decode step. 0: as many as max_stretch allows, learned while"
        " running.", ge=0,
    )  # fmt: skip
    max_stretch: float = key(
        3.0, "How many times as long as its decode rows alone a step with local prefill may take: the pace of running"
        " streams while a long prompt is computed, against that prompt's speed. It holds in the middle, not for every"
        " step, and not below what 4 prompt tokens take. decodectl status shows the chunk and the rate it comes to."
        " Above 1.",
        gt=1, le=1000,
    )  # fmt: skip


class HealthConfig(Section):
    """When /readyz says no although the process lives."""

    stall: Duration = key(
        30.0,
        "Requests wait and the engine made no progress for so long: not ready, and the watchdog is not fed.",
        ge=1,
        le=3600,
    )


class PeerPolicyConfig(Section):
    """Which peers are accepted beyond the identity that must always match."""

    require_same_numerics: bool = key(
        False,
        "Refuse peers whose weights (exact, int8), dtype, kv_dtype, device, chunk or threads differ. false: other"
        " weights or dtypes, by which tokens depend on the route, are a warning in the log and shown by `peers`.",
    )


class CodecConfig(Section):
    """What a lossy codec (stream.codec) must have shown before it is used."""

    min_agreement: float = key(
        0.99,
        "Part of the positions of a text at which the same token must be most likely with and without the codec, in the"
        " report of `decodectl codec check` (its column top1; docs/transport.md has some); decoded does not start"
        " below it.",
        ge=0,
        le=1,
    )


class DecodeConfig(SharedConfig):
    """The root of decoded's configuration."""

    daemon: ClassVar[str] = "decoded"
    http: HttpConfig = HttpConfig()
    peers: Annotated[tuple[PeerConfig, ...], Array] = key(
        (),
        "The prefillds, one [[peers]] table each with `name` and `address`. None: everything is computed here.",
    )
    routing: RoutingConfig = RoutingConfig()
    fallback: FallbackConfig = FallbackConfig()
    admission: AdmissionConfig = AdmissionConfig()
    batch: BatchConfig = BatchConfig()
    slo: SloConfig = SloConfig()
    health: HealthConfig = HealthConfig()
    codec: CodecConfig = CodecConfig()
    peer_policy: PeerPolicyConfig = PeerPolicyConfig()

    def check(self) -> Iterator[Problem]:
        yield from super().check()
        yield from self.admission.check()
        yield from check_bind("http.host", self.http.host, self.http.api_key_file is not None, "http.api_key_file")
        if self.http.max_total_body_bytes < self.http.max_body_bytes:
            yield Problem(
                ("http.max_total_body_bytes", "http.max_body_bytes"),
                "less than http.max_body_bytes: the longest body could never be taken",
            )
        for what in ("name", "address"):
            counts = Counter(getattr(peer, what) for peer in self.peers)
            seen: set[str] = set()
            for n, peer in enumerate(self.peers):
                value = getattr(peer, what)
                if counts[value] > 1 and value in seen:
                    yield Problem((f"peers[{n}].{what}", "peers"), f"{value!r} is used by more than one peer")
                seen.add(value)
        for n, peer in enumerate(self.peers):
            if not is_loopback(peer.host) and not self.security.is_authenticated:
                yield Problem(
                    (f"peers[{n}].address", "security.key_file"),
                    f'{peer.address} is not on this machine: set security.key_file or security.mode = "tls"',
                )
            if peer.tls_name and self.security.mode != "tls":
                message = f'is not used with security.mode = "{self.security.mode}": remove it'
                yield Problem((f"peers[{n}].tls_name", "security.mode"), message)
            if self.security.mode == "tls" and not is_certificate_name(peer.tls_name or peer.host):
                yield Problem((f"peers[{n}].address",), f"{peer.host!r} can be in no certificate: set tls_name")
        if self.routing.mode == "remote-only" and not self.peers:
            yield Problem(("routing.mode", "peers"), '"remote-only" needs at least one entry in [[peers]]')

    def check_environment(self, when: When) -> Iterator[Problem]:
        yield from super().check_environment(when)
        if when != "reload" and self.stream.codec in LOSSY:
            yield from self._check_codec()
        if self.http.api_key_file is not None:
            yield from unreadable("http.api_key_file", self._read_api_keys, self.http.api_key_file)

    def _check_codec(self) -> Iterator[Problem]:
        """A lossy codec that no report can allow: found before a large model is loaded, not after."""
        from common.engine.manifest import read_manifest

        known = {}
        if self.engine.backend == "local" and self.model.path is not None:
            known = {"dtype": self.engine.dtype, "kv_dtype": self.engine.state_dtype}
            with contextlib.suppress(StartupError):  # a problem of model.path, which is listed as such
                known["weights_digest"] = read_manifest(self.model.path).weights_digest
        if why := obstacle(self.node.state_dir, self.stream.codec, known, self.codec.min_agreement):
            yield Problem(("stream.codec", "node.state_dir", "model.path", "codec.min_agreement"), why)

    def _read_api_keys(self, path: Path) -> None:
        """Raises ConfigError: unreadable, or a class that there is not."""
        known = [c.name for c in self.admission.classes]
        for number, line in enumerate(read_lines(path), 1):
            name = read_api_key(line)[1]
            if name and name not in known:
                classes = ", ".join(known) or "none"
                raise ConfigError(f"{path}: class {name[:80]!r} of key {number}; admission.classes: {classes}")
