"""What one seed is made of: how the daemons are configured, what lies between them, what is asked, what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from common.net.options import LinkOptions
from tests.faultsim import engine
from tests.faultsim.faults import CACHE_KINDS, Fault, draw_faults
from tests.faultsim.nodes import Plan
from tests.faultsim.transport import Way
from tests.faultsim.users import Want

CACHED_SHARE = 0.12
"""Of the seeds in which daemons have prefix caches."""


@dataclass
class Script:
    """A whole run. Drawn from a seed, or written by a test. `ways`: one for each pair of a decoded and a prefilld."""

    plan: Plan
    num_prefillds: int = 1
    num_decodeds: int = 1
    ways: Sequence[Way] = (Way(),)
    wants: list[Want] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    is_uvloop: bool = True
    executor_s: float = 0.0
    """How long another thread takes at most to begin or to end a piece of work."""
    inline_bytes: int | None = None
    """Segments above are encoded and verified by other threads; None: what the product says."""


def draw(seed: int) -> Script:
    """The script of a seed."""
    rng = random.Random(seed)
    plan = _plan(rng)
    num_prefillds = 2 if rng.random() < 0.2 else 1
    num_decodeds = 2 if rng.random() < 0.1 else 1
    is_storm = rng.random() < 0.025
    num_faults = rng.randrange(5, 10) if is_storm else rng.choice((0, 1, 1, 2, 2, 3, 4))
    num_wants = rng.randrange(4, 7) if is_storm else rng.choice((1, 1, 2, 2, 3))
    script = Script(
        plan=plan,
        num_prefillds=num_prefillds,
        num_decodeds=num_decodeds,
        ways=[_way(rng) for _ in range(num_prefillds * num_decodeds)],
        wants=[_want(rng, n, plan, num_decodeds, num_prefillds) for n in range(num_wants)],
        faults=draw_faults(rng, num_faults, plan.options.lease_s),
        is_uvloop=rng.random() < 0.7,
        executor_s=rng.choice((0.0, 0.002, 0.05)),
        inline_bytes=rng.choice((None, None, 0)),
    )
    chance = _chance_of_caches(seed)
    return _with_due_times(
        random.Random(f"due times of {seed}"), script if chance is None else _with_caches(chance, script)
    )


def _with_due_times(rng: random.Random, script: Script) -> Script:
    """The same where half of what is asked for is due at some time."""
    wants = [replace(w, due_s=rng.choice((None, None, None, None, 0.0, 0.2, 1.0, 5.0))) for w in script.wants]
    return replace(script, wants=wants)


def has_caches(seed: int) -> bool:
    """Whether daemons have prefix caches in that seed."""
    return _chance_of_caches(seed) is not None


def _chance_of_caches(seed: int) -> random.Random | None:
    """Chance of its own for what a seed with caches has beyond the others."""
    rng = random.Random(f"caches of {seed}")
    return rng if rng.random() < CACHED_SHARE else None


def _with_caches(rng: random.Random, script: Script) -> Script:
    """The same with prefix caches at the prefillds, large or small, often at the decodeds too; prompts begin alike."""
    plan = replace(
        script.plan, cache_blocks=rng.choice((2, 4, 64, 64)), own_cache_blocks=rng.choice((0, 0, 4, 64)), push="always"
    )
    wants = script.wants + [
        _want(rng, len(script.wants) + n, plan, script.num_decodeds, script.num_prefillds)
        for n in range(rng.choice((1, 1, 2)))
    ]
    cleared = [Fault(rng.choice(CACHE_KINDS), rng.randrange(1, 150), 0.0, 0.0) for _ in range(rng.choice((0, 0, 1, 3)))]
    return replace(script, plan=plan, wants=[_alike(rng, want) for want in wants], faults=script.faults + cleared)


def _alike(rng: random.Random, want: Want) -> Want:
    """A request for a prompt that others may have begun, of a tenant of whom there are two."""
    num_tokens = rng.choice((40, 70, 100, 150, 200))
    start = rng.choice((0, 0, num_tokens // 2, 64, 65, num_tokens - 1)) if want.kind == "bare" else 0
    start = min(start, num_tokens - 1)
    return replace(
        want,
        num_tokens=num_tokens,
        start=start,
        pushes=start > 0 and rng.random() < 0.7,
        stem=rng.choice((0, 0, 0, 1)),
        tenant=rng.choice(("", "", "", "other")),
        after_s=rng.choice((want.after_s, 2.5 * rng.random())),
    )


def _want(rng: random.Random, number: int, plan: Plan, num_decodeds: int, num_prefillds: int) -> Want:
    num_tokens = rng.choice((1, 5, 30, 60, 100, 150))
    is_bare = rng.random() < 0.6
    start = rng.choice((0, 0, 0, num_tokens // 2, num_tokens // 2, num_tokens - 1)) if is_bare else 0
    if is_bare and rng.random() < 0.02:
        start = num_tokens  # nothing to compute
    return Want(
        f"r{number}",
        "bare" if is_bare else "whole",
        decoded=rng.randrange(num_decodeds),
        peer=rng.randrange(num_prefillds),
        after_s=rng.choice((0.0, 0.0, 0.3, 1.5)) * rng.random(),
        num_tokens=num_tokens,
        start=start,
        deadline_s=rng.choice((0.1, 0.6, 3.0, 20.0)) if rng.random() < 0.3 else None,
        cancel_s=rng.choice((0.0, 0.05, 0.3, 1.0)) * rng.random() if rng.random() < 0.15 else None,
        num_output=rng.choice((1, 1, 1, 4)),
        pushes=0 < start < num_tokens and rng.random() < 0.6,
        codec="zstd" if plan.model.is_plain else rng.choice(("raw", "zstd")),
    )


def _plan(rng: random.Random) -> Plan:
    heartbeat_s = rng.choice((0.5, 1.0, 1.0, 2.0))
    options = LinkOptions(
        data_links=rng.choice((1, 1, 1, 2, 2, 3)),
        heartbeat_s=heartbeat_s,
        lease_s=heartbeat_s * rng.choice((1.5, 6, 8)),
        piece_bytes=rng.choice((4096, 4096, 8192)),
        max_segment_bytes=rng.choice((4096, 8192, 32768)),
        credit_bytes=rng.choice((4096, 12000, 1 << 20)),
        connect_timeout_s=rng.choice((2.5, 5.0)),
        gone_after_s=rng.choice((0.3, 2.0)),
        codec="zstd",
        reconnect_min_s=0.05,
        reconnect_max_s=1.0,
        max_streams=rng.choice((2, 64, 64, 64)),
    )
    # The ends are configured apart; both keep to the smaller limit, and to the longer patience.
    server_options = replace(
        options,
        heartbeat_s=rng.choice((heartbeat_s, 1.0)),
        lease_s=rng.choice((options.lease_s, 12.0)),
        piece_bytes=rng.choice((4096, 8192)),
        max_segment_bytes=rng.choice((options.max_segment_bytes, 8192)),
    )
    return Plan(
        options=options,
        server_options=server_options,
        model=_model(rng),
        prefill_tokens_per_s=rng.choice((200.0, 1000.0, 20000.0)),
        max_staged_bytes=rng.choice((4096, 20000, 1 << 20)),
        progress_timeout_s=rng.choice((2.0, 8.0, 8.0)),
        max_running=rng.choice((1, 4)),
        max_queued=rng.choice((0, 4, 4)),
        fallback_tokens_per_s=rng.choice((0.0, 50.0, 2000.0)),
        max_attempts=rng.choice((1, 2)),
        max_admitted=rng.choice((1, 8)),
        is_traced=rng.random() < 0.03,
        push=rng.choice(("always", "always", "never")),
        is_sealed=rng.random() < 0.3,
    )


def _model(rng: random.Random) -> engine.Model:
    return engine.Model(
        num_layers=rng.choice((1, 2, 3)),
        window_layers=rng.choice((0, 0, 1)),
        head_dim=rng.choice((8, 32)),
        kv_dtype=rng.choice(("float32", "bfloat16")),
        is_plain=rng.random() < 0.4,
        chunk_tokens=rng.choice((16, 32, 64)),
    )


def _way(rng: random.Random) -> Way:
    latency_s = rng.choice((0.0002, 0.005, 0.03, 0.08))
    return Way(
        latency_s=latency_s,
        jitter_s=latency_s * rng.choice((0.0, 0.3, 2.0)),
        rate=rng.choice((30e3, 300e3, 1e8)),
        capacity=rng.choice((3000, 16384, 1 << 17)),
        burst=rng.choice((1400, 9000, 1 << 16)),
        detours=rng.choice((0.0, 0.0, 0.3)),
        split=rng.choice((0.0, 0.1, 0.4)),
        high_water=rng.choice((2048, 16384, 1 << 20)),
    )
