"""What secrecy costs: goodput and CPU seconds per GB of security modes "key" and "tls", side by side on loopback.

    python -m benchmarks.transport.secrecy --mib 512 --rounds 5 --json secrecy.json

A sender process (prefilld's network) and this one (decoded's) move the same made-up state; modes alternate round by
round, so that a busy machine hurts all alike. Beside them, to judge the design: a bare sender and receiver on uvloop
without protocol, over TCP ("bare") and over TLS inside the event loop ("bare-tls"), which is what data links would cost
at least if they were TLS. CPU seconds are those of all threads of a process, and of the one with its event loop, from
the kernel. Loopback has no distance: the figures are of cost, not of what a network gives.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from benchmarks.certificates import CertificateAuthority
from benchmarks.engine.machine import facts
from common.backend import ComputedSegment
from common.layout import ModelInfo, StateLayout, StateSpec, TensorSpec
from common.net.options import LinkOptions, LocalEnd, RemoteRequest, Role, Security
from common.net.pool import PeerClient
from common.net.server import PrefillServer, ServerStream
from common.net.tls import TlsEnd

CASES = ("key", "tls", "bare", "bare-tls")
NUM_LAYERS, ROW_BYTES, ROWS = 32, 2048, 256
_WRITE_BYTES = 1 << 20
_HOST = "127.0.0.1"


def layout() -> StateLayout:
    """32 layers of K and V in bfloat16, 128 KiB a token: a segment of one layer and 256 tokens is 1 MiB."""
    tensors = tuple(TensorSpec(name, (ROW_BYTES // 2,), "bfloat16") for name in ("k", "v"))
    return StateLayout(tuple(StateSpec(n, "full", tensors) for n in range(NUM_LAYERS)))


def local_end(role: Role, security: Security) -> LocalEnd:
    info = ModelInfo("bench", "w", "c", "t", layout(), 50_000, 1 << 20, (0,))
    return LocalEnd(role, role, f"{role}-1", info, security)


def securities(folder: Path, role: Role) -> dict[str, Security]:
    """For both modes, from files that `make_files` left."""
    paths = [folder / f"{role}.pem", folder / f"{role}.key", folder / "trial-ca.pem"]
    tls = TlsEnd.load(paths[0], paths[1], paths[2], ("", "", ""))
    return {"key": Security("key", (bytes(32),)), "tls": Security("tls", (), tls)}


def make_files(folder: Path) -> None:
    ca = CertificateAuthority(folder)
    ca.make("prefill", [_HOST], "prefill")
    ca.make("decode", ["decode"], "decode")


class Sink:
    """State memory that is there before the first byte."""

    def __init__(self, num_tokens: int) -> None:
        self._memory = [[bytearray(num_tokens * ROW_BYTES) for _ in range(2)] for _ in range(NUM_LAYERS)]
        for pair in self._memory:
            for memory in pair:
                memory[::4096] = b"\1" * len(memory[::4096])  # so that the pages are there too

    def buffers(self, start: int, stop: int, layers: tuple[int, ...]) -> tuple[memoryview, ...]:
        views = (memoryview(m)[start * ROW_BYTES : stop * ROW_BYTES] for n in layers for m in self._memory[n])
        return tuple(views)

    def landed(self, start: int, stop: int, layers: tuple[int, ...]) -> None:
        """Nothing to do."""


# ---- the sender process


async def send_for_ever(folder: Path) -> None:
    """All four senders; prints their ports as one line of JSON, then serves until it is ended."""
    rng = np.random.default_rng(0)
    halves = rng.standard_normal(ROWS * ROW_BYTES // 2).astype(np.float32).view(np.uint32) >> 16
    buffer = memoryview(halves.astype("<u2").tobytes())

    async def serve(stream: ServerStream) -> None:
        num_tokens = len(stream.request.tokens)
        await stream.accept()
        await stream.started(time.monotonic())
        for row in range(0, num_tokens, ROWS):
            for n in range(NUM_LAYERS):
                stop = min(row + ROWS, num_tokens)
                part = buffer[: (stop - row) * ROW_BYTES]
                await stream.send_segment(ComputedSegment(row, stop, (n,), (part, part), time.monotonic()))
                await stream.wait_staged_below(64 << 20)
        await stream.complete(num_tokens, 0.0)

    ports = {}
    for mode, security in securities(folder, "prefill").items():
        server = PrefillServer(local_end("prefill", security), LinkOptions(), serve)
        await server.start(_HOST, 0)
        ports[mode] = server.port
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.load_cert_chain(folder / "prefill.pem", folder / "prefill.key")
    loop = asyncio.get_running_loop()
    for case, tls in (("bare", None), ("bare-tls", context)):
        bare = await loop.create_server(BareSender, _HOST, 0, ssl=tls)
        ports[case] = bare.sockets[0].getsockname()[1]
    sys.stdout.write(json.dumps(ports) + "\n")
    sys.stdout.flush()
    await asyncio.Event().wait()


class BareSender(asyncio.Protocol):
    """Sends as many bytes as it is asked for with 8 bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        self._transport.set_write_buffer_limits(high=4 << 20)  # type: ignore[attr-defined]
        self._left, self._is_paused = 0, False
        self._data = memoryview(bytes(_WRITE_BYTES))

    def data_received(self, data: bytes) -> None:
        self._left += int.from_bytes(data, "big")
        self._go_on()

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        self._go_on()

    def _go_on(self) -> None:
        while self._left and not self._is_paused:
            num = min(self._left, _WRITE_BYTES)
            self._left -= num
            self._transport.write(self._data[:num])  # type: ignore[attr-defined]


# ---- this process


class BareReceiver(asyncio.BufferedProtocol):
    """Receives into one buffer and counts."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(_WRITE_BYTES))
        self._left = 0
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._left -= nbytes
        if not self._left and self._done is not None:
            self._done.set_result(None)

    async def fetch(self, num_bytes: int) -> None:
        self._left, self._done = num_bytes, asyncio.get_running_loop().create_future()
        self._transport.write(num_bytes.to_bytes(8, "big"))  # type: ignore[attr-defined]
        await self._done


def cpu_s(pid: int) -> tuple[float, float]:
    """CPU seconds of all threads that the process has, and of the one that runs its event loop."""
    by_thread = {
        f.parent.name: int(f.read_text().split()[0]) / 1e9 for f in Path(f"/proc/{pid}/task").glob("*/schedstat")
    }
    return sum(by_thread.values()), by_thread[str(pid)]


@dataclass
class Bench:
    """One sender, and a way to fetch from it for each case."""

    sender_pid: int
    num_tokens: int
    codec: str
    clients: dict[str, PeerClient]
    bare: dict[str, BareReceiver]
    sink: Sink

    @property
    def num_bytes(self) -> int:
        """State bytes of one run."""
        return layout().transfer_bytes(0, self.num_tokens)

    async def run(self, case: str) -> dict[str, float]:
        """One transfer: bytes per second, and CPU seconds per GB of state at each end, the loop's among them."""
        pids = {"sender": self.sender_pid, "receiver": os.getpid()}
        before = {end: cpu_s(pid) for end, pid in pids.items()}
        began = time.perf_counter()
        if case in self.clients:
            request = RemoteRequest(f"r{began}", (1,) * self.num_tokens, codecs=(self.codec,))
            await self.clients[case].prefill(request, self.sink).wait()
        else:
            await self.bare[case].fetch(self.num_bytes)
        seconds = time.perf_counter() - began
        gb = self.num_bytes / 1e9
        found = {"goodput_gb_per_s": gb / seconds}
        for end, pid in pids.items():
            for name, after, earlier in zip(("cpu", "loop_cpu"), cpu_s(pid), before[end], strict=True):
                found[f"{end}_{name}_s_per_gb"] = (after - earlier) / gb
        return found


async def connect(mode: str, security: Security, port: int, options: LinkOptions) -> PeerClient:
    """A client whose session is ready."""
    client, changed = (
        PeerClient(mode, _HOST, port, local=local_end("decode", security), options=options),
        asyncio.Event(),
    )
    client.on_state = lambda _: changed.set()
    await client.start()
    while client.state != "ready":
        changed.clear()
        await changed.wait()
    return client


async def measure(args: argparse.Namespace, folder: Path, sender_pid: int, ports: dict[str, int]) -> dict[str, Any]:
    """All rounds of all cases."""
    options = replace(LinkOptions(), data_links=args.links, codec=args.codec)
    num_tokens = args.mib * (1 << 20) // layout().transfer_bytes(0, 1)
    bench = Bench(sender_pid, num_tokens, args.codec, {}, {}, Sink(num_tokens))
    for mode, security in securities(folder, "decode").items():
        bench.clients[mode] = await connect(mode, security, ports[mode], options)
    context = ssl.create_default_context(cafile=folder / "trial-ca.pem")
    for case, tls in (("bare", None), ("bare-tls", context)):
        receiver = BareReceiver()
        await asyncio.get_running_loop().create_connection(lambda r=receiver: r, _HOST, ports[case], ssl=tls)
        bench.bare[case] = receiver
    rounds: dict[str, list[dict[str, float]]] = {case: [] for case in CASES}
    for number in range(args.rounds + 1):
        for case in CASES if number % 2 else reversed(CASES):
            result = await bench.run(case)
            if number:  # the first is to warm up
                rounds[case].append(result)
    for client in bench.clients.values():
        await client.close()
    options_given = {name: getattr(args, name) for name in ("mib", "rounds", "links", "codec")}
    return {"machine": facts(sorted(os.sched_getaffinity(0))), "options": options_given, "rounds": rounds}


def table(report: dict[str, Any]) -> str:
    """Medians, with the lowest and highest goodput."""
    ends = ("sender", "receiver")
    heads = (
        "goodput GB/s",
        "lowest",
        "highest",
        *(f"{end} {what}" for end in ends for what in ("CPU s/GB", "its loop")),
    )
    lines = [f"{'':10}" + "".join(f"{head:>19}" for head in heads)]
    for case, runs in report["rounds"].items():
        rates = [run["goodput_gb_per_s"] for run in runs]
        keys = [f"{end}_{name}_s_per_gb" for end in ends for name in ("cpu", "loop_cpu")]
        figures = [statistics.median(rates), min(rates), max(rates)]
        figures += [statistics.median(run[key] for run in runs) for key in keys]
        lines.append(f"{case:10}" + "".join(f"{figure:19.2f}" for figure in figures))
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512, help="state of one run (default: 512)")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each case (default: 5)")
    parser.add_argument("--links", type=int, default=1, help="data links (default: 1)")
    parser.add_argument(
        "--codec", choices=("raw", "zstd"), default="raw", help="default: raw, so that the links matter"
    )
    parser.add_argument("--json", type=Path, help="write everything to this file")
    parser.add_argument("--send-from", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.send_from is not None:
        uvloop.run(send_for_ever(args.send_from))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        command = [sys.executable, "-m", "benchmarks.transport.secrecy", "--send-from", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as sender:
            try:
                ports = json.loads(sender.stdout.readline() if sender.stdout is not None else "")
                report = uvloop.run(measure(args, Path(folder), sender.pid, ports))
            finally:
                sender.kill()
    if args.json is not None:
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    print(table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
