"""TLS 1.3 with certificates at both ends, for control links: contexts made of files, and one connection without I/O.

asyncio's and uvloop's own TLS can neither share a port with links that begin otherwise, nor do they send the alert that
tells the peer why it was refused; hence ssl's memory BIOs, fed by link.py. Verification is OpenSSL's.
"""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from common.errors import TlsFailed

_KIND_OF_VERIFY_CODE = {
    9: "not_yet_valid", 10: "expired", 62: "wrong_name", 64: "wrong_name",
    **dict.fromkeys((2, 18, 19, 20, 21), "unknown_ca"),
}  # fmt: skip
_DAMAGE = ("BAD_RECORD_MAC", "DECODE_ERROR", "DECRYPT_ERROR", "UNEXPECTED_MESSAGE", "ILLEGAL_PARAMETER", "OVERFLOW")
"""Alerts about bytes, not about us."""
_MAX_NAMES = 200
_FIRST_BYTE = 0x16
"""Of a TLS handshake record; a frame begins with 0x50."""


def is_tls(first_bytes: memoryview) -> bool:
    """Whether the first bytes of a connection begin a TLS handshake (or an alert about one)."""
    return first_bytes[0] in (_FIRST_BYTE, _FIRST_BYTE - 1)


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a certificate says: subject alternative names, and until when (Unix seconds)."""

    names: tuple[str, ...]
    expires_at: float

    @property
    def name(self) -> str:
        """The first name; "?" for a certificate that has none."""
        return self.names[0] if self.names else "?"

    def has_name(self, allowed: tuple[str, ...]) -> bool:
        """Whether one of its names is one of these, letter case aside."""
        return bool({n.lower() for n in self.names} & {n.lower() for n in allowed})


@dataclass(frozen=True, slots=True)
class TlsEnd:
    """This process's certificate and key, and the CAs that it believes for certificates of peers, as OpenSSL has them.

    `digests` of the three files tell when one of them was exchanged.
    """

    digests: tuple[str, str, str]
    client: ssl.SSLContext = field(repr=False, compare=False)
    server: ssl.SSLContext = field(repr=False, compare=False)

    @classmethod
    def load(cls, cert_file: Path, key_file: Path, ca_file: Path, digests: tuple[str, str, str]) -> TlsEnd:
        """Contexts of these files.

        Raises:
            OSError: a file cannot be read, or OpenSSL does not take it (ssl.SSLError is one).
        """
        contexts = [ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)]
        for context in contexts:
            context.minimum_version = context.maximum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            # Never asked for: keys with a passphrase were refused before.
            context.load_cert_chain(cert_file, key_file, password="")
            context.load_verify_locations(ca_file)
            # A CA that another one signed is believed for itself, whether or not that one is in the file too.
            context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        client, server = contexts
        client.hostname_checks_common_name = False
        # A resumed session would not show its certificate again, whatever was revoked meanwhile.
        server.num_tickets = 0
        return cls(digests, client, server)


class TlsChannel:
    """One end of one TLS connection: bytes of the socket in and out at one side, clear bytes at the other.

    `peer_name` is what the server's certificate must be for; None makes this the server. `certificate` is the peer's,
    from the moment on at which it was verified.
    """

    def __init__(self, end: TlsEnd, peer_name: str | None) -> None:
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        context = end.server if peer_name is None else end.client
        self._ssl = context.wrap_bio(
            self._incoming, self._outgoing, server_side=peer_name is None, server_hostname=peer_name
        )
        self.certificate: CertificateFacts | None = None
        self._waiting: list[bytes | memoryview] = []
        if peer_name is not None:
            self._shake_hands()

    def receive(self, data: bytes | memoryview) -> None:
        """Bytes from the socket. Raises TlsFailed; what `take_output` has then tells the peer."""
        self._incoming.write(data)
        if self.certificate is None:
            self._shake_hands()

    def read_into(self, buffer: memoryview) -> int:
        """Clear bytes into `buffer`; 0 when there are no more for now. Raises TlsFailed."""
        if self.certificate is None:
            return 0
        try:
            return cast(int, self._ssl.read(len(buffer), buffer))  # an int where there is a buffer
        except (ssl.SSLWantReadError, ssl.SSLZeroReturnError):
            return 0
        except ssl.SSLError as e:
            raise _failure(e) from None

    def write(self, data: bytes | memoryview) -> None:
        """Clear bytes for the peer; they wait until the handshake is done."""
        if self.certificate is None:
            self._waiting.append(data)
            return
        view = memoryview(data)
        while view:
            view = view[self._ssl.write(view) :]

    def take_output(self) -> bytes:
        """Bytes for the socket."""
        return self._outgoing.read()

    def _shake_hands(self) -> None:
        try:
            self._ssl.do_handshake()
        except ssl.SSLWantReadError:
            return
        except ssl.SSLError as e:
            raise _failure(e, self._ssl) from None
        self.certificate = _certificate(self._ssl.getpeercert() or {})
        waiting, self._waiting = self._waiting, []
        for data in waiting:
            self.write(data)


def _certificate(facts: dict[str, Any]) -> CertificateFacts:
    names = tuple(value for kind, value in facts.get("subjectAltName", ()) if kind in ("DNS", "IP Address"))
    return CertificateFacts(names, float(ssl.cert_time_to_seconds(facts["notAfter"])))


def _shown_names(connection: ssl.SSLObject) -> str:
    """Names in a certificate that was not accepted, for people: nothing may be decided by them."""
    try:
        # Python has a public way only from 3.13 on, and there without what is in the certificate.
        chain: list[Any] = cast(Any, connection)._sslobj.get_unverified_chain() or []
        names = _certificate(chain[0].get_info()).names
    except (AttributeError, LookupError, TypeError, ValueError, ssl.SSLError):
        return ""
    return ", ".join(map(repr, names))[:_MAX_NAMES]


def _failure(error: ssl.SSLError, connection: ssl.SSLObject | None = None) -> TlsFailed:
    if isinstance(error, ssl.SSLCertVerificationError):
        kind = _KIND_OF_VERIFY_CODE.get(error.verify_code, "bad_certificate")
        text = f"TLS: the peer's certificate is not accepted: {error.verify_message.rstrip('.')}"
        if kind == "wrong_name" and connection is not None:
            names = _shown_names(connection)
            text += f"; it is for {names}" if names else ""
            text += ": if this is the peer that is meant, set its peers.tls_name to that"
        return TlsFailed(text, kind)
    reason = error.reason or str(error)
    if "ALERT" in reason:
        said = reason.partition("ALERT_")[2]
        kind = "failed" if said.endswith(_DAMAGE) else "refused"
        return TlsFailed(f"TLS: the peer refused this end: {said.replace('_', ' ').lower()}", kind)
    if reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return TlsFailed("TLS: the peer showed no certificate", "no_certificate")
    if reason == "WRONG_VERSION_NUMBER":
        return plain_peer()
    return TlsFailed(f"TLS: {reason.replace('_', ' ').lower()}", "failed")


def plain_peer() -> TlsFailed:
    """The peer said something, but not TLS."""
    return TlsFailed("the peer does not speak TLS here: compare security.mode on both ends", "plain")
