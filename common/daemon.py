"""A daemon's life: arguments, configuration, signals, control socket, systemd, exit code. The same for both daemons.

    run_daemon(program, argv)   config -> logs -> cpu settings -> control socket -> service.start() -> READY
        SIGTERM / SIGINT        drain, stop, exit 0; a second one cancels what is in flight and exits 1
        SIGHUP / `reload`       the new configuration if every check and the service agree, else the old one stays
        fatal(error)            the engine is dead: exit 1, systemd restarts
Knows no verb of a service but `status`, whose state it overrides while starting and stopping. Reads the clock.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from common.config import EngineConfig, SharedConfig, load, render
from common.config_types import When
from common.errors import EXIT_CONFIG, EXIT_OK, EXIT_STARTUP, EXIT_USAGE, ConfigError, PdError, StartupError
from common.release import version
from common.units import parse_duration, parse_rate

# Turns of the loop in which an OpenMP thread waits for work before it sleeps: the best of 0 to 300,000 for decoding.
SPIN_COUNT = "10000"
C = TypeVar("C", bound=SharedConfig)
Handler = Callable[[dict[str, Any]], Awaitable[Any]]


@dataclass(frozen=True, slots=True)
class FakePeer:
    """--fake-peer RATE,RTT: a pretended peer behind a link of `rate_bps` bits per second and `rtt_s` round trip."""

    rate_bps: float
    rtt_s: float


class Service(Protocol):
    """What run_daemon drives. All of it is called on the event loop."""

    on_fatal: Callable[[PdError], None]
    """Set by run_daemon before start(); the service calls it when the process cannot go on."""

    async def start(self) -> None:
        """Return when requests would be served. Raises StartupError, ConfigError, OSError."""

    async def drain(self, timeout: float) -> None:
        """Take nothing new; return when nothing is in flight, or after `timeout` seconds. May be cancelled."""

    async def stop(self) -> None:
        """Cancel what is in flight and release everything. Also called when start() failed or was cancelled."""

    def restart_problems(self, config: Any) -> list[str]:
        """What differs from the running configuration and only a restart can change, as problems of a ConfigError."""

    async def reload(self, config: Any) -> list[str]:
        """Apply a validated configuration that needs no restart; returns what changed, for people. Raises ConfigError
        to veto all of it.
        """

    def is_healthy(self) -> bool:
        """False starves the watchdog: work waits and the engine makes no progress."""

    def control_handlers(self) -> dict[str, Handler]:
        """Verb -> coroutine of params. `status` must have `state`; `config` and `reload` are the daemon's own."""


@dataclass(frozen=True)
class Program(Generic[C]):
    """What makes one daemon differ from the other. `make_service` may import torch: it is called after cpu settings."""

    name: str
    description: str
    root: type[C]
    make_service: Callable[[C, FakePeer | None], Service]

    @property
    def default_config(self) -> Path:
        """Where the configuration is when --config is not given."""
        return default_config(self.name)


def default_config(name: str) -> Path:
    """The configuration of the daemon `name` unless --config names another."""
    return Path("/etc/prfaas") / f"{name}.toml"


def parse_fake_peer(text: str) -> FakePeer:
    """ "50Mbit/s,40ms" -> FakePeer. Raises argparse.ArgumentTypeError."""
    rate, comma, rtt = text.partition(",")
    try:
        if not comma:
            raise ValueError('write RATE,RTT, for example "50Mbit/s,40ms" ("inf,0" is no link at all)')
        return FakePeer(parse_rate(rate), parse_duration(rtt))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def make_parser(program: Program[Any]) -> argparse.ArgumentParser:
    """The daemon's command line."""
    parser = argparse.ArgumentParser(
        prog=program.name,
        description=program.description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n"
        f"  {program.name} --config conf/{program.name}.toml --check\n"
        f"  {program.name} --config /etc/prfaas/{program.name}.toml\n"
        f"conf/{program.name}.toml of the source tree lists every key with its default, unit and reason, as does"
        f" --print-config.\n\n"
        "signals:\n"
        "  SIGTERM, SIGINT  drain (up to drain.timeout), stop, exit; a second one does not wait\n"
        "  SIGHUP           read the configuration again; a wrong one is logged and the old one stays\n\n"
        "exit codes: 0 ok, 1 runtime or forced, 2 usage, 3 start-up (port taken, altered model), 78 configuration",
    )
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help=f"configuration (default: {program.default_config}, if it exists)")
    add(
        "--check",
        action="store_true",
        help="validate configuration, files, cores and device, list every problem, and exit. Of the model: that every"
        " file is there with its size; whether it is what was imported shows at start, where hashes are compared",
    )
    add("--print-config", action="store_true", help="print the effective configuration as commented TOML, and exit")
    add(
        "--fake-peer",
        type=parse_fake_peer,
        metavar="RATE,RTT",
        help='run alone: pretend a peer behind a link, for example "50Mbit/s,40ms" (no peer is contacted; the state it'
        " sends to decoded is made up, so the tokens mean nothing)",
    )
    add("--version", action="version", version=f"{program.name} {version()}")
    return parser


def version_facts(daemon: str, model: str | None) -> dict[str, Any]:
    """What /version and the verb `version` answer; no model while it is being loaded."""
    from common.wire.frames import VERSION

    return {"daemon": daemon, "version": version(), "model": model, "protocol": VERSION}


def run_daemon(program: Program[C], argv: Sequence[str] | None = None) -> int:
    """Run the daemon until it is told to stop; returns the exit code of errors.py."""
    open_standard_streams()
    # A watchdog's SIGABRT leaves the stacks of all threads in the log. Until our handler is in place SIGHUP would kill.
    faulthandler.enable(2)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    args = make_parser(program).parse_args(argv)
    path: Path | None = args.config
    if path is None and program.default_config.exists():
        path = program.default_config
    if path is None and args.check:
        print(f"{program.name}: --check needs --config FILE, or {program.default_config}", file=sys.stderr)  # noqa: T201
        return EXIT_USAGE
    try:
        when: When = "never" if args.print_config else "check" if args.check else "start"
        config = load_or_default(path, program.root, when)
        if args.print_config:
            sys.stdout.write(f"# {program.name}: effective configuration of {path or 'no file (defaults)'}\n\n")
            sys.stdout.write(render(config))
            return EXIT_OK
        if args.check:
            sys.stdout.write(f"{program.name}: {path} is valid\n")
            for line in config.warnings():
                print(f"{program.name}: warning: {line}", file=sys.stderr)  # noqa: T201
            return EXIT_OK
        apply_cpu_settings(config.engine)
    except ConfigError as error:
        report_problems(program.name, path, error)
        return EXIT_CONFIG
    except StartupError as error:
        print(f"{program.name}: {error}", file=sys.stderr)  # noqa: T201
        return EXIT_STARTUP
    from common.lifecycle import run_service

    return run_service(program, config, path, args.fake_peer)


def open_standard_streams() -> None:
    """Give descriptors 0, 1 and 2 to /dev/null where they are closed: the next sockets would become our log."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest that is free: this one
    # Python has None for a stream whose descriptor was closed when it started.
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def load_or_default(path: Path | None, root: type[C], environment: When) -> C:
    """The configuration of a file, or all defaults without one. Raises ConfigError."""
    if path is not None:
        return load(path, root, environment=environment)
    config = root()
    problems = [] if environment == "never" else [f"{p.paths[0]}: {p.message}" for p in config.check()]
    if problems:
        raise ConfigError(problems)
    return config


def report_problems(name: str, path: Path | None, error: ConfigError) -> None:
    """All problems on standard error, one per line."""
    count = len(error.problems)
    where = path or f"the defaults (no --config was given and {default_config(name)} does not exist)"
    print(f"{name}: {count} problem{'s' * (count != 1)} in {where}:", file=sys.stderr)  # noqa: T201
    for problem in error.problems:
        print(f"  {problem}", file=sys.stderr)  # noqa: T201


def apply_cpu_settings(engine: EngineConfig) -> None:
    """Pin the process and set the thread counts that numeric libraries read once, when they are imported.

    Raises:
        StartupError: torch is imported already, or the cores cannot be used.
    """
    if "torch" in sys.modules:
        raise StartupError("torch was imported before the CPU settings: engine.threads could no longer take effect")
    if engine.cpus:
        try:
            os.sched_setaffinity(0, engine.cpus)
        except OSError as error:
            raise StartupError(f"engine.cpus = {list(engine.cpus)}: {error.strerror}") from error
    threads = str(engine.num_threads)
    for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
        os.environ[variable] = threads
    # Spinning workers of two daemons on neighbouring cores would take the time the other one computes in; but a decode
    # step has hundreds of short parallel regions, between which going to sleep costs more than the work (microseconds).
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
