"""From configuration to objects both daemons need: the backend, our end of a session, link options, the trace.

The only place that knows both the configuration's names and the constructors' arguments. torch is imported by the
engine's factory, on the engine's thread.
"""

from __future__ import annotations

import hashlib
import logging
import secrets
import socket
from typing import TYPE_CHECKING

from common.certificates import check_cas, check_key, read_certificate, validity_problem
from common.config import SharedConfig, read_key
from common.disk_parts import PartFiles
from common.errors import ConfigError, StartupError
from common.fake import FakeExecutor, FakeOptions
from common.layout import ModelInfo
from common.local_backend import LocalBackend
from common.net.options import LinkOptions, LocalEnd, Role, Security
from common.net.tls import CertificateFacts, TlsEnd
from common.sched.executor import Executor
from common.sched.prefix_index import ROWS, STATE, WINDOW
from common.state_cache import StateCache
from common.state_parts import group_layouts
from common.trace import TraceWriter
from common.worker import WorkerOptions

if TYPE_CHECKING:
    from common.engine.runner import Runner

log = logging.getLogger(__name__)
RELOADABLE_SECURITY = tuple(
    f"security.{name}"
    for name in ("key_file", "previous_key_file", "cert_file", "cert_key_file", "ca_file", "allowed_names")
)


def make_backend(
    config: SharedConfig, *, max_batch: int = 16, token_budget: int = 0, max_stretch: float = 3.0, warm_up_rows: int = 0
) -> LocalBackend:
    """The engine that the configuration names, not started yet."""
    engine = config.engine
    options = WorkerOptions(
        chunk_tokens=engine.num_chunk_tokens,
        token_budget=token_budget,
        max_stretch=max_stretch,
        max_batch=max_batch,
        warm_up_rows=warm_up_rows,
        segment_bytes=engine.segment_bytes,
        cpus=tuple(engine.cpus),
    )
    return LocalBackend(lambda: _make_executor(config), options, lambda info: make_cache(config, info))


def make_cache(config: SharedConfig, info: ModelInfo) -> StateCache | None:
    """The prefix cache that the configuration asks for; None where nothing could ever be found in it."""
    cache = config.cache
    limits = {ROWS: cache.rows_bytes, WINDOW: cache.window_bytes, STATE: cache.recurrent_bytes}
    used = {group: limits[group] for group in group_layouts(info.layout)}
    if not cache.rows_bytes or not all(used.values()):
        log.info(
            "the prefix cache is off",
            extra={"rows": limits[ROWS], "window": limits[WINDOW], "recurrent": limits[STATE]},
        )
        return None
    files, disk_limits = None, {}
    if cache.disk_bytes and config.node.state_dir is not None:
        # State of other weights, or computed in other ways, must not be taken for ours.
        telling = [info.weights_digest, info.config_digest, info.layout.digest]
        telling += [info.numerics.get(name, "") for name in ("dtype", "kv_dtype", "weights")]
        identity = hashlib.sha256("\0".join(telling).encode()).hexdigest()[:16]
        files = PartFiles(config.node.state_dir / "prefix-cache", identity)
        disk_limits = {group: cache.disk_bytes * limit // sum(used.values()) for group, limit in used.items()}
    return StateCache(info.layout, used, disk_limits=disk_limits, files=files)


def fake_options(config: SharedConfig) -> FakeOptions:
    """Speeds and sizes of the fake engine."""
    fake, engine = config.fake, config.engine
    return FakeOptions(
        prefill_tokens_per_s=fake.prefill_tokens_per_s,
        decode_tokens_per_s=fake.decode_tokens_per_s,
        num_layers=fake.num_layers - fake.window_layers,
        num_heads=fake.num_heads,
        head_dim=fake.head_dim,
        window_layers=fake.window_layers,
        window=fake.window,
        kv_dtype=engine.state_dtype,
        vocab_size=fake.vocab_size,
        max_context=fake.max_context,
        room=engine.num_chunk_tokens,
    )


def _make_executor(config: SharedConfig) -> Executor:
    if config.engine.backend == "fake":
        return FakeExecutor(fake_options(config))
    return load_runner(config)


def load_runner(config: SharedConfig) -> Runner:
    """The torch engine that the configuration names. Call on the thread that will use it. Raises StartupError."""
    from common.engine.runner import RunnerOptions, load

    engine = config.engine
    if config.model.path is None:
        raise StartupError('model.path is needed unless engine.backend is "fake"')
    options = RunnerOptions(
        device=engine.device,
        dtype=engine.dtype,
        kv_dtype=engine.state_dtype,
        weights=engine.weights,
        compile=engine.compile,
        threads=engine.num_threads,
        room=engine.num_chunk_tokens,
    )
    return load(config.model.path, options)


def local_end(
    config: SharedConfig, role: Role, info: ModelInfo, security: Security, *, require_same_numerics: bool = False
) -> LocalEnd:
    """Our side of every session; the instance id is new at every start."""
    return LocalEnd(
        role=role,
        name=config.node.name,
        instance_id=secrets.token_hex(8),
        info=info,
        security=security,
        require_same_numerics=require_same_numerics,
        numerics=dict(info.numerics),
    )


def make_security(config: SharedConfig, role: Role) -> Security:
    """What the section [security] and its files say now. Raises ConfigError."""
    section = config.security
    cert_file, key_file, ca_file = section.cert_file, section.cert_key_file, section.ca_file
    if section.mode == "key" or cert_file is None or key_file is None or ca_file is None:
        files = (section.key_file, section.previous_key_file)
        keys = tuple(dict.fromkeys(read_key(file) for file in files if file is not None))
        return Security("key" if keys else "none", keys)
    certificate = read_certificate(cert_file, role)
    digests = (certificate.digest, check_key(cert_file, key_file), check_cas(ca_file))
    try:
        end = TlsEnd.load(cert_file, key_file, ca_file, digests)
    except OSError as e:
        raise ConfigError(f"security.cert_file: {cert_file}, {key_file} and {ca_file} do not make TLS: {e}") from e
    allowed_names: tuple[str, ...] = getattr(section, "allowed_names", ())  # prefilld's alone
    return Security("tls", (), end, allowed_names, CertificateFacts(certificate.names, certificate.expires_at))


def reload_security(config: SharedConfig, role: Role, unix_now: float) -> Security:
    """As make_security. Raises ConfigError for a certificate that does not hold now, too."""
    file = config.security.cert_file
    if file is not None and (why := validity_problem(read_certificate(file, role), unix_now)):
        raise ConfigError(f"security.cert_file: {why}")
    return make_security(config, role)


def security_changes(old: Security, new: Security) -> list[str]:
    """Which files have other contents; never what is in them but the certificate's name."""
    lines = []
    if old.keys[:1] != new.keys[:1]:
        lines.append("security.key_file: another secret")
    if old.keys[1:] != new.keys[1:]:
        lines.append("security.previous_key_file: " + ("another secret" if new.keys[1:] else "none holds any more"))
    if old.tls is not None and new.tls is not None:
        names = ("cert_file: another certificate", "cert_key_file: another key", "ca_file: other CAs")
        lines += [f"security.{name}" for n, name in enumerate(names) if old.tls.digests[n] != new.tls.digests[n]]
    return lines


def security_status(security: Security, unix_now: float) -> dict[str, object]:
    """What `status` shows."""
    facts: dict[str, object] = {"mode": security.mode}
    if security.mode == "key":
        facts["num_keys"] = len(security.keys)
    if security.certificate is not None:
        facts["certificate"] = security.certificate.name
        facts["certificate_expires_s"] = round(security.certificate.expires_at - unix_now)
    return facts


def bench_security(security: Security) -> Security:
    """For both ends of `--fake-peer`, which are in this process: certificates would not fit a peer on loopback."""
    return security if security.mode != "tls" else Security("key", (secrets.token_bytes(32),))


def link_options(config: SharedConfig) -> LinkOptions:
    """How sessions behave."""
    links, stream = config.links, config.stream
    return LinkOptions(
        data_links=links.data_links,
        congestion_control=links.congestion_control,
        heartbeat_s=links.heartbeat,
        lease_s=stream.lease,
        piece_bytes=links.piece_bytes,
        credit_bytes=stream.credit_bytes,
        connect_timeout_s=links.connect_timeout,
        codec=stream.codec,
        reconnect_min_s=links.reconnect_min,
        reconnect_max_s=links.reconnect_max,
    )


def check_port(host: str, port: int, setting: str) -> None:
    """Find out that an address is taken before a large model is loaded, not after. Raises StartupError."""
    if port == 0:
        return
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as e:
        raise StartupError(f"cannot listen on {host}:{port} ({setting}): {e.strerror or e}") from e


def make_trace(config: SharedConfig) -> TraceWriter | None:
    """The trace that `log.trace_file` asks for."""
    return TraceWriter(config.log.trace_file) if config.log.trace_file is not None else None
