"""The running half of daemon.py: one event loop, one service, from start() to the exit code.

Watches signals, the control socket, the watchdog and the service's own death; everything that happens to a daemon from
outside goes through the one `_Life` below. Reads the clock only through the loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from common import logs
from common.config import SharedConfig, plain, render
from common.control import ControlServer
from common.control_client import default_socket
from common.daemon import FakePeer, Handler, Program, Service, load_or_default, report_problems, version_facts
from common.errors import (
    EXIT_CONFIG,
    EXIT_OK,
    EXIT_RUNTIME,
    EXIT_STARTUP,
    ConfigError,
    ControlError,
    PdError,
    StartupError,
)
from common.sdnotify import Notifier, restart_command

C = TypeVar("C", bound=SharedConfig)
Phase = Literal["starting", "serving", "draining", "stopping"]

STOP_TIMEOUT_S = 10.0
DRAIN_GRACE_S = 5.0
WHILE_STARTING = ("status", "version", "config")
WHILE_ENDING = ("status", "peers", "requests", "config", "version", "explain", "drain")

log = logging.getLogger(__name__)


def run_service(program: Program[C], config: C, path: Path | None, fake_peer: FakePeer | None) -> int:
    """Run a service on uvloop until it ends; returns the exit code."""
    import uvloop

    writer = logs.setup(config.log.level, config.log.format)
    life = _Life(program, config, path, writer)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            code = runner.run(life.run(fake_peer))
        if life.is_cut_short:
            # The engine's thread may be deep in loading a model; an orderly exit would wait for it, or crash in it.
            writer.close()
            sys.stdout.flush()
            os._exit(code)
        return code
    except ConfigError as error:
        report_problems(program.name, path, error)
        return EXIT_CONFIG
    except StartupError as error:
        log.error("cannot start: %s", error)
        return EXIT_STARTUP
    finally:
        writer.close()


class _Life(Generic[C]):
    def __init__(self, program: Program[C], config: C, path: Path | None, writer: logs.LogWriter) -> None:
        self._program, self._config, self._path, self._writer = program, config, path, writer
        self._phase: Phase = "starting"
        self._notify = Notifier()
        self._service: Service | None = None
        self._handlers: dict[str, Handler] = {}
        self._stop_asked = asyncio.Event()
        self._forced = asyncio.Event()
        self._fatal: PdError | None = None
        self._reload_lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()
        self.is_cut_short = False
        """Told to stop before start-up was done."""

    async def run(self, fake_peer: FakePeer | None) -> int:
        """From nothing to the exit code. Raises ConfigError or StartupError when it does not get up."""
        control = ControlServer(self._config.control.socket or default_socket(self._program.name).path, self._dispatch)
        await control.start()
        self._install_signals()
        log.info("starting", extra={"node": self._config.node.name, "control": str(control.path)})
        for line in self._config.warnings():
            log.warning(line)
        try:
            service = self._service = self._program.make_service(self._config, fake_peer)
            service.on_fatal = self._on_fatal
            if await self._start(service):
                await self._serve(service)
            return await self._end(service)
        finally:
            self._phase = "stopping"
            await control.close()
            for task in tuple(self._tasks):
                task.cancel()
            self._notify.close()

    # Up

    async def _start(self, service: Service) -> bool:
        """True when the service is up; False when a signal came first."""
        starting = asyncio.ensure_future(service.start())
        asked = asyncio.ensure_future(self._stop_asked.wait())
        await asyncio.wait((starting, asked), return_when=asyncio.FIRST_COMPLETED)
        asked.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait((starting,), timeout=STOP_TIMEOUT_S)
            self.is_cut_short = True
            log.info("told to stop while starting")
            return False
        try:
            starting.result()
        except Exception as error:
            await self._stop(service)
            if isinstance(error, PdError | OSError) and not isinstance(error, ConfigError | StartupError):
                raise StartupError(str(error)) from error
            raise
        return True

    async def _serve(self, service: Service) -> None:
        """READY until something asks to stop."""
        self._handlers = service.control_handlers()
        self._phase = "serving"
        # A full collection over all that torch and the model brought takes 0.2 s, in which no thread of ours runs.
        gc.collect()
        gc.freeze()
        self._notify.ready("ready")
        log.info("ready")
        self._spawn(self._feed_watchdog(service))
        await self._stop_asked.wait()

    async def _feed_watchdog(self, service: Service) -> None:
        """Tell systemd that we live, three times per interval, only while work makes progress."""
        interval = (self._notify.watchdog_s or 6.0) / 3
        was_healthy = True
        while True:
            # An engine that was closed makes no progress; how long stopping may take systemd was told.
            is_healthy = self._phase == "stopping" or service.is_healthy()
            if is_healthy and self._notify.watchdog_s is not None:
                self._notify.watchdog()
            if is_healthy != was_healthy:
                log.log(logging.INFO if is_healthy else logging.ERROR, "healthy again" if is_healthy else "unhealthy")
                state = "ready" if self._phase == "serving" else self._phase
                self._notify.status(state if is_healthy else f"{state}, unhealthy: no progress, the watchdog starves")
                was_healthy = is_healthy
            await asyncio.sleep(interval)

    # Down

    async def _end(self, service: Service) -> int:
        """Drain unless forced or dead, stop, and say how it went."""
        is_clean = True
        if self._phase == "serving" and self._fatal is None:
            self._phase = "draining"
            is_clean = await self._drain(service)
        self._phase = "stopping"
        self._notify.stopping("stopping")
        self._notify.extend_timeout(STOP_TIMEOUT_S + DRAIN_GRACE_S)
        is_clean &= await self._stop(service)
        if self._fatal is not None:
            return EXIT_RUNTIME
        log.info("stopped", extra={"clean": is_clean})
        return EXIT_OK if is_clean else EXIT_RUNTIME

    async def _drain(self, service: Service) -> bool:
        """False when a second signal cut it short. A timeout is an orderly end: the configuration asked for it."""
        timeout = self._config.drain.timeout
        log.info("draining; a second signal does not wait", extra={"timeout_s": timeout})
        self._notify.stopping(f"draining, up to {timeout:g} s")
        self._notify.extend_timeout(timeout + STOP_TIMEOUT_S + 2 * DRAIN_GRACE_S)
        draining = asyncio.ensure_future(service.drain(timeout))
        forced = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait((draining, forced), timeout=timeout + DRAIN_GRACE_S, return_when=asyncio.FIRST_COMPLETED)
        forced.cancel()
        if draining.done():
            if (error := draining.exception()) is not None:
                log.error("draining failed", exc_info=error)
            return error is None
        draining.cancel()
        await asyncio.wait((draining,), timeout=DRAIN_GRACE_S)
        is_forced = self._forced.is_set()
        log.warning("forced to stop: requests in flight are cancelled" if is_forced else "drain.timeout has passed")
        return not is_forced

    async def _stop(self, service: Service) -> bool:
        """False when stop() hung or failed; the process ends all the same."""
        try:
            await asyncio.wait_for(service.stop(), STOP_TIMEOUT_S)
        except TimeoutError:
            log.error("the service did not stop in time", extra={"timeout_s": STOP_TIMEOUT_S})
            return False
        except (PdError, OSError) as error:
            log.error("stopping failed: %s", error)
            return False
        return True

    # What comes from outside

    def _install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._on_stop_signal, number)
        loop.add_signal_handler(signal.SIGHUP, lambda: self._spawn(self._on_hangup()))

    def _on_stop_signal(self, number: signal.Signals) -> None:
        if self._stop_asked.is_set():
            log.warning("second signal: not waiting", extra={"signal": number.name})
            self._forced.set()
        else:
            log.info("told to stop", extra={"signal": number.name})
            self._stop_asked.set()

    def _on_fatal(self, error: PdError) -> None:
        if self._fatal is None:
            self._fatal = error
            log.critical("cannot go on: %s", error, exc_info=error)
            self._stop_asked.set()

    async def _on_hangup(self) -> None:
        with contextlib.suppress(PdError):  # Already logged; the old configuration stays.
            await self.reload({})

    async def reload(self, params: dict[str, Any]) -> dict[str, Any]:
        """Load the configuration again and let the service apply it. Raises ConfigError; then nothing changed."""
        service = self._service
        if self._phase != "serving" or service is None:
            raise ControlError(f"cannot reload while {self._phase}")
        async with self._reload_lock:
            self._notify.reloading()
            try:
                config = self._read_again(service)
                changes = await service.reload(config)
            except PdError as error:
                if isinstance(error, ConfigError) and any("needs a restart" in problem for problem in error.problems):
                    error.advice = f"to apply what needs a restart: {restart_command(self._program.name)}"
                log.error("reload refused, the old configuration stays: %s", error)
                self._notify.ready("ready; the last reload was refused")
                raise
            self._config = config
            self._writer.configure(config.log.level, config.log.format)
            log.info("reloaded", extra={"changes": ", ".join(changes) or "none"})
            self._notify.ready("ready")
            return {"changed": changes, "config": str(self._path)}

    def _read_again(self, service: Service) -> C:
        """The configuration as it is now. Raises ConfigError with all that is wrong with it or needs a restart."""
        if self._path is None:
            raise ConfigError("started without a configuration file: there is nothing to reload")
        problems: list[str] = []
        try:
            config = load_or_default(self._path, self._program.root, "reload")
        except ConfigError as error:
            problems = error.problems
            try:
                # What is wrong with files that it names must not hide that it needs a restart.
                config = load_or_default(self._path, self._program.root, "never")
            except ConfigError:
                raise error from None
        problems += service.restart_problems(config)
        if problems:
            raise ConfigError(problems)
        return config

    async def _dispatch(self, verb: str, params: dict[str, Any]) -> Any:
        """The control API: the daemon's own verbs, then the service's, as far as the phase allows."""
        if self._phase == "starting" and verb not in WHILE_STARTING:
            raise ControlError(f"{verb}: {self._program.name} is still starting")
        if self._phase in ("draining", "stopping") and verb not in WHILE_ENDING:
            raise ControlError(f"{verb}: {self._program.name} is {self._phase}")
        if verb == "reload":
            return await self.reload(params)
        if verb == "config":
            return {"file": str(self._path or ""), "toml": render(self._config), "values": plain(self._config)}
        handler = self._handlers.get(verb)
        if handler is None and verb == "version":
            return version_facts(self._program.name, None)
        if handler is None and verb == "status":
            state = "ready" if self._phase == "serving" else self._phase
            return {"daemon": self._program.name, "node": self._config.node.name, "state": state}
        if handler is None:
            raise ControlError(f"unknown verb {verb!r}; this daemon knows {', '.join(sorted(self._verbs()))}")
        data = await handler(params)
        if verb == "status" and self._phase == "stopping" and isinstance(data, dict):
            data = {**data, "state": "stopping"}
        return data

    def _verbs(self) -> set[str]:
        return {*self._handlers, "config", "reload", "status", "version"}

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a task of the life cycle failed", exc_info=error)
