"""Ends with certificates for the rig: made once for each test folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.certificates import CertificateAuthority, Role
from common.config_security import SecurityConfig
from common.net.options import LocalEnd, Security
from common.wiring import make_security
from decoded.config import DecodeConfig
from prefilld.config import PrefillConfig, PrefillSecurityConfig
from tests.net.rig import end

CLIENT, SERVER = "a1.example", "127.0.0.1"


def security(role: Role, section: dict[str, Any]) -> Security:
    """What a daemon makes of this section."""
    if role == "prefill":
        return make_security(PrefillConfig(security=PrefillSecurityConfig(**_paths(section))), role)
    return make_security(DecodeConfig(security=SecurityConfig(**_paths(section))), role)


def _paths(section: dict[str, Any]) -> dict[str, Any]:
    return {k: Path(v) if k.endswith("_file") else v for k, v in section.items()}


class TlsEnds:
    """A CA, a client's and a server's certificate; `server` and `client` make LocalEnds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ca = CertificateAuthority(folder)
        self.sections: dict[str, dict[str, Any]] = {
            "prefill": self.ca.make("server", [SERVER], "prefill"),
            "decode": self.ca.make("client", [CLIENT], "decode"),
        }

    def end(self, role: Role, section: dict[str, Any] | None = None, **changes: Any) -> LocalEnd:
        found = security(role, {**self.sections[role], **(section or {})})
        return end(role, security=found, **changes)

    def both(self, **changes: Any) -> dict[str, Any]:
        """What `Rig.start` takes."""
        return {"server_end": self.end("prefill", **changes), "client_end": self.end("decode", **changes)}
