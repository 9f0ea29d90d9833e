"""An event loop without sockets, threads or waiting: time jumps to the next timer, everything else follows from a seed.

It runs several pretended processes side by side. A callback belongs to the process in whose context it was scheduled
(PROCESS), so that a process can be killed (nothing of it runs again, not even a `finally`) or stopped for a while
(everything waits, as after SIGSTOP). Knows no network: that is network.py.
"""

from __future__ import annotations

import asyncio
import heapq
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from math import floor
from typing import Any, Protocol

STEP_S = 2e-6
"""What every callback takes: a clock that stood still would let a busy wait go on for ever."""
MAX_STEPS = 120_000
START_AT = 1000.0


class Net(Protocol):
    """What the loop hands connections to; see network.py."""

    async def connect(self, process: Process, factory: Callable[[], Any], host: str, port: int) -> tuple[Any, Any]: ...

    def listen(self, process: Process, factory: Callable[[], Any], host: str, port: int) -> Any: ...


class Process:
    """One pretended process: what belongs to it, and whether it runs."""

    def __init__(self, name: str, host: str, clock_s: float) -> None:
        self.name, self.host = name, host
        self.clock_s = clock_s
        """How far its monotonic clock is ahead: instants of two machines have nothing to do with each other."""
        self.is_dead = self.is_stopped = False
        self.stopped_s = 0.0
        self.node: Any = None
        self.backlog: list[Handle] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.context = Context()
        self.context.run(PROCESS.set, self)


PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)


class Handle:
    """What call_soon and call_at answer."""

    __slots__ = ("args", "callback", "context", "is_cancelled", "loop", "process")

    def __init__(self, loop: SimLoop, callback: Callable[..., Any], args: tuple[Any, ...], context: Context) -> None:
        self.loop, self.callback, self.args, self.context = loop, callback, args, context
        self.process = context.get(PROCESS)
        self.is_cancelled = False

    def cancel(self) -> None:
        self.is_cancelled = True

    def cancelled(self) -> bool:
        return self.is_cancelled


class SimLoop(asyncio.AbstractEventLoop):
    """`is_coarse`: timers count whole milliseconds of a clock that is read once per turn, as uvloop's do."""

    def __init__(self, seed: int, on_error: Callable[[dict[str, Any]], None], *, is_coarse: bool) -> None:
        self.now = START_AT
        self.engine_s = 0.0
        """How far an engine thread is ahead of the loop while it computes: its clock shows now + engine_s."""
        self.step = 0
        self.is_coarse = is_coarse
        self.net: Net | None = None
        self.executor_s = 0.0
        self.is_stopped = False
        self.after_step: Callable[[Process], None] = lambda process: None
        """Called when something of a process has run."""
        self._on_error = on_error
        self._rng = random.Random(seed)
        self._ready: deque[Handle] = deque()
        self._timers: list[tuple[float, int, Handle]] = []
        self._num_timers = 0
        self._is_closed = False

    # ---- clock

    def monotonic(self) -> float:
        """What time.monotonic answers in the process that asks."""
        process = PROCESS.get()
        return self.now + self.engine_s + (process.clock_s if process is not None else 0.0)

    def time(self) -> float:
        process = PROCESS.get()
        now = self.now + (process.clock_s if process is not None else 0.0)
        return floor(now * 1000) / 1000 if self.is_coarse else now

    # ---- scheduling

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        handle = Handle(self, callback, args, copy_context() if context is None else context)
        if not self._is_closed:
            self._ready.append(handle)
        return handle

    call_soon_threadsafe = call_soon

    def call_later(
        self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> Handle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        clock, late_s = self.time(), self._rng.random() * 8e-4
        process = PROCESS.get()
        if self.is_coarse:
            when = clock + max(0, round((when - clock) * 1000)) / 1000
        if process is not None:
            when -= process.clock_s
        return self.at(max(when + late_s, self.now + 1e-4), callback, *args, context=context)

    def at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Handle:
        """At exactly that instant: for what is no timer of a process."""
        handle = Handle(self, callback, args, copy_context() if context is None else context)
        if not self._is_closed:
            self._num_timers += 1
            heapq.heappush(self._timers, (when, self._num_timers, handle))
        return handle

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, *, name: str | None = None, context: Context | None = None) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = asyncio.Task(coro, loop=self, name=name, context=context)
        if (process := PROCESS.get()) is not None:
            process.tasks.append(task)
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:
        """The work is done at some instant, its result is known at a later one."""
        done = self.create_future()
        self.at(self.now + self._rng.random() * self.executor_s, self._work, done, func, args)
        return done

    def _work(self, done: asyncio.Future[Any], func: Callable[..., Any], args: tuple[Any, ...]) -> None:
        try:
            result, error = func(*args), None
        except Exception as e:  # noqa: BLE001 - it belongs to whoever waits
            result, error = None, e
        self.at(self.now + self._rng.random() * self.executor_s, _settle, done, result, error)

    # ---- connections

    async def create_connection(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None and self.net is not None
        return await self.net.connect(process, factory, host, port)

    async def create_server(self, factory: Any, host: Any = None, port: Any = None, **_: Any) -> Any:
        process = PROCESS.get()
        assert process is not None and self.net is not None
        return self.net.listen(process, factory, host, port)

    # ---- running

    def run(self, until: Callable[[], bool]) -> None:
        """Until that holds, or `is_stopped` is set. Raises TimeoutError when it never would."""
        asyncio._set_running_loop(self)
        try:
            while not self.is_stopped and not until():
                if (handle := self._next()) is not None:
                    self._step(handle)
        finally:
            asyncio._set_running_loop(None)

    def _next(self) -> Handle | None:
        """What runs now; None when that was cancelled, or its process does not run."""
        if self._ready:
            handle = self._ready.popleft()
            if handle.is_cancelled:
                return None
        elif self._timers:
            when, _, handle = heapq.heappop(self._timers)
            if handle.is_cancelled:
                return None
            if when > self.now:
                self.now = when
        else:
            raise TimeoutError("nothing is left to do, and it is not done")
        process = handle.process
        if process is None or not (process.is_dead or process.is_stopped):
            return handle
        if not process.is_dead:
            process.backlog.append(handle)
        return None

    def _step(self, handle: Handle) -> None:
        self.step += 1
        self.now += STEP_S
        if self.step > MAX_STEPS:
            raise TimeoutError(f"no end after {MAX_STEPS} steps")
        try:
            handle.context.run(handle.callback, *handle.args)
        except Exception as e:  # noqa: BLE001 - as every event loop does
            self.call_exception_handler({"message": f"callback {handle.callback!r}", "exception": e})
        if handle.process is not None:
            self.after_step(handle.process)

    def stop_process(self, process: Process) -> None:
        """Nothing of it runs until `resume_process`."""
        process.is_stopped = True

    def resume_process(self, process: Process) -> None:
        """What was due meanwhile runs now, in that order."""
        process.is_stopped = False
        backlog, process.backlog = process.backlog, []
        self._ready.extend(backlog)

    def pending(self, process: Process) -> list[Handle]:
        """Its timers and callbacks that have not run and are not cancelled."""
        waiting = [*self._ready, *(handle for _, _, handle in self._timers)]
        return [h for h in waiting if h.process is process and not h.is_cancelled]

    # ---- what asyncio asks for

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        if not self._is_closed:
            self._on_error(context)

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return not self._is_closed

    def is_closed(self) -> bool:
        return self._is_closed

    def close(self) -> None:
        self._is_closed = True
        self._ready.clear()
        self._timers.clear()


def _settle(done: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if done.done():
        return
    if error is None:
        done.set_result(result)
    else:
        done.set_exception(error)
