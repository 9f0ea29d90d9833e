"""A small service driven by the real run_daemon, as a process: `python tests/ops/fake_daemon.py --config F`."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from common.config import changes, restart_problems
from common.daemon import Program, run_daemon
from common.errors import ConfigError, EngineDead, StartupError
from common.worker import EngineWorker, WorkerOptions
from decoded.config import DecodeConfig


def load_for_ever() -> Any:
    """An engine whose model is large. Holds what a process waits for when it ends: a thread that is no daemon."""
    print("loading for ever", flush=True)
    with ThreadPoolExecutor() as pool:
        pool.submit(threading.Event().wait).result()


class FakeService:
    """Environment variables choose what goes wrong."""

    def __init__(self, config: DecodeConfig, fake_peer: Any = None) -> None:
        self.config, self.fake_peer = config, fake_peer
        self.state = "starting"
        self.num_running = int(os.environ.get("FAKE_RUNNING", "0"))
        self.idle = asyncio.Event()
        self.healthy = True
        self.worker: EngineWorker | None = None
        if self.num_running == 0:
            self.idle.set()

    async def start(self) -> None:
        match os.environ.get("FAKE_START", ""):
            case "startup":
                raise StartupError("no weights in /nowhere")
            case "oserror":
                raise OSError(98, "Address already in use")
            case "config":
                raise ConfigError("model.path: tampered")
            case "bug":
                raise KeyError("a bug")
            case "hang":
                await asyncio.Event().wait()
            case "load":
                self.worker = EngineWorker(load_for_ever, WorkerOptions())
                await self.worker.start(lambda error: None)
        self.state = "ready"
        asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, self.finish)

    def finish(self) -> None:
        self.num_running = 0
        self.idle.set()
        if self.state == "draining":
            self.state = "drained"

    async def drain(self, timeout: float) -> None:
        self.state = "draining"
        try:
            await asyncio.wait_for(self.idle.wait(), timeout)
        except TimeoutError:
            return
        self.state = "drained"

    async def stop(self) -> None:
        if self.worker is not None:
            await self.worker.close()
        print("stop called", flush=True)

    def restart_problems(self, config: DecodeConfig) -> list[str]:
        if config.http.port == self.config.http.port:
            return []
        return restart_problems(self.config, config, ("log", "peers"))

    async def reload(self, config: DecodeConfig) -> list[str]:
        old, self.config = self.config, config
        return changes(old, config)

    def is_healthy(self) -> bool:
        return self.healthy

    def control_handlers(self) -> dict[str, Any]:
        async def status(params: dict[str, Any]) -> dict[str, Any]:
            fake = None if self.fake_peer is None else [self.fake_peer.rate_bps, self.fake_peer.rtt_s]
            return {
                "state": self.state,
                "requests": {"running": self.num_running},
                "state_bytes": 3 << 20,
                "fake_peer": fake,
                "omp": os.environ.get("OMP_NUM_THREADS"),
                "cpus": sorted(os.sched_getaffinity(0)),
            }

        async def drain(params: dict[str, Any]) -> dict[str, Any]:
            self.state = "drained" if self.idle.is_set() else "draining"
            return {"state": self.state}

        async def finish(params: dict[str, Any]) -> dict[str, Any]:
            self.finish()
            return {}

        async def peers(params: dict[str, Any]) -> list[dict[str, Any]]:
            return [{"name": p.name, "state": "ready", "in_bytes": 2048} for p in self.config.peers]

        async def sick(params: dict[str, Any]) -> dict[str, Any]:
            self.healthy = bool(params.get("healthy", False))
            return {}

        async def die(params: dict[str, Any]) -> dict[str, Any]:
            self.on_fatal(EngineDead("the engine thread ended"))
            return {}

        async def bug(params: dict[str, Any]) -> dict[str, Any]:
            raise KeyError("a bug")

        async def threshold(params: dict[str, Any]) -> dict[str, Any]:
            return {"threshold": params.get("threshold", 1000)}

        async def explain(params: dict[str, Any]) -> dict[str, Any]:
            terms = {"mode": "threshold", "inequality": "9 <= 1000", "peers": {"b1": "down: " + "no route " * 9}}
            decision = {"route": "local", "reason": "below_threshold", "peer": None, "terms": terms}
            report = {"request_id": params["request_id"], "route": "local", "reason": "below_threshold"}
            report |= {"outcome": "ok", "wire_bytes": 0, "timing": {"queue_s": 0.0123, "ttft_s": 0.5}}
            return {"stage": "finished", "decisions": [decision], "report": report, "num_output_tokens": 4}

        return {
            k: v
            for k, v in locals().items()
            if k in {"status", "drain", "finish", "peers", "sick", "die", "bug", "threshold", "explain"}
        }


if __name__ == "__main__":
    sys.exit(run_daemon(Program("decoded", "A daemon for tests.", DecodeConfig, FakeService), sys.argv[1:]))
