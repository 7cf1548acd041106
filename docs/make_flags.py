"""Generates docs/flags.md, which lists every flag, from the code: `python docs/make_flags.py`."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tasks import TASKS
from trainer.config import FlagGroup, Option, described, flag_name, options, shown
from trainer.flags import DEFAULT_CACHE, TRAINER_GROUPS
from trainer.profiling.cli import COMMANDS
from trainer.registry import find_task

PAGE = Path(__file__).parent / "flags.md"
INTRODUCTION = """# Every flag

`python docs/make_flags.py` writes this page from the code. `--help-all` shows the same flags for one task, `--help`
those that most runs need.

`--batch-size=4`, `--batch-size 4` and `--batch_size 4` are equal; names are not abbreviated. `--drop-last=false` takes
back a switch that a [file](../QUICK_REFERENCE.md#config-files) or a task has set. Spaces or commas separate the values
of a list; write a comma in a name as `'\\,'`. All mistakes of a command line are shown together. *off* is a switch that
is not set; words in parentheses say what happens without the flag. A task may have defaults of its own for the
trainer's flags.
"""


def page() -> str:
    """Returns the Markdown of docs/flags.md."""
    sections: dict[str, list[str]] = {}
    for group in TRAINER_GROUPS:
        sections.setdefault(described(group)[0], []).extend(rows(group))
    for name in TASKS:
        task = find_task(name)
        heading, text = described(task.Config)
        changed = ", ".join(f"`{flag_name(field)} {shown(value)}`" for field, value in task.defaults.items())
        notes = [" ".join(text.split()), f"Other defaults of this task: {changed}." if changed else ""]
        sections[heading] = [*(f"{note}\n" for note in notes if note), *TABLE, *rows(task.Config)]
    for name, command in COMMANDS.items():
        sections[f"profiler.py {name}"] = rows(command.tool)
    texts = []
    for heading, lines in sections.items():
        lines = lines if TABLE[0] in lines else [*TABLE, *lines]
        texts.append("\n".join([f"## {heading}\n", *lines, ""]))
    return "\n".join([INTRODUCTION, *texts])


TABLE = ("| flag | default | meaning |", "| --- | --- | --- |")


def rows(group: type[FlagGroup]) -> list[str]:
    """Returns a table row for each visible flag of a group."""
    lines = []
    for option in options(group).values():
        name = option.name + (f" {{{','.join(option.choices)}}}" if option.choices else "")
        if not option.hidden:
            lines.append(f"| `{name}` | {shown_default(option)} | {escaped(option.text)} |")
    return lines


def shown_default(option: Option) -> str:
    """Returns a flag's default as a literal in code, *off*, or words in parentheses."""
    if option.is_switch:
        return "*off*"
    if option.without_value:
        return f"({escaped(option.without_value)})"
    if option.name == "--task":
        return f"`{next(iter(TASKS))}`"
    if option.name == "--save-dir" and option.default == Path("checkpoints"):
        return "`checkpoints/TASK`"
    if option.default == DEFAULT_CACHE:  # its folder depends on the user's environment
        return f"`~/.cache/{DEFAULT_CACHE.name}`"
    return "(none)" if option.default is None else f"`{shown(option.default)}`"


def escaped(text: str) -> str:
    """Escapes characters that Markdown would interpret in a table."""
    for mark in "\\|*_<":
        text = text.replace(mark, f"\\{mark}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
