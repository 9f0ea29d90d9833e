"""`prefillctl model`"""

from __future__ import annotations

import argparse

from common.ctl import Context, Verb
from common.ctl_verbs import run_child


def _arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    text = (
        "Make a served model directory DEST (safetensors, tokenizer, manifest with content digests) from SOURCE. Both\n"
        "daemons need one with equal digests. No running daemon is needed. A complete DEST from the same SOURCE\n"
        "is kept as it is; anything else that is in the way is refused."
    )
    raw = argparse.RawDescriptionHelpFormatter
    add = actions.add_parser("import", help="from a GGUF file or Hugging Face directory", description=text,
                             formatter_class=raw)  # fmt: skip
    add.add_argument("source", metavar="SOURCE", help="a .gguf file, or a directory with config.json and safetensors")
    add.add_argument("dest", metavar="DEST", help="directory to make")
    add.add_argument(
        "--name",
        default="",
        help="model name shown to clients: letters, digits, '.', '_', '-', 63 at most (default: the name of DEST)",
    )
    add.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help="print the result as JSON")


def _run(context: Context) -> int:
    args = context.args
    options = [*(["--name", args.name] if args.name else []), *(["--json"] if args.json else [])]
    return run_child("common.engine.importer", [*options, "--", args.source, args.dest])


VERB = Verb("model", "import a model", "Work on model directories, without a daemon.", _run, _arguments, False)
