"""Hybrid models through real daemons: latents, recurrent states, windows and sinks cross the wire as K and V do."""

from __future__ import annotations

import pytest

from benchmarks.cluster import running_cluster
from tests.e2e.test_exact import ask as ask_all
from tests.e2e.test_exact import check_routes, prompts_of, reference, texts

# KDA + MLA; Mamba 2 and attention in one layer; windows, sinks and experts; recurrent state only.
SLOW = ("MiMoV2Flash", "FalconH1", "Mamba2")
SERVED = ["KimiLinear", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)]
LENGTHS = [1, 2, 64, 65, 257, 258, 700]


@pytest.mark.parametrize("name", SERVED)
async def test_remote_equals_local_equals_generate(import_family, name):
    model_dir = import_family(name)
    prompts = prompts_of(model_dir, LENGTHS)
    expected = reference(model_dir, prompts)
    with running_cluster(model_dir, prefilld={"engine": {"chunk_tokens": 96}}) as cluster:
        for route in ("local", "remote"):
            answers = await ask_all(cluster, prompts, route)
            check_routes(answers, prompts, route)
            assert dict(zip(LENGTHS, texts(answers), strict=True)) == dict(zip(LENGTHS, expected, strict=True)), route
        options = {"max_tokens": 16, "temperature": 0.9, "seed": 5, "n": 4}
        local = await ask_all(cluster, prompts[-2:], "local", **options)
        remote = await ask_all(cluster, prompts[-2:], "remote", **options)
        for a, b in zip(local, remote, strict=True):
            assert [c["text"] for c in a["choices"]] == [c["text"] for c in b["choices"]]
            assert len({c["text"] for c in a["choices"]}) > 1
