"""What prefillctl and decodectl share: the command line, the connection, output, exit codes. Standard library only.

A verb is a `Verb` in a file of its own (prefilld/ctl/<verb>.py, decoded/ctl/<verb>.py); bodies that both have are in
ctl_verbs.py. Exit codes: 0 done, 1 refused or unreachable, 2 usage. Called by the daemons' ctl/__main__.py.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from common.control_client import ControlClient, find_socket
from common.ctl_render import to_text
from common.errors import EXIT_OK, EXIT_RUNTIME, EXIT_USAGE, ControlError

EPILOG = """\
where the daemon is looked for: --socket, else control.socket in --config, else control.sock in the runtime directory
({daemon}: $RUNTIME_DIRECTORY; /run/{daemon} for root; for other users $XDG_RUNTIME_DIR/{daemon}, or
/tmp/{daemon}-<uid> without XDG_RUNTIME_DIR; then /run/{daemon})

exit codes: 0 done; 1 the daemon refused, cannot be reached, or a wait timed out; 2 usage
"""


@dataclass(frozen=True, slots=True)
class Context:
    """What a verb gets: its arguments and ways to reach the daemon and the user."""

    prog: str
    daemon: str
    args: argparse.Namespace

    def connect(self, timeout_s: float = 30.0) -> ControlClient:
        """A connection to the daemon. Raises ControlError."""
        return ControlClient(find_socket(self.daemon, self.args.socket, self.args.config), timeout_s)

    def call(self, verb: str, params: dict[str, Any] | None = None, timeout_s: float = 30.0) -> Any:
        """One request on a connection of its own. Raises ControlError."""
        with self.connect(timeout_s) as client:
            return client.call(verb, params)

    def show(self, data: Any, text: str | None = None) -> int:
        """Print data: JSON with --json, else `text` or a general rendering. Returns EXIT_OK."""
        if self.args.json:
            sys.stdout.write(json.dumps(data, indent=2, ensure_ascii=False) + "\n")
        else:
            sys.stdout.write((to_text(data) if text is None else text).rstrip("\n") + "\n")
        return EXIT_OK


@dataclass(frozen=True, slots=True)
class Verb:
    """One verb of a ctl. `arguments` adds what it takes to its parser; `run` returns the exit code."""

    name: str
    summary: str
    description: str
    run: Callable[[Context], int]
    arguments: Callable[[argparse.ArgumentParser], None] | None = None
    needs_daemon: bool = True


class _Version(argparse.Action):
    """--version, looked up only when asked for: it reads the metadata of the installation."""

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version of this command, and exit")

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from common.release import version

        sys.stdout.write(f"{parser.prog} {version()}\n")
        parser.exit()


def global_options(parser: argparse.ArgumentParser, *, is_top: bool = False, needs_daemon: bool = True) -> None:
    """The options that may stand before the verb, behind it, and behind its action; those parsers must not reset what
    stood before.
    """
    none: Any = None if is_top else argparse.SUPPRESS
    group = parser.add_argument_group("connection and output" if needs_daemon else "output")
    if needs_daemon:
        group.add_argument("--socket", metavar="PATH", default=none, help="control socket of the daemon")
        group.add_argument(
            "--config", metavar="FILE", default=none, help="the daemon's configuration: where its socket is"
        )
    json_default: Any = False if is_top else argparse.SUPPRESS
    group.add_argument("--json", action="store_true", default=json_default, help="print the reply as JSON")


def make_parser(prog: str, daemon: str, description: str, verbs: Sequence[Verb]) -> argparse.ArgumentParser:
    """The command line of one ctl."""
    raw = argparse.RawDescriptionHelpFormatter
    epilog = EPILOG.format(daemon=daemon)
    parser = argparse.ArgumentParser(prog=prog, description=description, epilog=epilog, formatter_class=raw)
    parser.add_argument("--version", action=_Version)
    global_options(parser, is_top=True)
    commands = parser.add_subparsers(dest="verb", metavar="VERB", title="verbs")
    for verb in verbs:
        sub = commands.add_parser(verb.name, help=verb.summary, description=verb.description, formatter_class=raw)
        if verb.arguments is not None:
            verb.arguments(sub)
        global_options(sub, needs_daemon=verb.needs_daemon)
        sub.set_defaults(run_verb=verb.run)
    return parser


def run_ctl(prog: str, daemon: str, description: str, verbs: Sequence[Verb], argv: Sequence[str] | None = None) -> int:
    """Parse, run the verb, return the exit code; what the daemon refused goes to standard error."""
    parser = make_parser(prog, daemon, description, verbs)
    args = parser.parse_args(argv)
    if args.verb is None:
        parser.print_help(sys.stderr)
        return EXIT_USAGE
    try:
        code: int = args.run_verb(Context(prog, daemon, args))
        sys.stdout.flush()
    except ControlError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return EXIT_RUNTIME
    except BrokenPipeError:
        sys.stderr.close()  # The reader of our output left (`| head`); the interpreter must not complain at exit.
        return EXIT_RUNTIME
    except KeyboardInterrupt:
        return 130
    return code
