"""Runs refuse randomly changed checkpoints with a message, or resume from them.

A changed pickle is packed into a complete archive again, so that its checksums match.
"""

import copy
import random
import signal
import zipfile
from io import BytesIO

import pytest
import torch

from tests.conftest import WEIGHTED, load
from tests.faults.lives import FIRST_SEED
from tests.faults.mutations import changed
from tests.helpers.malicious import Malicious
from trainer.checkpoint.file import read_checkpoint
from trainer.commands.build import assemble_run, build_task, prepare_training
from trainer.commands.parse import parse
from trainer.commands.resume import Changes, resume
from trainer.commands.weights import resume_weights
from trainer.common.errors import UserError
from trainer.loop.checkpointing import restore_progress
from trainer.parallel.strategy import SingleDevice

ARGV = [
    "--task", WEIGHTED, "--num-train", "24", "--num-val", "2", "--num-test", "1", "--width", "2", "--batch-size", "12",
    "--num-threads", "1", "--device", "cpu", "--epochs", "2", "--ema-decay", "0.9",
]  # fmt: skip
NUM_MUTATIONS, MOST_SECONDS = 600, 60


@pytest.fixture
def run(signals_restored, no_rank_variables, tmp_path):
    """Returns an untrained run into which checkpoints are loaded."""
    flags, _ = parse([*ARGV, "--save-dir", str(tmp_path / "new")], several_devices=False)
    run = assemble_run(flags, build_task(flags), SingleDevice(torch.device("cpu")))
    run.facts |= {"code": {"commit": None, "changed": None, "task_file": None, "task_sha256": None}, "run_id": "0" * 12}
    prepare_training(flags, run.task, run.learner, run.plan.orders, run.memory)
    return run


@pytest.fixture
def intact(run_here, tmp_path):
    run_here(*ARGV, "--epochs", 1, "--save-dir", tmp_path / "run")
    return load(tmp_path / "run" / "last.pth")


# --- mutations: a state -> the bytes of a file -------------------------------------------------------------------


def written(state) -> bytes:
    file = BytesIO()
    torch.save(state, file)
    return file.getvalue()


def flipped(draw, data: bytes) -> bytes:
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 10])):
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return bytes(data)


def flipped_bits(draw, state):
    return flipped(draw, written(state))


def truncated(draw, state):
    data = written(state)
    return data[: draw.randrange(len(data))]


def changed_pickle(draw, state):
    """Flips bits of the archive's pickle, with matching checksums."""
    return repacked(written(state), lambda name, part: flipped(draw, part) if name.endswith("data.pkl") else part)


def spoiled_parts(draw, state):
    """Empties, truncates, doubles or removes parts of the archive."""

    def spoiled(name, part):
        if draw.random() < 0.8:
            return part
        return draw.choice([b"", part[: len(part) // 2], part * 2, None])

    return repacked(written(state), spoiled)


def repacked(data, change):
    file = BytesIO()
    with zipfile.ZipFile(BytesIO(data)) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            part = change(name, old.read(name))
            if part is not None:
                new.writestr(zipfile.ZipInfo(name), part)
    return file.getvalue()


def changed_values(draw, state):
    for _ in range(draw.choice([1, 1, 3])):
        state = changed(draw, state)[0]
    return written(state)


def tensors_in(node):
    """Yields (mapping or list, key) of every tensor."""
    for key, value in [*node.items()] if isinstance(node, dict) else [*enumerate(node)]:
        if isinstance(value, torch.Tensor):
            yield node, key
        elif isinstance(value, dict | list):
            yield from tensors_in(value)


def swapped_tensors(draw, state):
    state = copy.deepcopy(state)
    (one, its), (other, others) = draw.sample([*tensors_in(state)], 2)
    one[its], other[others] = other[others], one[its]
    return written(state)


HOSTILE = [
    lambda value: torch.zeros(1).expand(10**12),
    lambda value: value[..., None].expand(*value.shape, 10**9),
    lambda value: torch.empty(10**12, device="meta"),
    lambda value: torch.empty_like(value, device="meta"),
    lambda value: value.to_sparse(),
    lambda value: torch.sparse_coo_tensor(torch.tensor([[2**40]]), torch.ones(1), (2**41,)),
    lambda value: value.float().reshape(-1, 1).to_sparse_csr(),
    lambda value: torch.quantize_per_tensor(value.float(), 0.1, 0, torch.quint8),
    lambda value: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    lambda value: value.to(torch.float8_e4m3fn),
    lambda value: torch.ones(value.numel(), dtype=torch.uint8).view(torch.bits8).view(value.shape),
    lambda value: value.to(torch.complex64).conj(),
    lambda value: torch._neg_view(value),
    lambda value: torch.nn.Parameter(value),
    lambda value: value.to(torch.bool),
    lambda value: value.flatten().as_strided((10**5, 10**5), (0, 0)),
    lambda value: [value] * 3,
    lambda value: bytearray(10**3),
    lambda value: {"__type__": "deque"},
    lambda value: {"__type__": ["array"], "items": value},
]


def hostile_tensors(draw, state):
    state = copy.deepcopy(state)
    node, key = draw.choice([*tensors_in(state)])
    node[key] = draw.choice(HOSTILE)(node[key])
    return written(state)


MUTATIONS = [
    flipped_bits, truncated, changed_pickle, changed_pickle, spoiled_parts, changed_values, changed_values,
    swapped_tensors, hostile_tensors, hostile_tensors,
]  # fmt: skip


# --- the test ----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")  # torch warns about unusual tensors
def test_600_mutated_checkpoints_are_refused_or_resume(run, intact, tmp_path):
    created = tmp_path / "created"
    harmful = intact | {"more": {"x": Malicious(created)}}
    file, outcomes = tmp_path / "x.pth", {"refused": 0, "went on": 0}

    def stop(*_):
        raise AssertionError(f"one of them takes more than {MOST_SECONDS} s")

    signal.signal(signal.SIGALRM, stop)
    for seed in range(FIRST_SEED, FIRST_SEED + NUM_MUTATIONS):
        draw = random.Random(seed)
        mutate = draw.choice(MUTATIONS)
        file.write_bytes(mutate(draw, harmful if mutate is changed_pickle and draw.random() < 0.5 else intact))
        signal.alarm(MOST_SECONDS)
        try:
            outcomes[outcome_of(run, file)] += 1
        except Exception as error:
            raise AssertionError(f"seed {seed}: {mutate.__name__}") from error
        finally:
            signal.alarm(0)
    assert min(outcomes.values()) > 50, outcomes
    assert not created.exists()
    assert {path.name for path in tmp_path.iterdir()} == {"run", "x.pth"}


def outcome_of(run, file):
    """Reads a checkpoint with `only_weights` and without, and loads it as a resume does: "refused" or "went on"."""
    try:
        read_checkpoint(file, "x.pth", only_weights=True)
    except UserError as error:
        assert str(error).startswith("x.pth: ") and "weights_only" not in str(error)
    try:
        state = read_checkpoint(file, "x.pth")
        changes = Changes(state, run.facts, run.task)
        changes.refuse_another_run()
        resume_weights(run.learner, state, "")
        changes.refuse_reordered(run.learner.objective.model.state_dict())
        run.progress = restore_progress(run.learner, state)
        resume(changes, run.plan, run.progress, run.is_complete, run.directory.forget_values)
    except UserError:
        return "refused"
    return "went on"
