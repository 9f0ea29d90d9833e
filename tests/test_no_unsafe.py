"""Nothing in the tree can run code that came from a socket or a file: no pickle, marshal, eval, exec, torch.load."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(
    p for top in ("common", "prefilld", "decoded", "benchmarks", "tests") for p in (ROOT / top).rglob("*.py")
)

BANNED_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "os.system", "os.popen"}
# Method names that unpickle or run foreign code whatever the object is called.
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("builtins", "eval"),
}


def problems(source: str) -> list[str]:
    """What is unsafe in a source text, with line numbers."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            module = str(node.module)
            names = {module.split(".")[0], *(f"{module}.{alias.name}" for alias in node.names)}
        else:
            found += _calls(node)
            continue
        bad = names & (BANNED_MODULES | {f"{a}.{b}" for a, b in BANNED_ATTRIBUTES})
        found += [f"line {node.lineno}: imports {name}" for name in sorted(bad)]
    return found


def _calls(node: ast.AST) -> list[str]:
    if not isinstance(node, ast.Call):
        return []
    found = []
    name = ast.unparse(node.func)
    if name in BANNED_CALLS or (isinstance(node.func, ast.Attribute) and _attribute(node.func) in BANNED_ATTRIBUTES):
        found.append(f"line {node.lineno}: calls {name}")
    for keyword in node.keywords:
        value = keyword.value.value if isinstance(keyword.value, ast.Constant) else True
        if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and value is not False:
            found.append(f"line {node.lineno}: passes {keyword.arg}={value}")
    return found


def _attribute(func: ast.Attribute) -> tuple[str, str]:
    return ast.unparse(func.value), func.attr


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_is_safe(path: Path) -> None:
    assert not problems(path.read_text())


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import marshal as m", "eval('1')", "exec(x)", "torch.load(f)",
        "from torch import load", "def f():\n    import shelve", "AutoModel.from_pretrained(p, trust_remote_code=True)",
        "np.load(f, allow_pickle=True)", "subprocess.run('ls', shell=True)",
    ],
)  # fmt: skip
def test_the_check_bites(source: str) -> None:
    assert problems(source)


def test_the_check_allows_the_safe_forms() -> None:
    assert not problems("model.eval()\nre.compile(x)\nm.from_pretrained(p, trust_remote_code=False)\njson.loads(t)")
