"""Collects facts about a run's environment, data and code, which checkpoints record for later comparison."""

import hashlib
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainer.checkpoint.format import brief
from trainer.checkpoint.manifest import as_json
from trainer.common import __version__
from trainer.common.errors import UserError
from trainer.common.files import MOST_RECORD, plain
from trainer.loading.batches import Batch, gathered
from trainer.loading.order import SampleKeys
from trainer.loading.streams import KeyedStream
from trainer.loading.torch_datasets import draws_put_back
from trainer.loop.contract import check_batch
from trainer.loop.evaluate import digest_of
from trainer.parallel.group import Group
from trainer.parallel.strategy import Strategy
from trainer.registry import source_file
from trainer.task import Task

GIT_TIMEOUT_S = 5.0
NUM_SAMPLES = 4
"""Samples of each data set that the default digest of the data covers."""
PACKAGES = ("trainer", "tasks", "models", "data")


def describe_environment(strategy: Strategy) -> dict[str, Any]:
    """Returns all facts, except flags, on which bit-identical results depend."""
    return {
        "world_size": strategy.group.world_size,
        "num_devices": strategy.num_devices,
        "num_threads_per_rank": torch.get_num_threads(),
        "device_type": strategy.device.type,
        "lockstep": __version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
    }


def facts_of_data(task: Task) -> dict[str, Any]:
    """Returns the result of `Task.describe_data` as plain values. Raises UserError if the result is invalid."""
    told: Any = task.describe_data()
    try:
        if not isinstance(told, Mapping) or not all(isinstance(name, str) for name in told):
            raise ValueError(f"must return a mapping from names to values, not {brief(told)}")
        facts = {str(name): plain(value, name) for name, value in told.items()}
        num_bytes = len(as_json(facts))
        if num_bytes > MOST_RECORD // 2:
            raise ValueError(f"must return at most {MOST_RECORD // 2:,} bytes, not {num_bytes:,}")
    except (ValueError, RecursionError) as error:
        problem = "returned lists nested too deeply" if isinstance(error, RecursionError) else error
        raise UserError(f"{type(task).__name__}.describe_data: {problem}") from None
    return facts


def digest_of_data(task: Task) -> str | None:
    """Returns the result of `Task.data_digest`, or by default a digest of a few samples, as a string.

    Returns None if the samples differ when read again. Raises UserError for an unsupported type.
    """
    digest: Any = task.data_digest()
    if isinstance(digest, bytes | bytearray):
        return digest.hex()
    if digest is not None and not isinstance(digest, str | int):
        raise UserError(f"{type(task).__name__}.data_digest: must return a string or None, not {brief(digest)}")
    if digest is not None:
        return f"{digest}"
    one, again = (
        digest_of(batch[name] for batch in batches_of(task).values() for name in sorted(batch)) for _ in range(2)
    )
    return one[:16] if one == again else None


def batches_of(task: Task) -> dict[str, Batch]:
    """Returns, by data set, a batch of a few samples spread over the whole data set; leaves out streams."""
    batches = dict[str, Batch]()
    for name, dataset in task.splits().items():
        if not isinstance(dataset, KeyedStream):
            index = np.unique(np.linspace(0, len(dataset) - 1, NUM_SAMPLES).astype(np.int64))
            with draws_put_back():
                batches[name] = gathered(dataset, task.collate, SampleKeys(index, epoch=0))
            check_batch(task, batches[name], len(index))
    return batches


def remarks_on_weights(task: Task) -> list[str]:
    """Names the data sets with sample weights other than 1 in `batches_of`, unless the task overrides `collate`."""
    if type(task).collate is not Task.collate:
        return []
    weights = {name: batch["weight"] for name, batch in batches_of(task).items()}
    found = [
        f"{name} ({weight.min():g} to {weight.max():g})" for name, weight in weights.items() if (weight != 1).any()
    ]
    if not found:
        return []
    each = f"the field 'weight' of a few samples of {', '.join(found)}"
    return [f"Weights: {each}. The sums of the loss and of all metrics are divided by the sum of the weights."]


def facts_of_helpers(helpers: Mapping[str, nn.Module], group: Group) -> dict[str, dict[str, str]]:
    """Returns {"helpers": digests of `Objective.helpers` by name}, or {} without helpers.

    All processes must call this function. Raises UserError if digests differ between processes.
    """
    digests = {name: digest_of(helper.state_dict().values()) for name, helper in helpers.items()}
    facts = {f"the digest of the helper {name}": digest for name, digest in digests.items()}
    group.require_same(facts, "build_objective must make the same helpers on all ranks")
    return {"helpers": digests} if digests else {}


def identify_code(task_type: type[Task]) -> dict[str, Any]:
    """Identifies the trainer's commit and the task's file; unknown entries are None.

    changed: whether tracked files differ from the commit. task_file, task_sha256: name and digest of the task's file.
    """
    commit, changed = read_git(Path(__file__).resolve().parent)
    file = source_file(task_type)
    digest = _sha256([file]) if file else None
    return {"commit": commit, "changed": changed, "task_file": file.name if file else None, "task_sha256": digest}


def code_digests(task_type: type[Task]) -> dict[str, str]:
    """Returns the sha256 digests of the trainer's code and of the task's file, without digests of unreadable files."""
    root, file = Path(__file__).resolve().parents[2], source_file(task_type)
    own = [path for package in PACKAGES for path in sorted((root / package).rglob("*.py"))]
    found = {"the code of the trainer": _sha256(own), "the task's file": _sha256([file] if file else [])}
    return {name: f"(sha256 {digest[:16]})" for name, digest in found.items() if digest is not None}


def _sha256(files: Sequence[Path]) -> str | None:
    """Returns the sha256 of the concatenated files; None if there are no files or one cannot be read."""
    digest = hashlib.sha256()
    try:
        for file in files:
            digest.update(file.read_bytes().replace(b"from lockstep.", b"from "))  # same digest as a clone
    except OSError:
        return None
    return digest.hexdigest() if files else None


@cache  # imported code does not change within a process
def read_git(folder: Path) -> tuple[str | None, bool | None]:
    """Returns a repository's commit, and whether tracked files differ from it; (None, None) if git finds no commit."""
    command = ["git", "-C", str(folder), "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    # variables set by a hook of another repository would direct git to that repository
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
