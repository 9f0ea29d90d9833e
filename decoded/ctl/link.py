"""`decodectl link`"""

from __future__ import annotations

import argparse
from typing import Any

from common.ctl import Context, Verb, global_options
from common.ctl_render import pairs
from common.units import parse_size


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    text = (
        "Have a peer send bytes that mean nothing over the data links of its session, and say how fast they came.\n"
        "State of prompts goes first, so a busy link shows what is left of it. Compare with `iperf3 -P LINKS -R`."
    )
    raw = argparse.RawDescriptionHelpFormatter
    bench = actions.add_parser(
        "bench", help="what the data links to a peer carry", description=text, formatter_class=raw
    )
    bench.add_argument("peer", metavar="PEER", help="name of the peer, as in `peers`")
    bench.add_argument("--bytes", type=_size, default=64 << 20, metavar="SIZE", help='up to "1GiB" (64MiB)')
    global_options(bench)


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as e:
        raise argparse.ArgumentTypeError(str(e)) from e


def _run(context: Context) -> int:
    data = context.call("link_bench", {"peer": context.args.peer, "num_bytes": context.args.bytes}, timeout_s=70.0)
    return context.show(data, link_text(data))


def link_text(data: dict[str, Any]) -> str:
    """One line for each figure; the general rendering would call the bytes "num"."""
    return "\n".join(pairs({"sent_bytes" if key == "num_bytes" else key: value for key, value in data.items()}))


VERB = Verb("link", "what the links to a peer carry", "Measure links to peers.", _run, _arguments)
