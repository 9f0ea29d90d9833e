"""asyncio / uvloop transports for wire/."""
