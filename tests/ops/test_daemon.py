"""The life cycle, with real processes, signals and a real notification socket."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.config import parse_text
from common.config_machine import threads_warning
from common.daemon import apply_cpu_settings, parse_fake_peer
from common.errors import StartupError
from common.sdnotify import restart_command
from decoded.config import DecodeConfig

ROOT = Path(__file__).resolve().parents[2]
Daemon = Any  # conftest.FakeDaemon


def program(*args: str, module: str = "decoded", **env: str) -> subprocess.CompletedProcess[str]:
    full = {**os.environ, "PYTHONPATH": str(ROOT), **env}
    command = [sys.executable, "-m", module, *args]
    return subprocess.run(command, env=full, cwd=ROOT, capture_output=True, text=True, timeout=60)


# Arguments, --check, --print-config


def test_closed_standard_streams_are_opened_first() -> None:
    """Else the event loop's descriptors would take their numbers, and a warning would end the process."""
    text = "import os, sys; from common.daemon import open_standard_streams as o; o(); sys.stderr.write('x');"
    text += "print([os.readlink(f'/proc/self/fd/{n}') for n in (0, 2)])"
    done = subprocess.run(
        [sys.executable, "-c", text],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: (os.close(0), os.close(2)),
    )
    assert (done.returncode, done.stdout) == (0, "['/dev/null', '/dev/null']\n")


@pytest.mark.parametrize("module", ["prefilld", "decoded"])
def test_help_says_what_signals_and_exit_codes_mean(module: str) -> None:
    done = program("--help", module=module)
    assert done.returncode == 0
    for word in ("--config", "--check", "--print-config", "--fake-peer", "SIGHUP", "SIGTERM", "78 configuration"):
        assert word in done.stdout


def test_usage_errors_exit_with_2(tmp_path: Path) -> None:
    assert program("--nope").returncode == 2
    done = program("--fake-peer", "50,40ms")
    assert done.returncode == 2
    assert "'50' has no unit" in done.stderr


def test_check_lists_every_problem_and_exits_with_78(tmp_path: Path) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[log]\nlevl = 'info'\n[http]\nport = 'x'\n")
    for args in (["--check"], []):
        done = program("--config", str(config), *args)
        assert done.returncode == 78
        assert f"decoded: 3 problems in {config}:" in done.stderr
        assert "  log.levl: unknown key; did you mean 'level'? (line 2)" in done.stderr
        assert "  http.port: should be a valid integer (got 'x') (line 4)" in done.stderr
        assert '  model.path: is required when engine.backend is "local"' in done.stderr


@pytest.mark.parametrize("module", ["prefilld", "decoded"])
def test_check_of_a_right_one(tmp_path: Path, module: str) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[engine]\nbackend = 'fake'\n")
    done = program("--config", str(config), "--check", module=module)
    assert (done.returncode, done.stdout) == (0, f"{module}: {config} is valid\n")


def test_more_threads_than_cores_are_a_warning(tmp_path: Path, model_dir: Path) -> None:
    """Both values are named; it starts all the same."""
    config = tmp_path / "c.toml"
    core = min(os.sched_getaffinity(0))
    socket = f"[control]\nsocket = '{tmp_path / 'c.sock'}'\n"
    config.write_text(f"{socket}[model]\npath = '{model_dir}'\n[engine]\nthreads = 3\ncpus = [{core}]\n")
    done = program("--config", str(config), "--check")
    assert (done.returncode, done.stdout) == (0, f"decoded: {config} is valid\n")
    assert done.stderr.startswith(f"decoded: warning: engine.threads = 3 but engine.cpus are 1 ({core}): ")
    text = config.read_text()
    config.write_text(text.replace("threads = 3", "threads = 1"))
    assert program("--config", str(config), "--check").stderr == ""
    config.write_text(text.replace("threads = 3", "threads = 999"))
    started = program("--config", str(config))  # this model cannot be loaded
    assert "warning common.lifecycle engine.threads = 999 but engine.cpus are 1" in started.stderr
    assert started.returncode == 3
    wide = "engine.threads = 999 but the cores that this process may use are "
    assert threads_warning(999, ()).startswith(wide) and threads_warning(1, ()) == ""


@pytest.mark.parametrize("module", ["prefilld", "decoded"])
def test_print_config_reads_back_unchanged(tmp_path: Path, module: str) -> None:
    first = program("--config", str(ROOT / "conf" / f"{module}.toml"), "--print-config", module=module)
    assert first.returncode == 0
    again = tmp_path / "again.toml"
    again.write_text(first.stdout)
    second = program("--config", str(again), "--print-config", module=module)
    assert second.stdout.split("\n\n", 1)[1] == first.stdout.split("\n\n", 1)[1]


def test_print_config_without_a_file_shows_the_defaults() -> None:
    done = program("--print-config")
    assert done.returncode == 0
    assert "[routing]" in done.stdout
    assert 'heartbeat = "2s"' in done.stdout


def test_a_foreign_common_package_is_refused_by_name(tmp_path: Path) -> None:
    foreign = tmp_path / "common"
    foreign.mkdir()
    (foreign / "__init__.py").write_text("")
    start = "import runpy, sys; sys.path.insert(0, sys.argv.pop(1)); runpy.run_module(sys.argv[1], run_name='__main__')"
    programs = {"decoded": "decoded", "prefilld": "prefilld", "decoded.ctl": "decodectl", "prefilld.ctl": "prefillctl"}
    for module, name in programs.items():
        done = subprocess.run(
            [sys.executable, "-c", start, str(tmp_path), module],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 3
        assert done.stderr.startswith(f"{name}: {foreign}/__init__.py would be imported as 'common'")


@pytest.mark.parametrize("text", ["50Mbit/s", "50Mbit/s,40", ",", "50Mbit/s,40ms,1", "x,0"])
def test_wrong_fake_peers(text: str) -> None:
    with pytest.raises(Exception, match=r"unit|RATE,RTT|is not a"):
        parse_fake_peer(text)


# Exit codes


@pytest.mark.parametrize(
    ("start", "code", "says"),
    [
        ("startup", 3, "cannot start: no weights in /nowhere"),
        ("oserror", 3, "cannot start: [Errno 98] Address already in use"),
        ("config", 78, "model.path: tampered"),
    ],
)
def test_exit_codes_of_a_failed_start(daemon: Daemon, start: str, code: int, says: str) -> None:
    daemon.start(ready=False, FAKE_START=start)
    assert daemon.wait() == code
    assert says in daemon.log_text()
    assert "stop called" in daemon.log_text()
    assert not daemon.socket.exists()
    assert "Traceback" not in daemon.log_text()


def test_a_bug_while_starting_stops_what_was_started(daemon: Daemon) -> None:
    daemon.start(ready=False, FAKE_START="bug")
    assert daemon.wait() == 1
    assert "stop called" in daemon.log_text()
    assert "KeyError: 'a bug'" in daemon.log_text()


def test_a_second_daemon_on_the_same_socket_exits_with_3(daemon: Daemon) -> None:
    daemon.start()
    first = daemon.process
    daemon.start(ready=False)
    assert daemon.wait() == 3
    assert f"belongs to a running daemon (pid {first.pid})" in daemon.log_text()
    daemon.process = first
    assert daemon.json("status")["state"] == "ready"


def test_after_a_kill_the_socket_is_taken_over(daemon: Daemon) -> None:
    daemon.start()
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    assert daemon.socket.exists()
    daemon.start()
    assert daemon.json("status")["state"] == "ready"


def test_a_dead_engine_ends_the_process_with_1(daemon: Daemon) -> None:
    daemon.start(FAKE_RUNNING="1")
    daemon.call("die")
    assert daemon.wait() == 1
    assert "cannot go on: the engine thread ended" in daemon.log_text()
    assert "draining" not in daemon.log_text()


# Signals


def test_sigterm_drains_then_stops_with_0(daemon: Daemon) -> None:
    daemon.start(FAKE_RUNNING="1")
    daemon.signal(signal.SIGTERM)
    stopping = daemon.notify.wait_for("STOPPING")
    assert stopping["STATUS"] == "draining, up to 20 s"
    assert int(daemon.notify.wait_for("EXTEND_TIMEOUT_USEC")["EXTEND_TIMEOUT_USEC"]) > 20e6
    assert daemon.json("status")["state"] == "draining"
    refused = daemon.ctl("resume")
    assert (refused.returncode, refused.stderr) == (1, "decodectl: resume: decoded is draining\n")
    # Nothing may end while a request runs; the request's end ends the drain. `finish` is no verb of an ending daemon,
    # so the service is told by its own signal.
    daemon.signal(signal.SIGUSR1)
    assert daemon.wait() == 0
    assert "stop called" in daemon.log_text()
    assert not daemon.socket.exists()


def test_an_idle_daemon_stops_at_once(daemon: Daemon) -> None:
    daemon.start()
    daemon.signal(signal.SIGINT)
    assert daemon.wait() == 0


def test_a_second_signal_does_not_wait_and_says_so_in_the_exit_code(daemon: Daemon) -> None:
    daemon.start(FAKE_RUNNING="1")
    daemon.signal(signal.SIGTERM)
    daemon.notify.wait_for("STOPPING")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 1
    assert "requests in flight are cancelled" in daemon.log_text()
    assert "stop called" in daemon.log_text()


def test_drain_timeout_is_an_orderly_end(daemon: Daemon) -> None:
    daemon.write(drain="100ms")
    daemon.start(FAKE_RUNNING="1")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0


def test_sigterm_while_the_model_loads_does_not_wait_for_it(daemon: Daemon) -> None:
    daemon.start(ready=False, FAKE_START="load")
    while "loading for ever" not in daemon.log.read_text():
        assert daemon.process.poll() is None
    daemon.signal(signal.SIGTERM)
    assert daemon.process.wait(5) == 0
    log = daemon.log_text()
    assert "told to stop while starting" in log
    assert "stop called" in log
    assert "in time" not in log
    assert not daemon.socket.exists()


def test_sigterm_while_starting(daemon: Daemon) -> None:
    daemon.start(ready=False, FAKE_START="hang")
    assert wait_for_state(daemon) == "starting"
    refused = daemon.ctl("peers")
    assert (refused.returncode, refused.stderr) == (1, "decodectl: peers: decoded is still starting\n")
    daemon.signal(signal.SIGTERM)
    assert daemon.wait() == 0
    assert "stop called" in daemon.log_text()
    assert not any("READY" in message for message in daemon.notify.drain_now())


def wait_for_state(daemon: Daemon) -> str:
    done = daemon.ctl("wait", "drained", "--timeout", "0")
    while "cannot reach" in done.stderr:
        done = daemon.ctl("wait", "drained", "--timeout", "0")
    return str(done.stderr.strip().rsplit(" ", 1)[1])


# Reload


def test_sighup_applies_a_good_configuration(daemon: Daemon) -> None:
    daemon.start()
    daemon.write("[[peers]]\nname = 'new'\naddress = '127.0.0.1:1'\n", level="debug")
    daemon.signal(signal.SIGHUP)
    reloading = daemon.notify.wait_for("RELOADING", "1")
    assert int(reloading["MONOTONIC_USEC"]) > 0
    daemon.notify.wait_for("READY", "1")
    assert [p["name"] for p in daemon.json("peers")] == ["new"]
    assert daemon.json("config")["log"]["level"] == "debug"
    assert 'log.level: "info" -> "debug"' in daemon.log_text().replace('\\"', '"')


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[log]\nlevel = 'loud'\n", "log.level: should be"),
        ("[[", "not valid TOML"),
        ("[engine]\nbackend = 'fake'\n[http]\nport = 1\n", "http.port: 0 -> 1 needs a restart"),
    ],
)
def test_sighup_with_a_wrong_one_keeps_the_old_and_says_why(daemon: Daemon, text: str, says: str) -> None:
    daemon.start()
    before = daemon.json("config")
    daemon.config.write_text(text)
    daemon.signal(signal.SIGHUP)
    daemon.notify.wait_for("RELOADING", "1")
    assert daemon.notify.wait_for("READY", "1")["STATUS"] == "ready; the last reload was refused"
    refused = daemon.ctl("reload")
    assert refused.returncode == 1
    assert says in refused.stderr
    assert daemon.json("config") == before
    assert daemon.log_text().count("reload refused, the old configuration stays") == 2
    assert daemon.log_text().count(says) == 2


def test_reload_after_the_file_is_gone(daemon: Daemon) -> None:
    daemon.start()
    daemon.config.unlink()
    refused = daemon.ctl("reload")
    assert refused.returncode == 1
    assert "cannot be read: No such file or directory" in refused.stderr
    assert daemon.json("status")["state"] == "ready"


def test_what_restarts_a_daemon_depends_on_who_started_it() -> None:
    assert restart_command("decoded", {"HOME": "/x", "NOTIFY_SOCKET": ""}) == "restart the daemon"
    for name in ("NOTIFY_SOCKET", "INVOCATION_ID"):
        assert restart_command("decoded", {name: "x"}) == "systemctl restart decoded"


# Watchdog


def test_the_watchdog_is_fed_only_while_the_service_is_healthy(daemon: Daemon) -> None:
    daemon.start(WATCHDOG_USEC="300000")
    daemon.notify.wait_for("WATCHDOG", "1")
    daemon.notify.wait_for("WATCHDOG", "1")
    daemon.call("sick")
    daemon.notify.wait_for("STATUS", "ready, unhealthy: no progress, the watchdog starves")
    with pytest.raises(AssertionError, match="no WATCHDOG=None within"):
        daemon.notify.wait_for("WATCHDOG", timeout_s=0.5)
    assert daemon.json("status")["state"] == "ready"
    daemon.call("sick", healthy=True)
    daemon.notify.wait_for("WATCHDOG", "1")
    daemon.notify.wait_for("STATUS", "ready")
    assert " error common.lifecycle unhealthy" in daemon.log_text()


def test_no_watchdog_for_another_process(daemon: Daemon) -> None:
    daemon.start(WATCHDOG_USEC="30000", WATCHDOG_PID="1")
    daemon.json("status")
    assert not any("WATCHDOG" in message for message in daemon.notify.drain_now())


# CPU settings, --fake-peer


def test_cpu_settings_and_fake_peer_reach_the_service(daemon: Daemon) -> None:
    core = max(os.sched_getaffinity(0))
    text = daemon.config.read_text()
    daemon.config.write_text(text.replace('"fake"\n', f'"fake"\ncpus = [{core}]\n'))
    daemon.start("--fake-peer", "50Mbit/s,40ms")
    status = daemon.json("status")
    assert status["cpus"] == [core]
    assert status["omp"] == "1"
    assert status["fake_peer"] == [5e7, 0.04]


def test_cpu_settings_come_before_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", object())
    config = parse_text("[engine]\nbackend = 'fake'", DecodeConfig)
    with pytest.raises(StartupError, match="torch was imported before"):
        apply_cpu_settings(config.engine)


def test_the_life_cycle_imports_no_torch() -> None:
    code = (
        "import sys, common.lifecycle, common.daemon, common.control, common.logs, common.metrics, decoded.config\n"
        "import prefilld.__main__, decoded.__main__\n"
        "sys.exit(','.join(m for m in ('torch', 'transformers', 'numpy', 'aiohttp') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == "\n" or done.stderr == ""
