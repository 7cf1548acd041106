"""The documents say what the program does: its flags and their defaults, its files, commands that parse."""

import argparse
import re
import shlex
import sys
from dataclasses import fields
from functools import cache

import pytest
import torch

from tasks import TASKS
from tests.conftest import ROOT, load
from trainer.commands.parse import EXAMPLES, parse
from trainer.config import build_parser, options
from trainer.flags import DEFAULT_CACHE, TRAINER_GROUPS, MultiDeviceFlags
from trainer.registry import find_task

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
SCRIPTS = {"main.py": False, "main_multi_gpu.py": True}
OWN_TASK = "examples/own_task.py:Spirals"


OF_THE_PROGRAM = {"task": next(iter(TASKS)), "save_dir": f"checkpoints/{next(iter(TASKS))}"}
"""Defaults that no group of flags has."""


def group_types() -> list[type]:
    """The groups of flags of every task."""
    return [*TRAINER_GROUPS, *(find_task(name).Config for name in TASKS)]


def heading(group: type) -> str:
    return (group.__doc__ or "").splitlines()[0]


def shown_in_help(parser: argparse.ArgumentParser) -> dict[str, list[argparse.Action]]:
    """The flags by the title of their group."""
    groups = {}
    for group in parser._action_groups:
        actions = [action for action in group._group_actions if action.help != argparse.SUPPRESS]
        groups[group.title] = [action for action in actions if "--help" not in action.option_strings]
    return {title: actions for title, actions in groups.items() if actions}


def real_flags() -> dict[tuple[str, str], str]:
    """What the reference must say: (group, flag) -> default, from the real parser and the real dataclasses."""
    found = {}
    for group in group_types():
        defaults = {field.name: field.default for field in fields(group)} | OF_THE_PROGRAM
        for title, actions in shown_in_help(build_parser([group], "")).items():
            for action in actions:
                (name,) = action.option_strings
                choices = action.metavar if str(action.metavar).startswith("{") else None
                shown = name if choices is None else f"{name} {choices}"
                found[title, shown] = shown_default(defaults[action.dest], not action.metavar)
    return found


def shown_default(default: object, is_switch: bool) -> str:
    if is_switch:
        return "off"
    if default is None:
        return "(none)"
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    if default == DEFAULT_CACHE:  # its folder depends on the user's environment
        return f"~/.cache/{DEFAULT_CACHE.name}"
    return str(default)


def reference(heading: str) -> str:
    """A `## ` section of the quick reference."""
    text = (ROOT / "QUICK_REFERENCE.md").read_text()
    return re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)[1]


def rows(section: str) -> list[list[str]]:
    """The cells of its tables' lines that begin with a name in code."""
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.strip("| ").split(" | ")] for line in lines]


def flag_sections() -> list[str]:
    return reference("Flags").split("\n### ")[1:]


def documented_flags() -> dict[tuple[str, str], str]:
    found = {}
    for part in flag_sections():
        title = part.splitlines()[0].strip()
        for line in part.splitlines():
            if match := re.match(r"\| `(--[^`]+)` \| (.*?) \| \S.* \|$", line):
                name, default = match.groups()
                assert (title, name) not in found, f"QUICK_REFERENCE.md documents {name} twice"
                found[title, name] = "(none)" if re.fullmatch(r"\(.+\)", default) else default.strip("`")
            else:
                assert not line.startswith("| `"), f"not read as flag, default, meaning: {line}"
    return found


def test_reference_has_every_flag_and_no_other():
    real, documented = real_flags(), documented_flags()
    lacking = sorted(real.keys() - documented.keys())
    invented = sorted(documented.keys() - real.keys())
    assert not lacking, f"QUICK_REFERENCE.md lacks {lacking}"
    assert not invented, f"QUICK_REFERENCE.md documents {invented}, which the program does not have"


def test_reference_has_the_real_defaults_in_the_groups_of_help():
    documented = documented_flags()
    wrong = {
        flag: f"is {real}, documented as {documented[flag]}"
        for flag, real in real_flags().items()
        if flag in documented and documented[flag] != real
    }
    assert not wrong


def test_reference_says_of_a_flag_what_help_says():
    """But for code and links, and links of its own in parentheses."""
    told = {}
    for title, line in ((part.splitlines()[0], line) for part in flag_sections() for line in part.splitlines()):
        if match := re.match(r"\| `(--[^` ]+)[^`]*` \| .*? \| (\S.*) \|$", line):
            told[title, match[1]] = match[2].replace("\\|", "|")
    for group in group_types():
        for option in options(group).values():
            if not option.hidden:
                words = re.sub(r" \(default: [^)]*\)", "", option.help)
                meaning = told[heading(group), option.name]
                forms = (meaning, re.sub(r" \(\[[^]]*\]\([^)]*\)\)", "", meaning))
                assert without_markup(words) in map(without_markup, forms), option.name


def without_markup(text: str) -> str:
    return re.sub(r"[`']", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text))


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("script", SCRIPTS)
def test_reference_covers_the_scripts_own_parser(script, task, monkeypatch, capsys):
    """The groups that this test reads are those that the command line is really parsed with."""
    monkeypatch.setattr(sys, "argv", [script])
    with pytest.raises(SystemExit) as ended:
        parse(["--task", task, "--help"], SCRIPTS[script])
    assert ended.value.code == 0
    shown = set(re.findall(r"^  (--[a-z0-9-]+)", capsys.readouterr().out, re.MULTILINE))
    groups = {heading(group) for group in (*TRAINER_GROUPS, find_task(task).Config)}
    if not SCRIPTS[script]:
        groups.remove(heading(MultiDeviceFlags))
    assert shown == {name.split()[0] for title, name in documented_flags() if title in groups}


@pytest.mark.parametrize("task", TASKS)
def test_reference_has_the_tasks_own_defaults_of_other_flags(task):
    section = reference("Flags").split(f"\n### {heading(find_task(task).Config)}\n")[1].split("\n### ")[0]
    stated = re.search(r"Other defaults of this task: (.*?)\.\n", section, re.DOTALL)
    found = dict(re.findall(r"`--([a-z-]+) ([^`]+)`", stated[1])) if stated else {}
    defaults = find_task(task).defaults.items()
    words = {name: map(str, value) if isinstance(value, tuple) else [str(value)] for name, value in defaults}
    assert found == {name.replace("_", "-"): " ".join(value) for name, value in words.items()}


# --- commands --------------------------------------------------------------------------------------------------


BLOCK = re.compile(r"^[ ]*```[a-z]*\n(.*?)^[ ]*```", re.MULTILINE | re.DOTALL)


def code_blocks(text: str) -> list[str]:
    return BLOCK.findall(text)


def code_in(text: str) -> list[str]:
    """Fenced blocks, and what stands in the running text, but for what is written as a pattern."""
    in_text = re.findall(r"`([^`\n]+)`", BLOCK.sub("", text))
    return [*code_blocks(text), *(code for code in in_text if "[" not in code)]


def commands_in(block: str) -> list[tuple[str, list[str]]]:
    """(script, arguments) of every line of a block that runs one of the two scripts."""
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
    help_texts = [("--help", re.sub(r" {3,}\S.*", "", text)) for text in EXAMPLES.values()]
    help_texts.append(("examples/own_task.py", (ROOT / "examples" / "own_task.py").read_text().split('"""')[1]))
    found += [
        (where, script, tuple(arguments)) for where, text in help_texts for script, arguments in commands_in(text)
    ]
    return list(dict.fromkeys(found))


def test_readme_shows_both_scripts():
    """So that a change of the format does not silently leave nothing to check."""
    shown = [script for document, script, _ in documented_commands() if document == "README.md"]
    assert shown.count("main.py") >= 3
    assert shown.count("main_multi_gpu.py") >= 5


@pytest.mark.parametrize(("document", "script", "arguments"), documented_commands())
def test_documented_command_parses(document, script, arguments, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "path", list(sys.path))  # a task's file adds its folder
    # As on a machine with GPUs, whatever this one has.
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    if "--help" in arguments:
        return
    _, problems = parse(arguments, SCRIPTS[script])
    # Files that the reader has and this machine does not.
    absent = re.compile(
        r"--(resume|init)-from(-partial)? \S+\.pth: does not exist"
        r"|--(data-dir|language-model) [^:]+: no such file or folder"
        r"|--config (checkpoints/\S+|mine\.toml): cannot be read"
    )
    problems = [text for text in problems if not absent.match(text)]
    assert not problems, f"{document}: {script} {shlex.join(arguments)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    targets = re.findall(r"\]\(([^)#\s]+)", document.read_text())
    broken = [t for t in targets if "://" not in t and not (document.parent / t).exists()]
    assert not broken


# --- files -----------------------------------------------------------------------------------------------------


def test_reference_lists_the_files_of_a_run(command, tmp_path):
    """A real run leaves exactly the documented files, and its checkpoint holds the documented entries."""
    arguments = ["--num-points", "64", "--epochs", "1", "--ema-decay", "0.9", "--save-every-steps", "1"]
    command("main.py", "--task", OWN_TASK, *arguments, "--device", "cpu", "--save-dir", tmp_path)
    made = set()
    for path in tmp_path.iterdir():
        name = re.sub(r"^checkpoint_\d+\.", "checkpoint_E.", path.name)
        made.add(re.sub(r"^checkpoint_\d+_\d+_\d+\.", "checkpoint_E_P_N.", name))
    documented = {row[0].strip("`") for row in rows(reference("Run directory"))}
    assert made == documented - {"previous-N", "NAME.damaged", "memory.json", "scores.jsonl"}

    entries = {name for row in rows(reference("A checkpoint")) for name in re.findall(r"`(\w+)`", row[0])}
    rare = {"other_buffers", "streams", "totals_of_parts"}  # of some models and data alone
    assert {*load(tmp_path / "best.pth")} == entries - rare
