from __future__ import annotations

import runpy
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from common.config import SharedConfig, load, parse_text, plain, render
from common.config_types import Section
from decoded.config import DecodeConfig
from prefilld.config import PrefillConfig

ROOT = Path(__file__).resolve().parents[2]
ROOTS: dict[str, type[SharedConfig]] = {"prefilld": PrefillConfig, "decoded": DecodeConfig}
SET_IN_EXAMPLES = {"node.name", "model.path", "peers"}


def flat(data: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        out |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return out


@pytest.mark.parametrize("name", ROOTS)
def test_the_example_is_complete_and_current(name: str) -> None:
    expected = runpy.run_path(str(ROOT / "tests" / "ops" / "conf_examples.py"))["expected"](name)
    assert (ROOT / "conf" / f"{name}.toml").read_text() == expected, "run: python tests/ops/conf_examples.py"


@pytest.mark.parametrize("name", ROOTS)
def test_the_example_differs_from_the_defaults_only_where_it_must(name: str) -> None:
    example = flat(plain(load(ROOT / "conf" / f"{name}.toml", ROOTS[name], environment="never")))
    defaults = flat(plain(ROOTS[name]()))
    assert {k for k in example if example[k] != defaults.get(k)} <= SET_IN_EXAMPLES
    assert example.keys() == defaults.keys()


@pytest.mark.parametrize("name", ROOTS)
def test_the_example_passes_every_check_once_its_model_exists(name: str, model_dir: Path) -> None:
    text = (ROOT / "conf" / f"{name}.toml").read_text()
    text = text.replace("/var/lib/prfaas/models/smollm2-135m-instruct", str(model_dir))
    assert parse_text(text, ROOTS[name], environment="check").model.path == model_dir


@pytest.mark.parametrize("name", ROOTS)
def test_every_key_says_what_it_is(name: str) -> None:
    def walk(model: type[Section], path: str) -> list[str]:
        silent = []
        for key, field in model.model_fields.items():
            inner = field.annotation
            if isinstance(inner, type) and issubclass(inner, Section):
                silent += walk(inner, f"{path}{key}.")
                silent += [] if (inner.__doc__ or "").strip() else [f"[{key}]"]
            elif len(field.description or "") < 10:
                silent.append(path + key)
        return silent

    assert walk(ROOTS[name], "") == []


@pytest.mark.parametrize("name", ROOTS)
def test_rendered_text_reads_back_as_the_same_configuration(name: str) -> None:
    text = """
[node]
name = "n"
[engine]
backend = "fake"
segment_bytes = 123457
[control]
socket = "/a \\"b\\" \\u0007\\u007f \u00e9"
[links]
heartbeat = "1.7s"
[fake]
prefill_tokens_per_s = 0.1
"""
    if name == "decoded":
        text += "[routing]\nthreshold_tokens = 'inf'\n[[peers]]\nname = 'a'\naddress = '[::1]:7'\n"
    config = parse_text(text, ROOTS[name])
    assert parse_text(render(config), ROOTS[name]) == config


@pytest.mark.parametrize("name", ROOTS)
def test_units_verify(name: str, tmp_path: Path) -> None:
    tool = shutil.which("systemd-analyze")
    if tool is None:
        pytest.skip("systemd-analyze is not installed")
    for program in ("prefilld", "decoded", "prefillctl", "decodectl"):
        stub = tmp_path / program
        stub.write_text("#!/bin/sh\n")
        stub.chmod(0o755)
    unit = tmp_path / f"{name}.service"
    unit.write_text((ROOT / "systemd" / f"{name}.service").read_text().replace("/opt/prfaas/bin", str(tmp_path)))
    done = subprocess.run([tool, "verify", "--man=no", str(unit)], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("name", ROOTS)
def test_units_stop_later_than_the_drain_and_do_not_restart_on_a_wrong_configuration(name: str) -> None:
    unit = (ROOT / "systemd" / f"{name}.service").read_text().splitlines()
    assert "Type=notify" in unit
    assert "RestartPreventExitStatus=78" in unit
    assert "TimeoutStopSec=90s" in unit
    assert ROOTS[name]().drain.timeout + 15 < 90
