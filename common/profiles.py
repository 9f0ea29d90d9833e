"""A node's profile as it is kept in node.state_dir: written whole, read at start, ignored unless it is about this node.

The document is what `profile` answers and `decodectl plan` reads (common/policy/profile.py). Knows files, no engine.
Used by profiler.py and by the daemons.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from common.layout import ModelInfo
from common.policy.fields import json_object
from common.policy.profile import NodeProfile, node_profile
from common.state_file import write_json

log = logging.getLogger(__name__)
FILE_NAME = "profile.json"
MAX_BYTES = 1 << 20


def identity(info: ModelInfo) -> str:
    """Digest of what is computed, whoever computes it: weights, configuration, state."""
    telling = (info.weights_digest, info.config_digest, info.layout.digest)
    return sha256("\0".join(telling).encode()).hexdigest()[:32]


def store(state_dir: Path, profile: Mapping[str, Any]) -> Path:
    """Keep a profile, whole or not at all; the folder is made. Raises OSError."""
    return write_json(state_dir / FILE_NAME, profile)


def load_profile(state_dir: Path | None, info: ModelInfo) -> NodeProfile | None:
    """What was measured of this model computed in this way; None, with a log line, when the file is about another or
    damaged, and without one when there is none.
    """
    if state_dir is None:
        return None
    path = state_dir / FILE_NAME
    try:
        data = _read(path)
        if why := _other(data, info):
            log.warning("the profile is not used, measure again: it is about %s", why, extra={"path": str(path)})
            return None
        found = node_profile(data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as e:
        log.warning("the profile is damaged and not used, measure again: %s", e, extra={"path": str(path)})
        return None
    log.info("profile read", extra={"path": str(path), "measured_at": data.get("measured_at")})
    return found


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_BYTES:
        raise ValueError(f"it is larger than {MAX_BYTES} bytes")
    return json_object(path.read_bytes())


def _other(data: Mapping[str, Any], info: ModelInfo) -> str:
    """What it is about if not this model with these numerics; "" if it is."""
    model, numerics = data.get("model"), data.get("numerics")
    if not isinstance(model, Mapping) or not isinstance(numerics, Mapping):
        raise ValueError("it names no model, or no numerics")
    if model.get("digest") != identity(info):
        return f"another model, {str(model.get('name'))[:64]!r}"
    names = sorted(numerics.keys() | info.numerics.keys())
    differ = [n for n in names if numerics.get(n) != info.numerics.get(n)]
    return ", ".join(
        f"{str(n)[:32]} = {str(numerics.get(n))[:32]!r}, which is {info.numerics.get(n)!r} now" for n in differ
    )
