"""A part of a core for a process: the kernel's CPU bandwidth control, cgroup v2 (cpu.max) or v1 (cpu.cfs_quota_us).

The period is short, so that what is held back stands still for milliseconds at a time: event loops go on. Needs root
and a writable hierarchy. Called by site.py.
"""

from __future__ import annotations

import os
from pathlib import Path

PERIOD_US = 10_000
ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/cpu"))


def hierarchy(roots: tuple[Path, ...] = ROOTS) -> Path | None:
    """Where groups with a CPU limit can be made; None where they cannot."""
    for root in roots:
        controllers = root / "cgroup.controllers"
        has_cpu = "cpu" in controllers.read_text().split() if controllers.exists() else _v1(root)
        if has_cpu and os.access(root, os.W_OK):
            return root
    return None


def _v1(root: Path) -> bool:
    return (root / "cpu.shares").exists()


class CpuQuota:
    """A group of this benchmark's own, of one process and its threads; removed by `close`."""

    def __init__(self, name: str, root: Path) -> None:
        """Raises OSError where the group cannot be made."""
        self._is_v2 = not _v1(root)
        if self._is_v2:
            (root / "cgroup.subtree_control").write_text("+cpu")
        self._root, self._group = root, root / f"{name}-{os.getpid()}"
        self._group.mkdir()

    def hold(self, pid: int, cores: float | None) -> None:
        """Let the process use that many cores in the mean from now on; None is as much as there is."""
        quota_us = None if cores is None else int(cores * PERIOD_US)
        if self._is_v2:
            limit = "max" if quota_us is None else str(quota_us)
            (self._group / "cpu.max").write_text(f"{limit} {PERIOD_US}")
        else:
            (self._group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (self._group / "cpu.cfs_quota_us").write_text(str(-1 if quota_us is None else quota_us))
        (self._group / "cgroup.procs").write_text(str(pid))

    def close(self) -> None:
        """Remove the group; the processes in it must have ended."""
        self._group.rmdir()
