"""The verb `profile` of both ctls: have the daemon measure itself, show what it found, keep it in a file.

Standard library only. Called by {prefilld,decoded}/ctl/profile.py.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from common.ctl import Context, Verb
from common.ctl_render import table
from common.ctl_verbs import duration
from common.errors import ControlError
from common.units import format_duration, format_size

TIMEOUT_S, GRACE_S = 120.0, 30.0


def profile(daemon: str, *, decodes: bool) -> Verb:
    """Measure."""

    def arguments(parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--out", metavar="FILE", help="write the profile there as JSON, for `decodectl plan`")
        parser.add_argument("--max-tokens", type=_whole, metavar="N", help="longest prompt (default: see above)")
        if decodes:
            parser.add_argument(
                "--rows", type=_rows, metavar="N,N", help="sequences decoded together (default: 1,4,16)"
            )
        parser.add_argument(
            "--timeout", type=duration, default=TIMEOUT_S, metavar="TIME", help='like "30s" or "5min" (2min)'
        )

    steps = " and of decode steps" if decodes else ""
    text = (
        f"Have the running {daemon} measure itself, its own engine on its own cores: seconds of prefill at a\n"
        f"ladder of prompt lengths{steps}. Prompts are random, leave nothing in the prefix cache, and\n"
        "double in length up to --max-tokens: by default what the model's context and half of the state memory allow,\n"
        "or as far as the time limit goes. Requests are served meanwhile and go first; the profile then says\n"
        "`was_idle: false`. `drain --wait` before and `resume` behind it make for undisturbed figures.\n\n"
        "The result is a node profile that `decodectl plan` reads (docs/policies.md, Planning). It is also kept as\n"
        "profile.json in node.state_dir, for the next start with the same model and numerics."
    )
    return Verb("profile", "measure speeds, for predictions and plans", text, _run, arguments)


def _whole(text: str) -> int:
    if text.isascii() and text.isdigit() and 0 < int(text) < 1 << 31:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")


def _rows(text: str) -> list[int]:
    return [_whole(part.strip()) for part in text.split(",")]


def _run(context: Context) -> int:
    args = context.args
    params = {"timeout_s": args.timeout}
    for name in ("max_tokens", "rows"):
        if getattr(args, name, None) is not None:
            params[name] = getattr(args, name)
    out = Path(args.out) if args.out else None
    if out is not None:
        _check(out)
    data = context.call("profile", params, timeout_s=args.timeout + GRACE_S)
    for text in data["warnings"]:
        sys.stderr.write(f"{context.prog}: warning: {text}\n")
    if out is not None:
        _write(out, {key: value for key, value in data.items() if key != "stored"})
    return context.show(data, None if args.json else profile_text(data))


def _check(out: Path) -> None:
    """Before minutes of measuring, not after. Raises ControlError."""
    folder = out.absolute().parent
    if out.is_dir():
        raise ControlError(f"--out {out} cannot be written: it is a directory")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ControlError(f"--out {out} cannot be written: {folder} is no directory, or not ours to write to")


def _write(out: Path, data: dict[str, Any]) -> None:
    part = out.with_name(out.name + ".part")
    try:
        part.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
        part.replace(out)
    except OSError as e:
        raise ControlError(f"--out {out} cannot be written: {e.strerror or e}") from e


def profile_text(data: dict[str, Any]) -> str:
    """The curve, the costs fitted to it, and where it is kept."""
    prefill, decode, state = data["prefill"], data.get("decode"), data["state"]
    rows = [{"prompt tokens": x, "seconds": y, "tokens/s": x / y if y else None} for x, y in prefill["points"]]
    lines = [
        table(rows),
        f"prefill      {_s(prefill['constant_s'])} + {_s(prefill['per_token_s'])} a token"
        f" + {_s(prefill['per_square_s'])} a token squared",
    ]
    if decode is not None:
        lines.append(
            f"decode step  {_s(decode['base_s'])} + {_s(decode['per_row_s'])} a row"
            f" + {_s(decode['per_context_s'])} a token of context; {decode['max_rows']} rows at most"
        )
    lines.append(f"state        {format_size(state['bytes_per_token'])} a token + {format_size(state['fixed_bytes'])}")
    model, idle = data["model"], "idle" if data["was_idle"] else "serving others"
    lines.append(f"measured     {model['name']} in {format_duration(data['took_s'])}, {idle}")
    if data.get("stored"):
        lines.append(f"kept in      {data['stored']}")
    return "\n".join(lines)


def _s(seconds: float) -> str:
    return format_duration(seconds)
