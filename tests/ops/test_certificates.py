"""Certificate files as [security] names them: every problem in words; and what tells that one expires."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from benchmarks.certificates import CertificateAuthority
from benchmarks.cluster import to_toml
from common import config as cfg
from common.certificates import CertificateWatch, read_certificate, validity_problem
from common.errors import ConfigError
from common.hosts import is_certificate_name
from common.wiring import make_security, reload_security, security_changes, security_status
from decoded.config import DecodeConfig
from prefilld.config import PrefillConfig

FAKE = {"engine": {"backend": "fake"}}
DAY_S = 86400.0


@pytest.fixture
def ca(tmp_path: Path) -> CertificateAuthority:
    return CertificateAuthority(tmp_path)


def problems(security: dict[str, Any], root: type[cfg.SharedConfig] = DecodeConfig) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        cfg.parse_text(to_toml({**FAKE, "security": security}), root)
    return [p.rsplit(" (line", 1)[0] for p in caught.value.problems]


def test_files_that_fit_pass_and_make_a_bind_possible(ca: CertificateAuthority) -> None:
    section = ca.make("a", ["a.example", "10.0.0.1"], "prefill")
    listen = {"host": "0.0.0.0"}
    config = cfg.parse_text(to_toml({**FAKE, "security": section, "listen": listen}), PrefillConfig)
    security = make_security(config, "prefill")
    assert security.mode == "tls" and security.certificate is not None
    assert security.certificate.names == ("a.example", "10.0.0.1") and not security.keys
    shown = security_status(security, time.time())
    assert shown["certificate"] == "a.example" and 363 * DAY_S < shown["certificate_expires_s"] <= 364 * DAY_S
    peers = [{"name": "p", "address": "10.0.0.1:7400"}]
    section = ca.make("d", ["d"], "decode")
    assert cfg.parse_text(to_toml({**FAKE, "security": section, "peers": peers}), DecodeConfig).peers


def test_each_file_that_does_not_do_is_named(ca: CertificateAuthority, tmp_path: Path) -> None:
    good, other = ca.make("a", ["a"], "decode"), ca.make("b", ["b"], "decode")
    text, key = tmp_path / "text", Path(good["cert_key_file"])
    text.write_text("no PEM")
    text.chmod(0o600)
    assert problems({**good, "cert_file": str(text)}) == [
        f"security.cert_file: {text} holds no certificate in PEM form"
    ]
    assert problems({**good, "ca_file": str(text)}) == [f"security.ca_file: {text} holds no certificate in PEM form"]
    assert problems({**good, "cert_key_file": str(text)}) == [
        f"security.cert_key_file: {text} holds no private key in PEM form"
    ]
    assert problems({**good, "cert_key_file": other["cert_key_file"]}) == [
        f"security.cert_key_file: {other['cert_key_file']} is not the key of the certificate in {good['cert_file']}"
    ]
    assert problems({**good, "ca_file": good["cert_file"]}) == [
        f"security.ca_file: {good['cert_file']}: CN=a is not the certificate of a CA"
    ]
    key.chmod(0o604)
    assert problems(good)[0].startswith(f"security.cert_key_file: {key} has mode 0604, which lets every user in")
    assert "cannot be read" in problems({**good, "cert_file": "/none"})[0]


def test_a_certificate_for_the_other_role_or_without_names(ca: CertificateAuthority) -> None:
    assert "lacks serverAuth" in problems(ca.make("d", ["d"], "decode"), PrefillConfig)[0]
    assert "lacks clientAuth" in problems(ca.make("p", ["p"], "prefill"), DecodeConfig)[0]
    assert "no subjectAltName" in problems(ca.make("n", [], "decode"), DecodeConfig)[0]


def test_a_key_with_a_passphrase(ca: CertificateAuthority, tmp_path: Path) -> None:
    from cryptography.hazmat.primitives import serialization as s

    section = ca.make("a", ["a"], "decode")
    path = Path(section["cert_key_file"])
    key = s.load_pem_private_key(path.read_bytes(), None)
    path.write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.BestAvailableEncryption(b"x")))
    assert problems(section) == [
        f"security.cert_key_file: {path}: the key has a passphrase, which nobody is there to enter"
    ]


def test_what_belongs_to_the_other_mode_is_refused_by_name(ca: CertificateAuthority) -> None:
    section = ca.make("a", ["a"], "decode")
    assert problems({**section, "mode": "key"}) == [
        f'security.{name}: is not used with security.mode = "key": remove it'
        for name in ("cert_file", "cert_key_file", "ca_file")
    ]
    assert 'security.key_file: is not used with security.mode = "tls": remove it' in problems(
        {**section, "key_file": "/none"}
    )
    assert problems({"allowed_names": ["a"]}, PrefillConfig) == [
        'security.allowed_names: is not used with security.mode = "key": remove it'
    ]
    server = ca.make("p", ["p"], "prefill")
    assert "must be a host name" in problems({**server, "allowed_names": ["*"]}, PrefillConfig)[0]
    assert "unknown key" in problems({**section, "allowed_names": ["a"]}, DecodeConfig)[0]


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    assert problems({"mode": "tls"}) == [
        f'security.{name}: is required when security.mode is "tls"'
        for name in ("cert_file", "cert_key_file", "ca_file")
    ]
    key = tmp_path / "key"
    key.touch(mode=0o600)
    key.write_text("0123456789abcdef" * 2)
    assert problems({"previous_key_file": str(key)}) == ["security.previous_key_file: needs security.key_file"]


@pytest.mark.parametrize(
    ("dates", "says"),
    [({"starts_in_days": -9, "days": 8}, "expired 1.0 days ago"), ({"starts_in_days": 2}, "holds only in 2.0 days")],
)
def test_reload_refuses_a_certificate_that_does_not_hold_now(ca: CertificateAuthority, dates: dict, says: str) -> None:
    """A start does not: the clock may be wrong at boot, and decoded serves short prompts without peers."""
    section = ca.make("a", ["a"], "decode", **dates)
    config = cfg.parse_text(to_toml({**FAKE, "security": section}), DecodeConfig)
    assert make_security(config, "decode").mode == "tls"
    with pytest.raises(ConfigError, match=f"security.cert_file: the certificate of a {says}"):
        reload_security(config, "decode", time.time())


def test_reload_says_which_files_are_others(ca: CertificateAuthority, tmp_path: Path) -> None:
    section = ca.make("a", ["a"], "decode")
    config = cfg.parse_text(to_toml({**FAKE, "security": section}), DecodeConfig)
    first = make_security(config, "decode")
    assert security_changes(first, make_security(config, "decode")) == []
    ca.make("a", ["a"], "decode")
    second = make_security(config, "decode")
    assert security_changes(first, second) == [
        "security.cert_file: another certificate", "security.cert_key_file: another key",
    ]  # fmt: skip
    other = CertificateAuthority(tmp_path, "other")
    with ca.ca_file.open("ab") as file:
        file.write(other.ca_file.read_bytes())
    assert security_changes(second, make_security(config, "decode")) == ["security.ca_file: other CAs"]


def test_keys_one_after_another(tmp_path: Path) -> None:
    files = []
    for n in range(2):
        path = tmp_path / f"key{n}"
        path.touch(mode=0o600)
        path.write_text(f"{n}123456789abcdef" * 2)
        files.append(str(path))

    def security(**section: str):
        return make_security(cfg.parse_text(to_toml({**FAKE, "security": section}), DecodeConfig), "decode")

    old, both, new = (
        security(key_file=files[0]),
        security(key_file=files[1], previous_key_file=files[0]),
        security(key_file=files[1]),
    )
    assert both.keys == (*new.keys, *old.keys) and len(both.keys) == 2
    assert security(key_file=files[0], previous_key_file=files[0]).keys == old.keys
    assert security_changes(old, both) == [
        "security.key_file: another secret", "security.previous_key_file: another secret",
    ]  # fmt: skip
    assert security_changes(both, new) == ["security.previous_key_file: none holds any more"]
    assert security_status(both, 0.0) == {"mode": "key", "num_keys": 2}
    assert security().mode == "none"


def test_gauges_and_warnings(caplog: pytest.LogCaptureFixture) -> None:
    registry = CollectorRegistry()
    watch = CertificateWatch(registry)
    own, peers = {"d.example": 100 * DAY_S}, {"p1": 50 * DAY_S, "p2": 90 * DAY_S}

    def value(name: str, label: str, of: str) -> float | None:
        return registry.get_sample_value(f"prfaas_{name}_expires_seconds", {label: of})

    with caplog.at_level(logging.WARNING):
        watch.update(own, peers, 10 * DAY_S)
        assert value("certificate", "certificate", "d.example") == 90 * DAY_S
        assert value("peer_certificate", "peer", "p1") == 40 * DAY_S
        assert not caplog.records
        watch.update(own, peers, 37 * DAY_S)
        watch.update(own, peers, 37 * DAY_S + 1)
        (record,) = caplog.records
        assert record.getMessage() == "certificate of peer expires in 13.0 days" and record.certificate == "p1"
        del peers["p1"]
        watch.update(own, peers, 101 * DAY_S)
        assert value("peer_certificate", "peer", "p1") is None
        assert value("certificate", "certificate", "d.example") == -DAY_S
        assert [r.getMessage() for r in caplog.records[1:]] == [
            "certificate of this daemon expired 1.0 days ago",
            "certificate of peer expired 11.0 days ago",
        ]


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("b1.example.net", True), ("localhost", True), ("10.0.0.7", True), ("::1", True), ("bücher.example", True),
        ("", False), (".a", False), ("*.a", False), ("a/b", False), ("a" * 64, False), ("a..b", False), ("a b", False),
    ],
)  # fmt: skip
def test_names_of_certificates(text: str, is_name: bool) -> None:
    assert is_certificate_name(text) == is_name


def test_a_chain_shows_its_first(ca: CertificateAuthority, tmp_path: Path) -> None:
    section = ca.make("a", ["a"], "decode")
    path = Path(section["cert_file"])
    path.write_bytes(path.read_bytes() + ca.ca_file.read_bytes())
    found = read_certificate(path, "decode")
    assert found.name == "a" and validity_problem(found, time.time()) == ""
