"""The size of files and functions, and that each says what it is: budgets that keep the code readable."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FILES = sorted(p for top in ("common", "prefilld", "decoded") for p in (ROOT / top).rglob("*.py"))
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 60  # without its docstring
MAX_DOCSTRING_LINES = 24  # of a module; trees and frames are drawn there


def functions(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """(name, lines without docstring)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            is_doc = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and len(node.body) > 1
            doc_lines = (first.end_lineno or 0) - first.lineno + 1 if is_doc else 0
            yield node.name, (node.end_lineno or 0) - node.lineno + 1 - doc_lines


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_file_keeps_to_the_budgets(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert text.count("\n") <= MAX_FILE_LINES
    assert not [f"{name}: {lines} lines" for name, lines in functions(tree) if lines > MAX_FUNCTION_LINES]
    doc = ast.get_docstring(tree)
    assert doc or not text.strip(), "no module docstring"
    assert (doc or "").count("\n") < MAX_DOCSTRING_LINES
    assert not [n.lineno for n in ast.walk(tree) if isinstance(n, ast.ExceptHandler) and n.type is None], "bare except"
