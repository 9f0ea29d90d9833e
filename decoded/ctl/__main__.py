"""decodectl: the command line of a running decoded. Starts without torch, pydantic or aiohttp."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from decoded.__main__ import refuse_foreign_common


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    if code := refuse_foreign_common("decodectl"):
        return code
    from common.ctl import run_ctl
    from decoded.ctl import (
        cache,
        codec,
        config,
        drain,
        explain,
        link,
        peers,
        plan,
        profile,
        reload,
        requests,
        resume,
        status,
        threshold,
        version,
        wait,
    )

    modules = (
        *(status, peers, requests, explain, threshold, profile, plan, cache, codec, link),
        *(config, drain, resume, reload, wait, version),
    )  # fmt: skip
    text = "Talk to a running decoded over its control socket."
    return run_ctl("decodectl", "decoded", text, [m.VERB for m in modules], argv)


if __name__ == "__main__":
    sys.exit(main())
