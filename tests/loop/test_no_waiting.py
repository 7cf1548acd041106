"""On a GPU the host never waits for the device in a training step.

Without one, training runs on torch's meta device: its tensors hold no numbers, so whatever would fetch one to the host
raises, and the code is that of a GPU, since the device is not a CPU.
"""

import sys
from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from models.sequential import ranking
from tests.conftest import WEIGHTED
from trainer.commands.build import assemble_run, prepare_training
from trainer.commands.parse import parse
from trainer.logs.run_log import SilentLog
from trainer.loop import totals
from trainer.loop.lockstep import Lockstep
from trainer.loop.run import Run
from trainer.loop.train import train_epoch
from trainer.loop.watch import Watch
from trainer.parallel.strategy import SingleDevice

NUM_STEPS = 12
GPU_STEPS = 100  # enough for totals to be folded, and for a group of outcomes to be looked at
SETTLING_STEPS = 3
CASES = {
    "har": [],
    "accumulation": ["--grad-accum-steps", "3"],
    "no clipping": ["--max-grad-norm", "0"],
    "ema": ["--ema-decay", "0.99"],
    "seqrec": ["--task", "seqrec", "--mhc"],
    "seqrec bce": ["--task", "seqrec", "--loss", "bce", "--no-time"],
    "batch norm": ["--model", "tinyhar"],
    "adam": ["--optimizer", "adam"],
    "sgd": ["--optimizer", "sgd", "--momentum", "0.9", "--nesterov"],
    "weighted": ["--task", WEIGHTED, "--num-train", "2000", "--batch-size", "8"],
}


class Numberless(SingleDevice):
    """The meta device, which has no generator to seed."""

    def __init__(self) -> None:
        super().__init__(torch.device("meta"))


class Copies(TorchDispatchMode):
    """Notes copies to the device for which the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_for: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default:
            leaves_host = args[0].device.type == "cpu" and kwargs.get("device", args[0].device) != args[0].device
            waits = leaves_host and not kwargs.get("non_blocking")
        elif func is torch.ops.aten.copy_.default:
            waits = is_from_host(args[1]) and not is_from_host(args[0]) and not (args[2:] or kwargs.get("non_blocking"))
        else:  # an index on the host, say
            on_host = [is_from_host(value) for value in tree_leaves((args, kwargs)) if isinstance(value, torch.Tensor)]
            waits = any(on_host) and not all(on_host)
        if waits:
            self.waited_for.append(str(func))
        return func(*args, **kwargs)


def is_from_host(tensor: torch.Tensor) -> bool:
    """Whether it has to be sent to the device. Numbers as such travel with the call."""
    return tensor.device.type == "cpu" and tensor.dim() > 0


@pytest.fixture
def numberless(monkeypatch):
    """The device, with what refuses it by its name alone made to accept it."""
    monkeypatch.setitem(ranking._CHUNK_ELEMENTS, "meta", 2**26)
    for name in ("torch.optim.adam", "torch.optim.sgd"):
        monkeypatch.setattr(sys.modules[name], "_device_dtype_check_for_fused", lambda parameter: None)
    monkeypatch.setattr(torch, "_fused_sgd_", lambda *args, **settings: None)  # torch has it for no such device
    return Numberless()


def run_of(argv: list[str], strategy: SingleDevice, cache_dir) -> Run:
    """A run whose steps neither log nor save."""
    flags, problems = parse(
        ["--save-dir", "unused", "--cache-dir", str(cache_dir), "--log-interval", "1000000", *argv],
        several_devices=False,
    )
    assert not problems
    task = flags.task_type(flags.task, seed=0, cache_dir=cache_dir)
    run = assemble_run(flags, task, strategy)
    prepare_training(flags, run.task, run.learner, run.strategy, run.plan.orders, run.memory)
    run.tried_saving.update(task.phases)  # a save may wait
    return run


class EndsAfter(SilentLog):
    """Ends training after so many steps, before anything is asked of the device."""

    class Reached(Exception):
        pass

    def __init__(self, num_steps: int, settled: int = 0, after_settling=lambda: None) -> None:
        super().__init__()
        self.left = num_steps
        self.settled = num_steps - settled
        self.after_settling = after_settling

    def advance(self, num_samples: int) -> None:
        self.left -= 1
        if self.left == self.settled:
            self.after_settling()
        if self.left == 0:
            raise self.Reached


def train_steps(run: Run, log: EndsAfter) -> None:
    run.log = log
    with pytest.raises(EndsAfter.Reached):
        train_epoch(run)


@pytest.mark.parametrize("argv", CASES.values(), ids=CASES)
def test_nothing_of_a_step_is_fetched_from_the_device(argv, numberless, cache_dir, monkeypatch):
    monkeypatch.setattr(totals, "FOLD_EVERY", 4)
    run = run_of(argv, numberless, cache_dir)
    assert {p.device.type for p in run.learner.objective.parameters()} == {"meta"}
    with Copies() as copies:
        train_steps(run, EndsAfter(NUM_STEPS))
    assert not copies.waited_for


def test_nothing_of_a_fingerprint_is_fetched(numberless, cache_dir):
    """As one of two processes, until the steps after which it has arrived."""
    numberless.group.world_size = 2
    run = run_of(["--task", WEIGHTED, "--num-train", "2000"], numberless, cache_dir)
    lockstep = Lockstep(run.learner.objective, numberless, every=3)
    lockstep.begin(run.progress)
    run.watches.append(lockstep)
    with Copies() as copies:
        train_steps(run, EndsAfter(NUM_STEPS))
    assert not copies.waited_for
    assert len(lockstep._taken) == NUM_STEPS // 3


class Waiting(Watch):
    def after_step(self, progress, record, log):
        record.result.sums["loss"].item()


def test_a_fetched_loss_is_noticed(numberless, cache_dir):
    """The negative control."""
    run = run_of(["--task", WEIGHTED], numberless, cache_dir)
    run.watches.append(Waiting())
    run.log = EndsAfter(NUM_STEPS)
    with pytest.raises(RuntimeError, match="item"):
        train_epoch(run)


def test_a_waiting_copy_is_noticed():
    there = torch.zeros(3, device="meta")
    with Copies() as copies:
        torch.zeros(3).to("meta", non_blocking=True)
        there.copy_(torch.zeros(3), non_blocking=True)
        assert there.sum().add(1.0) is not None
        assert not copies.waited_for
        torch.zeros(3).to("meta")
        there.copy_(torch.zeros(3))
        there[:2] = torch.zeros(2)
        there.index_select(0, torch.tensor([1]).to("meta", non_blocking=True))
        assert len(copies.waited_for) == 3
        with suppress(RuntimeError):
            there[torch.tensor([1])]
    assert len(copies.waited_for) == 4


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and -m cuda")
@pytest.mark.parametrize("amp", ["off", "bf16", "fp16"])
@pytest.mark.parametrize("argv", CASES.values(), ids=CASES)
def test_cuda_never_makes_the_host_wait(argv, amp, cache_dir):
    enough_steps_of_an_epoch = ["--batch-size", "8"]
    run = run_of([*argv, *enough_steps_of_an_epoch, "--amp", amp], SingleDevice(torch.device("cuda", 0)), cache_dir)
    try:
        train_steps(run, EndsAfter(GPU_STEPS, SETTLING_STEPS, lambda: torch.cuda.set_sync_debug_mode("error")))
    finally:
        torch.cuda.set_sync_debug_mode("default")
