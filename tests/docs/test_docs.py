"""The pages match the program: flags and their defaults, files of a run, commands and links."""

import re
import runpy
import shlex
import sys
from functools import cache

import pytest
import torch

from tasks import TASKS
from tests.conftest import ROOT, load
from trainer.commands.parse import examples_of, parse
from trainer.config import options
from trainer.flags import TRAINER_GROUPS
from trainer.registry import default_task, find_task

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPTS = {"main.py": False, "main_multi_gpu.py": True}
OWN_TASK = "examples/own_task.py:Spirals"


def reference(heading: str) -> str:
    """Returns a `## ` section of the quick reference."""
    text = (ROOT / "QUICK_REFERENCE.md").read_text()
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def rows(section: str) -> list[list[str]]:
    """Returns the cells of table rows that begin with a name in code."""
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


# --- flags -----------------------------------------------------------------------------------------------------


def test_tables_of_flags_match_the_code():
    """`python docs/make_flags.py` writes these tables."""
    maker = runpy.run_path(str(ROOT / "docs" / "make_flags.py"))
    assert maker["PAGE"].read_text() == maker["page"]()


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_help_fits_on_a_screen_and_help_all_shows_every_flag(script, task, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [script])
    monkeypatch.setenv("COLUMNS", "80")
    shown = {}
    for asked in ("--help", "--help-all"):
        with pytest.raises(SystemExit) as ended:
            parse(["--task", task, asked], SCRIPTS[script])
        assert ended.value.code == 0
        shown[asked] = capsys.readouterr().out
    num_lines = len(shown["--help"].splitlines())
    assert num_lines <= 60, f"--help has {num_lines} lines; use flag(..., common=True) for fewer flags"
    names = {asked: set(re.findall(r"^  (--[a-z0-9-]+)", text, re.MULTILINE)) for asked, text in shown.items()}
    groups = [*TRAINER_GROUPS[: None if SCRIPTS[script] else -1], find_task(task).Config]
    visible = [option for option in options(*groups).values() if not option.hidden]
    assert names["--help-all"] == {option.name for option in visible}
    assert names["--help"] == {option.name for option in visible if option.common}, "flag(..., common=True)"
    # Help shows an example command of each task.
    assert f"--task {task} " in shown["--help"] or task == default_task() or SCRIPTS[script]


# --- commands --------------------------------------------------------------------------------------------------


BLOCK = re.compile(r"^[ ]*```[a-z]*\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> list[str]:
    return BLOCK.findall(text)


def code_in(text: str) -> list[str]:
    """Returns the fenced blocks and the inline code of a page, but no inline pattern such as `--flag [value]`."""
    in_text = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return [*code_blocks(text), *(code for code in in_text if "[" not in code)]


def commands_in(block: str) -> list[tuple[str, list[str]]]:
    """Returns (script, arguments) of every line of a block that runs one of the two scripts."""
    found = []
    for line in block.replace("\\\n", " ").splitlines():
        if not any(script in line for script in SCRIPTS):
            continue
        for part in re.split(r"&&|;|\|| & | > ", line):
            try:
                tokens = shlex.split(part, comments=True)
            except ValueError:  # prose with an apostrophe
                continue
            for i, token in enumerate(tokens):
                is_run = i > 0 and re.search(r"python|torchrun|torch\.distributed\.launch", " ".join(tokens[:i]))
                if token in SCRIPTS and is_run:
                    found.append((token, [t for t in tokens[i + 1 :] if t != "&"]))
    return found


@cache
def documented_commands() -> list[tuple[str, str, tuple[str, ...]]]:
    found = [
        (str(path.relative_to(ROOT)), script, tuple(arguments))
        for path in DOCUMENTS
        for block in code_in(path.read_text())
        for script, arguments in commands_in(block)
    ]
    help_texts = [("--help", examples_of(name, find_task(name), s)) for name in TASKS for s in SCRIPTS.values()]
    help_texts.append(("examples/own_task.py", (ROOT / "examples" / "own_task.py").read_text().split('"""')[1]))
    found += [
        (where, script, tuple(arguments)) for where, text in help_texts for script, arguments in commands_in(text)
    ]
    return list(dict.fromkeys(found))


def test_readme_names_every_task():
    text = (ROOT / "README.md").read_text()
    assert [task for task in TASKS if f"| `{task}`" not in text and f"--task {task} " not in text] == []


def test_readme_shows_both_scripts():
    """If the format of the pages changed, documented_commands might find no command to test."""
    shown = [script for document, script, _ in documented_commands() if document == "README.md"]
    assert shown.count("main.py") >= 3
    assert shown.count("main_multi_gpu.py") >= 5


@pytest.mark.parametrize(("document", "script", "arguments"), documented_commands())
def test_documented_command_parses(document, script, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))  # loading a task's file adds its folder
    # Commands are parsed as on a machine with GPUs.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    if {"--help", "--help-all"} & {*arguments}:
        return
    _, problems = parse(arguments, SCRIPTS[script])
    # The reader has these files, and this machine does not.
    absent = re.compile(
        r"--(resume|init)-from(-partial)? \S+\.pth: does not exist"
        r"|--(data-dir|language-model) [^:]+: no such file or folder"
        r"|--config (checkpoints/\S+|mine\.toml): cannot be read"
    )
    problems = [text for text in problems if not absent.match(text)]
    assert not problems, f"{document}: {script} {shlex.join(arguments)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_pages_exist(document):
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    broken = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not broken


# --- files -----------------------------------------------------------------------------------------------------


def test_reference_lists_the_files_of_a_run(command, tmp_path):
    arguments = ["--num-points", "64", "--epochs", "1", "--ema-decay", "0.9", "--save-every-steps", "1"]
    command("main.py", "--task", OWN_TASK, *arguments, "--device", "cpu", "--save-dir", tmp_path)
    made = set()
    for path in tmp_path.iterdir():
        name = re.sub(r"^checkpoint_\d+\.", "checkpoint_E.", path.name)
        made.add(re.sub(r"^checkpoint_\d+_\d+_\d+\.", "checkpoint_E_P_N.", name))
    documented = {name for row in rows(reference("Run directory")) for name in re.findall(r"`([\w.-]+)`", row[0])}
    assert made == documented - {"previous-N", "NAME.damaged", "memory.json", "scores.jsonl"}

    entries = {name for row in rows(reference("A checkpoint")) for name in re.findall(r"`(\w+)`", row[0])}
    rare = {"other_buffers", "streams", "totals_of_parts"}  # only some models and data have these
    assert {*load(tmp_path / "best.pth")} == entries - rare
