"""Verbs that both ctls have. Each is made by a function, since the text names the daemon. Standard library only."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import Any

from common.control_client import Refused
from common.ctl import Context, Verb, global_options
from common.ctl_render import pairs
from common.ctl_views import peers_text, refusal_text, reload_text, state_text, status_text
from common.errors import EXIT_OK, EXIT_RUNTIME, ControlError
from common.units import parse_duration

POLL_S = 0.1


def duration(text: str) -> float:
    """An argument like "30s", as in the configuration. Raises argparse.ArgumentTypeError."""
    try:
        return parse_duration(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _show(verb: str, view: Callable[[Any], str] | None = None) -> Any:
    def run(context: Context) -> int:
        data = context.call(verb)
        return context.show(data, None if view is None or context.args.json else view(data))

    return run


def status(daemon: str) -> Verb:
    """Everything at a glance."""
    text = (
        f"State of {daemon}: starting, ready, draining, drained or stopping; what runs and waits, memory, limits.\n"
        "Always answers with exit code 0 while the daemon lives; see `wait ready` for a check."
    )
    return Verb("status", "state, load and memory of the daemon", text, _show("status", status_text))


def peers(daemon: str) -> Verb:
    """Who is connected."""
    egress = "Says where a limit of [egress] does not hold, or not yet.\n" if daemon == "prefilld" else ""
    text = (
        f"The peers of {daemon}: state, address, links, round trip, bytes, and why a peer is not usable; also the\n"
        "rate at which the network delivers, where more than 1 MiB was sent beyond this machine.\n"
        "Says where a peer computes with other weights or dtypes than this daemon: tokens then depend on the route.\n"
        f"{egress}"
        "With --json also codec, identity, numerics, load, each data link with its retransmissions, and the path."
    )
    return Verb("peers", "peers with state, links and traffic", text, _show("peers", peers_text))


def requests(daemon: str) -> Verb:
    """What is in flight."""
    return Verb("requests", "requests in flight", f"One line for each request {daemon} has running or queued.",
                _show("requests"))  # fmt: skip


def config(daemon: str) -> Verb:
    """The running configuration."""

    def run(context: Context) -> int:
        data = context.call("config")
        return context.show(
            data["values"], f"# in use by {daemon}; read from {data['file'] or 'no file'}\n{data['toml']}"
        )

    text = (
        f"The configuration {daemon} runs with, as TOML with every default (values as JSON with --json).\n"
        "It differs from the file when the file was edited and not yet, or not successfully, reloaded."
    )
    return Verb("config", "configuration in use", text, run)


def cache(daemon: str) -> Verb:
    """The prefix cache."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
        for name, text in (("stats", "what is kept, found and given up"), ("clear", "forget everything, on disk too")):
            action = actions.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
            global_options(action)

    def run(context: Context) -> int:
        data = context.call("cache" if context.args.action == "stats" else "cache_clear")
        return context.show(data, None if context.args.json else "\n".join(pairs(data)))

    text = (
        f"The prefix cache of {daemon}: state of past prompts and answers, from which prompts that begin alike go on.\n"
        "Tokens that were looked up count up to the last one of each prompt, which is always computed."
    )
    return Verb("cache", "the prefix cache: stats, clear", text, run, arguments)


def version(daemon: str) -> Verb:
    """What runs."""
    return Verb("version", "version of the daemon and of its model", f"What runs: versions and model of {daemon}.",
                _show("version"))  # fmt: skip


def resume(daemon: str) -> Verb:
    """The opposite of drain."""

    def run(context: Context) -> int:
        return _show_state(context, context.call("resume"))

    return Verb("resume", "accept work again after drain", f"End a drain: {daemon} accepts new work again.", run)


def _show_state(context: Context, data: Any) -> int:
    """One line; all of the status with --json."""
    return context.show(data, state_text(data, context.prog))


def reload(daemon: str) -> Verb:
    """The configuration file again."""

    def run(context: Context) -> int:
        try:
            data = context.call("reload")
        except Refused as error:
            raise ControlError(refusal_text(error.problems, error.advice)) from error
        return context.show(data, reload_text(data))

    removed = (
        " What a peer that is removed was computing is computed again, by another one or here as far as\n"
        "[fallback] allows; past that the client gets 503."
    )
    text = (
        f"Make {daemon} read its configuration again and say what changed. If anything in it is wrong, or would need\n"
        "a restart, the old one stays, the reasons are printed, and the exit code is 1.\n"
        "Requests in flight go on." + (removed if daemon == "decoded" else "")
    )
    return Verb("reload", "apply the edited configuration", text, run)


def drain(daemon: str) -> Verb:
    """Finish what is accepted, accept nothing new."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--wait", action="store_true", help="return when no request is in flight any more")
        _add_timeout(parser, "with --wait: give up after this time (exit code 1; the drain goes on)")

    def run(context: Context) -> int:
        data = context.call("drain")
        if context.args.wait:
            data = wait_for(context, "drained", context.args.timeout)
        return _show_state(context, data)

    text = (
        f"{daemon} finishes what it accepted and accepts nothing new; peers are told, /readyz answers 503. It keeps\n"
        "running: `resume` ends the drain, SIGTERM stops it."
    )
    return Verb("drain", "finish what is accepted, accept nothing new", text, run, arguments)


def wait(daemon: str) -> Verb:
    """Block until a state is reached."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("state", choices=("ready", "drained"), help="the state to wait for")
        _add_timeout(parser, "give up after this time, with exit code 1")

    def run(context: Context) -> int:
        return _show_state(context, wait_for(context, context.args.state, context.args.timeout))

    text = (
        f"Return with exit code 0 as soon as {daemon} is in the state, with 1 after the timeout. `wait ready` may be\n"
        "called before the daemon is started; `wait drained` fails at once when nobody answers."
    )
    return Verb("wait", "block until the daemon is ready or drained", text, run, arguments)


def _add_timeout(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument(
        "--timeout",
        type=duration,
        metavar="TIME",
        help=f'{text}: a number and its unit, ms, s, min or h, like "90s" or "5min" (default: forever)',
    )


def wait_for(context: Context, state: str, timeout_s: float | None) -> Any:
    """Poll `status` until it has the state; returns the last status. Raises ControlError after the timeout."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    is_told = False
    while True:
        seen = "unreachable"
        try:
            data = context.call("status")
            seen = str(data.get("state"))
            if seen == state:
                return data
            if state == "ready" and seen in ("draining", "drained") and not is_told:
                sys.stderr.write(f"{context.prog}: waiting, but {context.daemon} is {state_text(data, context.prog)}\n")
                is_told = True
        except ControlError as error:
            if state == "drained":
                raise
            seen = str(error)
        if deadline is not None and time.monotonic() >= deadline:
            raise ControlError(f"not {state} after {timeout_s:g} s; last seen: {seen}")
        time.sleep(POLL_S)


def run_child(module: str, arguments: list[str]) -> int:
    """Run a module as a child process with our own input and output; returns its exit code (128 + n for signal n)."""
    import subprocess

    try:
        code = subprocess.call([sys.executable, "-m", module, *arguments])
    except OSError as error:
        sys.stderr.write(f"cannot run {sys.executable}: {error}\n")
        return EXIT_RUNTIME
    return code if code >= EXIT_OK else 128 - code
