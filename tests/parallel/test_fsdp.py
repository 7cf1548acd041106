"""A sharded model matches an unsharded one, and its checkpoints are the same as in any other form of training."""

import gc
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT, assert_same_bits, load
from tests.helpers import forks
from tests.helpers.pieces_task import PiecesFlags, PiecesObjective, Words
from tests.helpers.weights import difference
from trainer.checkpoint.background import BackgroundSaver
from trainer.checkpoint.format import LARGE
from trainer.checkpoint.weights import TrainedRun
from trainer.common.errors import UserError
from trainer.common.tensors import local_shards, with_shapes_of
from trainer.flags import DeviceFlags, MultiDeviceFlags
from trainer.loop.precision import Precision
from trainer.parallel.environment import RankEnvironment
from trainer.parallel.fsdp import Sharded, built_as_outline, meta_state_of, refuse_what_cannot_be_cut
from trainer.parallel.process_group import ProcessGroup

TOLERANCE = 1e-9
PIECES = ["--task", f"{ROOT / 'tests' / 'helpers' / 'pieces_task.py'}:Pieces"]
# Global batches have 5 samples, the last of an epoch 3, so with micro-batches of 1 the ranks have unequal shares.
RUN = [
    *PIECES, "--device", "cpu", "--num-threads", 1, "--dtype", "float64", "--epochs", 2, "--batch-size", 1,
    "--global-batch-size", 5, "--lr", 0.02, "--max-grad-norm", 0.3, "--ema-decay", 0.9, "--poisoned",
    "--on-nonfinite", "skip", "--save-every-steps", 3, "--keep-checkpoints", 20,
]  # fmt: skip


@dataclass
class Starter:
    """Starts runs and asserts that they succeed. form: --multi-gpu of main_multi_gpu.py; None starts main.py."""

    environment: dict[str, str]
    folder: object

    def __call__(self, name, *more, form=None, world_size=1, base=RUN, prepare=None):
        directory, output = self.folder / name, self.folder / f"{name}.txt"
        argv = [*base, "--save-dir", directory, *more]
        if form is None:
            process = forks.start(argv, self.environment, output, output)
            process.join(120)
            statuses = [process.exitcode]
        else:
            argv = ["--multi-gpu", form, *argv]
            statuses = forks.run_group(argv, world_size, self.environment, output, prepare, timeout_s=300)
        assert statuses == [0] * world_size, output.read_text()
        return directory


@pytest.fixture(scope="module")
def start(environment, tmp_path_factory):
    return Starter(environment, tmp_path_factory.mktemp("fsdp"))


@pytest.fixture(scope="module")
def one_device(start):
    return start("one")


def loaded(path):
    return torch.load(path, weights_only=True)


def tensors(value, path=""):
    """Returns the tensors of a checkpoint, by their path in it."""
    if isinstance(value, torch.Tensor):
        return {path: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {name: t for key, item in items for name, t in tensors(item, f"{path}/{key}").items()}


def assert_same(directory, expected, checkpoint="final.pth"):
    """Asserts that entries, dtypes and shapes are equal, and values but for the order of sums."""
    found, wanted = (loaded(folder / checkpoint) for folder in (directory, expected))
    assert found.keys() == wanted.keys()
    for name in ("model", "training_model", "optimizers"):
        own, others = tensors(found[name]), tensors(wanted[name])
        assert list(own) == list(others)  # in the same order too
        for place, value in own.items():
            other = others[place]
            assert (type(value), value.dtype, value.shape) == (type(other), other.dtype, other.shape), place
            torch.testing.assert_close(value, other, rtol=TOLERANCE, atol=TOLERANCE, msg=place)
    assert difference(found["model"], wanted["model"]) < TOLERANCE
    its_metrics, metrics = (json.loads((folder / "results.json").read_text()) for folder in (directory, expected))
    assert its_metrics["metrics"] == pytest.approx(metrics["metrics"], rel=TOLERANCE)
    assert found["skipped_steps"] == wanted["skipped_steps"] == 2


def test_resumes_in_any_form_within_an_epoch(start, one_device):
    """The run moves from one device to 3 FSDP processes, to 2 DDP processes, and back to one device."""
    resume = "--resume-from"
    sharded = start("fsdp", resume, one_device / "checkpoint_0_0_10.pth", form="fsdp", world_size=3)
    assert_same(sharded, one_device)
    assert_same(sharded, one_device, "checkpoint_1_0_5_1.pth")
    copied = start("ddp", resume, sharded / "checkpoint_1_0_5_1.pth", form="ddp", world_size=2)
    assert_same(copied, one_device)
    again = start("again", resume, copied / "checkpoint_1_0_15_1.pth")
    assert_same(again, one_device)


def test_values_derived_from_a_checkpoint_belong_to_that_checkpoint(start):
    base = [
        "--task", f"{ROOT / 'tests' / 'helpers' / 'refreshing_task.py'}:Refreshing", "--device", "cpu", "--num-threads",
        1, "--dtype", "float64", "--epochs", 2, "--global-batch-size", 12, "--save-every-steps", 3,
        "--keep-checkpoints", 0,
    ]  # fmt: skip
    unbroken = start("derived-one", base=base)
    middle = unbroken / "checkpoint_1_0_36.pth"
    resumed = start("derived", "--resume-from", middle, base=base, form="fsdp", world_size=2)
    assert difference(loaded(resumed / "final.pth")["model"], loaded(unbroken / "final.pth")["model"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "more"),
    [
        (1, []),
        (2, []),
        (2, ["--reshard", "never"]),
        (3, ["--batch-size", 2, "--no-names-blocks"]),
        (4, ["--shard-size", 2]),
    ],
    ids=["1", "2", "2-never", "3-one-unit", "2x2"],
)
def test_matches_one_device(world_size, more, start, one_device):
    name = "-".join(map(str, [world_size, *more])).replace("--", "")
    assert_same(start(name, *more, form="fsdp", world_size=world_size), one_device)


@pytest.mark.slow
def test_a_model_with_initialised_content_is_built_on_every_process(start, one_device):
    assert_same(start("eager", "--eager", form="fsdp", world_size=2), one_device)


SHIPPED = {
    "har": ["--dropout", 0],
    "seqrec": ["--dropout", 0],
    "kgat": ["--model", "kgat", "--dropout", 0, "--node-dropout", 0],
    "speech": ["--dropout", 0],
    "tabular": ["--num-blocks", 1, "--width", 16, "--num-heads", 2, "--num-val-tables", 65],
}


@pytest.mark.slow
@pytest.mark.parametrize("task", SHIPPED)
def test_trains_every_task_that_comes_with_it(task, start):
    """The two processes have batches of unequal size."""
    base = [
        "--task", task, *SHIPPED[task], "--device", "cpu", "--num-threads", 1, "--dtype", "float64", "--max-steps", 3,
        "--batch-size", 8, "--global-batch-size", 15, "--eval-batch-size", 200, "--no-test",
    ]  # fmt: skip
    whole = start(f"{task}-one", base=base)
    found = start(f"{task}-fsdp", base=base, form="fsdp", world_size=2)
    assert difference(loaded(found / "final.pth")["model"], loaded(whole / "final.pth")["model"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer", [["adam"], ["sgd", "--momentum", 0.9], ["sgd", "--momentum", 0.9, "--nesterov"]], ids=len
)
def test_every_optimizer_matches_one_device(optimizer, start):
    more = ["--optimizer", *optimizer]
    name = f"{optimizer[0]}{len(optimizer)}"
    assert_same(start(name, *more, form="fsdp", world_size=2), start(f"{name}-one", *more))


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_an_averaging_optimizer_matches_one_device(form, start):
    task = ["--task", f"{ROOT / 'tests' / 'helpers' / 'schedule_free_task.py'}:Free", "--device", "cpu"]
    base = [*task, "--num-threads", 1, "--dtype", "float64", "--epochs", 2, "--global-batch-size", 8]
    whole, found = start(f"free-one-{form}", base=base), start(f"free-{form}", base=base, form=form, world_size=2)
    expected, found = (loaded(folder / "final.pth") for folder in (whole, found))
    assert difference(expected["model"], expected["training_model"]) > 100 * TOLERANCE
    for name in ("model", "training_model"):
        assert difference(found[name], expected[name]) < TOLERANCE


@pytest.mark.slow
def test_autocast_works_on_shards(start):
    """Weights stay float32. Rounding to bfloat16 depends on which samples share a forward pass."""
    base = [
        *PIECES, "--device", "cpu", "--num-threads", 1, "--amp", "bf16", "--epochs", 1, "--batch-size", 2,
        "--global-batch-size", 8, "--lr", 0.02, "--optimizer", "sgd",
    ]  # fmt: skip
    whole, found = start("bf16-one", base=base), start("bf16-fsdp", base=base, form="fsdp", world_size=2)
    weights, expected = (loaded(folder / "final.pth")["model"] for folder in (found, whole))
    assert {value.dtype for value in weights.values()} == {value.dtype for value in expected.values()}
    assert 0 < difference(weights, expected) < 2e-2


# --- compiled --------------------------------------------------------------------------------------------------------

RAGGED = [
    "--task", f"{ROOT / 'tests' / 'helpers' / 'ragged_task.py'}:AheadOfTime", "--device", "cpu", "--num-threads", 1,
    "--max-steps", 5, "--batch-size", 1, "--global-batch-size", 4, "--lr", 0.01,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [[], ["--no-has-blocks"], ["--grad-checkpointing"], ["--reshard", "never"]], ids=" ".join
)
def test_compiled_units_train_equally(more, start):
    base = [*RAGGED, "--dtype", "float64", "--dropout", 0, "--no-norm"]
    plain = start(f"plain{more}", base=base)
    compiled = start(f"compiled{more}", "--compile", *more, base=base, form="fsdp", world_size=2)
    assert difference(loaded(compiled / "final.pth")["model"], loaded(plain / "final.pth")["model"]) < TOLERANCE


@pytest.mark.slow
@pytest.mark.parametrize("more", [[], ["--grad-checkpointing"]], ids=" ".join)
def test_a_compiled_run_resumes_bit_identically(more, start):
    """The run has dropout and batch norm."""
    often = ["--compile", *more, "--save-every-steps", 2, "--keep-checkpoints", 0]
    unbroken = start(f"unbroken{more}", *often, base=RAGGED, form="fsdp", world_size=2)
    middle = unbroken / "checkpoint_0_0_8.pth"
    resumed = start(f"resumed{more}", *often, "--resume-from", middle, base=RAGGED, form="fsdp", world_size=2)
    assert_same_bits(*(load(folder / "final.pth") for folder in (unbroken, resumed)))


# --- what cannot be divided ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"sparse": True}, "does not support sparse gradients"),
        ({"ties": True}, "blocks.0.up.weight and outer.weight are tied, but a block of Task.blocks contains only one"),
        ({"scalar": True}, "offset is a scalar"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(more, message):
    model = Words(PiecesFlags(**more))
    with pytest.raises(UserError, match=f"^--multi-gpu fsdp: .*{message}"):
        refuse_what_cannot_be_cut(PiecesObjective(model), list(model.blocks))


class Spun(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.turn = torch.nn.Parameter(torch.zeros(2, dtype=torch.complex64))
        self.length = torch.nn.Parameter(torch.zeros(2))


def test_complex_and_real_parameters_together_are_refused():
    with pytest.raises(UserError, match=r"^--multi-gpu fsdp: turn and length are sharded together"):
        refuse_what_cannot_be_cut(PiecesObjective(Spun()), [])


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_empty_parameters_are_refused():
    with pytest.raises(UserError, match=r"^--multi-gpu fsdp: weight has no elements and cannot be sharded"):
        refuse_what_cannot_be_cut(PiecesObjective(torch.nn.Linear(0, 2)), [])


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_parameter_hooks_that_would_be_lost_are_refused(register):
    model = Words(PiecesFlags())
    getattr(model.second.bias, register)(lambda gradient: None)
    with pytest.raises(UserError, match=r"^--multi-gpu fsdp: second.bias has a gradient hook"):
        refuse_what_cannot_be_cut(PiecesObjective(model), [])


def test_hooks_added_after_sharding_are_refused():
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    optimizer = torch.optim.SGD([weight])
    Sharded.check_optimizers(None, [optimizer])
    weight.register_hook(lambda gradient: None)
    with pytest.raises(UserError, match=r"^--multi-gpu fsdp: a parameter of shape \(2, 3\) has a gradient hook"):
        Sharded.check_optimizers(None, [optimizer])


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_is_refused():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.jit.script(torch.nn.Linear(2, 2)))
    with pytest.raises(UserError, match=r"^--multi-gpu fsdp: 1 is made by torch\.jit\.script"):
        refuse_what_cannot_be_cut(PiecesObjective(model), [])


def test_tied_weights_within_a_unit_are_accepted():
    model = Words(PiecesFlags(ties=True))
    refuse_what_cannot_be_cut(PiecesObjective(model), [])


def test_a_shard_size_that_does_not_divide_the_processes_is_refused():
    with pytest.raises(UserError, match=r"--shard-size 2: must evenly divide the number of processes \(3\)"):
        ProcessGroup(RankEnvironment(0, 3), MultiDeviceFlags("fsdp", shard_size=2), DeviceFlags("cpu"))


def test_optimizers_of_whole_matrices_are_refused():
    """torch 2.8 has no Muon, so another optimizer gets its name."""
    muon = type("Muon", (torch.optim.SGD,), {})([torch.zeros(2, 2)])
    with pytest.raises(UserError, match=r"^--multi-gpu fsdp: Muon orthogonalises whole matrices"):
        Sharded.check_optimizers(None, [muon])


# --- what only rank 0 holds ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eager", [False, True])
def test_an_outline_has_no_content_if_the_task_allows_it(eager):
    def build():
        return PiecesObjective(Words(PiecesFlags(eager=eager)))

    objective = built_as_outline(build, meta_state_of(build()))
    assert {value.is_meta for value in objective.state_dict().values()} == {not eager}


class Keeps:
    """Object that is not a module, and keeps a value."""

    def __init__(self, value):
        self.value = value


@pytest.mark.parametrize("keep", [lambda x: x, lambda x: [x], Keeps, lambda x: lambda: x, None])
def test_an_outline_has_content_for_tensors_that_rank_0_does_not_send(keep):
    def build():
        objective = PiecesObjective(Words(PiecesFlags()))
        objective.model.kept = keep(torch.ones(3)) if keep else None
        objective.register_buffer("mean", torch.ones(3) * 2)
        return objective

    objective = built_as_outline(build, meta_state_of(build()))
    assert {value.is_meta for value in objective.state_dict().values()} == {keep is None}


def test_other_ranks_get_outlines_of_weights_and_all_other_values():
    weights = {"w": torch.ones(3, dtype=torch.float64)}
    state = {
        "model": weights,
        "optimizers": {"train": [{"state": {0: {"step": torch.tensor(2.0), "exp_avg": torch.ones(3)}}}]},
        "totals": {"model": {"loss": torch.ones(2)}},
        "step": 7,
    }
    got = with_shapes_of(LARGE, TrainedRun("the weights", state, Path("run"))).state
    assert (got["model"]["w"].device.type, got["model"]["w"].dtype, got["model"]["w"].shape) == (
        "meta", torch.float64, (3,)
    )  # fmt: skip
    moments = got["optimizers"]["train"][0]["state"][0]
    assert (moments["exp_avg"].is_meta, moments["step"].item()) == (True, 2)
    assert torch.equal(got["totals"]["model"]["loss"], torch.ones(2))
    assert (got["step"], state["model"]) == (7, weights)


# --- memory ----------------------------------------------------------------------------------------------------------

NUM_BLOCKS = 4
SEQREC = [
    "--task", "seqrec", "--hidden-units", 192, "--num-blocks", NUM_BLOCKS, "--no-time", "--maxlen", 4,
    "--device", "cpu", "--num-threads", 1, "--batch-size", 2, "--eval-batch-size", 500, "--no-test",
]  # fmt: skip


def live_bytes():
    """Returns the bytes of all tensors of this process, counting each storage once."""
    plain = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter) and not t.is_meta)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain}.values())


def watch_memory():
    """Records the memory of a process in bytes, and returns a function that writes it to a file.

    step: in an optimizer step. peak: most in blocks and reductions. unit: the largest sharded unit. loading: most when
    a large tensor arrives before the first step. saving: when a write begins. whole: weights, gradients and moments
    of the whole model.
    """
    seen = {"loading": 0, "step": 0, "peak": 0, "saving": 0}
    step, place, broadcast, begin = Precision.step, Sharded.place, Sharded.broadcast, BackgroundSaver.start

    def held():
        return live_bytes() - seen["before"]

    def noting(function):
        def call(*args, **kwargs):
            if torch.is_grad_enabled() or function is reduce_scatter:
                seen["peak"] = max(seen["peak"], held())
            return function(*args, **kwargs)

        return call

    def counting_step(self, optimizers, params, *more):
        seen["step"] = max(seen["step"], held())  # the second step has moments
        seen["whole"] = 4 * sum(p.numel() * p.itemsize for p in params)
        return step(self, optimizers, params, *more)

    def counting_broadcast(self, value):
        whole = broadcast(self, value)
        if seen["step"] == 0 and whole.numel() >= 2**15:
            seen["loading"] = max(seen["loading"], held())
        return whole

    def counting_place(self, build, blocks, complete):
        seen["before"], seen["is_main"] = live_bytes(), self.group.is_main
        objective = place(self, build, blocks, complete)
        units = [sum(p.numel() * p.itemsize for p in block.parameters()) for block in blocks(objective.model)]
        units.append(sum(p.numel() * p.itemsize for p in objective.parameters()) - sum(units))
        seen["unit"] = max(units)
        for block in blocks(objective.model):
            block.forward = noting(block.forward)
        return objective

    def counting_begin(*args):
        begin(*args)
        seen["saving"] = max(seen["saving"], held())

    BackgroundSaver.start = counting_begin
    reduce_scatter = torch.distributed.reduce_scatter_tensor
    torch.distributed.reduce_scatter_tensor = noting(reduce_scatter)
    Precision.step, Sharded.place, Sharded.broadcast = counting_step, counting_place, counting_broadcast
    gc.collect()
    return lambda: (Path(os.environ["MEMORY"]) / f"{os.getpid()}.json").write_text(json.dumps(seen))


@pytest.fixture
def memory_of_ranks(start, tmp_path):
    """Starts or resumes the run of a test; returns what `watch_memory` recorded on each rank."""
    start.environment = start.environment | {"MEMORY": str(tmp_path)}

    def run(world_size, *more):
        start(tmp_path.name, *more, form="fsdp", world_size=world_size, base=SEQREC, prepare=watch_memory)
        found = [json.loads(path.read_text()) for path in tmp_path.iterdir()]
        for path in tmp_path.iterdir():
            path.unlink()
        return found

    return run


def require_copies():
    """Makes a save fail if rank 0 gathers a tensor that training changes, or a view of a larger storage."""
    full_tensor = Sharded.full_tensor

    def checked(self, value):
        whole, own = full_tensor(self, value), local_shards([value])[0]
        if self.group.is_main:
            assert whole.numel() == 0 or whole.untyped_storage().data_ptr() != own.untyped_storage().data_ptr()
            assert whole.untyped_storage().nbytes() == whole.nbytes
        return whole

    Sharded.full_tensor = checked
    return lambda: None


@pytest.mark.parametrize("world_size", [1, 2])
def test_gathered_tensors_are_copies(world_size, start):
    name = f"copies{world_size}"
    start(name, "--epochs", 1, form="fsdp", world_size=world_size, prepare=require_copies)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_a_process_holds_only_its_shard(world_size, memory_of_ranks):
    for seen in memory_of_ranks(world_size, "--max-steps", 2):
        share = seen["whole"] / world_size
        units = (seen["peak"] - share) / seen["unit"]
        print(f"{seen['step'] / share:.3f} of the share, at most {units:.2f} of the largest unit more in a step")
        assert 0.9 * share < seen["step"] <= 1.1 * share
        assert seen["peak"] <= 1.1 * share + 2 * seen["unit"]  # its parameters and its gradients


@pytest.mark.slow
def test_only_rank_0_holds_a_whole_checkpoint(memory_of_ranks):
    """Other ranks hold neither a whole new model nor a whole checkpoint, which has weights and two moments."""
    world_size = 3
    for num_steps, num_kinds in ((2, 1), (3, 3)):
        for seen in memory_of_ranks(world_size, "--max-steps", num_steps):
            weights = seen["whole"] / 4
            if seen["is_main"]:
                print(f"{(seen['saving'] - seen['whole'] / world_size) / weights:.2f} times the weights for a save")
                assert seen["saving"] <= 1.1 * (seen["whole"] / world_size + 3 * weights)
            else:
                parts = num_kinds * weights / world_size
                units = (seen["loading"] - parts) / seen["unit"]
                print(f"{num_kinds} kinds: {units:.2f} of the largest unit more than the share")
                assert 0 < seen["loading"] <= 1.1 * parts + 1.1 * seen["unit"] < 0.9 * num_kinds * weights


# --- parameters that ranks skip ------------------------------------------------------------------------------------

DROPPING = [
    "--task", f"{ROOT / 'tests' / 'helpers' / 'dropping_task.py'}:Dropping", "--device", "cpu", "--num-threads", 1,
    "--dtype", "float64", "--global-batch-size", 8, "--optimizer", "sgd", "--momentum", 0.9, "--weight-decay", 0.1,
    "--no-test",
]  # fmt: skip


def assert_learns_what_ddp_learns(start, *more, of_fsdp=()):
    name = "-".join([*more, *of_fsdp]).replace("--", "")
    copied = start(f"dropping-{name}", *more, base=DROPPING, form="ddp", world_size=2)
    parts = start(f"dropping-in-parts-{name}", *more, *of_fsdp, base=DROPPING, form="fsdp", world_size=2)
    found, expected = (loaded(folder / "final.pth") for folder in (parts, copied))
    assert difference(found["model"], expected["model"]) < TOLERANCE
    its_moments, moments = (tensors(each["optimizers"]) for each in (found, expected))
    assert its_moments.keys() == moments.keys()  # unused parameters have no moments


def test_ranks_may_skip_different_blocks(start):
    """A step has four micro-batches, and several of the forward passes run no block."""
    assert_learns_what_ddp_learns(start, "--batch-size", "1", "--epochs", "2")


@pytest.mark.slow
@pytest.mark.parametrize("of_fsdp", [[], ["--reshard", "never"]], ids=" ".join)
@pytest.mark.parametrize(
    "more", [["--no-names-blocks"], ["--projects"], ["--projects", "--grad-checkpointing"], ["--grad-checkpointing"]],
    ids=" ".join,
)  # fmt: skip
def test_ranks_may_skip_any_parameters(more, of_fsdp, start):
    assert_learns_what_ddp_learns(start, *more, "--batch-size", "2", "--epochs", "3", of_fsdp=of_fsdp)


def test_a_gradient_in_forward_through_checkpointed_blocks_is_refused(start):
    with pytest.raises(AssertionError, match="--multi-gpu fsdp: the objective computes a gradient within its forward"):
        start("penalty", "--penalty", base=DROPPING, form="fsdp", world_size=2)


@pytest.mark.slow
def test_a_gradient_in_forward_without_blocks_is_right(start):
    assert_learns_what_ddp_learns(start, "--penalty", "--no-names-blocks", "--epochs", "2")
