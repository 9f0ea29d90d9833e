"""Small JSON files in node.state_dir, written whole or not at all. Used by profiles.py and decoded's codec reports."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, data: Mapping[str, Any]) -> Path:
    """Write a file; its folder is made, the folder's must exist. Answers the path. Raises OSError."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(data, indent=1) + "\n", "utf-8")
    part.replace(path)
    return path
