"""Docstrings make sense alone: they begin with a verb or a noun, and avoid phrases that point elsewhere."""

import ast
import re

import pytest

from tests.helpers.budget import ROOT, sources

OPENINGS = re.compile(r"(?!What to )(What|Of|Those|That of|The same|Its|So|As of|Which|Who|Where|By) ")
PHRASES = re.compile(r"\b(anew|so many|goes on with|what is left|can do without|of its own accord|ever the same)\b")
HOLDERS = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstrings(folder):
    """Yields (place, text) of the docstrings of modules, classes, functions and constants."""
    for path in sources(ROOT / folder):
        for holder in ast.walk(ast.parse(path.read_text())):
            for statement in holder.body if isinstance(holder, HOLDERS) else ():
                value = statement.value if isinstance(statement, ast.Expr) else None
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    yield f"{path.relative_to(ROOT)}:{statement.lineno}", value.value


@pytest.mark.parametrize("folder", ["trainer", "tasks", "models", "data", "lockstep"])
def test_docstrings_make_sense_alone(folder):
    bad = ((where, text) for where, text in docstrings(folder) if OPENINGS.match(text) or PHRASES.search(text))
    found = [f"{where}: {text[:90]!r}" for where, text in bad]
    assert not found, "\n".join(found)
