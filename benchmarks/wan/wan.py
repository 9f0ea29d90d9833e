"""An emulated wide-area link as a context manager: `with Wan(rate_mbit=50, delay_ms=20, loss=0.001) as wan: ...`.

Both ends keep their real kernel TCP, each in a network namespace of its own; see README.md. Needs root, /dev/net/tun,
`ip` and a C compiler. Called by the WAN tests and benchmarks.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

T = TypeVar("T")
End = Literal["A", "B"]
_CLONE_NEWNET = 0x40000000
SCRIPT = Path(__file__).resolve().parent / "wan"
ADDRESS: dict[End, str] = {"A": "10.9.0.1", "B": "10.9.0.2"}
BESIDE: dict[End, str] = {"A": "10.9.1.1", "B": "10.9.1.2"}
_numbers = count()


class WanError(RuntimeError):
    """The link could not be made or changed; the message is what the script said."""


def is_available() -> bool:
    """True when this process may make namespaces and TUN devices."""
    return os.geteuid() == 0 and Path("/dev/net/tun").exists()


@dataclass(frozen=True)
class Direction:
    """What one direction has carried since the link came up."""

    num_packets: int
    megabytes: float
    num_lost: int
    num_tail_dropped: int
    max_queue_ms: float


@dataclass
class Wan:
    """A link with the same properties in both directions. `rate_mbit` 0 is unlimited; `delay_ms` is one way.

    `queue_kb` 0 takes two bandwidth-delay products. Several links may be up at once; they do not see each other.
    """

    rate_mbit: float
    delay_ms: float
    loss: float = 0.0
    queue_kb: int = 0
    _env: dict[str, str] = field(init=False, repr=False)
    _folder: tempfile.TemporaryDirectory[str] | None = field(default=None, init=False, repr=False)

    def __enter__(self) -> Wan:
        self.up()
        return self

    def __exit__(self, *_: object) -> None:
        self.down()

    def up(self) -> None:
        """Make the namespaces and the link. Raises WanError."""
        self._folder = tempfile.TemporaryDirectory(prefix="wan-")
        self._env = {"WAN_NAME": f"pf{os.getpid()}x{next(_numbers)}", "WAN_DIR": self._folder.name}
        queue = [str(self.queue_kb)] if self.queue_kb else []
        try:
            self._script("up", str(self.rate_mbit), str(self.delay_ms), str(self.loss), *queue)
        except WanError:
            self.down()
            raise

    def down(self) -> None:
        """Remove everything, also after a failed `up`. Idempotent. Processes inside lose their network and live on."""
        if self._folder is not None:
            try:
                self._script("down")
            finally:
                self._folder.cleanup()
                self._folder = None

    def set(self, *, rate_mbit: float | None = None, delay_ms: float | None = None, loss: float | None = None) -> None:
        """Change the running link, both directions at once."""
        for name, value in (("rate", rate_mbit), ("delay", delay_ms), ("loss", loss)):
            if value is not None:
                self._script("set", f"{name} {value}")
        self.rate_mbit = self.rate_mbit if rate_mbit is None else rate_mbit
        self.delay_ms = self.delay_ms if delay_ms is None else delay_ms
        self.loss = self.loss if loss is None else loss

    def join(self) -> None:
        """A second path between the ends, as within one site: not emulated, at the addresses of BESIDE."""
        names = {end: f"{self._env['WAN_NAME']}{end}" for end in BESIDE}
        commands = [
            ["ip", "link", "add", "beside", "netns", names["A"], "type", "veth", "peer", "beside", "netns", names["B"]]
        ]
        for end, address in BESIDE.items():
            commands += [
                ["ip", "-n", names[end], "address", "add", f"{address}/30", "dev", "beside"],
                ["ip", "-n", names[end], "link", "set", "beside", "up"],
            ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                raise WanError(f"{' '.join(command)} failed: {done.stderr.strip()}")

    def cut(self) -> None:
        """Lose every packet until `restore`."""
        self._script("set", "down")

    def restore(self) -> None:
        """End a cut."""
        self._script("set", "up")

    def stats(self) -> dict[str, Direction]:
        """Counters by direction, "A>B" and "B>A"."""
        return {line.split()[0]: _direction(line) for line in self._script("stats").splitlines() if ">" in line}

    def command(self, end: End, *argv: str) -> list[str]:
        """The command line that runs `argv` in the namespace of `end`, for subprocess or asyncio."""
        return ["ip", "netns", "exec", f"{self._env['WAN_NAME']}{end}", *argv]

    def exec(self, end: End, *argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
        """Run a command in the namespace of `end`, its text output captured. Options as of subprocess.run."""
        options = {"capture_output": True, "text": True, "check": True, "stdin": subprocess.DEVNULL} | options
        return subprocess.run(self.command(end, *argv), **options)

    def popen(self, end: End, *argv: str, **options: Any) -> subprocess.Popen[str]:
        """Start a command in the namespace of `end`. Options as of subprocess.Popen."""
        return subprocess.Popen(self.command(end, *argv), **({"text": True, "stdin": subprocess.DEVNULL} | options))

    def call(self, end: End, function: Callable[[], T]) -> T:
        """Run a function in a thread of its own inside the namespace of `end`: its new sockets belong there."""

        def inside() -> T:
            with Path(f"/run/netns/{self._env['WAN_NAME']}{end}").open() as namespace:
                if ctypes.CDLL(None, use_errno=True).setns(namespace.fileno(), _CLONE_NEWNET) != 0:
                    raise OSError(ctypes.get_errno(), "setns failed")
            return function()

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(inside).result()

    def _script(self, *args: str) -> str:
        # Output goes to a file: the link keeps running with whatever it inherited, and a pipe would never end.
        with tempfile.TemporaryFile("w+") as output:
            done = subprocess.run(
                [str(SCRIPT), *args],
                env=os.environ | self._env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=60,
                check=False,
            )
            output.seek(0)
            text = output.read()
        if done.returncode:
            raise WanError(f"wan {args[0]} failed with {done.returncode}: {text.strip()}")
        return text


def _direction(line: str) -> Direction:
    facts = dict(part.split("=") for part in line.split()[1:])
    return Direction(
        num_packets=int(facts["packets"]),
        megabytes=float(facts["MB"]),
        num_lost=int(facts["lost"]),
        num_tail_dropped=int(facts["tail_dropped"]),
        max_queue_ms=float(facts["max_queue_ms"]),
    )
