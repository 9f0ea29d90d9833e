"""The recipe of docs/security.md, as it stands there: its commands, its files in its configurations, a session."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from common.config import parse_text
from common.errors import TLS_KINDS
from common.wire.connection import FAULT_CODES
from decoded.config import DecodeConfig
from prefilld.config import PrefillConfig
from tests.net.rig import end, on_uvloop, rigged
from tests.net.tls_ends import security

ROOT = Path(__file__).resolve().parents[2]
DOC = (ROOT / "docs" / "security.md").read_text()
FAKE = '[engine]\nbackend = "fake"\n'


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", DOC, re.M | re.S)


@on_uvloop
async def test_the_recipe_makes_a_session(tmp_path):
    if shutil.which("openssl") is None:
        pytest.fail("openssl is missing: install it, the recipe needs it")
    (commands,) = blocks("sh")
    subprocess.run(["sh", "-euc", commands], cwd=tmp_path, check=True, capture_output=True, timeout=60)
    texts = [text.replace("/etc/prfaas", str(tmp_path)) for text in blocks("toml")]
    for text, root in zip(texts, (PrefillConfig, DecodeConfig), strict=True):
        assert parse_text(FAKE + text, root, environment="start").security.mode == "tls"
    server, client = (tomllib.loads(text)["security"] for text in texts)
    ends = {
        "server_end": end("prefill", security=security("prefill", server)),
        "client_end": end("decode", security=security("decode", client)),
    }
    async with rigged(tls_name="b1.example.net", **ends) as rig:
        prefill, sink = rig.ask(100)
        await rig.finish(prefill, sink)
        assert rig.server.sessions[0]["certificate"] == "a1.example.net"


def test_every_metric_and_code_that_is_named_exists():
    code = "".join(p.read_text() for top in ("common", "prefilld", "decoded") for p in (ROOT / top).rglob("*.py"))
    for name in re.findall(r"prfaas_\w+", DOC):
        assert f'"{name}"' in code, name
    assert "seal" in FAULT_CODES
    protocol = (ROOT / "docs" / "protocol.md").read_text()
    assert all(f"`tls_{kind}`" in protocol for kind in TLS_KINDS)


def test_every_setting_of_the_section_is_explained():
    for name in PrefillConfig().security.model_dump():
        assert f"`{name}`" in DOC or f"\n{name} = " in DOC, name
