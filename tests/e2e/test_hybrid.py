"""Hybrid models through real daemons: latents, recurrent states, windows and sinks cross the wire as K and V do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cluster import running_cluster
from tests.e2e.test_exact import ask as ask_all
from tests.e2e.test_exact import check_routes, prompts_of, reference, texts
from tests.engine.families import FAMILIES

# KDA + MLA; Mamba 2 and attention in one layer; windows, sinks and experts; recurrent state only.
SLOW = ("MiMoV2Flash", "FalconH1", "Mamba2")
SERVED = ["KimiLinear", *(pytest.param(f, marks=pytest.mark.slow) for f in SLOW)]
LENGTHS = [1, 2, 64, 65, 257, 258, 700]


@pytest.fixture(scope="module")
def import_family(smollm2_dir, tmp_path_factory):
    """Makes a served model directory of a family with tiny random weights and SmolLM2's tokenizer."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        family = FAMILIES[name]
        sizes = {"vocab_size": 49152, "max_position_embeddings": 4096, "eos_token_id": 2}
        model = type(family)(family.name, family.known_as, family.formula, family.extra | sizes).model()
        model.save_pretrained(folder / "source")
        for file in smollm2_dir.glob("tokenizer*"):
            shutil.copy(file, folder / "source")
        command = [sys.executable, "-m", "prefilld.ctl", "model", "import", folder / "source", folder / "served"]
        subprocess.run([str(part) for part in command], check=True, capture_output=True)
        return folder / "served"

    return make


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
