"""The configuration sections both daemons share, and `load`. pydantic models over TOML, frozen.

The text of each key is its documentation in `--print-config` and conf/*.toml. Roots are PrefillConfig and DecodeConfig
in the daemons' own config.py; they take their sections from SharedConfig and may add checks. No network is touched.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal

from pydantic import Field

from common.config_cache import CacheConfig
from common.config_load import load_file as load
from common.config_load import parse_text
from common.config_machine import (
    MAKE_MODEL,
    check_cpus,
    check_device,
    check_folder,
    check_folder_of,
    check_model,
    threads_warning,
)
from common.config_render import changes, plain, render, restart_problems
from common.config_secrets import check_bind, read_key, read_lines, unreadable
from common.config_security import SecurityConfig
from common.config_types import Duration, FilePath, IntList, Problem, RootSection, Section, Size, When, key
from common.units import GIB, KIB, MIB, exact_size

__all__ = [
    "SharedConfig",
    "changes",
    "check_bind",
    "load",
    "parse_text",
    "plain",
    "read_key",
    "read_lines",
    "render",
    "restart_problems",
    "unreadable",
]

MAX_SOCKET_PATH = 107
ONLY_IN = {
    "prefilld": frozenset({"listen", "limits", "egress"}),
    "decoded": frozenset(
        {"peers", "routing", "fallback", "admission", "slo", "batch", "health", "peer_policy", "codec"}
    ),
}
"""Sections by which a file that was given to the wrong daemon is known."""
MAX_STATE_BYTES = 4 * GIB
MAX_CONNECTIONS_WHY = (
    "HTTP connections at a time. One more closes the one that is idle for longest, or gets 503 when all are busy. A"
    " quarter of the process's file descriptors, 256 at most, is never given to them."
)
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$"
Dtype = Literal["float32", "bfloat16", "float16"]


def _host_name() -> str:
    return re.sub(r"[^A-Za-z0-9._-]", "-", platform.node()).strip("-._")[:63] or "node"


class NodeConfig(Section):
    """Who this daemon is."""

    name: str = Field(
        default_factory=_host_name,
        pattern=NAME,
        description="What peers, logs and metrics call this daemon: letters, digits, '.', '_' and '-', 63 at most.",
        json_schema_extra={"default_note": "the host's name"},
    )
    state_dir: FilePath = key(
        None,
        "Directory for what outlives a restart: reports of `decodectl codec check`, what `profile` measured, the prefix"
        ' cache\'s files; made if the one around it exists. "" keeps nothing. The units in systemd/ have'
        " /var/lib/<daemon> for it.",
    )


class ModelConfig(Section):
    """The model that is served. Both sides must hold the same one; the handshake compares digests."""

    path: FilePath = key(
        None,
        "Model directory as `prefillctl model import` makes it (safetensors, tokenizer, manifest with digests). A"
        ' relative path starts at this file\'s directory. Needed unless engine.backend is "fake".',
    )


class EngineConfig(Section):
    """The engine that computes."""

    backend: Literal["local", "fake"] = key(
        "local", '"local" runs the model in this process; "fake" computes nothing at the speeds of [fake].'
    )
    device: str = key("cpu", '"cpu", "cuda" or "cuda:N".', pattern=r"^(cpu|cuda(:[0-9]{1,3})?)$")
    dtype: Dtype = key(
        "float32",
        "Compute dtype. On a CPU without AMX or AVX-512 bfloat16 is several times slower than float32; only float32"
        " makes outputs equal token for token on every route.",
    )
    kv_dtype: Literal["", "float32", "bfloat16", "float16"] = key(
        "",
        'Dtype of the state kept and sent; "" is the compute dtype. bfloat16 halves memory and transfer, and rounds.',
    )
    weights: Literal["exact", "int8", "torch"] = key(
        "exact",
        'How a CPU keeps float32 matrices: "exact" in the smallest form that loses nothing, with kernels of our own'
        ' where they can be made; "int8" rounds those that need more than 8 bits (32 numbers to a scale), a quarter of'
        ' the memory and its traffic: other tokens, so set it alike at both ends; "torch" leaves everything to torch,'
        " which also happens with another dtype.",
    )
    compile: bool = key(
        False,
        'torch.compile for the parts of the model without state; on a CPU only with weights = "torch", and slower'
        " there. Seconds to minutes more at start; where it fails the log says so and the model runs as it is.",
    )
    threads: int = key(
        0,
        "Compute threads; 0 is one per allowed core. Two daemons sharing cores slow each other down 10 to 40 times, so"
        " give each its own `cpus`.",
        ge=0,
        le=1024,
    )
    cpus: IntList = key((), "Core numbers this process may run on; [] leaves the affinity alone.")
    chunk_tokens: int = key(
        0, "Prompt tokens computed in one forward pass; 0 is 256 on a CPU and 2048 on CUDA.", ge=0, le=1 << 20
    )
    segment_bytes: Size = key(
        1 * MIB,
        "Raw bytes of one segment of state at most, where one layer allows it: smaller leaves earlier, larger"
        " compresses better and costs fewer messages.",
        ge=16 * KIB,
        le=256 * MIB,
    )

    @property
    def num_chunk_tokens(self) -> int:
        """chunk_tokens with its default for the device."""
        return self.chunk_tokens or (256 if self.device == "cpu" else 2048)

    @property
    def state_dtype(self) -> str:
        """kv_dtype with its default."""
        return self.kv_dtype or self.dtype

    @property
    def num_threads(self) -> int:
        """threads with its default: one for each core this process is, or will be, allowed to use."""
        return self.threads or len(self.cpus) or len(os.sched_getaffinity(0))


class FakeConfig(Section):
    """Speeds and state sizes of the fake engine, read when engine.backend is "fake" or with --fake-peer."""

    prefill_tokens_per_s: float = key(
        2000.0, "Prompt tokens computed per second, all requests together; 0 takes no time.", ge=0
    )
    decode_tokens_per_s: float = key(50.0, "Output tokens per second of each sequence; 0 takes no time.", ge=0)
    num_layers: int = key(8, "Layers, windowed ones included.", ge=1, le=1024)
    num_heads: int = key(2, "Key and value heads of each layer.", ge=1, le=1024)
    head_dim: int = key(
        64, "Width of one head; a token's state is 2 x heads x width x dtype in each layer.", ge=1, le=4096
    )
    window_layers: int = key(0, "How many of the layers have a sliding window.", ge=0, le=1024)
    window: int = key(512, "Tokens in the window, the token itself included.", ge=2)
    vocab_size: int = key(32000, "Token ids run from 0 to this, exclusive.", ge=2, le=1 << 24)
    max_context: int = key(32768, "Prompt plus output tokens of one sequence.", ge=2)


class LinksConfig(Section):
    """TCP connections to or from peers."""

    data_links: int = key(
        0,
        "Data links per session, next to one control link; 0 is 1 to a loopback peer, and to any other 4, or up to 8"
        " where the kernel lacks bbr and the path is long or loses packets.",
        ge=0,
        le=64,
    )
    heartbeat: Duration = key(
        2.0, "Interval of pings; a link that is silent for three of them is dead.", ge=0.05, le=60
    )
    reconnect_min: Duration = key(
        0.1, "First pause before a lost peer is called again; doubles, with jitter.", ge=0.01, le=60
    )
    reconnect_max: Duration = key(
        2.0,
        "Longest such pause. Above two heartbeats a restarted peer is used later than it could be.",
        ge=0.01,
        le=600,
    )
    connect_timeout: Duration = key(5.0, "For TCP and the handshake together.", ge=0.1, le=120)
    piece_bytes: Size = key(
        1 * MIB,
        "Largest payload of one frame; more than engine.segment_bytes changes nothing. Slow links get smaller ones by"
        " themselves, down to 256KiB, so that the faster link takes more.",
        ge=4 * KIB,
        le=8 * MIB,
    )
    congestion_control: str = key(
        "auto",
        'Of links that are not on loopback, as in /proc/sys/net/ipv4/tcp_available_congestion_control. "auto" is bbr'
        ' where the kernel has it: with cubic a loss of 0.1 % at 80 ms costs nine tenths of 250 Mbit/s. "" leaves the'
        " system's.",
        pattern=r"^[a-z0-9_-]{0,15}$",
    )


class StreamConfig(Section):
    """The transfer of one request's state."""

    lease: Duration = key(
        30.0,
        "How long a request's state is held for a peer that cannot be reached before it is given up.",
        ge=0.5,
        le=3600,
    )
    credit_bytes: Size = key(
        64 * MIB,
        "Encoded bytes a sender may have under way to us per session: bounds our receive memory.",
        ge=64 * KIB,
        le=1 << 40,
    )
    max_staged_bytes: Size = key(
        64 * MIB,
        "Raw unacknowledged bytes of one stream past which its next chunk waits while others run.",
        ge=64 * KIB,
    )
    progress_timeout: Duration = key(
        60.0,
        "A remote prefill that shows neither progress nor bytes for so long is given up by decoded and computed"
        " elsewhere; prefilld gives up one whose peer, connected, takes nothing of its state, or sends nothing of a"
        " prefix that it pushes, for so long. While others of the same two daemons go first, theirs counts: for ten"
        " times as long at decoded.",
        ge=1,
        le=3600,
    )
    codec: Literal["zstd", "raw", "q8", "q4"] = key(
        "zstd",
        '"zstd" is lossless with byte planes; "raw" spends no CPU, for links faster than about 1 GB/s. "q8" and "q4"'
        " round state to 8 and 4 bits (recurrent state to 8): answers change a little, how much `decodectl codec check`"
        " measures, without whose report decoded does not start with one of them (its --help has what the figures mean,"
        " docs/transport.md those of some models). What decoded asks for holds.",
    )


class ControlConfig(Section):
    """The control socket of the ctl."""

    socket: FilePath = key(
        None,
        'Unix socket, mode 0600; "" is control.sock in the runtime directory (/run/<daemon> for root and under systemd,'
        " $XDG_RUNTIME_DIR/<daemon> for users, /tmp/<daemon>-<uid> for users without XDG_RUNTIME_DIR), which is made;"
        " the directory of any other path must exist. Two daemons of one kind on a machine need one each.",
    )


class LogConfig(Section):
    """The log, on standard error. Changes by reload."""

    level: Literal["debug", "info", "warning", "error"] = key("info", "Least severe message that is written.")
    format: Literal["text", "json"] = key("text", '"text" is one line of key=value; "json" one object per line.')
    trace_file: FilePath = key(
        None,
        'Append one JSON line for each chunk, segment and piece to this file, in a directory that exists; "" is no'
        " trace. For measuring how compute and transfer overlap: it grows without bound. Needs a restart.",
    )


class DrainConfig(Section):
    """What SIGTERM and the verb `drain` wait for."""

    timeout: Duration = key(
        60.0, "How long a stopping daemon waits for requests in flight before it cancels them.", ge=0, le=86400
    )


class SharedConfig(RootSection):
    """Sections that both daemons have."""

    node: NodeConfig = NodeConfig()
    model: ModelConfig = ModelConfig()
    engine: EngineConfig = EngineConfig()
    fake: FakeConfig = FakeConfig()
    security: SecurityConfig = SecurityConfig()
    links: LinksConfig = LinksConfig()
    stream: StreamConfig = StreamConfig()
    cache: CacheConfig = CacheConfig()
    control: ControlConfig = ControlConfig()
    log: LogConfig = LogConfig()
    drain: DrainConfig = DrainConfig()

    daemon: ClassVar[str] = ""

    def check(self) -> Iterator[Problem]:
        yield from _check_engine(self)
        yield from _check_transfer(self)
        yield from self.cache.check_disk(self.node.state_dir)
        yield from self.security.check()

    def check_environment(self, when: When) -> Iterator[Problem]:
        # Not on reload: what only a restart can change is no reason there, and the affinity is the daemon's own then.
        if when != "reload":
            yield from _check_machine(self, when)
        yield from self.security.check_files("prefill" if self.daemon == "prefilld" else "decode")

    def warnings(self) -> list[str]:
        """What is allowed and hardly meant, a sentence each."""
        text = threads_warning(self.engine.threads, self.engine.cpus) if self.engine.backend == "local" else ""
        return [text] if text else []

    @classmethod
    def foreign(cls, data: dict[str, Any]) -> str:
        for daemon, sections in ONLY_IN.items():
            found = [name for name in data if name in sections]
            if found and daemon != cls.daemon and not ONLY_IN.get(cls.daemon, frozenset()) & data.keys():
                return f"this looks like the file of {daemon}, not of {cls.daemon}: it has {', '.join(found)}"
        return ""


def _check_machine(config: SharedConfig, when: When) -> Iterator[Problem]:
    yield from check_cpus("engine.cpus", config.engine.cpus)
    if config.engine.backend == "local" and config.model.path is not None:
        yield from check_model("model.path", config.model.path)
    if config.engine.backend == "local" and when == "check":
        yield from check_device("engine.device", config.engine.device)
    if config.node.state_dir is not None:
        yield from check_folder("node.state_dir", config.node.state_dir)
    if config.control.socket is not None:
        yield from check_folder_of("control.socket", config.control.socket, may_exist=False)
    if config.log.trace_file is not None:
        yield from check_folder_of("log.trace_file", config.log.trace_file, may_exist=True)


def _check_engine(config: SharedConfig) -> Iterator[Problem]:
    if config.engine.backend == "local" and config.model.path is None:
        yield Problem(("model.path", "engine.backend"), f'is required when engine.backend is "local"; {MAKE_MODEL}')
    engine = config.engine
    if engine.compile and engine.device == "cpu" and engine.weights != "torch":
        yield Problem(
            ("engine.compile", "engine.weights"),
            f'compiles what torch computes, but weights = "{engine.weights}" on a CPU leaves it nothing: set "torch"',
        )
    if engine.weights == "int8" and (engine.dtype != "float32" or engine.device != "cpu"):
        yield Problem(
            ("engine.weights", "engine.dtype", "engine.device"),
            f'"int8" needs dtype = "float32" on device = "cpu", not "{engine.dtype}" on "{engine.device}"',
        )
    if config.fake.window_layers > config.fake.num_layers:
        yield Problem(
            ("fake.window_layers", "fake.num_layers"),
            f"{config.fake.window_layers} windowed layers do not fit into num_layers = {config.fake.num_layers}",
        )
    socket = config.control.socket
    if socket is not None and len(os.fsencode(socket)) > MAX_SOCKET_PATH:
        yield Problem(
            ("control.socket",),
            f"the path has {len(os.fsencode(socket))} bytes, a Unix socket's may have {MAX_SOCKET_PATH}",
        )


def _check_transfer(config: SharedConfig) -> Iterator[Problem]:
    links, stream = config.links, config.stream
    if links.reconnect_max < links.reconnect_min:
        yield Problem(("links.reconnect_max", "links.reconnect_min"), "is less than links.reconnect_min")
    if stream.credit_bytes < links.piece_bytes:
        yield Problem(
            ("stream.credit_bytes", "links.piece_bytes"),
            f"{exact_size(stream.credit_bytes)} cannot hold one piece of links.piece_bytes ="
            f" {exact_size(links.piece_bytes)}: nothing would ever be sent",
        )
    if stream.max_staged_bytes < config.engine.segment_bytes:
        yield Problem(
            ("stream.max_staged_bytes", "engine.segment_bytes"),
            f"{exact_size(stream.max_staged_bytes)} cannot hold one segment of engine.segment_bytes ="
            f" {exact_size(config.engine.segment_bytes)}",
        )
    if stream.lease < 2 * links.heartbeat:
        yield Problem(
            ("stream.lease", "links.heartbeat"),
            f"{stream.lease:g} s is less than two heartbeats of {links.heartbeat:g} s: one lost ping ends requests",
        )
