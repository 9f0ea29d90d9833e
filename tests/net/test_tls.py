"""TLS on control links and sealed data links over real sockets: what passes, what is refused, why, at both ends."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.certificates import CertificateAuthority
from common.errors import LinkLost
from common.net.options import LocalEnd
from common.net.tls import TlsEnd
from common.wire.auth import key_id
from common.wire.connection import Closed
from common.wire.frames import FRAME_BYTES, parse_head
from common.wire.messages import Error, Hello, decode_message, encode_frame
from tests.net.rig import KEY, Rig, both_loops, end, on_uvloop, rigged
from tests.net.tls_ends import CLIENT, SERVER, TlsEnds


@pytest.fixture(scope="module")
def ends(tmp_path_factory: pytest.TempPathFactory) -> TlsEnds:
    return TlsEnds(Path(tmp_path_factory.mktemp("tls")))


@pytest.mark.parametrize("codec", ["raw", "zstd"])
@both_loops
async def test_state_arrives_whole_and_both_ends_say_how(ends, codec):
    async with rigged(**ends.both()) as rig:
        prefill, sink = rig.ask(3000, codec=codec)
        await rig.finish(prefill, sink)
        status, (session,) = rig.client.status(), rig.server.sessions
        assert (status["security"], status["certificate"]) == ("tls", SERVER)
        assert (session["security"], session["certificate"]) == ("tls", CLIENT)
        for shown in (status, session):
            assert 363 * 86400 < shown["certificate_expires_s"] < 365 * 86400


class Refusal:
    """How the two ends see a connection that must not come about, and how long that took."""

    def __init__(self, client_end: LocalEnd, server_end: LocalEnd, tls_name: str = "") -> None:
        self.rig, self.tls_name = Rig(), tls_name
        self.args = {"client_end": client_end, "server_end": server_end}
        self.at_server: list[tuple[str, str]] = []
        self.at_client: list[str] = []

    async def seen(self) -> dict[str, Any]:
        rig = self.rig
        rig.server = await rig.start_server(self.args["server_end"])
        rig.server.on_refused = self._refused
        began = time.monotonic()
        await rig.start_client(self.args["client_end"], rig.server.port, tls_name=self.tls_name)
        rig.client.on_refused = lambda client, code: self.at_client.append(code)
        try:
            await rig.state("incompatible", timeout=1)
            while not self.at_server and time.monotonic() < began + 1:
                await asyncio.sleep(0.01)
            assert time.monotonic() < began + 1
            with pytest.raises(LinkLost):
                rig.ask(10)
            status = rig.client.status()
            assert status["last_error"] == status["reason"] and self.at_client
            (code, why), *_ = self.at_server
            return {"client": status["reason"], "client_code": self.at_client[0], "server": why, "server_code": code}
        finally:
            await rig.close()

    def _refused(self, closed: Closed, address: str) -> None:
        self.at_server.append((closed.code, str(closed.error)))


@on_uvloop
async def test_a_server_of_another_ca(ends, tmp_path):
    other = CertificateAuthority(tmp_path, "other").make("other", [SERVER], "prefill")
    server = ends.end("prefill", {**other, "ca_file": str(ends.ca.ca_file)})
    seen = await Refusal(ends.end("decode"), server).seen()
    assert seen["client_code"] == "tls_unknown_ca" and "local issuer" in seen["client"]
    assert seen["server_code"] == "tls_refused" and "refused this end: unknown ca" in seen["server"]


@on_uvloop
async def test_a_client_of_another_ca(ends, tmp_path):
    other = CertificateAuthority(tmp_path, "other").make("other", [CLIENT], "decode")
    client = ends.end("decode", {**other, "ca_file": str(ends.ca.ca_file)})
    seen = await Refusal(client, ends.end("prefill")).seen()
    assert seen["server_code"] == "tls_unknown_ca" and "local issuer" in seen["server"]
    assert seen["client_code"] == "tls_refused" and "refused this end: unknown ca" in seen["client"]


@on_uvloop
@pytest.mark.parametrize(
    ("dates", "kind", "says"),
    [
        ({"starts_in_days": -30, "days": 29}, "expired", "certificate has expired"),
        ({"starts_in_days": 1}, "not_yet_valid", "certificate is not yet valid"),
    ],
)
async def test_a_certificate_that_does_not_hold_now(ends, dates, kind, says):
    server = ends.end("prefill", ends.ca.make(f"server-{kind}", [SERVER], "prefill", **dates))
    seen = await Refusal(ends.end("decode"), server).seen()
    assert seen["client_code"] == f"tls_{kind}" and says in seen["client"]
    assert seen["server_code"] == "tls_refused"
    client = ends.end("decode", ends.ca.make(f"client-{kind}", [CLIENT], "decode", **dates))
    seen = await Refusal(client, ends.end("prefill")).seen()
    assert seen["server_code"] == f"tls_{kind}" and says in seen["server"]
    assert seen["client_code"] == "tls_refused"


@on_uvloop
async def test_certificates_with_another_ca_between(ends, tmp_path):
    """The one between may come with the certificate, or be believed itself."""
    between = CertificateAuthority(tmp_path, "between", ends.ca)
    section = between.make("chained", [SERVER], "prefill")
    root_only, itself = {**section, "ca_file": ends.ca.ca_file}, {"ca_file": between.ca_file}
    seen = await Refusal(ends.end("decode"), ends.end("prefill", root_only)).seen()
    assert seen["client_code"] == "tls_unknown_ca"
    async with rigged(client_end=ends.end("decode", itself), server_end=ends.end("prefill", root_only)) as rig:
        assert rig.client.status()["certificate"] == SERVER
    path = Path(section["cert_file"])
    path.write_bytes(path.read_bytes() + between.ca_file.read_bytes())
    async with rigged(client_end=ends.end("decode"), server_end=ends.end("prefill", root_only)) as rig:
        assert rig.client.status()["certificate"] == SERVER
    # Who is signed by the root alone is not let in by an end that believes only the one between.
    seen = await Refusal(ends.end("decode", itself), ends.end("prefill")).seen()
    assert seen["client_code"] == "tls_unknown_ca"


@on_uvloop
async def test_a_server_of_another_name(ends):
    seen = await Refusal(ends.end("decode"), ends.end("prefill"), tls_name="b1.example").seen()
    assert seen["client_code"] == "tls_wrong_name" and "'b1.example'" in seen["client"]
    assert f"; it is for {SERVER!r}: if this is the peer that is meant, set its peers.tls_name to" in seen["client"]
    assert seen["server_code"] == "tls_refused" and "bad certificate" in seen["server"]
    named = ends.end("prefill", ends.ca.make("b1", ["b1.example"], "prefill"))
    seen = await Refusal(ends.end("decode"), named).seen()
    assert seen["client_code"] == "tls_wrong_name" and SERVER in seen["client"]
    async with rigged(client_end=ends.end("decode"), server_end=named, tls_name="B1.example") as rig:
        assert rig.client.status()["certificate"] == "b1.example"


@on_uvloop
async def test_a_client_certificate_does_not_make_a_server(ends):
    """One decoded that is taken over must not pass for a prefilld, even if it is called like one."""
    files = ends.ca.make("both", [SERVER], "decode")
    # Its own checks would refuse these files; the other end does not know that.
    paths = [Path(files[name]) for name in ("cert_file", "cert_key_file", "ca_file")]
    server = ends.end("prefill")
    server = replace(server, security=replace(server.security, tls=TlsEnd.load(*paths, ("", "", ""))))
    seen = await Refusal(ends.end("decode"), server).seen()
    assert seen["client_code"] == "tls_bad_certificate" and "unsuitable certificate purpose" in seen["client"]


@on_uvloop
async def test_clients_that_are_not_among_the_allowed_names(ends):
    server = ends.end("prefill", {"allowed_names": ("a2.example", "a3.example")})
    seen = await Refusal(ends.end("decode"), server).seen()
    assert seen["client_code"] == seen["server_code"] == "auth"
    assert seen["client"] == seen["server"]
    assert CLIENT in seen["client"] and "security.allowed_names" in seen["client"]
    server = ends.end("prefill", {"allowed_names": ("a2.example", CLIENT.upper())})
    async with rigged(client_end=ends.end("decode"), server_end=server) as rig:
        prefill, sink = rig.ask(100)
        await rig.finish(prefill, sink)


@on_uvloop
async def test_plain_client_at_a_tls_server(ends):
    seen = await Refusal(end("decode"), ends.end("prefill")).seen()
    assert seen["client_code"] == seen["server_code"] == "auth"
    assert seen["client"] == seen["server"]
    assert "the prefill end has TLS, the decode end a shared key" in seen["client"]


@on_uvloop
async def test_tls_client_at_a_plain_server(ends):
    seen = await Refusal(ends.end("decode"), end("prefill")).seen()
    assert seen["client_code"] == "tls_plain" and "does not speak TLS" in seen["client"]
    assert seen["server_code"] == "bad_magic" and "they are TLS" in seen["server"]


@on_uvloop
async def test_other_modes_without_tls():
    seen = await Refusal(end("decode"), end("prefill", key=None)).seen()
    assert "the prefill end has no shared key and no TLS, the decode end a shared key" in seen["server"]


async def raw_answer(rig: Rig, data: bytes) -> Error:
    """What a server says to these bytes; it must close."""
    reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
    writer.write(data)
    answer = await asyncio.wait_for(reader.read(), 2)
    writer.close()
    head = parse_head(answer)
    message = decode_message(head, answer[FRAME_BYTES:][: head.header_bytes])
    assert isinstance(message, Error)
    return message


@on_uvloop
async def test_no_way_round_tls(ends):
    """What a client says of itself in the clear does not matter: control links come through TLS or not at all."""
    async with rigged(**ends.both()) as rig:
        for mode, keys in (("tls", ()), ("none", ()), ("key", (key_id(KEY),))):
            error = await raw_answer(rig, encode_frame(Hello("decode", b"n" * 32, b"s" * 16, 0, mode, keys)))
            assert error.code == "auth" and "TLS" in error.message
        # A data link of a session that is not there gets a Hello, and no further.
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
        writer.write(encode_frame(Hello("decode", b"n" * 32, b"s" * 16, 1, "tls", ())))
        head = parse_head(await reader.readexactly(FRAME_BYTES))
        assert head.type.name == "HELLO"
        writer.close()


@on_uvloop
async def test_a_data_link_may_not_come_through_tls(ends):
    async with rigged(**ends.both()) as rig:
        context = ends.end("decode").security.tls.client
        reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port, ssl=context)
        writer.write(encode_frame(Hello("decode", b"n" * 32, b"s" * 16, 1, "tls", ())))
        answer = await asyncio.wait_for(reader.read(), 2)
        head = parse_head(answer)
        error = decode_message(head, answer[FRAME_BYTES:])
        assert isinstance(error, Error) and error.code == "auth" and "only they" in error.message
        writer.transport.abort()


@on_uvloop
@pytest.mark.parametrize("case", ["no certificate", "TLS 1.2", "garbage"])
async def test_strangers_at_a_tls_port(ends, case):
    refused: list[Closed] = []
    async with rigged(**ends.both()) as rig:
        rig.server.on_refused = lambda closed, address: refused.append(closed)
        context = ssl.create_default_context(cafile=ends.ca.ca_file)
        if case == "TLS 1.2":
            context.maximum_version = ssl.TLSVersion.TLSv1_2
        if case == "garbage":
            reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port)
            writer.write(b"\x16\x03\x01" + bytes(500))
        else:
            with contextlib.suppress(ssl.SSLError, ConnectionError):
                reader, writer = await asyncio.open_connection("127.0.0.1", rig.server.port, ssl=context)
                await reader.read()
        async with asyncio.timeout(1):
            while not refused:
                await asyncio.sleep(0.01)
        if case == "garbage":
            writer.close()
        (closed,) = refused
        kinds = {"no certificate": "tls_no_certificate", "TLS 1.2": "tls_failed", "garbage": "tls_plain"}
        assert closed.code == kinds[case]
        prefill, sink = rig.ask(100)
        await rig.finish(prefill, sink)
