"""Docstrings make sense alone: they begin with a verb or a noun of their own."""

import ast
import re

import pytest

from tests.helpers.budget import ROOT, sources

OPENINGS = re.compile(r"(?!What to )(What|Of|Those|That of|The same|Its|So|As of|Which|Who|Where|By) ")
PHRASES = re.compile(r"\b(anew|so many|goes on with|what is left)\b")


@pytest.mark.parametrize("folder", ["trainer", "tasks", "models", "data", "lockstep", "benchmarks", "tests"])
def test_docstrings_make_sense_alone(folder):
    found = []
    for path in sources(ROOT / folder):
        for node in ast.walk(ast.parse(path.read_text())):
            text = node.value.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) else ""
            if isinstance(text, str) and (OPENINGS.match(text) or PHRASES.search(text)):
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {text[:90]!r}")
    assert not found, "\n".join(found)
