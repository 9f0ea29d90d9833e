"""The ctls against a real daemon process, and what they print."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from common import ctl_verbs
from common.cachemetrics import cache_facts
from common.ctl_render import pairs, to_text
from common.ctl_views import peers_text, status_text
from common.fake import FakeOptions
from common.layout import numerics_differ
from common.release import version
from common.sched.prefix_index import ROWS
from common.state_cache import StateCache
from decoded.ctl.link import link_text

ROOT = Path(__file__).resolve().parents[2]
Daemon = Any  # conftest.FakeDaemon
HEAVY = (
    "torch",
    "transformers",
    "aiohttp",
    "pydantic",
    "numpy",
    "asyncio",
    "rich",
    "prometheus_client",
    "uvloop",
    "ssl",
)
BOTH = ["status", "peers", "requests", "config", "drain", "resume", "reload", "wait", "version", "profile"]
VERBS = {"prefilld": [*BOTH, "model"], "decoded": [*BOTH, "explain", "threshold"]}


def ctl(module: str, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"{module}.ctl", *args]
    full = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    return subprocess.run(command, env=full, cwd=ROOT, capture_output=True, text=True, timeout=60)


# Start-up


@pytest.mark.parametrize("module", VERBS)
def test_a_ctl_imports_nothing_heavy(module: str) -> None:
    code = (
        f"import sys\nfrom {module}.ctl.__main__ import main\n"
        "try:\n    main(['--socket', '/none', 'status'])\nfinally:\n"
        f"    print(','.join(m for m in {HEAVY!r} if m in sys.modules) or 'light')"
    )
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    print(f"{module}.ctl: {(time.perf_counter() - started) * 1e3:.0f} ms from start to exit")
    assert done.stdout == "light\n"


# Help


@pytest.mark.parametrize(("module", "verb"), [(m, v) for m, verbs in VERBS.items() for v in verbs])
def test_every_verb_explains_itself(module: str, verb: str) -> None:
    done = ctl(module, verb, "--help")
    assert done.returncode == 0
    description = done.stdout.split("\n\n")[1]
    assert len(description) > 40, description


@pytest.mark.parametrize("module", VERBS)
def test_the_help_lists_all_verbs_and_where_the_daemon_is_looked_for(module: str) -> None:
    done = ctl(module, "--help")
    for verb in VERBS[module]:
        assert f"\n    {verb} " in done.stdout
    assert "$XDG_RUNTIME_DIR" in done.stdout
    assert "exit codes: 0 done; 1" in done.stdout


@pytest.mark.parametrize(("module", "prog"), [("prefilld", "prefillctl"), ("decoded", "decodectl")])
def test_version_without_a_daemon(module: str, prog: str) -> None:
    done = ctl(module, "--version")
    assert (done.returncode, done.stdout) == (0, f"{prog} {version()}\n")


def test_a_verb_without_a_daemon_offers_no_way_to_one() -> None:
    for args in (("model", "--help"), ("model", "import", "--help")):
        done = ctl("prefilld", *args)
        assert "--json" in done.stdout
        assert "--socket" not in done.stdout
        assert "--config" not in done.stdout


@pytest.mark.parametrize(
    "args",
    [
        (),
        ("nope",),
        ("wait",),
        ("wait", "happy"),
        ("wait", "ready", "--timeout", "1m"),
        ("wait", "ready", "--timeout", "3"),
    ],
)
def test_usage_errors_exit_with_2(args: tuple[str, ...]) -> None:
    assert ctl("decoded", *args).returncode == 2


@pytest.mark.parametrize(
    "args",
    [("--max-tokens", "0"), ("--max-tokens", "1e3"), ("--rows", "1,,4"), ("--rows", "0"), ("--timeout", "30")],
)
def test_wrong_options_of_profile_are_usage_errors(args: tuple[str, str]) -> None:
    done = ctl("decoded", "profile", *args)
    assert done.returncode == 2
    assert args[0] in done.stderr


def test_a_profile_that_could_not_be_written_is_refused_before_it_is_measured(tmp_path: Path) -> None:
    for out in (tmp_path, tmp_path / "nowhere" / "p.json"):
        done = ctl("prefilld", "profile", "--out", str(out), "--socket", str(tmp_path / "no.sock"))
        assert done.returncode == 1
        assert f"--out {out} cannot be written: " in done.stderr
    assert ctl("prefilld", "profile", "--rows", "1").returncode == 2


@pytest.mark.parametrize("text", ["-1", "1.5", "INF", "many", "²"])
def test_wrong_thresholds_are_usage_errors(text: str) -> None:
    done = ctl("decoded", "threshold", "--", text)
    assert done.returncode == 2
    assert "neither a whole number of tokens >= 0 nor" in done.stderr


# Against a daemon


def test_options_stand_before_or_behind_the_verb(daemon: Daemon) -> None:
    daemon.start()
    socket, config = str(daemon.socket), str(daemon.config)
    for args in (
        ("--socket", socket, "--json", "status"),
        ("status", "--json", "--socket", socket),
        ("--json", "status", "--config", config),
        ("--config", config, "status", "--json"),
    ):
        done = ctl("decoded", *args)
        assert done.returncode == 0, done.stderr
        assert '"state": "ready"' in done.stdout


def test_verbs_with_arguments(daemon: Daemon) -> None:
    daemon.start()
    assert daemon.json("threshold") == {"threshold": 1000}
    assert daemon.json("threshold", "inf") == {"threshold": "inf"}
    assert daemon.json("threshold", "0") == {"threshold": 0}


def test_explain_shows_every_term_whole_in_blocks(daemon: Daemon) -> None:
    daemon.start()
    assert daemon.ctl("explain", "r-1").stdout.splitlines() == [
        "request_id         r-1",
        "outcome            ok",
        "num_output_tokens  4",
        "stage              finished",
        "decision:",
        "  route       local",
        "  reason      below_threshold",
        "  mode        threshold",
        "  inequality  9 <= 1000",
        "  peers:",
        "    b1  down: " + ("no route " * 9).rstrip(),
        "timing:",
        "  queue  12.3 ms",
        "  ttft   500 ms",
    ]


def test_config_shows_what_is_in_use(daemon: Daemon) -> None:
    daemon.start()
    text = daemon.ctl("config").stdout
    assert text.startswith(f"# in use by decoded; read from {daemon.config}\n")
    assert 'backend = "fake"' in text
    assert daemon.json("config")["routing"]["threshold_tokens"] == "auto"
    assert daemon.json("config")["links"]["heartbeat"] == 2.0


def test_reload_says_what_changed(daemon: Daemon) -> None:
    daemon.start()
    daemon.write(level="error")
    changed = 'log.level: "info" -> "error"'
    assert daemon.json("reload") == {"changed": [changed], "config": str(daemon.config)}
    assert daemon.ctl("reload").stdout == f"reloaded {daemon.config}: nothing changed\n"
    daemon.write(level="info")
    assert daemon.ctl("reload").stdout == f'reloaded {daemon.config}:\n  log.level: "error" -> "info"\n'


def test_a_refused_reload_lists_the_keys_and_what_helps(daemon: Daemon) -> None:
    daemon.start()
    daemon.write("[links]\nheartbeat = '1s'\n", port=1)
    done = daemon.ctl("reload")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.splitlines() == [
        "decodectl: reload refused, the old configuration stays:",
        '  links.heartbeat: "2s" -> "1s" needs a restart',
        "  http.port: 0 -> 1 needs a restart",
        "to apply what needs a restart: systemctl restart decoded",
    ]
    daemon.config.write_text("[log]\nlevl = 'info'\n")
    assert "systemctl" not in daemon.ctl("reload").stderr


def test_a_verb_the_daemon_does_not_know(daemon: Daemon) -> None:
    daemon.start()
    done = daemon.ctl("requests")
    assert done.returncode == 1
    assert done.stderr.startswith("decodectl: unknown verb 'requests'; this daemon knows bug, config, die,")


def test_drain_waits_for_requests_in_flight(daemon: Daemon) -> None:
    daemon.start(FAKE_RUNNING="1")
    late = daemon.ctl("drain", "--wait", "--timeout", "200ms")
    assert late.returncode == 1
    assert "not drained after 0.2 s; last seen: draining" in late.stderr
    command = [sys.executable, "-m", "decoded.ctl", "--socket", str(daemon.socket), "drain", "--wait"]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as waiting:
        assert daemon.json("status")["state"] == "draining"
        daemon.call("finish")
        assert waiting.wait(30) == 0
    assert daemon.ctl("wait", "drained").returncode == 0


def test_wait_ready_may_come_before_the_daemon(daemon: Daemon) -> None:
    nobody = daemon.ctl("wait", "ready", "--timeout", "200ms")
    assert nobody.returncode == 1
    assert "not ready after 0.2 s; last seen: cannot reach the daemon" in nobody.stderr
    command = [
        sys.executable,
        "-m",
        "decoded.ctl",
        "--socket",
        str(daemon.socket),
        "wait",
        "ready",
        "--timeout",
        "1min",
    ]
    with subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE) as waiting:
        daemon.start()
        assert waiting.wait(30) == 0


def test_waiting_for_a_drained_daemon_says_how_it_gets_ready(daemon: Daemon) -> None:
    daemon.start()
    assert daemon.ctl("wait", "ready").stdout == "ready\n"
    hint = "drained; `decodectl resume` takes work again"
    assert daemon.ctl("drain").stdout == f"{hint}\n"
    done = daemon.ctl("wait", "ready", "--timeout", "300ms")
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        [f"decodectl: waiting, but decoded is {hint}", "decodectl: not ready after 0.3 s; last seen: drained"],
    )


def test_wait_drained_fails_at_once_without_a_daemon(daemon: Daemon) -> None:
    done = daemon.ctl("wait", "drained")
    assert done.returncode == 1
    assert f"cannot reach the daemon at {daemon.socket} (--socket): no such socket" in done.stderr


def test_a_reader_that_leaves_is_no_error(daemon: Daemon) -> None:
    daemon.start()
    command = f"{sys.executable} -m decoded.ctl --socket {daemon.socket} config | head -1"
    done = subprocess.run(
        ["bash", "-c", command], env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""


# Without a daemon


def test_model_import_hands_over_arguments_and_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    from prefilld.ctl.__main__ import main

    seen: list[list[str]] = []

    def fake_call(command: list[str]) -> int:
        seen.append(command[1:])
        return 5

    monkeypatch.setattr(subprocess, "call", fake_call)
    assert main(["model", "import", "a.gguf", "out", "--name", "m"]) == 5
    assert main(["model", "import", "--json", "a.gguf", "out"]) == 5
    assert main(["--json", "model", "import", "a.gguf", "out"]) == 5
    module = ["-m", "common.engine.importer"]
    assert seen == [
        [*module, "--name", "m", "--", "a.gguf", "out"],
        [*module, "--json", "--", "a.gguf", "out"],
        [*module, "--json", "--", "a.gguf", "out"],
    ]


@pytest.mark.parametrize(("body", "code"), [("sys.exit(7)", 7), ("pass", 0), ("os.kill(os.getpid(), 9)", 137)])
def test_a_childs_exit_code_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, code: int) -> None:
    (tmp_path / "child_for_test.py").write_text(f"import os, sys\n{body}\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert ctl_verbs.run_child("child_for_test", []) == code


# Rendering


def test_text_of_nested_data_and_tables() -> None:
    data = {
        "state": "ready",
        "uptime_s": 7380,
        "num_running": 1234,
        "is_healthy": True,
        "model": {"name": "m", "state_bytes": 3 << 20, "rate_bps": 5e7},
        "empty": {},
        "tokens_per_s": 12.3456,
        "peers": [{"name": "a", "rtt_s": 0.01, "links": [1, 2]}, {"name": "bb", "why": None}],
        "last": "",
    }
    assert to_text(data).splitlines() == [
        "state         ready",
        "uptime        2 h 03 min",
        "num_running   1,234",
        "is_healthy    yes",
        "model:",
        "  name   m",
        "  state  3.00 MiB",
        "  rate   50.0 Mbit/s",
        "empty         -",
        "tokens_per_s  12.35",
        "peers:",
        "  name      rtt  links  why",
        "  a     10.0 ms  1, 2     -",
        "  bb          -  -        -",
        "last          -",
    ]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ([], "(none)"),
        ({"peers": []}, "(none)"),
        ([{"a": 1}], "a\n1"),
        ({"peers": [{"a": "x"}]}, "a\nx"),
        ([{"a": "x" * 60}], "a\n" + "x" * 45 + "..."),
        ([{"a": {"k": 1, "n_bytes": 2048}}], "a\nk=1 n_bytes=2.00 KiB"),
        (
            {"held_bytes": {"full": 2048, "window": 0}, "bytes_in": 1024},
            "held:\n  full    2.00 KiB\n  window  0 B\nbytes_in  1.00 KiB",
        ),
        ({"state": "ready", "state_bytes": 5}, "state        ready\nstate_bytes  5 B"),
        ({"tokens": 2000000.0}, "tokens  2,000,000"),
        ("plain", "plain"),
        (None, "-"),
        ({}, ""),
    ],
)
def test_text_of_other_replies(data: Any, text: str) -> None:
    assert to_text(data) == text


def test_peers_fit_a_terminal_and_keep_the_reason_whole() -> None:
    reason = "cannot connect to b1.example.net:7400: " + "no route to host " * 5
    busy = {"name": "b1", "address": "203.0.113.17:7400", "state": "ready", "reason": "", "num_links": 5, "rtt_s": 0.04}
    busy |= {"num_streams": 12, "bytes_in": 3 << 40, "bytes_out": 5 << 20, "delivery_bps": 4.7e7, "codec": "zstd"}
    down = {**busy, "name": "b2", "state": "incompatible", "reason": reason, "rtt_s": None, "identity": {"x": "y" * 99}}
    lines = peers_text([busy, down]).splitlines()
    assert lines[0].split() == ["name", "state", "address", "links", "streams", "rtt", "in", "out", "rate", "reason"]
    assert lines[1].split("  ")[-1] == "47.0 Mbit/s"
    assert lines[2].endswith(f"  {reason.rstrip()}")
    assert max(len(line) for line in lines[:2]) <= 110
    assert peers_text([]) == "(none)"
    assert peers_text([{"name": "a"}]) == "name\na"


def test_bytes_of_a_link_bench_are_called_so() -> None:
    text = link_text({"peer": "b1", "goodput_bps": 1e9, "num_bytes": 64 << 20, "seconds": 0.5, "num_data_links": 1})
    assert [line.split() for line in text.splitlines()][1:3] == [["goodput", "1.00", "Gbit/s"], ["sent", "64.0", "MiB"]]


def test_what_was_stored_is_not_taken_for_what_is_held() -> None:
    layout = FakeOptions().layout()
    facts = cache_facts(StateCache(layout, {ROWS: 1 << 20}))
    text = "\n".join(pairs(facts | {"stored_since_start_bytes": {"rows": 5 << 20}}))
    assert facts["stored_since_start_bytes"] == {} and "stored_since_start:\n  rows  5.00 MiB" in text


def test_reload_says_what_becomes_of_requests() -> None:
    assert "is removed was computing is computed again" in ctl_verbs.reload("decoded").description
    assert ctl_verbs.reload("prefilld").description.endswith("Requests in flight go on.")
    for daemon in ("decoded", "prefilld"):
        for verb in (ctl_verbs.reload(daemon), ctl_verbs.peers(daemon)):
            assert max(map(len, verb.description.splitlines())) <= 120


def test_peers_say_when_tokens_depend_on_the_route() -> None:
    differ = numerics_differ({"weights": "exact", "dtype": "float32"}, {"weights": "int8", "dtype": "float32"})
    lines = peers_text([{"name": "b1", "state": "ready", "reason": "", "numerics_differ": differ}]).splitlines()
    assert lines[1] == "b1    ready  numerics differ (ours/theirs): weights exact/int8"
    both = {"name": "a1", "state": "ready", "numerics_differ": differ, "egress_note": "egress.share holds once"}
    assert peers_text([both]).splitlines()[1].endswith("weights exact/int8; egress.share holds once")
    down = {"name": "b1", "state": "down", "reason": "gone", "numerics_differ": differ}
    assert peers_text([down]).splitlines()[1].endswith("  gone")


def test_only_telling_numerics_differ() -> None:
    """Weights kept exactly by either kind of product are the same, and so is what one end does not tell."""
    ours = {"weights": "torch", "dtype": "float32", "threads": "1", "device": "cpu"}
    assert numerics_differ(ours, {"weights": "exact", "threads": "8", "device": "cuda", "kv_dtype": "float16"}) == {}
    assert list(numerics_differ(ours, {"weights": "int8", "dtype": "bfloat16"})) == ["weights", "dtype"]


def test_status_says_nothing_twice() -> None:
    data = {"state": "ready", "is_ready": True, "why": "ready", "state_bytes": {}, "uptime_s": 42.8}
    assert status_text(data) == "state         ready\nstate_memory  0 B\nuptime        42.80 s"
    data = {"state": "ready", "is_healthy": False, "is_ready": False, "why": "stalled", "state_bytes": {"full": 2048}}
    assert status_text(data).splitlines() == [
        "state       ready",
        "is_healthy  no",
        "is_ready    no",
        "why         stalled",
        "state_memory:",
        "  full  2.00 KiB",
    ]
