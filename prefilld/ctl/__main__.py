"""prefillctl: the command line of a running prefilld. Starts without torch, pydantic or aiohttp."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from prefilld.__main__ import refuse_foreign_common


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    if code := refuse_foreign_common("prefillctl"):
        return code
    from common.ctl import run_ctl
    from prefilld.ctl import (
        cache,
        config,
        drain,
        model,
        peers,
        profile,
        reload,
        requests,
        resume,
        status,
        version,
        wait,
    )

    modules = (status, peers, requests, profile, cache, config, drain, resume, reload, wait, version, model)
    text = "Talk to a running prefilld over its control socket; import models."
    return run_ctl("prefillctl", "prefilld", text, [m.VERB for m in modules], argv)


if __name__ == "__main__":
    sys.exit(main())
