"""Keys, certificates and CAs change one end after another, under load, with every link made anew after each step."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from benchmarks.certificates import CertificateAuthority
from common.net.options import Security
from tests.net.rig import KEY, Rig, end, on_uvloop, rigged
from tests.net.test_faults import BIG, Gate
from tests.net.tls_ends import CLIENT, SERVER, TlsEnds, security

NEW = b"n" * 32
OLD_ONLY, BOTH, NEW_ONLY = Security("key", (KEY,)), Security("key", (NEW, KEY)), Security("key", (NEW,))
BOTH_AS_OLD = Security("key", (KEY, NEW))


async def reconnect(rig: Rig) -> None:
    """Every link is lost and comes back."""
    before = rig.client.status()["num_sessions"]
    rig.proxy.cut()
    async with asyncio.timeout(5):
        while rig.client.status()["num_sessions"] == before or rig.client.state != "ready":
            await asyncio.sleep(0.01)


async def walk(rig: Rig, steps: list[tuple[str, Security]]) -> None:
    """One prefill lives through all steps, with a small one after each."""
    gate = Gate(rig)
    prefill, sink = rig.ask(BIG)
    await gate.reached.wait()
    rig.handler = rig.serve
    for n, (who, new) in enumerate(steps):
        (rig.server if who == "server" else rig.client).set_security(new)
        await reconnect(rig)
        small, small_sink = rig.ask(200, name=f"step {n}")
        await rig.finish(small, small_sink)
    gate.go.set()
    await rig.finish(prefill, sink)
    assert rig.client.status()["num_sessions"] == 1 + len(steps)


@pytest.mark.parametrize(
    "steps",
    [
        [("server", BOTH), ("client", BOTH), ("server", NEW_ONLY), ("client", NEW_ONLY)],
        [("client", BOTH), ("server", NEW_ONLY), ("client", NEW_ONLY)],
        [("server", BOTH), ("client", NEW_ONLY), ("server", NEW_ONLY)],
        [("server", BOTH_AS_OLD), ("client", BOTH), ("server", NEW_ONLY)],
    ],
)
@on_uvloop
async def test_a_shared_key_changes_in_any_order(steps):
    async with rigged(proxy=True) as rig:
        await walk(rig, steps)


@on_uvloop
async def test_a_key_that_is_gone_at_one_end_is_refused():
    async with rigged(proxy=True) as rig:
        rig.server.set_security(NEW_ONLY)
        prefill, sink = rig.ask(100)
        await rig.finish(prefill, sink)  # the session that is there goes on
        rig.proxy.cut()
        await rig.state("incompatible")
        assert "but not the same" in rig.client.reason
        rig.client.set_security(BOTH)
        await rig.state("ready")


@on_uvloop
async def test_certificates_and_the_ca_change(tmp_path: Path):
    old = TlsEnds(tmp_path)
    new = CertificateAuthority(tmp_path, "new")
    both_cas = tmp_path / "both.pem"
    both_cas.write_bytes(old.ca.ca_file.read_bytes() + new.ca_file.read_bytes())
    server, client = new.make("server2", [SERVER], "prefill"), new.make("client2", [CLIENT], "decode")
    steps = [
        ("server", security("prefill", {**old.sections["prefill"], "ca_file": both_cas})),
        ("client", security("decode", {**old.sections["decode"], "ca_file": both_cas})),
        ("client", security("decode", {**client, "ca_file": both_cas})),
        ("server", security("prefill", server)),
        ("client", security("decode", client)),
    ]
    async with rigged(proxy=True, **old.both()) as rig:
        await walk(rig, steps)
        rig.server.set_security(old.end("prefill").security)
        rig.proxy.cut()
        await rig.state("incompatible")
        assert "certificate" in rig.client.reason


@on_uvloop
async def test_of_two_keys_in_common_one_is_taken():
    """With two keys in common the server's first is taken."""
    a, b = Security("key", (KEY, NEW)), Security("key", (NEW, KEY))
    async with rigged(client_end=end("decode", security=a), server_end=end("prefill", security=b)) as rig:
        assert rig.client._dialer.control.connection.handshake._key == NEW
        prefill, sink = rig.ask(100)
        await rig.finish(prefill, sink)
