"""Measures the tables of docs/results.md again, and updates the page.

    python benchmarks/results.py            # all tables: about half an hour on two idle cores
    python benchmarks/results.py overhead   # tables whose command contains this word

A table is between a comment with its command, `<!-- python benchmarks/overhead.py -->`, and `<!-- end -->`. The table
shows figures of the JSON object in the last line that the command prints: the figures of its existing rows, or all
figures if it has no rows.
"""

import argparse
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "results.md"
TABLE = re.compile(r"<!-- python (?P<command>[^>]*?) -->\n(?P<table>.*?)<!-- end -->", re.DOTALL)


def measured(command: str) -> dict[str, Any]:
    """Runs a benchmark, prints its output, and returns the JSON object of the last line."""
    print(f"python {command}", flush=True)
    lines = []
    process = subprocess.Popen([sys.executable, *shlex.split(command)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in process.stdout:
        print(f"  {line}", end="", flush=True)
        lines.append(line)
    if process.wait() != 0:
        sys.exit(f"python {command} failed; its table was not changed")
    return json.loads(lines[-1])


def table(result: dict[str, Any], old: str = "") -> str:
    """Formats a result as a table with a row per figure; if the table `old` has rows, with only these rows."""
    rows = {name.replace("_", " "): value for name, value in flat(result)}
    names = [line.split(" | ")[0].removeprefix("| ") for line in old.splitlines()[2:]] or [*rows]
    lines = ["| measured | value |", "| --- | --- |", *(f"| {name} | {rows[name]} |" for name in names)]
    return "\n".join(lines) + "\n"


def flat(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yields each value of a nested result with its path; a list of plain values counts as one value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from flat(item, f"{name}, {key}" if name else key)
    elif isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        for number, item in enumerate(value, 1):
            yield from flat(item, f"{name} {number}")
    else:
        yield name, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("word", nargs="?", default="", help="measure only commands that contain this word")
    word = parser.parse_args().word
    commands = [match["command"] for match in TABLE.finditer(DOCUMENT.read_text()) if word in match["command"]]
    if not commands:
        parser.error(f"no command of {DOCUMENT.name} contains {word!r}")
    for command in commands:
        write(command, measured(command))


def write(command: str, result: dict[str, Any]) -> None:
    def replaced(match: re.Match[str]) -> str:
        if match["command"] != command:
            return match[0]
        return f"<!-- python {command} -->\n{table(result, match['table'])}<!-- end -->"

    DOCUMENT.write_text(TABLE.sub(replaced, DOCUMENT.read_text()))


if __name__ == "__main__":
    main()
