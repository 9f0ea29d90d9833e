"""The daemons as processes with security.mode "tls": the same tokens, rotation by reload under load, refusals."""

from __future__ import annotations

import re
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.certificates import CertificateAuthority
from benchmarks.cluster import Cluster, Daemon, running_cluster
from tests.e2e.test_exact import prompts_of
from tests.e2e.test_reload import refusal

FAKE = {"engine": {"backend": "fake"}, "fake": {"prefill_tokens_per_s": 0, "decode_tokens_per_s": 0}}
NEVER_HERE = {"routing": {"mode": "remote-only"}, "fallback": {"local_prefill_tokens_per_s": 0}}


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


@pytest.fixture(autouse=True)
def _no_systemd(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTIFY_SOCKET", "INVOCATION_ID"):
        monkeypatch.delenv(name, raising=False)


def sections(ca: CertificateAuthority, stem: str = "first") -> tuple[dict[str, Any], dict[str, Any]]:
    """[security] of prefilld and of decoded."""
    server = ca.make(f"{stem}-b1", ["b1.example", "127.0.0.1"], "prefill")
    client = ca.make(f"{stem}-a1", ["a1.example"], "decode")
    return {**server, "allowed_names": ["a1.example"]}, client


def metric(daemon: Daemon, line: str) -> float:
    """The value of a sample, 0.0 when there is none."""
    http = daemon.config["http"]
    with urllib.request.urlopen(f"http://{http['host']}:{http['port']}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    found = re.search(rf"^{re.escape(line)} (\S+)$", text, re.M)
    return float(found[1]) if found else 0.0


def wait_for(what: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < deadline, what
        time.sleep(0.05)


def test_the_same_tokens_as_local_and_what_the_verbs_show(ca: CertificateAuthority, smollm2_dir: Path) -> None:
    server, client = sections(ca)
    with running_cluster(smollm2_dir, prefilld={"security": server}, decoded={"security": client}) as c:
        for prompt in prompts_of(smollm2_dir, [2, 300, 700]):
            answers = []
            for route in ("local", "remote"):
                body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
                headers = {"X-Prfaas-Route": route, "X-Prfaas-Timing": "1"}
                answers.append(c.post("/v1/completions", body, headers))
            assert answers[0]["choices"] == answers[1]["choices"]
            assert [a["prfaas"]["route"] for a in answers] == ["local", "remote"]
        (peer,), (session,) = c.decoded.ctl("peers"), c.prefillds[0].ctl("peers")
        assert (peer["security"], peer["certificate"]) == ("tls", "b1.example")
        assert (session["security"], session["certificate"]) == ("tls", "a1.example")
        for daemon, name in ((c.decoded, "a1.example"), (c.prefillds[0], "b1.example")):
            shown = daemon.ctl("status")["security"]
            assert (shown["mode"], shown["certificate"]) == ("tls", name)
            assert 360 * 86400 < shown["certificate_expires_s"] < 365 * 86400
            own = f'prfaas_certificate_expires_seconds{{certificate="{name}"}}'
            assert 360 * 86400 < metric(daemon, own) < 365 * 86400
        name = c.prefillds[0].name
        assert metric(c.decoded, f'prfaas_peer_certificate_expires_seconds{{peer="{name}"}}') > 360 * 86400
        assert metric(c.prefillds[0], 'prfaas_peer_certificate_expires_seconds{peer="a1.example"}') > 360 * 86400


class Load:
    """Requests one after another on a few threads; every answer must be whole."""

    def __init__(self, cluster: Cluster, num_threads: int = 3) -> None:
        self._cluster, self._stop = cluster, threading.Event()
        self.num_ok = 0
        self.failures: list[Exception] = []
        self._threads = [threading.Thread(target=self._run) for _ in range(num_threads)]
        for thread in self._threads:
            thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                answer = self._cluster.post("/v1/completions", {"prompt": [1] * 1500, "max_tokens": 2}, timeout_s=30)
                assert answer["usage"]["completion_tokens"] == 2
                self.num_ok += 1
            except (OSError, AssertionError, ValueError) as error:
                self.failures.append(error)

    def more(self, num: int) -> None:
        """Until so many more were answered."""
        goal = self.num_ok + num
        wait_for(lambda: self.num_ok >= goal or bool(self.failures), 30)

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join()


def test_certificates_keys_and_ca_rotate_by_reload_under_load(ca: CertificateAuthority, tmp_path: Path) -> None:
    """Every step is followed by new connections: the peer gets another name in decoded's configuration."""
    new_ca = CertificateAuthority(tmp_path, "new")
    both = tmp_path / "both.pem"
    both.write_bytes(ca.ca_file.read_bytes() + new_ca.ca_file.read_bytes())
    server, client = sections(ca)
    new_server, new_client = sections(new_ca, "second")
    slow = {**FAKE, "fake": {"prefill_tokens_per_s": 30_000, "decode_tokens_per_s": 0}}
    config = {"prefilld": {**slow, "security": server}, "decoded": {**FAKE, **NEVER_HERE, "security": client}}
    with running_cluster(None, **config) as c:
        prefilld, decoded = c.prefillds[0], c.decoded
        load = Load(c)
        try:
            for n, (daemon, section) in enumerate([
                (prefilld, {**server, "ca_file": str(both)}),
                (decoded, {**client, "ca_file": str(both)}),
                (decoded, {**new_client, "ca_file": str(both)}),
                (prefilld, {**new_server, "allowed_names": ["a1.example"]}),
                (decoded, new_client),
            ]):  # fmt: skip
                daemon.config["security"] = section
                daemon.write_config()
                assert any("security." in line for line in daemon.ctl("reload")["changed"])
                decoded.config["peers"] = [{**decoded.config["peers"][0], "name": f"b1-{n}"}]
                decoded.write_config()
                decoded.ctl("reload")
                c.wait_peers()
                load.more(5)
        finally:
            load.end()
        assert load.failures == [] and load.num_ok >= 25
        # What was taken over is what is used: an end of the old CA is not let in any more.
        decoded.config["security"] = client
        decoded.config["peers"] = [{**decoded.config["peers"][0], "name": "b1-old"}]
        decoded.write_config()
        decoded.ctl("reload")
        wait_for(lambda: decoded.ctl("peers")[0]["state"] == "incompatible")


def test_files_exchanged_under_the_same_names_are_read_by_reload(ca: CertificateAuthority) -> None:
    server, client = sections(ca)
    config = {"prefilld": {**FAKE, "security": server}, "decoded": {**FAKE, "security": client}}
    with running_cluster(None, **config) as c:
        assert c.prefillds[0].ctl("reload")["changed"] == []
        ca.make("first-b1", ["127.0.0.1"], "prefill", days=10)
        assert c.prefillds[0].ctl("reload")["changed"] == [
            "security.cert_file: another certificate", "security.cert_key_file: another key",
        ]  # fmt: skip
        wait_for(lambda: "certificate of this daemon expires in 9.0 days" in c.prefillds[0].log_path.read_text())
        ca.make("first-b1", ["127.0.0.1"], "prefill", starts_in_days=-9, days=8)
        assert "security.cert_file: the certificate of 127.0.0.1 expired 1.0 days ago" in refusal(c.prefillds[0])
        Path(server["cert_key_file"]).write_text("nothing")
        assert "holds no private key" in refusal(c.prefillds[0])[0]
        assert c.post("/v1/completions", {"prompt": [1] * 1500, "max_tokens": 1}, {"X-Prfaas-Route": "remote"})
        c.decoded.config["security"] = {**client, "mode": "key"}
        c.decoded.write_config()
        assert 'security.cert_file: is not used with security.mode = "key": remove it' in refusal(c.decoded)[0]


def test_a_wrong_ca_is_refused_at_both_ends_within_a_second(ca: CertificateAuthority, tmp_path: Path) -> None:
    server, client = sections(ca)
    other_server, _ = sections(CertificateAuthority(tmp_path, "other"), "other")
    config = {"prefilld": {**FAKE, "security": server}, "decoded": {**FAKE, "security": client}}
    with running_cluster(None, **config) as c:
        prefilld, decoded = c.prefillds[0], c.decoded
        prefilld.config["security"] = {**other_server, "allowed_names": []}
        prefilld.write_config()
        prefilld.ctl("reload")
        decoded.config["peers"] = [{**decoded.config["peers"][0], "name": "again"}]
        decoded.write_config()
        decoded.ctl("reload")
        wait_for(lambda: decoded.ctl("peers")[0]["state"] == "incompatible", 3)
        (peer,) = decoded.ctl("peers")
        assert peer["last_error"] == peer["reason"] and "certificate is not accepted" in peer["reason"]
        assert metric(decoded, 'prfaas_handshakes_failed_total{code="tls_unknown_ca",peer="again"}') >= 1
        assert metric(prefilld, 'prfaas_handshakes_failed_total{code="tls_refused"}') >= 1
        assert "certificate is not accepted" in decoded.log_path.read_text()
        assert "refused this end: unknown ca" in prefilld.log_path.read_text()
        refused = [row for row in prefilld.ctl("peers") if row["state"] == "incompatible"]
        assert [row["last_error_code"] for row in refused] == ["tls_refused"]
        assert "refused this end: unknown ca" in refused[0]["reason"]


def test_fake_peers_need_no_certificate_of_theirs(ca: CertificateAuthority) -> None:
    """--fake-peer: both ends are in one process, on loopback."""
    server, client = sections(ca)
    with running_cluster(None, num_prefillds=0, decoded={**FAKE, "security": client}) as c:
        c.decoded.stop()
        c.decoded.args = ("--fake-peer", "1Gbit/s,1ms")
        c.decoded.start().wait_ready()
        (peer,) = c.decoded.ctl("peers")
        assert (peer["state"], peer["security"]) == ("ready", "none")
        assert c.decoded.ctl("reload")["changed"] == []
    with running_cluster(None, prefilld={**FAKE, "security": server}, decoded={**FAKE, "peers": []}) as c:
        c.prefillds[0].stop()
        c.prefillds[0].args = ("--fake-peer", "1Gbit/s,1ms")
        c.prefillds[0].start().wait_ready()
        wait_for(lambda: "fake request done" in c.prefillds[0].log_path.read_text())
        assert c.prefillds[0].ctl("reload")["changed"] == []
