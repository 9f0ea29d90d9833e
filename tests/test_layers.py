"""Who may import whom, where a clock may be read, and what may lie at the top of the repository.

The tables are those of docs/architecture.md. Imports are read from the syntax tree, so lazy ones count too;
only for the ctls it matters whether an import runs at start.
"""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = ("common", "prefilld", "decoded")
BASE = ("common.errors", "common.units", "common.request", "common.layout", "common.resources", "common.hosts",
        "common.linkfacts")  # fmt: skip
CLOCK = ("time", "datetime")

TOP_LEVEL = {
    "prefilld", "decoded", "common", "conf", "systemd", "tests", "docs", "benchmarks", ".ci",
    "pyproject.toml", "README.md", "CHANGELOG.md", "Makefile", "LICENSE", ".gitignore",
}  # fmt: skip
MAX_FOLDERS = 2  # below a top-level folder


@dataclass(frozen=True)
class Layer:
    """`ours` and `others` are the only modules of the product / of third parties it may import; None means any."""

    ours: tuple[str, ...] | None = None
    others: tuple[str, ...] | None = None
    banned: tuple[str, ...] = ()


# The longest matching prefix applies.
LAYERS = {
    **dict.fromkeys(BASE, Layer(ours=BASE, others=())),
    "common.wire": Layer(
        ours=BASE,
        others=("msgpack", "zstandard", "numpy", "xxhash", "cryptography"),
        banned=("asyncio", "socket", "ssl", "select", "threading", "random", *CLOCK),
    ),
    "common.policy": Layer(
        ours=BASE, others=(), banned=("asyncio", "socket", "ssl", "random", "secrets", "threading", *CLOCK)
    ),
    "common.sched": Layer(ours=BASE, others=(), banned=("asyncio", "socket", "random", "secrets", *CLOCK)),
    "common.engine": Layer(
        ours=(*BASE, "common.sched", "common.text"),
        others=("torch", "transformers", "numpy", "safetensors", "tokenizers", "gguf", "llvmlite"),
        banned=("asyncio", "socket", *CLOCK),
    ),
    "common.text": Layer(ours=BASE, others=("tokenizers", "jinja2"), banned=("asyncio", "socket", "threading", "time")),
    "common.backend": Layer(ours=(*BASE, "common.sched.prefixes"), others=()),
    "common.net": Layer(ours=(*BASE, "common.backend", "common.wire"), others=("uvloop", "xxhash")),
    "common.sim": Layer(
        ours=(*BASE, "common.policy", "common.sched"), others=("numpy", "rich"), banned=("asyncio", *CLOCK)
    ),
    "common": Layer(banned=("torch", "transformers", "prefilld", "decoded", "common.sim")),
    "prefilld": Layer(banned=("decoded", "common.sim")),
    "decoded": Layer(banned=("prefilld", "common.sim")),
    "decoded.ctl.plan": Layer(banned=("prefilld",)),
}

# Everybody else is handed `now`. Both daemons are services and stamp where things happen; so do the backends.
CLOCK_READERS = (
    "common.net.link", "common.net.relay", "common.looplag", "common.worker", "common.fake", "common.profiler",
    "common.profile_probe",
    "common.local_generation", "common.local_outputs", "common.local_prefill",
    "common.daemon", "common.lifecycle", "common.sdnotify", "common.logs", "common.ctl", "common.ctl_verbs",
    "common.text.chat_template", "prefilld", "decoded",
)  # fmt: skip

CTLS = ("prefilld.ctl.__main__", "decoded.ctl.__main__")
NOT_AT_START = ("torch", "transformers", "aiohttp", "pydantic", "numpy", "rich", "common.sim")


def _inside(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == p or name.startswith(p + ".") for p in prefixes)


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the product."""
    found = {}
    for path in (p for top in PRODUCT for p in (ROOT / top).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(modules()[module].read_text(), str(modules()[module]))


def imports(module: str, *, at_start: bool = False) -> Iterator[tuple[str, int]]:
    """(imported module, line). `at_start` leaves out imports inside functions and under TYPE_CHECKING."""
    todo: list[ast.AST] = [tree(module)]
    while todo:
        node = todo.pop()
        if at_start and (isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(node)):
            continue
        todo.extend(ast.iter_child_nodes(node))
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno} has a relative import; name the module"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield (full if full in modules() else str(node.module)), node.lineno


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


def _layer(module: str) -> str:
    return max((p for p in LAYERS if _inside(module, (p,))), key=len)


def _problem(module: str, imported: str) -> str | None:
    own = _layer(module)
    layer, top = LAYERS[own], imported.split(".")[0]
    if _inside(imported, layer.banned):
        return "is banned here"
    if top in PRODUCT:
        if layer.ours is None or imported == "common" or _inside(imported, (*layer.ours, own)):
            return None
        return f"is not among {', '.join(layer.ours)}"
    if top in sys.stdlib_module_names or layer.others is None or top in layer.others:
        return None
    return f"is not among {', '.join(layer.others) or 'the standard library'}"


def test_imports_keep_to_the_layers() -> None:
    problems = [
        f"{module}:{line}: {imported} {problem}"
        for module in sorted(modules())
        for imported, line in imports(module)
        if (problem := _problem(module, imported))
    ]
    assert not problems, "\n".join(problems)


def test_the_rules_bite() -> None:
    """The checker itself refuses what the table forbids."""
    assert _problem("common.policy.routing", "time")
    assert _problem("common.wire.frames", "torch")
    assert _problem("common.engine.loader", "common.net.link")
    assert _problem("common.request", "numpy")
    assert _problem("prefilld.service", "decoded.service")
    assert _problem("common.worker", "torch")
    assert not _problem("common.engine.loader", "torch")
    assert not _problem("common.net.link", "common.wire.frames")


@pytest.mark.parametrize("package", ["policy", "sched", "wire"])
def test_no_clock_in_pure_packages(package: str) -> None:
    """Even a comment may not look as if the clock was read: grep 'time\\.' prints nothing."""
    hits = [
        f"{path.relative_to(ROOT)}:{n}: {line.strip()}"
        for path in sorted((ROOT / "common" / package).rglob("*.py"))
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if "time." in line
    ]
    assert not hits, "\n".join(hits)


def _clock_reads(module: str) -> Iterator[int]:
    """Lines that import a clock or ask an event loop for the time."""
    yield from (line for imported, line in imports(module) if _inside(imported, CLOCK))
    for node in ast.walk(tree(module)):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".time"):
            yield node.lineno


def test_clocks_are_read_in_few_places() -> None:
    found = [f"{m}:{line}" for m in sorted(modules()) if not _inside(m, CLOCK_READERS) for line in _clock_reads(m)]
    assert not found, "read the clock in a service and hand `now` down: " + ", ".join(found)


@pytest.mark.parametrize("ctl", CTLS)
def test_ctl_starts_without_heavy_imports(ctl: str) -> None:
    todo, seen = [(ctl, ctl)], {ctl}
    while todo:
        module, chain = todo.pop()
        for imported, _ in imports(module, at_start=True):
            assert not _inside(imported, NOT_AT_START), f"{chain} -> {imported}"
            parents = [".".join(imported.split(".")[:n]) for n in range(1, imported.count(".") + 2)]
            for name in parents:
                if name in modules() and name not in seen:
                    seen.add(name)
                    todo.append((name, f"{chain} -> {name}"))


@pytest.mark.parametrize("ctl", CTLS)
def test_ctl_really_starts_without_heavy_imports(ctl: str) -> None:
    """What the syntax tree cannot see: third-party modules that pull in others."""
    code = f"import sys, {ctl}; print(*sorted(set(sys.modules) & set({NOT_AT_START!r})))"
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == ""


def _tracked() -> list[Path]:
    """Files under version control, or all but caches where there is no repository."""
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False)
    if listing.returncode == 0:
        return [Path(name) for name in listing.stdout.split("\0") if name]
    skipped = {".venv", ".git", "build", "dist"}
    return [
        (Path(folder) / f).relative_to(ROOT)
        for folder, _, names in os.walk(ROOT)
        if not skipped & set(Path(folder).relative_to(ROOT).parts)
        for f in names
    ]


def test_top_level_is_fixed() -> None:
    extra = {path.parts[0] for path in _tracked()} - TOP_LEVEL
    assert not extra, f"not a place for {', '.join(sorted(extra))}"


def test_folders_are_shallow() -> None:
    deep = [str(path) for path in _tracked() if len(path.parts) > MAX_FOLDERS + 2]
    assert not deep, ", ".join(deep)


def test_tests_are_not_packages() -> None:
    """An __init__.py under tests/ would let tests/common shadow the real one."""
    assert not [str(p) for p in _tracked() if p.parts[0] == "tests" and p.name == "__init__.py"]


def test_every_package_is_in_the_wheel() -> None:
    """setuptools needs the explicit list; a package that is missing there would only be missed by users."""
    import tomllib

    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    packages = {".".join(p.parent.parts) for p in _tracked() if p.parts[0] in PRODUCT and p.suffix == ".py"}
    assert packages | {"common.conf", "common.systemd"} == listed
