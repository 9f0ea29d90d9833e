"""The section [cache] of both daemons: how much state of past requests is kept for prompts that begin alike."""

from __future__ import annotations

from collections.abc import Iterator

from common.config_types import FilePath, Problem, Section, Size, key
from common.units import GIB, MIB


class CacheConfig(Section):
    """State of past prompts and answers, so that a prompt that begins like one of them is computed from there on only.

    Kept in blocks of 64 tokens, apart for each API key. What saves least computing per byte, and was not used for
    longest, goes first.
    """

    rows_bytes: Size = key(
        1 * GIB,
        "Memory for rows of full-attention and latent layers, beside that of running requests. 0 keeps nothing at all.",
        ge=0,
    )
    window_bytes: Size = key(
        512 * MIB,
        "Memory for rows of sliding-window layers; without them a prompt of such a model goes on nowhere.",
        ge=0,
    )
    recurrent_bytes: Size = key(
        512 * MIB,
        "Memory for the state of recurrent layers, kept at ends of prompts and answers and where prompts branch.",
        ge=0,
    )
    disk_bytes: Size = key(
        0,
        "Files in node.state_dir/prefix-cache, of all kinds together: what memory gives up, and what it holds when the"
        " daemon stops. Read again after a restart; a file that is damaged is removed, never used. 0 writes none.",
        ge=0,
    )

    def check_disk(self, state_dir: FilePath) -> Iterator[Problem]:
        """A disk tier needs a place."""
        if self.disk_bytes and state_dir is None:
            yield Problem(("cache.disk_bytes", "node.state_dir"), "needs node.state_dir, where its files would be")
