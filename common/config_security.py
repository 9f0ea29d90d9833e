"""The configuration section [security] and what may be wrong with it: keys of the other mode, unusable files."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from common.certificates import Role, check_cas, check_key, read_certificate
from common.config_secrets import read_key, unreadable
from common.config_types import FilePath, Problem, Section, key

_OF_KEY = ("key_file", "previous_key_file")
_OF_TLS = ("cert_file", "cert_key_file", "ca_file")


class SecurityConfig(Section):
    """How daemons prove to each other who they are, and whether others can read what they send: docs/security.md.
    But for the mode, files and names are read again by reload, for new connections."""

    mode: Literal["key", "tls"] = key(
        "key",
        '"key" is mutual challenge and response over one shared key: it authenticates, it does not hide. "tls" is TLS'
        " 1.3 with certificates at both ends; what crosses is encrypted. Settings of the other mode have to be removed,"
        " decoded's peers.tls_name too.",
    )
    key_file: FilePath = key(
        None,
        'File with the shared secret of mode "key", the same on both sides: 32 bytes or more'
        ' (`head -c 32 /dev/urandom | base64`), not readable by others. "" is no authentication, allowed only between'
        " loopback addresses.",
    )
    previous_key_file: FilePath = key(
        None,
        "File with a second secret that holds too, so that daemons can change to another key one after another: the new"
        " one in key_file, the old one here, until every daemon has the new one.",
    )
    cert_file: FilePath = key(
        None,
        'Certificate of this daemon for mode "tls", PEM, its subjectAltName being what peers call it; those between it'
        " and the CA may follow.",
    )
    cert_key_file: FilePath = key(
        None, "The certificate's private key, PEM without passphrase, not readable by others."
    )
    ca_file: FilePath = key(
        None,
        "Certificates of the CAs whose signature on a peer's certificate is believed, PEM, one or more: while CAs"
        " change, the old and the new one.",
    )

    @property
    def is_authenticated(self) -> bool:
        """Whether peers must prove who they are."""
        return self.mode == "tls" or self.key_file is not None

    def check(self) -> Iterator[Problem]:
        """Settings of the other mode, which would look as if they did something, and settings that are missing."""
        for name in _OF_KEY if self.mode == "tls" else _OF_TLS:
            if getattr(self, name) is not None:
                message = f'is not used with security.mode = "{self.mode}": remove it'
                yield Problem((f"security.{name}", "security.mode"), message)
        if self.mode == "tls":
            for name in _OF_TLS:
                if getattr(self, name) is None:
                    yield Problem((f"security.{name}", "security.mode"), 'is required when security.mode is "tls"')
        elif self.previous_key_file is not None and self.key_file is None:
            yield Problem(("security.previous_key_file", "security.key_file"), "needs security.key_file")

    def check_files(self, role: Role) -> Iterator[Problem]:
        """What cannot be read, or is not what it should be. Not whether certificates hold at this moment: at start the
        clock may not be set yet, and a decoded without peers is better than none.
        """
        if self.key_file is not None:
            yield from unreadable("security.key_file", read_key, self.key_file)
        if self.previous_key_file is not None:
            yield from unreadable("security.previous_key_file", read_key, self.previous_key_file)
        cert = self.cert_file
        if cert is not None:
            yield from (bad := list(unreadable("security.cert_file", lambda p: read_certificate(p, role), cert)))
            if self.cert_key_file is not None and not bad:
                yield from unreadable("security.cert_key_file", lambda p: check_key(cert, p), self.cert_key_file)
        if self.ca_file is not None:
            yield from unreadable("security.ca_file", check_cas, self.ca_file)
