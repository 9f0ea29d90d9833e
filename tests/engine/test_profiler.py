"""The verb `profile` over engines in this process: figures that are right, users who are left alone, clean ends."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from common.errors import ControlError, EngineDead
from common.fake import FakeExecutor, FakeOptions
from common.layout import ModelInfo
from common.local_backend import LocalBackend
from common.policy.admission import AdmissionController, AdmissionLimits
from common.policy.profile import node_profile
from common.policy.views import Demand
from common.profiler import Node, Profiler
from common.profiles import FILE_NAME, load_profile
from common.state_cache import StateCache
from common.worker import WorkerOptions
from tests.engine.kitchen import AMPLE, run

LIMITS = AdmissionLimits(16, 4, 100_000, 1 << 28, section="limits")


class Bench:
    """A profiler and all around it, over a fake engine with a prefix cache."""

    def __init__(self, state_dir: Path | None = None, max_rows: int = 8, limits: AdmissionLimits = LIMITS, **fake: Any):
        speeds = {"prefill_tokens_per_s": 20_000, "decode_tokens_per_s": 400}
        options = FakeOptions(**{**speeds, "num_layers": 2, "max_context": 4096, "room": 64, **fake})
        worker = WorkerOptions(chunk_tokens=64, max_batch=max_rows or 16)

        def make_cache(info: ModelInfo) -> StateCache:
            return StateCache(info.layout, AMPLE)

        self.backend = LocalBackend(lambda: FakeExecutor(options), worker, make_cache)
        self.admission, self.admitted = AdmissionController(limits), []
        self.registry = CollectorRegistry()
        node = Node("decoded", "here", state_dir, max_rows)
        self.profiler = Profiler(self.backend, self.admission, node, self.admitted.append, self.registry)

    async def __aenter__(self) -> Bench:
        await self.backend.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.backend.close()

    async def profile(self, **params: Any) -> dict[str, Any]:
        return await self.profiler.run({"max_tokens": 512, "timeout_s": 20, **params})

    def outcomes(self) -> dict[str, float]:
        samples = [s for metric in self.registry.collect() for s in metric.samples if s.name == "prfaas_profiles_total"]
        return {s.labels["outcome"]: s.value for s in samples}

    async def is_left_alone(self) -> bool:
        """Nothing of a measurement runs on, and no memory is booked."""
        for _ in range(100):
            stats = self.backend.stats()
            idle = not (
                stats.num_running or stats.num_prefilling or stats.num_waiting or sum(stats.state_bytes.values())
            )
            if idle and not self.admission.running and not self.admission.queue and not self.admission.state_bytes:
                return True
            await asyncio.sleep(0.02)
        return False


async def test_figures_are_those_of_the_engine_and_are_kept(tmp_path: Path, caplog):
    async with Bench(tmp_path) as bench:
        with caplog.at_level(logging.INFO):
            found = await bench.profile(rows=[1, 4])
        profile = node_profile(json.loads(json.dumps(found)))
        assert [x for x, _ in found["prefill"]["points"]] == [64, 128, 256, 512]
        assert profile.cost().seconds(0, 400) == pytest.approx(400 / 20_000, rel=0.5)
        assert profile.decode is not None
        assert profile.decode.step_s(4, 1000) == pytest.approx(1 / 400, rel=0.7)
        assert profile.max_rows == 8
        layout = bench.backend.info.layout
        assert found["state"] == {"fixed_bytes": 0, "bytes_per_token": layout.token_bytes}
        assert (found["name"], found["chunk_tokens"], found["was_idle"], found["warnings"]) == ("here", 64, True, [])
        assert found["model"]["name"] == "fake" and found["numerics"] == bench.backend.info.numerics
        measured = found["measured"]["prefill"]
        assert {(m["cached"], m["tokens"]) for m in measured} == {(0, 64), (0, 128), (64, 64), (0, 256), (128, 128),
                                                                 (0, 512), (256, 256)}  # fmt: skip
        assert {len(m["seconds"]) for m in measured} == {3}
        steps = [(m["rows"], m["context_tokens"]) for m in found["measured"]["decode"]]
        assert steps == [(1, 80), (1, 528), (4, 320), (4, 2112)]
        assert found["stored"] == str(tmp_path / FILE_NAME)
        loaded = load_profile(tmp_path, bench.backend.info)
        assert loaded is not None and loaded.cost() == profile.cost() and loaded.decode == profile.decode
        assert bench.outcomes() == {"ok": 1}
        assert await bench.is_left_alone()


async def test_windows_are_a_fixed_part_of_the_state_and_prefilld_decodes_nothing():
    async with Bench(max_rows=0, window_layers=2, window=100) as bench:
        found = await bench.profile()
        assert "decode" not in found and found["stored"] is None and found["measured"]["decode"] == []
        layout = bench.backend.info.layout
        size = found["state"]
        for length in (200, 3000):
            assert size["fixed_bytes"] + length * size["bytes_per_token"] == layout.transfer_bytes(0, length)
        with pytest.raises(ControlError, match="rows: decoded decodes nothing"):
            await bench.profile(rows=[1])


async def test_users_keep_what_is_cached_of_theirs(tools):
    async with Bench(prefill_tokens_per_s=0, decode_tokens_per_s=0) as bench:
        request = tools.request(tools.prompt(200), max_tokens=3)
        _, expected = await run(bench.backend, request, tools)
        cache = bench.backend.cache
        assert cache is not None
        before = (len(cache.books.index), dict(cache.books.memory.used), cache.counts.num_lookups)
        await bench.profile()
        await cache.settle()
        assert (len(cache.books.index), dict(cache.books.memory.used), cache.counts.num_lookups) == before
        assert await run(bench.backend, request, tools) == (199, expected)


async def test_under_load_it_says_so_and_users_are_served(tools, caplog):
    async with Bench() as bench:
        request = tools.request(tools.prompt(60), max_tokens=150)
        generation = await bench.backend.open(request)
        generation.compute()

        async def serve() -> int:
            return len([output async for output in generation])

        served = asyncio.create_task(serve())
        found = await bench.profile(rows=[2])
        assert not found["was_idle"]
        assert any("under load" in text for text in found["warnings"])
        assert "under load" in caplog.text
        assert await served == 150


async def test_a_second_one_at_the_same_time_is_refused():
    async with Bench() as bench:
        first = asyncio.create_task(bench.profile())
        await asyncio.sleep(0.05)
        with pytest.raises(ControlError, match="a profile is being measured already"):
            await bench.profile()
        assert (await first)["was_idle"]
        await bench.profile(max_tokens=64)
        assert bench.outcomes() == {"ok": 2, "refused": 1}


@pytest.mark.parametrize("after_s", [0.02, 0.2, 0.6])
async def test_cancelling_it_ends_what_runs(after_s, tmp_path: Path, caplog):
    async with Bench(tmp_path, prefill_tokens_per_s=3000) as bench:
        task = asyncio.create_task(bench.profile())
        await asyncio.sleep(after_s)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await bench.is_left_alone()
        assert bench.outcomes() == {"cancelled": 1}
        assert "profile given up" in caplog.text
        assert list(tmp_path.iterdir()) == []
        assert (await bench.profile(max_tokens=64, rows=[1]))["was_idle"]


async def test_the_time_limit_shortens_the_ladder_and_says_so():
    async with Bench(max_rows=0, prefill_tokens_per_s=1000) as bench:
        found = await bench.profile(max_tokens=4000, timeout_s=4)
        lengths = [x for x, _ in found["prefill"]["points"]]
        assert 256 <= lengths[-1] < 1024
        assert found["warnings"] == [
            f"prompts of {2 * lengths[-1]} tokens and more would take too long for a time limit of 4 s (--timeout) and"
            " were not measured"
        ]
        assert found["took_s"] < 4


async def test_an_engine_that_is_too_slow_is_told():
    async with Bench(max_rows=0, prefill_tokens_per_s=100) as bench:
        with pytest.raises(ControlError, match=r"takes 0.6\d* s: allow more time \(--timeout\)"):
            await bench.profile(timeout_s=2)
        with pytest.raises(ControlError, match=r"not done after 1 s: measure shorter prompts \(--max-tokens\)"):
            await bench.profile(timeout_s=1)
        assert bench.outcomes() == {"timeout": 2}
        assert await bench.is_left_alone()


@pytest.mark.parametrize(
    ("params", "why"),
    [
        (
            {"max_tokens": 15},
            "max_tokens 15 must be from 16 to 4072, which the model's context and 50% of limits.max_state",
        ),
        ({"max_tokens": 5000}, "max_tokens 5000 must be from 16 to 4072"),
        ({"max_tokens": "512"}, "max_tokens '512' must be"),
        ({"max_tokens": True}, "max_tokens True must be"),
        ({"rows": [9]}, "rows [9] must be a list of numbers from 1 to batch.max_batch = 8"),
        ({"rows": []}, "rows [] must be"),
        ({"rows": 4}, "rows 4 must be"),
        ({"rows": [1, "2"]}, "rows [1, '2'] must be"),
        ({"timeout_s": 0}, "timeout_s 0 must be from 1 to 3600 seconds"),
        ({"timeout_s": float("nan")}, "timeout_s nan must be"),
        ({"timeout_s": "1s"}, "timeout_s '1s' must be"),
    ],
)
async def test_what_cannot_be_asked_is_refused_by_name(params, why):
    async with Bench() as bench:
        with pytest.raises(ControlError) as e:
            await bench.profile(**params)
        assert str(e.value).startswith(why)
        assert bench.outcomes() == {"refused": 1}


async def test_half_of_the_state_memory_is_left_to_users():
    token_bytes = FakeOptions(num_layers=2).layout().token_bytes
    limits = AdmissionLimits(16, 4, 100_000, 1000 * token_bytes, section="limits")
    async with Bench(limits=limits, prefill_tokens_per_s=0, decode_tokens_per_s=0) as bench:
        with pytest.raises(ControlError, match=r"max_tokens 600 must be from 16 to (4\d\d|500), which"):
            await bench.profile(max_tokens=600)
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, bench.admission.state_bytes)
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        found = await bench.profiler.run({"timeout_s": 20, "rows": [1, 4, 8]})
        watching.cancel()
        steps = [(m["rows"], m["context_tokens"]) for m in found["measured"]["decode"]]
        assert steps == [(1, 80), (1, 272), (4, 4 * 80)]
        assert 0 < most <= limits.max_state_bytes // 2
        assert found["warnings"] == ["8 rows of 64 tokens do not fit and were not measured"]


@pytest.mark.parametrize("num_queued", [0, 4])
async def test_a_full_daemon_is_measured_when_it_has_room_and_its_queue_goes_first(num_queued):
    limits = AdmissionLimits(1, num_queued, 100_000, 1 << 28, section="limits")
    async with Bench(limits=limits) as bench:
        assert bench.admission.offer(Demand("user", 10, 100)) == "running"
        profiling = asyncio.create_task(bench.profile())
        await asyncio.sleep(0.3)
        assert bench.backend.stats().num_prompt_tokens == 0 and not bench.admission.queue
        if num_queued:
            assert bench.admission.offer(Demand("next", 10, 100)) == "queued"
        assert bench.admission.release("user") == ["next"][:num_queued]
        if num_queued:
            await asyncio.sleep(0.3)
            assert bench.backend.stats().num_prompt_tokens == 0
            bench.admission.release("next")
        while not bench.admission.running:
            await asyncio.sleep(0.01)
        if num_queued:  # whoever waits for a measurement runs before the next one
            assert bench.admission.offer(Demand("later", 10, 100)) == "queued"
            while not bench.admitted:
                await asyncio.sleep(0)
            assert bench.admitted == ["later"] and list(bench.admission.running) == ["later"]
            bench.admission.release("later")
        assert len((await profiling)["prefill"]["points"]) == 4
        assert await bench.is_left_alone()


async def test_a_daemon_that_stays_full_is_given_up_in_time():
    async with Bench(limits=AdmissionLimits(1, 4, 100_000, 1 << 28, section="limits")) as bench:
        bench.admission.offer(Demand("user", 10, 100))
        with pytest.raises(ControlError, match=r"not done after 1 s: .*measure while fewer requests are served"):
            await bench.profile(timeout_s=1)
        assert list(bench.admission.running) == ["user"] and bench.outcomes() == {"timeout": 1}


async def test_an_engine_that_dies_ends_it():
    async with Bench(prefill_tokens_per_s=3000) as bench:
        profiling = asyncio.create_task(bench.profile())
        await asyncio.sleep(0.1)
        await bench.backend.close()
        with pytest.raises(EngineDead):
            await profiling
        assert bench.outcomes() == {"failed": 1}


async def test_a_state_dir_is_made_and_one_that_cannot_be_is_said(tmp_path: Path):
    async with Bench(tmp_path / "new", max_rows=0) as bench:
        assert (await bench.profile(max_tokens=64))["stored"] == str(tmp_path / "new" / FILE_NAME)
    async with Bench(tmp_path / "gone" / "new", max_rows=0) as bench:
        found = await bench.profile(max_tokens=64)
        assert found["stored"] is None
        assert any("could not be kept in node.state_dir" in text for text in found["warnings"])


@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "KimiLinear"])
async def test_real_engines_are_measured(family, make_kitchen):
    backend = await make_kitchen(family).backend(AMPLE)
    node = Node("decoded", "here", None, 4)
    profiler = Profiler(backend, AdmissionController(LIMITS), node, lambda _: None, CollectorRegistry())
    found = await profiler.run({"max_tokens": 100, "rows": [1, 3], "timeout_s": 60})
    profile = node_profile(found)
    assert profile.cost().seconds(0, 80) > 0 and profile.decode is not None and profile.decode.step_s(2, 100) > 0
    assert found["was_idle"] and len(found["measured"]["decode"]) == 4
    assert (found["state"]["fixed_bytes"] > 0) == (family != "Llama")
