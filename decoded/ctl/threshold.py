"""`decodectl threshold`"""

from __future__ import annotations

import argparse

from common.ctl import Context, Verb


def _tokens(text: str) -> int | str:
    if text in ("inf", "auto"):
        return text
    if text.isascii() and text.isdigit():
        return int(text)
    raise argparse.ArgumentTypeError(f'{text!r} is neither a whole number of tokens >= 0 nor "inf" nor "auto"')


def _arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "tokens", nargs="?", type=_tokens, metavar="N|inf|auto", help="new threshold; without it, show it"
    )


def _run(context: Context) -> int:
    tokens = context.args.tokens
    return context.show(context.call("threshold", {} if tokens is None else {"threshold": tokens}))


VERB = Verb(
    "threshold",
    "show or set the routing threshold",
    "Uncached prompt tokens above which prefill goes to a peer: 0 sends all, inf none, auto\n"
    "solves it while running. A new value holds until the next reload or restart; requests already routed are not\n"
    "touched.",
    _run,
    _arguments,
)
