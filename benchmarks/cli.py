"""The command lines of the benchmarks: descriptions as written, and a default behind every option that has one."""

from __future__ import annotations

import argparse

NAMED = "models by their names in PRFAAS_HOME/models"


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Shows defaults as one types them; what has none, or is off, says nothing."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        if default in (None, "", [], (), False, argparse.SUPPRESS):
            return text
        shown = " ".join(map(str, default)) if isinstance(default, list | tuple) else str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def make_parser(command: str, description: str) -> argparse.ArgumentParser:
    """A parser called what people type, such as "make bench ARGS='...'"."""
    return argparse.ArgumentParser(prog=command, description=description, formatter_class=HelpFormatter)
