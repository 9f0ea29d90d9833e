import asyncio

from common.net.relay import Relay, Shaper


def test_shaper_spaces_bytes_at_the_rate():
    shaper = Shaper(rate_bps=8000)
    assert [shaper.departure(100, 0.0), shaper.departure(100, 0.0), shaper.departure(100, 10.0)] == [0.1, 0.2, 10.1]


async def test_relay_forwards_at_no_more_than_its_rate_and_closes():
    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.read(-1))
        writer.close()

    server = await asyncio.start_server(echo, "127.0.0.1", 0)
    relay = Relay("127.0.0.1", server.sockets[0].getsockname()[1], rate_bps=40e6, rtt_s=0.02)
    port = await relay.start()
    loop = asyncio.get_running_loop()
    data = bytes(range(256)) * 4096
    began = loop.time()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    writer.write_eof()
    assert await reader.read(-1) == data
    # 1 MiB up, then 1 MiB down at 40 Mbit/s, and one round trip: a lower bound that no noise can break.
    assert loop.time() - began >= 2 * len(data) * 8 / 40e6 + 0.02 - 0.01
    writer.close()
    await relay.close()
    server.close()


async def test_closing_with_open_connections_is_no_error():
    gone = asyncio.Event()

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(-1)
        gone.set()
        writer.close()

    errors: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    server = await asyncio.start_server(hold, "127.0.0.1", 0)
    relay = Relay("127.0.0.1", server.sockets[0].getsockname()[1], rate_bps=1e9, rtt_s=0.0)
    port = await relay.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"x")
    await asyncio.sleep(0.05)
    await relay.close()
    assert await reader.read(-1) == b""
    await asyncio.wait_for(gone.wait(), 5)
    writer.close()
    server.close()
    assert errors == []
