"""The wheel: what pip installs has the modules, the example configurations and units, the licence, and the commands."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from common.resources import shipped, shipped_text

ROOT = Path(__file__).resolve().parent.parent
READ_INSTALLED = """
import json, sys
sys.path[:0] = [sys.argv[1]]
import common
from common.resources import shipped
assert common.__file__.startswith(sys.argv[1]), common.__file__
print(json.dumps({kind: shipped(kind) for kind in ("conf", "systemd")}))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, so that the checkout stays clean; offline, with the setuptools of this environment."""
    work = tmp_path_factory.mktemp("wheel")
    for name in ("common", "prefilld", "decoded", "conf", "systemd"):
        shutil.copytree(ROOT / name, work / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "LICENSE", "README.md"):
        shutil.copy(ROOT / name, work / name)
    code = "from setuptools.build_meta import build_wheel; build_wheel('out')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=work, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = (work / "out").glob("*.whl")
    return path


def test_wheel_has_every_module(wheel: Path) -> None:
    inside = set(zipfile.ZipFile(wheel).namelist())
    ours = {str(p.relative_to(ROOT)) for top in ("common", "prefilld", "decoded") for p in (ROOT / top).rglob("*.py")}
    assert ours <= inside


def test_wheel_has_nothing_else(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"common", "prefilld", "decoded"}
    assert not [n for n in zipfile.ZipFile(wheel).namelist() if n.endswith("constraints.txt")]


def test_wheel_has_licence_and_commands(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (licence,) = (n for n in archive.namelist() if n.endswith("/LICENSE"))
    assert b"Apache License" in archive.read(licence)
    (entry_points,) = (n for n in archive.namelist() if n.endswith("entry_points.txt"))
    commands = {line.split(" = ")[0] for line in archive.read(entry_points).decode().splitlines() if " = " in line}
    assert commands == {"prefilld", "decoded", "prefillctl", "decodectl"}


def test_installed_files_are_read_as_resources(wheel: Path, tmp_path: Path) -> None:
    """Unpacked as pip does it, away from the checkout."""
    import json

    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-I", "-c", READ_INSTALLED, str(tmp_path)]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=True, env=dict(os.environ)
    )
    installed = json.loads(done.stdout)
    for kind in ("conf", "systemd"):
        tracked = {p.name: p.read_text() for p in (ROOT / kind).iterdir() if kind == "systemd" or p.suffix == ".toml"}
        assert installed[kind] == tracked
        assert tracked


def test_checkout_reads_the_same_files() -> None:
    assert {"prefilld.toml", "decoded.toml"} <= set(shipped("conf"))
    assert shipped_text("conf", "decoded.toml") == (ROOT / "conf" / "decoded.toml").read_text()
    assert any(name.endswith(".service") for name in shipped("systemd"))


@pytest.mark.parametrize("name", ["nothing.toml", "../pyproject.toml", "constraints.txt", ""])
def test_other_files_are_not_shipped(name: str) -> None:
    with pytest.raises(FileNotFoundError, match="is not shipped; there are decoded"):
        shipped_text("conf", name)
