"""The benchmark of what secrecy costs runs, and its table has what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.transport.secrecy import CASES, main


@pytest.mark.parametrize("codec", ["raw", "zstd"])
def test_a_short_run(codec: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.json"
    assert main(["--mib", "8", "--rounds", "1", "--links", "2", "--codec", codec, "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert set(report["rounds"]) == set(CASES) and report["options"]["codec"] == codec
    for (run,) in report["rounds"].values():
        assert run["goodput_gb_per_s"] > 0 and run["sender_cpu_s_per_gb"] > 0 and run["receiver_cpu_s_per_gb"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + len(CASES) and "goodput" in lines[0]
