"""What start-up needs of this machine: cores, a device, a whole model directory, folders to write to.

Cheap enough for every start: contents of model files are not read, and torch is loaded only to look for a device that
is no CPU. Knows no section; called by the configuration's checks.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from common.config_types import Problem
from common.errors import StartupError

MAKE_MODEL = "`make model` or `prefillctl model import` makes a model directory"


def check_cpus(path: str, cpus: Sequence[int]) -> Iterator[Problem]:
    """Cores that do not exist, or that this process may not use."""
    allowed = os.sched_getaffinity(0)
    missing = [n for n in cpus if n not in allowed]
    if missing:
        yield Problem(
            (path,),
            f"core {', '.join(map(str, missing))} does not exist or is not allowed here; allowed:"
            f" {', '.join(map(str, sorted(allowed)))}",
        )
    if len(set(cpus)) != len(cpus):
        yield Problem((path,), "names a core twice")


def threads_warning(threads: int, cpus: Sequence[int]) -> str:
    """What is wrong with more compute threads than cores, "" when they fit. `cpus`: of the configuration, or none."""
    cores = sorted(set(cpus) or os.sched_getaffinity(0))
    if threads <= len(cores):
        return ""
    whence = "engine.cpus" if cpus else "the cores that this process may use"
    return (
        f"engine.threads = {threads} but {whence} are {len(cores)} ({', '.join(map(str, cores))}): threads that share a"
        f" core wait for each other at every step, many times slower; set engine.threads to at most {len(cores)}"
    )


def check_model(path: str, folder: Path) -> Iterator[Problem]:
    """What a served model directory lacks, file by file; that contents are what was imported shows at start only."""
    from common.engine.loader import directory_problems
    from common.engine.manifest import read_manifest

    if not folder.is_dir():
        yield Problem((path,), f"{folder} is not a directory, or may not be entered; {MAKE_MODEL}")
        return
    try:
        yield from (Problem((path,), p) for p in directory_problems(folder, read_manifest(folder)))
    except (StartupError, OSError) as error:
        yield Problem((path,), str(error))


def check_device(path: str, device: str) -> Iterator[Problem]:
    """A device that torch does not have. Loads torch, unless it is the CPU."""
    if device == "cpu":
        return
    try:
        from common.engine.loader import find_device

        find_device(device)
    except (StartupError, ImportError) as error:
        yield Problem((path,), str(error))


def check_folder_of(path: str, file: Path, *, may_exist: bool) -> Iterator[Problem]:
    """A folder in which the file could not be made. `may_exist`: a file that can be written to is enough."""
    folder = file.parent
    written = file if may_exist and file.exists() else folder
    if not folder.is_dir():
        yield Problem((path,), f"{folder} is not a directory, or may not be entered: make it first")
    elif file.is_dir():
        yield Problem((path,), f"{file} is a directory")
    elif may_exist and file.exists() and not (file.is_file() or file.is_char_device()):
        # To open a FIFO waits for its reader.
        yield Problem((path,), f"{file} is not a regular file")
    elif not os.access(written, os.W_OK):
        yield Problem((path,), f"{written} may not be written to by this user")


def check_folder(path: str, folder: Path) -> Iterator[Problem]:
    """A folder in which no file can be made, and that could not be made itself. Leaves nothing behind."""
    tried = folder if folder.exists() else folder.parent
    try:
        # Not os.access: a read-only or special file system refuses root as well.
        with tempfile.TemporaryFile(dir=tried):
            pass
    except OSError as error:
        yield Problem((path,), f"{tried} cannot be used, or cannot be made a directory: {error.strerror or error}")
