"""From configuration to objects both daemons need: the backend, our end of a session, link options, the trace.

The only place that knows both the configuration's names and the constructors' arguments. torch is imported by the
engine's factory, on the engine's thread.
"""

from __future__ import annotations

import secrets
import socket

from common.config import SharedConfig, read_key
from common.errors import StartupError
from common.fake import FakeExecutor, FakeOptions
from common.layout import ModelInfo
from common.local_backend import LocalBackend
from common.net.options import LinkOptions, LocalEnd, Role
from common.sched.executor import Executor
from common.trace import TraceWriter
from common.worker import WorkerOptions


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
    return LocalBackend(lambda: _make_executor(config), options)


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


def local_end(config: SharedConfig, role: Role, info: ModelInfo, *, require_same_numerics: bool = False) -> LocalEnd:
    """Our side of every session; the instance id is new at every start. Raises ConfigError for an unreadable key."""
    key_file = config.security.key_file
    return LocalEnd(
        role=role,
        name=config.node.name,
        instance_id=secrets.token_hex(8),
        info=info,
        key=read_key(key_file) if key_file is not None else None,
        require_same_numerics=require_same_numerics,
        numerics=dict(info.numerics),
    )


def key_problems(old: SharedConfig, new: SharedConfig, end: LocalEnd) -> list[str]:
    """A shared key that changed in its file since `end` was made: sessions keep theirs. Raises as local_end."""
    file = new.security.key_file
    if file is None or file != old.security.key_file or read_key(file) == end.key:
        return []
    return ["security.key_file: there is another secret in the file, which needs a restart"]


def link_options(config: SharedConfig) -> LinkOptions:
    """How sessions behave."""
    links, stream = config.links, config.stream
    return LinkOptions(
        data_links=links.data_links,
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
