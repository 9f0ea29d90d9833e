"""Bytes over N plain sockets, blocking calls and a thread each: what the kernel's TCP gives without any protocol.

The peer of the WAN benchmark: the same congestion control and number of sockets, one queue of parts that the sockets
empty as fast as each can. The receiver asks for them over one more socket.

    serve    python -m benchmarks.transport.raw serve '{"host": ..., "num_links": 4, "congestion_control": "bbr"}'
    fetch    python -m benchmarks.transport.raw fetch '{"host": ..., "port": ...}'     one JSON line per line of input
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
from dataclasses import dataclass
from time import monotonic
from typing import Any

from benchmarks.transport.ends import say
from common.net.tcpinfo import tcp_info

PART_BYTES = 256 << 10
_HEAD = struct.Struct("<Q")


@dataclass(frozen=True)
class Setup:
    """What is measured. `pacing_bps` is of each socket, 0 is none."""

    host: str = "127.0.0.1"
    port: int = 0
    num_links: int = 1
    congestion_control: str = ""
    pacing_bps: float = 0.0


class Sender:
    """The serving end: every socket takes the next part of what is left, sends it with its length, and asks again."""

    def __init__(self, setup: Setup) -> None:
        self._setup, self._data = setup, bytes(PART_BYTES)
        self._lock, self._wake, self._left = threading.Lock(), threading.Condition(), 0
        self.sockets: list[socket.socket] = []

    def run(self) -> None:
        """Until stdin ends: each line is answered with facts about the sockets."""
        setup = self._setup
        with socket.create_server((setup.host, setup.port)) as listener:
            say({"port": listener.getsockname()[1]})
            while len(self.sockets) < setup.num_links:
                connection, _ = listener.accept()
                self._tune(connection)
                self.sockets.append(connection)
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            control, _ = listener.accept()
        threading.Thread(target=self._listen, args=(control,), daemon=True).start()
        for _line in sys.stdin:
            say({"links": [facts(s) for s in self.sockets]})

    def _listen(self, control: socket.socket) -> None:
        """Each request is a number of bytes."""
        while asked := control.recv(_HEAD.size, socket.MSG_WAITALL):
            with self._wake:
                (self._left,) = _HEAD.unpack(asked)
                self._wake.notify_all()

    def _tune(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._setup.congestion_control:
            name = self._setup.congestion_control.encode()
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name)
        if self._setup.pacing_bps:
            rate = struct.pack("=Q", int(self._setup.pacing_bps / 8))
            connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, rate)

    def _serve(self, connection: socket.socket) -> None:
        while True:
            with self._wake:
                self._wake.wait_for(lambda: self._left > 0)
                num = min(PART_BYTES, self._left)
                self._left -= num
            connection.sendall(_HEAD.pack(num))
            connection.sendall(memoryview(self._data)[:num])


SO_MAX_PACING_RATE = getattr(socket, "SO_MAX_PACING_RATE", 47)


def facts(connection: socket.socket) -> dict[str, Any]:
    """TCP_INFO of one socket."""
    info = tcp_info(connection)
    return {"bytes_sent": info.bytes_sent, "bytes_retrans": info.bytes_retrans, "rtt_s": info.rtt_s} if info else {}


class Receiver:
    """The asking end."""

    def __init__(self, setup: Setup) -> None:
        self._lock, self._done = threading.Lock(), threading.Condition()
        self.num_bytes, self.last_at = 0, 0.0
        for _ in range(setup.num_links):
            connection = socket.create_connection((setup.host, setup.port))
            threading.Thread(target=self._receive, args=(connection,), daemon=True).start()
        self._control = socket.create_connection((setup.host, setup.port))
        self._control.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _receive(self, connection: socket.socket) -> None:
        memory = memoryview(bytearray(PART_BYTES))
        while True:
            (left,) = _HEAD.unpack(connection.recv(8, socket.MSG_WAITALL))
            while left:
                num = connection.recv_into(memory[:left])
                left -= num
                with self._done:
                    self.num_bytes, self.last_at = self.num_bytes + num, monotonic()
                    self._done.notify_all()

    def get(self, num_bytes: int, timeout_s: float) -> float:
        """Ask for so many bytes; answers how long they took, in seconds."""
        began = monotonic()
        self._control.sendall(_HEAD.pack(num_bytes))
        with self._done:
            if not self._done.wait_for(lambda: self.num_bytes >= num_bytes, timeout_s):
                raise TimeoutError(f"{self.num_bytes} of {num_bytes} bytes in {timeout_s} s")
            self.num_bytes = 0
            return self.last_at - began


def main() -> None:
    role, text = sys.argv[1:]
    setup = Setup(**json.loads(text))
    if role == "serve":
        Sender(setup).run()
        return
    receiver = Receiver(setup)
    say({})
    for line in sys.stdin:
        wanted = json.loads(line)
        say({"wall_s": receiver.get(wanted["num_bytes"], wanted["timeout_s"])})


if __name__ == "__main__":
    main()
