"""Sans-I/O protocol: bytes in, events out. No asyncio, socket, clock or torch."""
