"""Phases that train one after another or in turns match a bare loop, at any world size and after any resume."""

import json
from itertools import count, islice, product, takewhile

import numpy as np
import pytest
import torch

from tests.conftest import assert_same_bits, cut_back, load, read_metrics
from tests.helpers.phased_task import Gan, PhasedFlags, Shared
from trainer.loading.order import EpochOrder, SampleKeys
from trainer.loop.schedule import lr_factor

FILE = "tests/helpers/phased_task.py"
EPOCHS, LR, WHOLE = 3, 0.02, 6
RUN = ["--dtype", "float64", "--epochs", EPOCHS, "--lr", LR, "--global-batch-size", WHOLE, "--num-threads", 1]
CASES = {
    "gan": (Gan, PhasedFlags()),
    "gan, two steps of one": (Gan, PhasedFlags(gen_steps=2)),
    "one after another": (Shared, PhasedFlags()),
    "a frozen layer": (Shared, PhasedFlags(frozen=True)),
}


def argv_of(case):
    task, config = CASES[case]
    more = ["--frozen"] * config.frozen + ["--gen-steps", config.gen_steps]
    return ["--task", f"{FILE}:{task.__name__}", *more, *RUN]


def without_epochs(argv):
    i = argv.index("--epochs")
    return argv[:i] + argv[i + 2 :]


class BareLoop:
    """Plain training loop on one process without accumulation, with gradients only for the phase's own parameters."""

    def __init__(self, case):
        task_type, config = CASES[case]
        self.task = task_type(config, seed=0, cache_dir=None)
        torch.manual_seed(0)
        self.objective = self.task.build_objective().double()
        self.params, self.optimizers = {}, {}
        for phase in self.task.phases:
            (group,) = self.task.param_groups(self.objective, phase)
            self.params[phase] = list(group["params"])
            matrices = {"params": self.params[phase], "weight_decay": group.get("weight_decay", 0.01)}
            self.optimizers[phase] = torch.optim.AdamW([matrices], lr=LR)

    def batches(self, phase, epoch):
        """Yields (samples, start, end) of each global batch."""
        size = self.task.num_samples(phase)
        whole = self.task.batch_size(phase, WHOLE)
        order = EpochOrder(0, epoch, self.task.phases.index(phase), size).take(0, size)
        for start in range(0, size, whole):
            yield order[start : start + whole], start, min(start + whole, size)

    def step(self, phase, epoch, samples, factor):
        keys = SampleKeys(np.asarray(samples), epoch)
        data = self.task.training_data(phase).__getitems__(keys)
        batch = {name: torch.from_numpy(array) for name, array in data.items()}
        loss = self.objective(batch, phase)["loss"] / len(samples)
        grads = torch.autograd.grad(loss, self.params[phase])
        for parameter, grad in zip(self.params[phase], grads, strict=True):
            parameter.grad = grad
        torch.nn.utils.clip_grad_norm_(self.params[phase], 1.0)
        for group in self.optimizers[phase].param_groups:
            group["lr"] = LR * factor
        self.optimizers[phase].step()
        for parameter in self.params[phase]:
            parameter.grad = None

    def one_after_another(self):
        """Yields (phase, epoch of its data, samples, progress in epochs) of each step, without end."""
        sizes = [self.task.num_samples(phase) for phase in self.task.phases]
        for epoch in count():
            for i, phase in enumerate(self.task.phases):
                for samples, start, end in self.batches(phase, epoch):
                    yield phase, epoch, samples, epoch + (sum(sizes[:i]) + (start + end) // 2) / sum(sizes)

    def in_turns(self):
        """Yields the same as `one_after_another`, with the phases in turns."""

        def endless():
            epoch = 0
            while True:
                yield from ((epoch, samples) for samples, _, _ in self.batches("gen", epoch))
                epoch += 1

        generator, size = endless(), self.task.num_samples("disc")
        for epoch in count():
            for samples, start, end in self.batches("disc", epoch):
                yield "disc", epoch, samples, epoch + (start + end) // 2 / size
                for _ in range(self.task.config.gen_steps):
                    own_epoch, own = next(generator)
                    yield "gen", own_epoch, own, epoch + max(0, end - (WHOLE + 1) // 2) / size

    def steps(self):
        return self.in_turns() if self.task.turns else self.one_after_another()

    def weights(self):
        for phase, epoch, samples, progress in takewhile(lambda step: step[-1] < EPOCHS, self.steps()):
            self.step(phase, epoch, samples, lr_factor(progress, EPOCHS / 10, EPOCHS, 0.0))
        return self.objective.model.state_dict()

    def weights_after(self, num_steps, warmup):
        """Returns the state dict after `num_steps` steps, with which the schedule ends. warmup: steps."""
        for number, (phase, epoch, samples, _) in enumerate(islice(self.steps(), num_steps)):
            self.step(phase, epoch, samples, lr_factor(number + 0.5, warmup, num_steps, 0.0))
        return self.objective.model.state_dict()


def difference(directory, weights):
    model = torch.load(directory / "final.pth", weights_only=True)["model"]
    assert model.keys() == weights.keys()
    return max(float((model[name] - weights[name]).abs().max() / weights[name].abs().max()) for name in weights)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("batch_size", [6, 2])
def test_one_device_matches_a_bare_loop(case, batch_size, run_here, tmp_path):
    run_here(*argv_of(case), "--batch-size", batch_size, "--save-dir", tmp_path)
    assert difference(tmp_path, BareLoop(case).weights()) < 1e-9


@pytest.mark.parametrize(
    ("case", "world", "batch_size"),
    [
        pytest.param(case, world, size, marks=[] if (case, world, size) == ("gan", 2, 2) else pytest.mark.slow)
        for case, world, size in product(CASES, (2, 3), (6, 1, 2))
    ],
)
def test_several_processes_match_a_bare_loop(case, world, batch_size, command, tmp_path):
    several = ["--multi-gpu", "ddp", "--nproc", world, "--device", "cpu", "--batch-size", batch_size]
    command("main_multi_gpu.py", *argv_of(case), *several, "--save-dir", tmp_path)
    assert difference(tmp_path, BareLoop(case).weights()) < 1e-9


# A stride of 3 is one turn of the GAN, so all resumes would begin in the same phase.
@pytest.mark.parametrize("stride", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["gan, two steps of one", "one after another"])
def test_a_run_resumes_bit_identically_in_the_middle_of_every_phase(case, stride, run_here, tmp_path):
    whole = tmp_path / "whole"
    run_here(*argv_of(case), "--batch-size", 2, "--save-every-steps", 1, "--keep-checkpoints", 0, "--save-dir", whole)
    expected = torch.load(whole / "final.pth", weights_only=True)
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    assert {entry["phase"] for entry in entries} == {0, 1}
    chosen = entries[:14:stride]
    assert {entry["phase"] for entry in chosen if entry["samples"] > 0} == {0, 1}
    for entry in chosen:
        directory = tmp_path / f"from-{entry['step']}"
        run_here(
            *argv_of(case), "--batch-size", 2, "--save-every-steps", 1, "--resume-from", whole / entry["file"],
            "--save-dir", directory,
        )  # fmt: skip
        found = torch.load(directory / "final.pth", weights_only=True)
        assert found["step"] == expected["step"] and found["position"] == expected["position"]
        for name, value in expected["model"].items():
            assert torch.equal(found["model"][name], value), (entry, name)


@pytest.mark.parametrize(("case", "max_steps"), [("gan, two steps of one", 17), ("one after another", 12)])
def test_a_run_limited_in_steps_ends_within_a_turn_or_phase(case, max_steps, run_here, tmp_path):
    length = ["--max-steps", max_steps, "--eval-every-steps", 3, "--batch-size", 2]
    argv = [*without_epochs(argv_of(case)), *length, "--save-every-steps", 1, "--keep-checkpoints", 0]
    whole = tmp_path / "whole"
    run_here(*argv, "--save-dir", whole)
    assert difference(whole, BareLoop(case).weights_after(max_steps, max_steps / 10)) < 1e-9
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    for i in range(1, len(entries), 3):
        again = tmp_path / str(i)
        cut_back(whole, entries[:i], again)
        run_here(*argv, "--save-dir", again)
        assert_same_bits(load(whole / "final.pth"), load(again / "final.pth"))
        for event in ("step", "epoch", "evaluation", "result"):
            assert read_metrics(again, event) == read_metrics(whole, event)


def test_a_resume_says_how_much_of_the_epoch_is_done(run_here, tmp_path):
    """With turns, the message counts the samples of the first phase, whichever phase is next."""
    argv = [*without_epochs(argv_of("gan")), "--batch-size", 2, "--save-dir", tmp_path, "--max-steps"]
    size = BareLoop("gan").task.num_samples("disc")
    for num_steps, num_done in ((3, 12), (4, 12)):  # two steps of disc, one or two of gen
        run_here(*argv, num_steps)
        out, _ = run_here(*argv, num_steps + 1)
        assert f"Resuming after optimizer step {num_steps}: epoch 1, {num_done} of {size} samples." in out


@pytest.mark.slow
def test_a_run_limited_in_steps_matches_a_bare_loop_on_two_processes(command, tmp_path):
    argv = [*without_epochs(argv_of("gan")), "--max-steps", 13, "--eval-every-steps", 5, "--batch-size", 2]
    several = ["--multi-gpu", "ddp", "--nproc", 2, "--device", "cpu"]
    command("main_multi_gpu.py", *argv, *several, "--save-dir", tmp_path)
    assert difference(tmp_path, BareLoop("gan").weights_after(13, 1.3)) < 1e-9


def test_metrics_are_named_by_phase(run_here, tmp_path):
    run_here(*argv_of("gan"), "--batch-size", 6, "--log-interval", 1, "--save-dir", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    assert {"train/disc/loss", "disc/learning_rate", "disc/grad_norm"} <= steps[0].keys()
    assert {"train/gen/loss", "gen/learning_rate", "gen/grad_norm"} <= steps[1].keys()
    epochs = [record for record in records if record["event"] == "epoch"]
    assert {"train/disc/loss", "train/disc/right", "train/gen/loss", "train/gen/fooled", "val/score"} <= epochs[
        0
    ].keys()
