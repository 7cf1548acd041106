"""Small run whose file operations are recorded and checked, and which is killed or loses power at any of them."""

import re
from dataclasses import dataclass
from functools import partial

from tests.conftest import WEIGHTED, assert_same_bits, load, read_metrics
from tests.faults.disk import KillPoint, Operation, disk_after, read_trace
from tests.faults.lives import Life, Recipe
from tests.faults.prepared import Prepared

# The run saves after every step and epoch, keeps the best weights, and deletes old checkpoints.
RECIPE = Recipe(
    argv=(
        "--task", WEIGHTED, "--num-train", 24, "--num-val", 4, "--width", 4, "--batch-size", 12, "--epochs", 3,
        "--num-threads", 1, "--keep-checkpoints", 1, "--keep-best", 2, "--save-every-steps", 1, "--log-interval", 1,
        "--lr", 0.01, "--ema-decay", 0.9, "--dropout", 0.1,
    ),
    global_batch_size=12,
    num_samples=24,
    epochs=3,
)  # fmt: skip
CHECKPOINT = re.compile(r"checkpoint_\w+")


@dataclass(frozen=True)
class Watched:
    """File operations of the last attempt of a life.

    before: contents of files before the attempt. step: optimizer step of the checkpoint from which it resumed, or 0.
    """

    life: Life
    before: dict[str, bytes]
    step: int
    operations: list[Operation]


def watch(life, forked, mutant=None):
    """Records the file operations of one more attempt, which runs in one process and must finish."""
    life.directory.mkdir(parents=True, exist_ok=True)
    before = {path.name: path.read_bytes() for path in life.directory.iterdir() if path.is_file()}
    trace = life.directory.with_name("trace")
    job = life.attempt(partial(forked, prepare=Prepared(mutant, life.directory, trace)), 1)
    assert life.statuses == [0], job.output
    return Watched(life, before, life.parts[-1].first_step, read_trace(trace))


# --- the order of operations -------------------------------------------------------------------------------------


def assert_durable_order(operations):
    """Asserts that a save syncs content, manifest and name in this order, and deletes old checkpoints afterwards."""
    for i, (kind, name, _) in enumerate(operations):
        if kind == "saved":
            assert_saved_durably(operations[: i + 1], temporary=name.replace(".pth", ".tmp"), name=name)
        elif kind == "unlink" and CHECKPOINT.match(name) and name.endswith(".pth"):
            assert_replaced(operations[:i], name)
        elif kind == "rename" and not name.endswith(".link.tmp"):
            assert_flushed(operations[:i], name)


def assert_flushed(operations, name):
    """Asserts that everything written to a file since it was last opened is synced."""
    own = [op.kind for op in operations if op.name == name and op.kind in ("open", "write", "truncate", "fsync")]
    assert own and own[-1] in ("fsync", "open"), f"{name} got its name before its content was on the disk"


def assert_replaced(operations, name):
    """Asserts that another checkpoint is the newest, and that the folder was synced after its rename."""
    named = max(i for i, op in enumerate(operations) if op.kind == "rename" and CHECKPOINT.match(op.name))
    flushed = any(op.kind == "sync directory" for op in operations[named:])
    assert flushed and operations[named].detail != name, f"{name} was deleted before another took its place"


def assert_saved_durably(operations, temporary, name):
    kinds = [(op.kind, op.name) for op in operations]
    content = last_index(kinds, ("fsync", temporary))
    listed = kinds.index(("rename", "manifest.tmp"), content)
    listed_for_good = kinds.index(("sync directory", "."), listed)
    named = kinds.index(("rename", temporary))
    assert operations[named].detail == name
    assert content < listed_for_good < named, f"{name} got its name before the manifest was on the disk"
    assert ("sync directory", ".") in kinds[named:], f"the name of {name} is not on the disk"


def last_index(items, item):
    return len(items) - 1 - items[::-1].index(item)


# --- kills -------------------------------------------------------------------------------------------------------


def named_points(operations):
    """Returns the kill points of the main stages of a save, by name: the first save of optimizer step 4."""
    ends = [i for i, op in enumerate(operations) if op.kind == "saved"]
    number = next(n for n, i in enumerate(ends) if operations[i].detail == 4)
    before, own = operations[: ends[number - 1]], operations[ends[number - 1] : ends[number]]
    temporary = next(op.name for op in own if op.kind == "open" and CHECKPOINT.match(op.name))
    evicted = next(op.name for op in own if op.kind == "unlink" and op.name.endswith(".pth"))
    manifests = sum(op.kind == "rename" and op.name == "manifest.tmp" for op in before)
    return {
        "before the temporary file": KillPoint("open", temporary, 0),
        "half-way through it": KillPoint("write", temporary, 0, half_way=True),
        "after fsync": KillPoint("rename", "manifest.tmp", manifests),
        "between manifest and rename": KillPoint("rename", temporary, 0),
        "in eviction": KillPoint("unlink", evicted, 0),
    }


def kill_in(life, point, forked, mutant=None):
    """Runs an attempt that is killed at an operation."""
    life.directory.mkdir(parents=True, exist_ok=True)
    life.attempt(partial(forked, prepare=Prepared(mutant, life.directory, kill_at=point)), 1)
    assert life.statuses == [-9], point


def killed_at(base, point, forked, mutant=None):
    """Returns a life that was killed at an operation and then resumed to its end."""
    life = Life(base / "run", RECIPE)
    kill_in(life, point, forked, mutant)
    job = life.attempt(partial(forked, prepare=Prepared(mutant)), 1)
    assert life.statuses == [0], f"{life.statuses} after {point}\n{job.output}"
    return life


# --- loss of power -----------------------------------------------------------------------------------------------


def restarted_without_power(base, watched, draw, unbroken, forked, mutant=None):
    """Simulates a power loss after a random operation; the restarted run must end like an uninterrupted run."""
    moment = draw.randrange(len(watched.operations) + 1)
    past = watched.operations[:moment]
    files = disk_after(past, watched.before).after_power_loss(draw)
    life = Life(base / "run", RECIPE)
    life.directory.mkdir(parents=True)
    for name, content in files.items():
        (life.directory / name).write_bytes(content)
    job = life.attempt(partial(forked, prepare=Prepared(mutant)), 1)
    context = f"{life.statuses} after {moment} operations, the last {past[-3:]}, with {sorted(files)}:\n{job.output}"
    assert life.statuses == [0], context
    promised = max((op.detail for op in past if op.kind == "saved"), default=watched.step)
    first = RECIPE.num_steps - len(life.batches)
    assert first >= promised, f"resumed after step {first} instead of {promised} {context}"
    assert life.batches == unbroken.batches[first:], context
    for name in ("final.pth", "best.pth"):
        assert_same_bits(load(unbroken.directory / name), load(life.directory / name))
    kept = [{path.name for path in one.directory.glob("checkpoint_*")} for one in (unbroken, life)]
    # Without another save, checkpoints remain that the last save was about to delete.
    assert kept[0] == kept[1] if first < RECIPE.num_steps else kept[0] <= kept[1], context
    for event in ("step", "epoch", "result"):
        records = read_metrics(life.directory, event)
        assert records == read_metrics(unbroken.directory, event), f"other {event} records {context}"
