"""A private CA and certificates in a folder, for tests and benchmarks (docs/security.md has a recipe for operators)."""

from __future__ import annotations

import ipaddress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Role = Literal["decode", "prefill"]


class CertificateAuthority:
    """Makes FOLDER/<name>-ca.pem, signed by itself or by `parent`, and certificates signed with it."""

    def __init__(self, folder: Path, name: str = "trial", parent: CertificateAuthority | None = None) -> None:
        self.folder, self.name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._subject = _named(f"{name} CA")
        signer = parent or self
        starts_at = datetime.now(UTC) - timedelta(days=100)
        builder = _builder(self._subject, signer._subject, self._key, starts_at, 3650)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        self.ca_file = folder / f"{name}-ca.pem"
        certificate = builder.sign(signer._key, hashes.SHA256())
        self.ca_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def make(
        self, stem: str, names: list[str], role: Role, *, starts_in_days: float = -1, days: float = 365
    ) -> dict[str, Any]:
        """A certificate and key in FOLDER; answers what [security] needs to use them."""
        key = ec.generate_private_key(ec.SECP256R1())
        starts_at = datetime.now(UTC) + timedelta(days=starts_in_days)
        purpose = ExtendedKeyUsageOID.SERVER_AUTH if role == "prefill" else ExtendedKeyUsageOID.CLIENT_AUTH
        builder = _builder(_named(stem), self._subject, key, starts_at, days)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.ExtendedKeyUsage([purpose]), critical=False)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName([_general_name(n) for n in names]), False)
        pem = serialization.Encoding.PEM
        cert_file, key_file = self.folder / f"{stem}.pem", self.folder / f"{stem}.key"
        cert_file.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(pem))
        key_file.touch(mode=0o600)
        pkcs8 = serialization.PrivateFormat.PKCS8
        key_file.write_bytes(key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        return {
            "mode": "tls",
            "cert_file": str(cert_file),
            "cert_key_file": str(key_file),
            "ca_file": str(self.ca_file),
        }


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, starts_at: datetime, days: float
) -> x509.CertificateBuilder:
    builder = x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
    return builder.not_valid_before(starts_at).not_valid_after(starts_at + timedelta(days=days))


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
