"""Certificates, their keys and CAs in files: what they say, and what is wrong with them in words.

Knows no section and makes no connection; called by the configuration's checks and by wiring.py. `CertificateWatch`
keeps gauges of when certificates expire, and warns in the log before they do; it is handed the time.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.x509.oid import ExtendedKeyUsageOID
from prometheus_client import CollectorRegistry, Gauge

from common.config_secrets import read_file, read_secret
from common.errors import ConfigError
from common.logs import Damper

log = logging.getLogger(__name__)
Role = Literal["decode", "prefill"]
WARN_S = 14 * 86400.0
_DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class Certificate:
    """Names (DNS and addresses) and validity (Unix seconds) of a certificate; `digest` is of its file."""

    names: tuple[str, ...]
    starts_at: float
    expires_at: float
    digest: str

    @property
    def name(self) -> str:
        """The first of its names."""
        return self.names[0]


def read_certificate(path: Path, role: Role) -> Certificate:
    """This daemon's certificate: the first of a PEM file, which may go on with those between it and the CA.

    Raises:
        ConfigError: unreadable, none in it, without names, or not meant for this role.
    """
    data = read_file(path)
    first = _certificates(path, data)[0]
    try:
        names = first.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        found = tuple(str(n.value) for n in names if isinstance(n, x509.DNSName | x509.IPAddress))
    except x509.ExtensionNotFound:
        found = ()
    if not found:
        raise ConfigError(f"{path}: the certificate has no subjectAltName, so that peers could not tell whose it is")
    _check_usage(path, first, role)
    starts_at, expires_at = first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp()
    return Certificate(found, starts_at, expires_at, _digest(data))


def check_key(cert_file: Path, key_file: Path) -> str:
    """The certificate's private key is in `key_file`; answers a digest of that file.

    Raises:
        ConfigError: unreadable, open to others, with a passphrase, or of another certificate.
    """
    data = read_secret(key_file)
    try:
        key = serialization.load_pem_private_key(data, password=None)
    except TypeError as error:
        raise ConfigError(f"{key_file}: the key has a passphrase, which nobody is there to enter") from error
    except ValueError as error:
        raise ConfigError(f"{key_file} holds no private key in PEM form") from error
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    public = _certificates(cert_file, read_file(cert_file))[0].public_key()
    if key.public_key().public_bytes(encoding, form) != public.public_bytes(encoding, form):
        raise ConfigError(f"{key_file} is not the key of the certificate in {cert_file}")
    return _digest(data)


def check_cas(path: Path) -> str:
    """A PEM file with the CAs to believe; answers its digest. Raises ConfigError."""
    data = read_file(path)
    for certificate in _certificates(path, data):
        try:
            is_ca = certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
        except x509.ExtensionNotFound:
            is_ca = False
        if not is_ca:
            raise ConfigError(f"{path}: {certificate.subject.rfc4514_string()} is not the certificate of a CA")
    return _digest(data)


def validity_problem(certificate: Certificate, now: float) -> str:
    """Why a certificate does not hold at this Unix time, or ""."""
    if now > certificate.expires_at:
        return f"the certificate of {certificate.name} expired {_days(now - certificate.expires_at)} ago"
    if now < certificate.starts_at:
        return f"the certificate of {certificate.name} holds only in {_days(certificate.starts_at - now)}"
    return ""


def _certificates(path: Path, data: bytes) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(data)
    except ValueError as error:
        raise ConfigError(f"{path} holds no certificate in PEM form") from error


def _check_usage(path: Path, certificate: x509.Certificate, role: Role) -> None:
    needed = ExtendedKeyUsageOID.SERVER_AUTH if role == "prefill" else ExtendedKeyUsageOID.CLIENT_AUTH
    try:
        usages = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return
    if needed not in usages:
        name = "serverAuth" if role == "prefill" else "clientAuth"
        raise ConfigError(f"{path}: the certificate's extended key usage lacks {name}, which peers would refuse")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _days(seconds: float) -> str:
    return f"{seconds / _DAY_S:.1f} days"


class CertificateWatch:
    """Seconds until certificates expire, as gauges; a warning a day for each that has less than 14 days left."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._own = Gauge(
            "prfaas_certificate_expires_seconds",
            "Seconds until this daemon's certificate expires, negative afterwards; only with security.mode tls.",
            ["certificate"],
            registry=registry,
        )
        self._peers = Gauge(
            "prfaas_peer_certificate_expires_seconds",
            "Seconds until a connected peer's certificate expires, negative afterwards.",
            ["peer"],
            registry=registry,
        )
        self._damper = Damper(_DAY_S)
        self._shown: dict[Gauge, set[str]] = {self._own: set(), self._peers: set()}

    def update(self, own: Mapping[str, float], peers: Mapping[str, float], now: float) -> None:
        """Names and when they expire, in Unix seconds: of our certificate, and of the peers that are connected."""
        for gauge, whose, found in ((self._own, "this daemon", own), (self._peers, "peer", peers)):
            for gone in self._shown[gauge] - found.keys():
                gauge.remove(gone)
            self._shown[gauge] = set(found)
            for name, expires_at in found.items():
                gauge.labels(name).set(expires_at - now)
                self._warn(whose, name, expires_at, now)

    def _warn(self, whose: str, name: str, expires_at: float, now: float) -> None:
        left_s = expires_at - now
        if left_s >= WARN_S or self._damper.admit(f"{whose} {name} {expires_at}") is None:
            return
        if left_s > 0:
            log.warning("certificate of %s expires in %s", whose, _days(left_s), extra={"certificate": name})
        else:
            log.error("certificate of %s expired %s ago", whose, _days(-left_s), extra={"certificate": name})
