"""The example configurations and systemd units that ship with the product.

Installed, they lie inside the package (common/conf, common/systemd); in a source checkout they are the top-level
folders of the same names. Standard library only; called by the daemons' and ctls' help and by tests.
"""

from __future__ import annotations

from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Literal

Kind = Literal["conf", "systemd"]


def shipped(kind: Kind) -> dict[str, str]:
    """File name -> text of every shipped file of a kind."""
    return {f.name: f.read_text(encoding="utf-8") for f in _folder(kind).iterdir() if _is_shipped(kind, f.name)}


def shipped_text(kind: Kind, name: str) -> str:
    """Text of one shipped file. Raises FileNotFoundError when there is none of that name."""
    if not _is_shipped(kind, name) or not (file := _folder(kind) / name).is_file():
        raise FileNotFoundError(f"{kind}/{name} is not shipped; there are {', '.join(sorted(shipped(kind)))}.")
    return file.read_text(encoding="utf-8")


def _folder(kind: Kind) -> Traversable:
    inside = files("common") / kind
    return inside if inside.is_dir() else Path(__file__).resolve().parent.parent / kind


def _is_shipped(kind: Kind, name: str) -> bool:
    return "/" not in name and not name.startswith((".", "_")) and (kind == "systemd" or name.endswith(".toml"))
