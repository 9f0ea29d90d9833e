"""What a reload takes over and what it refuses, with the real daemons and the fake engine."""

from __future__ import annotations

import os
import subprocess
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cluster import Cluster, Daemon, http_status, running_cluster

FAKE = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 0, "decode_tokens_per_s": 0}}
SECRET = "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "INVOCATION_ID"):
        monkeypatch.delenv(name, raising=False)


def secret_file(path: Path, text: str) -> str:
    path.touch(mode=0o600)
    path.write_text(text)
    return str(path)


def refusal(daemon: Daemon) -> list[str]:
    with pytest.raises(subprocess.CalledProcessError) as refused:
        daemon.ctl("reload")
    head, *lines = refused.value.stderr.decode().splitlines()
    assert head.endswith("reload refused, the old configuration stays:")
    return [line.strip() for line in lines]


def status_with(cluster: Cluster, key: str) -> int:
    try:
        cluster.post("/v1/completions", {"prompt": [1, 2], "max_tokens": 1}, {"Authorization": f"Bearer {key}"})
    except urllib.error.HTTPError as error:
        return http_status(error)[0]
    return 200


def test_api_keys_come_and_go_by_reload(tmp_path: Path) -> None:
    keys = tmp_path / "api.keys"
    http = {"api_key_file": secret_file(keys, "sk-old\nsk-kept\n")}
    with running_cluster(None, num_prefillds=0, decoded={**FAKE, "http": http}) as c:
        reload = c.decoded.ctl
        assert [status_with(c, key) for key in ("sk-old", "sk-kept", "sk-new")] == [200, 200, 401]
        assert reload("reload")["changed"] == []
        keys.write_text("sk-kept\nsk-new\n")
        assert reload("reload")["changed"] == ["http.api_key_file: 1 key added, 1 removed"]
        assert [status_with(c, key) for key in ("sk-old", "sk-kept", "sk-new")] == [401, 200, 200]
        keys.write_text("# nobody\n")
        assert refusal(c.decoded)[0].startswith(f"http.api_key_file: {keys} holds no key")
        assert [status_with(c, key) for key in ("sk-old", "sk-kept", "sk-new", "")] == [401, 200, 200, 401]
        assert "sk-" not in c.decoded.log_path.read_text()


def test_shared_keys_change_one_daemon_after_another(tmp_path: Path) -> None:
    """Each has a file of its own; after every step decoded knows its peer by another name, so that it connects anew."""
    old, new = SECRET, SECRET[::-1]
    files = {who: secret_file(tmp_path / f"{who}.key", old) for who in ("prefilld", "decoded")}
    previous = secret_file(tmp_path / "previous.key", old)
    never_here = {"routing": {"mode": "remote-only"}, "fallback": {"local_prefill_tokens_per_s": 0}}
    config = {who: {**FAKE, "security": {"key_file": file}} for who, file in files.items()}
    with running_cluster(None, decoded={**config["decoded"], **never_here}, prefilld=config["prefilld"]) as c:
        prefilld, decoded = c.prefillds[0], c.decoded

        def step(daemon: Daemon, key: str, *, keeps_old: bool) -> list[str]:
            file = files["decoded" if daemon is decoded else "prefilld"]
            Path(file).write_text(key + "\n")  # a line end is no part of it
            daemon.config["security"] = {"key_file": file, **({"previous_key_file": previous} if keeps_old else {})}
            daemon.write_config()
            changed = [line.split(":")[0] for line in daemon.ctl("reload")["changed"]]
            decoded.config["peers"] = [{**decoded.config["peers"][0], "name": f"p{time.monotonic_ns()}"}]
            decoded.write_config()
            decoded.ctl("reload")
            c.wait_peers()
            assert c.post("/v1/completions", {"prompt": [1] * 1500, "max_tokens": 1})
            return changed

        assert step(decoded, old, keeps_old=False) == []
        both = ["security.previous_key_file", "security.key_file", "security.previous_key_file"]
        assert step(decoded, new, keeps_old=True) == both
        assert decoded.ctl("status")["security"] == {"mode": "key", "num_keys": 2}
        assert step(prefilld, new, keeps_old=False) == ["security.key_file"]
        assert step(decoded, new, keeps_old=False) == ["security.previous_key_file"] * 2
        assert not [d for d in c.daemons if old in d.log_path.read_text() or new in d.log_path.read_text()]


def test_requests_in_flight_move_to_the_peer_that_replaces_theirs() -> None:
    """Nothing may be prefilled here: what was under way waits the moment until the new peer is connected."""
    slow = {**FAKE, "fake": {"prefill_tokens_per_s": 2000, "decode_tokens_per_s": 0}}
    never_here = {"routing": {"mode": "remote-only"}, "fallback": {"local_prefill_tokens_per_s": 0}}
    with running_cluster(None, num_prefillds=2, decoded={**FAKE, **never_here}, prefilld=slow) as c:
        peers = c.decoded.config["peers"]
        config = c.decoded.config
        config["peers"] = peers[:1]
        c.decoded.write_config()
        c.decoded.ctl("reload")
        ask = {"prompt": [1] * 1500, "max_tokens": 1}
        with ThreadPoolExecutor(6) as threads:
            answers = [threads.submit(c.post, "/v1/completions", ask, {"X-Prfaas-Timing": "1"}) for _ in range(6)]
            while len(c.decoded.ctl("requests")) < 6:
                time.sleep(0.02)
            config["peers"] = [{**peers[1], "name": peers[0]["name"]}]
            c.decoded.write_config()
            c.decoded.ctl("reload")
            assert [a.result()["prfaas"]["peer"] for a in answers] == [peers[0]["name"]] * 6


def test_a_wrong_file_does_not_hide_that_a_restart_is_needed(tmp_path: Path) -> None:
    keys = tmp_path / "api.keys"
    with running_cluster(None, num_prefillds=0, decoded=FAKE) as c:
        http = dict(c.decoded.config["http"])
        c.decoded.config["http"] = http | {"api_key_file": secret_file(keys, "sk-one gold\n")}
        c.decoded.write_config()
        wrong, restart, advice = refusal(c.decoded)
        assert wrong.startswith(f"http.api_key_file: {keys}: class 'gold' of key 1; admission.classes: none")
        assert restart == f'http.api_key_file: "" -> "{keys}" needs a restart'
        assert advice.startswith("to apply what needs a restart: ")
        c.decoded.config["http"] = http | {"port": -1}
        c.decoded.write_config()
        assert len(refusal(c.decoded)) == 1


def test_limits_that_do_nothing_on_loopback_are_told(tmp_path: Path) -> None:
    with running_cluster(None, decoded=FAKE, prefilld=FAKE) as c:
        (prefilld,) = c.prefillds
        assert prefilld.ctl("peers")[0]["egress_note"] == ""
        prefilld.config["egress"] = {"max_bps": "20Mbit/s"}
        prefilld.write_config()
        prefilld.ctl("reload")
        text = "egress.max_bps does nothing on loopback"
        assert prefilld.ctl("peers")[0]["egress_note"] == text
        deadline = time.monotonic() + 5
        while text not in prefilld.log_path.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.1)


def test_every_key_that_needs_a_restart_is_named_and_no_false_reason() -> None:
    """The daemon narrowed its own affinity to engine.cpus: that the other cores exist is not for it to judge."""
    cores = sorted(os.sched_getaffinity(0))
    edit: dict[str, Any] = {"engine": {"cpus": cores[1:]}, "links": {"heartbeat": "1s"}, "log": {"trace_file": "/x/y"}}
    decoded = {**FAKE, "engine": {**FAKE["engine"], "cpus": cores[:1]}}
    with running_cluster(None, num_prefillds=0, decoded=decoded) as c:
        for section, keys in edit.items():
            c.decoded.config[section] = {**c.decoded.config.get(section, {}), **keys}
        c.decoded.write_config()
        assert refusal(c.decoded) == [
            f"engine.cpus: {cores[:1]} -> {cores[1:]} needs a restart",
            'links.heartbeat: "2s" -> "1s" needs a restart',
            'log.trace_file: "" -> "/x/y" needs a restart',
            "to apply what needs a restart: restart the daemon",
        ]
