from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import stat
import struct
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from common import control_client
from common.control import ControlServer, bind_http, http_routes
from common.control_client import (
    MAX_REQUEST_BYTES,
    ControlClient,
    SocketPath,
    decode_body,
    default_socket,
    encode_frame,
    find_socket,
    frame_length,
)
from common.errors import ControlError, StartupError


async def echo(verb: str, params: dict[str, Any]) -> Any:
    if verb == "refuse":
        raise ControlError("not today: 3 of 2")
    if verb == "bug":
        raise KeyError("a bug")
    return {"verb": verb, "params": params}


@contextlib.asynccontextmanager
async def serving(
    path: Path, dispatch: Callable[[str, dict[str, Any]], Awaitable[Any]] = echo
) -> AsyncIterator[ControlServer]:
    server = ControlServer(path, dispatch)
    await server.start()
    try:
        yield server
    finally:
        await server.close()


def client(path: Path, timeout_s: float = 10) -> ControlClient:
    return ControlClient(SocketPath(path, "the test"), timeout_s)


async def call(path: Path, verb: str, params: dict[str, Any] | None = None) -> Any:
    def work() -> Any:
        with client(path) as connection:
            return connection.call(verb, params)

    return await asyncio.to_thread(work)


async def test_answers_and_refusals(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with serving(path):
        assert await call(path, "status", {"n": [1, "ü"]}) == {"verb": "status", "params": {"n": [1, "ü"]}}
        with pytest.raises(ControlError, match="not today: 3 of 2"):
            await call(path, "refuse")


async def test_one_connection_carries_many_requests(tmp_path: Path) -> None:
    def work() -> list[Any]:
        with client(tmp_path / "c.sock") as connection:
            return [connection.call("n", {"n": n})["params"]["n"] for n in range(50)]

    async with serving(tmp_path / "c.sock"):
        assert await asyncio.to_thread(work) == list(range(50))


async def test_a_bug_in_a_verb_closes_its_connection_and_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c.sock"
    async with serving(path):
        with pytest.raises(ControlError, match="closed the connection; its log says why"):
            await call(path, "bug")
        assert await call(path, "status") == {"verb": "status", "params": {}}
    assert "KeyError: 'a bug'" in caplog.text


async def test_the_socket_is_ours_alone_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run" / "c.sock"
    before = os.umask(0)
    try:
        async with serving(path):
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            assert os.umask(0) == 0, "the umask must be put back"
    finally:
        os.umask(before)
    assert not path.exists()


async def test_a_second_daemon_is_refused_and_the_first_one_stays(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with serving(path):
        with pytest.raises(StartupError, match=rf"{path} belongs to a running daemon \(pid {os.getpid()}\)"):
            await ControlServer(path, echo).start()
        assert await call(path, "x") == {"verb": "x", "params": {}}
    async with serving(path):
        pass


async def test_a_dead_daemons_socket_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(path))
    (tmp_path / "c.sock.lock").write_text("4194304\n")
    async with serving(path):
        assert await call(path, "x") == {"verb": "x", "params": {}}


async def test_a_file_in_the_way_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    path.write_text("precious")
    with pytest.raises(StartupError, match="is in the way, not a socket"):
        await ControlServer(path, echo).start()
    assert path.read_text() == "precious"
    path.unlink()
    async with serving(path):
        pass


async def test_a_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot create"):
        await ControlServer(tmp_path / "file" / "c.sock", echo).start()


def frames(*bodies: bytes) -> bytes:
    return b"".join(struct.pack(">I", len(b)) + b for b in bodies)


@pytest.mark.parametrize(
    ("sent", "says"),
    [
        (struct.pack(">I", MAX_REQUEST_BYTES + 1), f"{MAX_REQUEST_BYTES + 1} bytes is not between 1 and"),
        (struct.pack(">I", 0), "0 bytes is not between"),
        (b"\xff\xff\xff\xff", "4294967295 bytes"),
        (frames(b"nope"), "is not JSON"),
        (frames(b"\xff\xfe"), "is not JSON"),
        (frames(b"[" * 100_000), "is not JSON"),
        (frames(b"[]"), "is not a JSON object"),
        (frames(b"{}"), "a request is"),
        (frames(b'{"verb": 1}'), "a request is"),
        (frames(b'{"verb": "x", "params": []}'), "a request is"),
    ],
)
async def test_nonsense_is_answered_and_the_server_goes_on(tmp_path: Path, sent: bytes, says: str) -> None:
    path = tmp_path / "c.sock"
    async with serving(path):
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(sent)
        length = frame_length(await reader.readexactly(4), 1 << 20)
        reply = decode_body(await reader.readexactly(length))
        assert reply["ok"] is False
        assert says in reply["error"]["message"]
        writer.close()
        assert await call(path, "x") == {"verb": "x", "params": {}}


@pytest.mark.parametrize("cut", range(1, len(encode_frame({"verb": "x", "params": {}}))))
async def test_a_request_cut_anywhere_is_waited_for_then_served(tmp_path: Path, cut: int) -> None:
    frame = encode_frame({"verb": "x", "params": {}})
    async with serving(tmp_path / "c.sock"):
        reader, writer = await asyncio.open_unix_connection(str(tmp_path / "c.sock"))
        writer.write(frame[:cut])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(frame[cut:])
        length = frame_length(await reader.readexactly(4), 1 << 20)
        assert decode_body(await reader.readexactly(length))["ok"] is True
        writer.close()


async def test_a_client_that_leaves_in_the_middle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "c.sock"
    async with serving(path):
        for cut in (2, 4, 6):
            _, writer = await asyncio.open_unix_connection(str(path))
            writer.write(encode_frame({"verb": "x"})[:cut])
            writer.close()
            await writer.wait_closed()
        assert await call(path, "x") == {"verb": "x", "params": {}}
    assert caplog.text == ""


async def test_closing_ends_open_connections(tmp_path: Path) -> None:
    entered = asyncio.Event()

    async def never(verb: str, params: dict[str, Any]) -> Any:
        entered.set()
        await asyncio.Event().wait()

    async with serving(tmp_path / "c.sock", never):
        waiting = asyncio.ensure_future(call(tmp_path / "c.sock", "x"))
        await entered.wait()
    with pytest.raises(ControlError, match=r"closed the connection|lost the daemon"):
        await waiting


# The blocking client against servers that misbehave


@pytest.mark.parametrize(
    ("reply", "says"),
    [
        (b"", "closed the connection"),
        (b"\x00\x00", "closed the connection"),
        (frames(b"{}"), "malformed"),
        (frames(b'{"ok": false}'), "malformed"),
        (b"\xff\xff\xff\xff", "not between"),
        (frames(b"nope"), "not JSON"),
    ],
)
def test_the_client_says_what_is_wrong_with_a_reply(tmp_path: Path, reply: bytes, says: str) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()

        def answer() -> None:
            peer, _ = listener.accept()
            with peer:
                peer.recv(4096)
                peer.sendall(reply)

        thread = threading.Thread(target=answer)
        thread.start()
        with client(path) as connection, pytest.raises(ControlError, match=says):
            connection.call("x")
        thread.join()


def test_the_client_gives_up_on_a_daemon_that_does_not_answer(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        with client(path, 0.05) as connection, pytest.raises(ControlError, match=r"no answer from .* within 0\.05 s"):
            connection.call("x")


def test_no_connection_names_path_source_and_reason(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match=rf"{tmp_path}/none \(the test\): no such socket: is the daemon running"):
        client(tmp_path / "none")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(tmp_path / "dead"))
    with pytest.raises(ControlError, match="nobody listens there"):
        client(tmp_path / "dead")
    with pytest.raises(ControlError, match="too long"):
        client(tmp_path / ("x" * 200))


# Where the socket is


def test_where_the_socket_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "c.toml"
    config.write_text("[control]\nsocket = 'run/c.sock'\n")
    assert find_socket("decoded", "/x", str(config)) == SocketPath(Path("/x"), "--socket")
    found = find_socket("decoded", None, str(config))
    assert found == SocketPath(tmp_path / "run" / "c.sock", f"control.socket in {config}")
    config.write_text("[log]\nlevel = 'info'\n")
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/a:/run/b")
    found = find_socket("decoded", None, str(config))
    assert found.path == Path("/run/a/control.sock")
    assert "sets no control.socket" in found.source
    monkeypatch.setattr(control_client, "SYSTEM_RUN", tmp_path / "system")
    assert find_socket("decoded", None, None) == SocketPath(Path("/run/a/control.sock"), "$RUNTIME_DIRECTORY")
    theirs = tmp_path / "system" / "decoded" / "control.sock"
    theirs.parent.mkdir(parents=True)
    theirs.touch()
    assert find_socket("decoded", None, None) == SocketPath(theirs, "found, as the default of systemd units")
    monkeypatch.setenv("RUNTIME_DIRECTORY", str(tmp_path))
    (tmp_path / "control.sock").touch()
    assert find_socket("decoded", None, None) == SocketPath(tmp_path / "control.sock", "$RUNTIME_DIRECTORY")


@pytest.mark.parametrize(
    ("uid", "environ", "path"),
    [
        (0, {}, "/run/decoded/control.sock"),
        (7, {"XDG_RUNTIME_DIR": "/run/user/7"}, "/run/user/7/decoded/control.sock"),
        (7, {}, "/tmp/decoded-7/control.sock"),
        (0, {"RUNTIME_DIRECTORY": "/run/x"}, "/run/x/control.sock"),
    ],
)
def test_default_sockets(uid: int, environ: dict[str, str], path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: uid)
    assert default_socket("decoded", environ).path == Path(path)


@pytest.mark.parametrize(("text", "says"), [(None, "cannot be read"), ("[", "is not valid TOML")])
def test_a_configuration_that_does_not_tell(tmp_path: Path, text: str | None, says: str) -> None:
    config = tmp_path / "c.toml"
    if text is not None:
        config.write_text(text)
    with pytest.raises(ControlError, match=says):
        find_socket("decoded", None, str(config))


# Read-only verbs over HTTP


async def test_only_read_only_verbs_are_mounted_on_http() -> None:
    async def handler(params: dict[str, Any]) -> Any:
        return {"state": "ready", "path": Path("/x")}

    routes = http_routes(dict.fromkeys(("status", "peers", "drain", "reload", "config", "threshold"), handler))
    assert sorted(route.path for route in routes) == ["/control/peers", "/control/status"]
    assert {route.method for route in routes} == {"GET"}
    status = next(route for route in routes if route.path == "/control/status")
    response = await status.handler(None)  # type: ignore[arg-type]
    assert isinstance(response, web.Response)
    assert response.text == '{"state":"ready","path":"/x"}'
    assert response.headers["Content-Type"] == "application/json"


async def test_too_few_descriptors_for_http_are_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvloop lists no socket of a server when no descriptor is left to duplicate it."""
    runner = web.AppRunner(web.Application())
    monkeypatch.setattr(web.AppRunner, "addresses", [])
    with pytest.raises(StartupError, match=r"\(http.port\): [0-9]+ file descriptors \(ulimit -n\) are too few"):
        await bind_http(runner, "127.0.0.1", 0, "http.port")


# Long verbs


@contextlib.asynccontextmanager
async def working(path: Path) -> AsyncIterator[dict[str, asyncio.Event]]:
    """A server whose verbs work until they are told to end."""
    seen = {name: asyncio.Event() for name in ("begun", "end", "cancelled", "done")}

    async def work(verb: str, _: dict[str, Any]) -> Any:
        seen["begun"].set()
        try:
            await seen["end"].wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # it may have something to put in order
            seen["cancelled"].set()
            raise
        seen["done"].set()
        return verb

    async with serving(path, work):
        yield seen


async def test_a_long_verb_is_given_up_when_the_client_leaves(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with working(path) as seen:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_frame({"verb": "profile"}))
        await asyncio.wait_for(seen["begun"].wait(), 5)
        writer.close()
        await asyncio.wait_for(seen["cancelled"].wait(), 5)


async def test_a_long_verb_is_given_up_when_the_daemon_ends(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with working(path) as seen:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_frame({"verb": "link_bench"}))
        await asyncio.wait_for(seen["begun"].wait(), 5)
    assert seen["cancelled"].is_set()
    writer.close()


async def test_any_other_verb_is_finished_though_the_client_left(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with working(path) as seen:
        _, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_frame({"verb": "reload"}))
        await asyncio.wait_for(seen["begun"].wait(), 5)
        writer.close()
        await asyncio.sleep(0.5)
        seen["end"].set()
        await asyncio.wait_for(seen["done"].wait(), 5)
        assert not seen["cancelled"].is_set()


async def test_a_long_verb_answers_a_client_that_has_sent_its_next_request(tmp_path: Path) -> None:
    path = tmp_path / "c.sock"
    async with working(path) as seen:
        reader, writer = await asyncio.open_unix_connection(path)
        writer.write(encode_frame({"verb": "profile"}) + encode_frame({"verb": "status"}))
        await asyncio.wait_for(seen["begun"].wait(), 5)
        await asyncio.sleep(0.3)
        seen["end"].set()
        for verb in ("profile", "status"):
            reply = decode_body(await reader.readexactly(frame_length(await reader.readexactly(4), 1 << 20)))
            assert reply == {"ok": True, "data": verb}
        writer.close()
