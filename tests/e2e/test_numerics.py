"""Daemons that compute one model otherwise: said once in each log and by `peers`."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.cluster import Daemon, running_cluster

WARNING = "numerics differ (ours/theirs): weights"


def warnings_of(daemon: Daemon) -> list[str]:
    """The log's lines about it, waited for."""
    deadline = time.monotonic() + 10
    while not (found := [n for n in daemon.log_path.read_text().splitlines() if WARNING in n]):
        assert time.monotonic() < deadline, "no warning"
        time.sleep(0.1)
    return found


def test_other_weights_are_a_warning_once_and_shown_by_peers(smollm2_dir: Path) -> None:
    with running_cluster(smollm2_dir, prefilld={"engine": {"weights": "int8"}}) as c:
        prefilld = c.prefillds[0]
        (ours,), (theirs,) = c.decoded.ctl("peers"), prefilld.ctl("peers")
        assert ours["state"] == "ready"
        assert ours["numerics_differ"] == {"weights": {"ours": "exact", "theirs": "int8"}}
        assert theirs["numerics_differ"] == {"weights": {"ours": "int8", "theirs": "exact"}}
        time.sleep(1.5)  # several looks at the sessions
        for daemon in (c.decoded, prefilld):
            (line,) = warnings_of(daemon)
            assert " warning " in line and "peer=" in line
