"""prefilld: the prefill daemon. Thin: checks that `common` is ours, then hands over to common/daemon.py."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from common.daemon import FakePeer, Service
    from prefilld.config import PrefillConfig

DESCRIPTION = """\
Prefill daemon: computes the state of prompts for decodeds and streams it to them over TCP while it is being computed.
It never samples a token. prefillctl talks to it while it runs."""


def refuse_foreign_common(program: str) -> int:
    """0 when the package `common` that Python would import is ours, else a message and the start-up exit code 3."""
    spec = find_spec("common")
    origin = None if spec is None else spec.origin
    ours = Path(__file__).resolve().parent.parent / "common" / "__init__.py"
    if origin is not None and Path(origin).resolve() == ours:
        return 0
    found = origin or "nothing, or a folder without __init__.py,"
    sys.stderr.write(
        f"{program}: {found} would be imported as 'common' instead of {ours}: another distribution or PYTHONPATH is in"
        " the way; install into a virtual environment of its own\n"
    )
    return 3


def _make_service(config: PrefillConfig, fake_peer: FakePeer | None) -> Service:
    from prefilld.service import PrefillService

    return PrefillService(config, fake_peer=fake_peer)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of the console script; returns the exit code."""
    if code := refuse_foreign_common("prefilld"):
        return code
    from common.daemon import Program, run_daemon
    from prefilld.config import PrefillConfig

    return run_daemon(Program("prefilld", DESCRIPTION, PrefillConfig, _make_service), argv)


if __name__ == "__main__":
    sys.exit(main())
