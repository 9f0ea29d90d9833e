"""`decodectl explain`"""

from __future__ import annotations

import argparse

from common.ctl import Context, Verb


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("request_id", metavar="REQUEST_ID", help="as in the response's `id`, the log, or `requests`")


def _run(context: Context) -> int:
    return context.show(context.call("explain", {"request_id": context.args.request_id}))


VERB = Verb(
    "explain",
    "why a request went where it went, and what its time was spent on",
    "Route, peer, reason, bytes and the measured parts of the time to first token of one request, in flight or recent.",
    _run,
    _arguments,
)
