"""A step with a joint loss equals a step written by hand, with one float64 graph over all its forward passes."""

import dataclasses
import functools
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

import trainer
from tasks import TASKS
from tests.conftest import ROOT, assert_same_bits, cut_back_to, load, read_metrics, results_of
from tests.helpers import joint_task
from tests.helpers.forks import folder_of_world, main_of_rank
from tests.helpers.replicas import ReplicasOnCpu
from tests.helpers.replicas import trained as train_on_replicas
from tests.helpers.weights import difference
from trainer.common.errors import UserError
from trainer.loading.order import EpochOrder, SampleKeys, split_global_batch
from trainer.loading.workers import BatchLoader
from trainer.parallel import ddp
from trainer.parallel.strategy import SingleDevice

FILE = ROOT / "tests" / "helpers" / "joint_task.py"
EPOCHS, GLOBAL_BATCH, LR, MID_EPOCH = 2, 12, 0.1, 4


@dataclass(frozen=True)
class Case:
    """size: samples per forward pass of a device. overlaps: gradients are exchanged during the backward pass."""

    task: str
    size: int
    num_train: int = 29
    dropout: float = 0.0
    norm: bool = False
    overlaps: bool = False
    amp: str = "off"
    resumes: bool = False

    @property
    def name(self):
        return "-".join(str(value) for value in dataclasses.astuple(self))

    @property
    def flags(self):
        own = ["--num-train", self.num_train, "--dropout", self.dropout, *(["--norm"] if self.norm else [])]
        number = ["--find-unused-parameters"] if self.overlaps and self.size < 6 else []
        number += ["--dtype", "float64"] if self.amp == "off" else ["--amp", self.amp]
        return [
            "--task", f"{FILE}:{self.task}", *own, *number, "--batch-size", self.size, "--global-batch-size",
            GLOBAL_BATCH, "--epochs", EPOCHS, "--lr", LR, "--schedule", "constant", "--warmup-epochs", 0,
            "--num-threads", 1, "--device", "cpu", "--save-every-steps", MID_EPOCH, "--keep-checkpoints", 0,
            "--log-interval", 1,
        ]  # fmt: skip


NAMES = "Joint", "Clips", "OfTriplets", "VicRegs"
TWO_LEFT = 26
"""26 samples leave two for the last step of an epoch, so that the third process has none."""
CASES = {
    1: [
        *(Case(task, 4, 30, dropout=0.3, norm=True, resumes=task == "Joint") for task in NAMES),
        Case("Clips", 4, dropout=0.3, resumes=True),
        Case("Joint", 12, dropout=0.3),
        Case("Clips", 12, amp="bf16"),
        Case("Clips", 5, amp="bf16"),
        Case("Gathers", 12),
        Case("Centred", 12),
        Case("Centred", 4, 30, dropout=0.3, resumes=True),
    ],
    2: [
        *(Case(task, 2, dropout=0.3, resumes=task in ("Joint", "Clips")) for task in NAMES),
        Case("Joint", 3, dropout=0.3, norm=True, resumes=True),
        Case("Clips", 6, overlaps=True),
        Case("Clips", 2, dropout=0.3, overlaps=True),
        Case("Gathers", 6, resumes=True),
        Case("GathersPadded", 6),
        Case("Centred", 3, dropout=0.3, resumes=True),
    ],
    3: [Case("Clips", 4, TWO_LEFT, 0.3), Case("OfTriplets", 2, TWO_LEFT, 0.3), Case("Gathers", 4, TWO_LEFT)],
}


REFUSED = {
    "fsdp": (Case("Joint", 6), ["--multi-gpu", "fsdp"], "--multi-gpu fsdp: SimClr.joint_loss may use parameters while"),
    "unlike": (Case("Unlike", 6), (), "differs from rank 0: the objective's output is {'a'"),
    "uneven": (
        Case("GathersItself", 6),
        (),
        "rank 0 runs the collective allgather of (2, 6), (2, 6), (2, 6), but rank 1 runs the collective allgather of",
    ),
    "twice": (Case("Gathers", 3), (), "trainer.gather: gathers the rows of one forward pass, but this step has 2"),
}
"""Runs that two processes refuse, by name: (case, further flags, message)."""


# --- one graph by hand -------------------------------------------------------------------------------------------


class OfRank(SingleDevice):
    """Strategy that seeds dropout like the process with the given rank."""

    def __init__(self, rank):
        super().__init__(torch.device("cpu"))
        self.group.rank = rank


def learnt(case, world_size):
    """Returns the state dict after a bare loop. Its batch norm statistics are right for one process only."""
    task_type = joint_task.Joint if case.task.startswith("Gathers") else getattr(joint_task, case.task)
    config = joint_task.JointFlags(num_train=case.num_train, dropout=case.dropout, norm=case.norm)
    task = task_type(config, seed=0, cache_dir=None)
    torch.manual_seed(0)
    objective = task.build_objective().train()
    if case.amp == "off":
        objective.double()
    optimizer = torch.optim.SGD(objective.parameters(), lr=LR, momentum=0.9)
    loader = BatchLoader([task.splits()["train"]], task.collate)
    for epoch in range(EPOCHS):
        order = EpochOrder(0, epoch, 0, case.num_train).take(0, case.num_train)
        for start in range(0, case.num_train, GLOBAL_BATCH):
            samples = order[start : start + GLOBAL_BATCH]
            with torch.autocast("cpu", torch.bfloat16) if case.amp == "bf16" else nullcontext():
                rows = {}
                for rank in range(world_size):
                    keys = split_global_batch(samples, (rank, world_size), case.size, epoch)
                    for number, (key, batch) in enumerate(zip(keys, loader(keys), strict=True)):
                        OfRank(rank).seed_dropout(0, epoch, 0, start, number)
                        if case.amp == "off":
                            batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
                        found = {} if key.placeholder else objective.outputs(batch)
                        for name, values in found.items():
                            rows.setdefault(name, {}).update(zip(key.index.tolist(), values, strict=True))
                joint = {name: torch.stack([values[i] for i in samples.tolist()]) for name, values in rows.items()}
                loss = objective.joint_loss(joint)["loss"]
            optimizer.zero_grad()
            (loss / len(samples)).backward()
            optimizer.step()
    return objective.model.state_dict()


# --- the same by the trainer -------------------------------------------------------------------------------------


def run_all(environment, folder):
    """Trains every case of this world size, and resumes some of them in the middle of an epoch."""
    usual = ddp.OVERLAP_BYTES
    for case in CASES[environment.world_size]:
        ddp.OVERLAP_BYTES = 0 if case.overlaps else usual
        place = folder / case.name
        if run_once(environment, case, place):
            return 1
        if not case.resumes:
            continue
        if environment.rank == 0:  # the other ranks wait for rank 0
            cut_back_to(place, MID_EPOCH, again(place))
        if run_once(environment, case, again(place)):
            return 1
    refusals = REFUSED if environment.world_size == 2 else {}
    statuses = [run_once(environment, case, folder / name, more) for name, (case, more, _) in refusals.items()]
    return max(status != 2 for status in statuses) if statuses else 0


def run_once(environment, case, place, more=()):
    return main_of_rank(environment, [*case.flags, *more], place)


def again(place):
    return place.with_name(f"{place.name}-again")


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Returns the folder of the runs of a world size, which are trained once."""

    @functools.cache
    def of_size(world_size):
        return folder_of_world(run_all, world_size, tmp_path_factory.mktemp("world"))

    return of_size


@pytest.mark.parametrize(
    ("world_size", "case"),
    [(size, case) for size, cases in CASES.items() for case in cases],
    ids=lambda x: getattr(x, "name", x),
)
def test_a_step_equals_one_graph_over_its_forward_passes(world_size, case, world):
    place = world(world_size) / case.name
    found, expected = load(place / "final.pth")["model"], learnt(case, world_size)
    statistics = [name for name in expected if "running" in name or "tracked" in name]
    if world_size > 1 and case.norm:
        expected = {name: value for name, value in expected.items() if name not in statistics}
    assert bool(statistics) == (case.norm or case.task == "Centred")
    close = 1e-12 if case.amp == "off" else 1e-6 if case.size == GLOBAL_BATCH else 5e-2
    assert difference({name: found[name] for name in expected}, expected) < close
    if case.resumes:
        assert_same_bits(load(place / "final.pth"), load(again(place) / "final.pth"))


def test_without_dropout_micro_batches_equal_the_whole_batch(run_here, tmp_path):
    for size in (12, 5):
        run_here(*Case("Joint", size).flags, "--save-dir", tmp_path / str(size))
    whole, parts = (load(tmp_path / str(size) / "final.pth")["model"] for size in (12, 5))
    assert difference(parts, whole) < 1e-12
    for one, other in zip(*(read_metrics(tmp_path / str(size), "step") for size in (12, 5)), strict=True):
        assert other["train/loss"] == pytest.approx(one["train/loss"], rel=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_unsupported_joint_losses_are_refused_on_two_processes(name, world):
    printed = "".join((world(2) / f"rank{rank}.txt").read_text() for rank in (0, 1))
    assert REFUSED[name][2] in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("task", "more", "message"),
    [
        ("Joint", ["--parts", 4], "--parts 4: SimClr.joint_loss couples samples of different parts"),
        ("Joint", ["--compile"], "--compile: SimClr.joint_loss runs forward passes twice"),
        ("Gathers", ["--parts", 4], "--parts 4: trainer.gather couples samples of different parts"),
        (
            "Gathers",
            ["--batch-size", 4],
            "trainer.gather: gathers the rows of one forward pass, but this step has 3",
        ),
        ("NoLoss", [], "OnlyRows: must have forward(batch, phase), which returns sums, or both `outputs` and `joint_"),
        ("NoRows", [], "Summed.outputs: 'e' must have one row per sample (2), but is ()"),
    ],
)
def test_unsupported_combinations_are_refused(task, more, message, cli, tmp_path):
    size = 3 if "--parts" in more else 12
    status, _, err = cli(*Case(task, size).flags, *more, "--dtype", "float32", "--save-dir", tmp_path)
    assert status == 2
    assert message in "".join(err)


@pytest.mark.parametrize("task", ["Joint", "Gathers"])
def test_data_parallel_is_refused(task, tmp_path):
    with pytest.raises(UserError, match=r"--multi-gpu dp: .* needs one process per device"):
        train_on_replicas(ReplicasOnCpu(2), tmp_path, *map(str, Case(task, 12).flags[:6]))


def test_a_joint_loss_beside_batch_norms_gets_a_remark(cli, tmp_path):
    _, out, _ = cli(*Case("Joint", 4, 30, norm=True).flags, "--save-dir", tmp_path / "norm")
    assert "joint_loss gets all rows of a step, but batch norms (model.norm) see only the samples of one" in out
    _, out, _ = cli(*Case("Joint", 4).flags, "--save-dir", tmp_path / "none")
    assert "joint_loss gets" not in out and "halves" not in out


@pytest.mark.parametrize("name", NAMES)
def test_a_mean_returned_instead_of_a_sum_is_named(name, cli, tmp_path, monkeypatch):
    task_type = getattr(joint_task, name)
    objective = task_type.objective

    def mean(self, rows, phase="train"):
        sums = objective.joint_loss(self, rows, phase)
        return {**sums, "loss": sums["loss"] / len(next(iter(rows.values())))}

    said = {}
    for own in (objective, type("Mean", (objective,), {"joint_loss": mean})):
        members = {"build_objective": lambda self, own=own: own(task_type.build_objective(self).model)}
        monkeypatch.setitem(TASKS, "joint", type("Tried", (task_type,), members))
        said[own] = cli(
            "--task",
            "joint",
            "--num-threads",
            1,
            "--device",
            "cpu",
            "--max-steps",
            1,
            "--batch-size",
            12,
            "--save-dir",
            tmp_path / own.__name__,
        )[1]
    sums, means = said.values()
    assert "as if it were a mean" not in sums
    assert "as if it were a mean. It must be a sum over the rows" in means


def test_an_evaluation_averages_the_losses_of_its_batches(cli, tmp_path):
    """The 8 samples make two batches of 4, each with a joint loss."""
    cli(*Case("Joint", 12).flags, "--eval-batch-size", 4, "--save-dir", tmp_path)
    objective = joint_task.SimClr(joint_task.Encoder(joint_task.JointFlags())).double().eval()
    objective.model.load_state_dict(load(tmp_path / "best.pth")["model"])
    data = joint_task.Pairs(8, 2)
    parts = [data.__getitems__(SampleKeys(torch.arange(start, start + 4).numpy(), 0)) for start in (0, 4)]
    batches = [{name: torch.from_numpy(values).double() for name, values in part.items()} for part in parts]
    with torch.no_grad():
        expected = sum(float(objective(batch)["loss"]) for batch in batches) / 8
    assert results_of(tmp_path)["metrics"]["test/loss"] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("name", ["Joint", "Gathers"])
def test_check_task_says_what_it_cannot_check(name, cli):
    status, out, err = cli("--task", f"{FILE}:{name}", "--check-task", "--num-threads", 1, "--device", "cpu")
    if name == "Joint":
        assert status == 2
        assert "so the best epoch depends on --eval-batch-size and the number of processes" in err[0]
    else:
        assert status == 0
        assert "The loss couples samples by design, so its dependence on batch splits is not checked." in out


def test_gather_outside_of_a_step_returns_its_rows():
    rows = torch.randn(3, 2, requires_grad=True)
    gathered = trainer.gather(rows)
    assert gathered.rows is rows
    assert gathered.own.tolist() == [0, 1, 2]
