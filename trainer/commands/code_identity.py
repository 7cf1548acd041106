"""Which code a run is made with: the commit, whether files were changed since, and the file of the task."""

import hashlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from trainer.registry import source_file
from trainer.task import Task

GIT_TIMEOUT_S = 5.0
PACKAGES = ("trainer", "tasks", "models", "data")


def identify_code(task_type: type[Task]) -> dict[str, Any]:
    """Plain values; None where there is no repository, no git, or no file.

    commit: of the repository that the trainer lies in. changed: whether tracked files differ from it. task_file,
    task_sha256: of the module that defines the task.
    """
    commit, changed = read_git(Path(__file__).resolve().parent)
    file = source_file(task_type)
    digest = _sha256([file]) if file else None
    return {"commit": commit, "changed": changed, "task_file": file.name if file else None, "task_sha256": digest}


def code_digests(task_type: type[Task]) -> dict[str, str]:
    """By what it is of, the sha256 of the trainer's code and of the task's file, as far as it can be read."""
    root, file = Path(__file__).resolve().parents[2], source_file(task_type)
    own = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    found = {"the code of the trainer": _sha256(own), "the task's file": _sha256([file] if file else [])}
    return {name: f"(sha256 {digest[:16]})" for name, digest in found.items() if digest is not None}


def _sha256(files: Sequence[Path]) -> str | None:
    """Digest of the bytes of files, one after another; None where there is none, or one cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.read_bytes())
    except OSError:
        return None
    return digest.hexdigest() if files else None


@cache  # a process has imported its code once, whatever is committed later
def read_git(folder: Path) -> tuple[str | None, bool | None]:
    """The commit of the repository that a folder lies in, and whether tracked files differ from it. Takes no lock."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # What a hook of another repository has set would lead there.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment["GIT_OPTIONAL_LOCKS"] = "0"
    try:
        done = subprocess.run(
            command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, timeout=GIT_TIMEOUT_S, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None, None
    lines = done.stdout.decode(errors="replace").splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if commits in ([], ["(initial)"]):
        return None, None
    return commits[0], any(not line.startswith("#") for line in lines)


def code_changes(then: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two identities, as far as both are known."""
    differing = {name for name in now if None not in (then[name], now[name]) and then[name] != now[name]}
    changes = []
    if "commit" in differing:
        changes.append(f"the code, commit {then['commit'][:7]} -> {now['commit'][:7]}")
    if "changed" in differing:
        some = {False: "none", True: "some"}
        changes.append(f"the code, uncommitted changes {some[then['changed']]} -> {some[now['changed']]}")
    if "task_sha256" in differing:
        changes.append(f"the task's file {now['task_file']}")
    return changes
