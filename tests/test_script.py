"""`trainer.fit(model, train, loss)` equals a bare loop, and refuses what it cannot train."""

import json
import pickle
import re
import subprocess
import sys
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

import trainer
from tests.conftest import ROOT, assert_same_bits, cut_back, load
from trainer import UserError
from trainer.commands import build
from trainer.commands.facts import digest_of_data
from trainer.loading.order import EpochOrder
from trainer.script import task_of

NAMES = ("x", "y")
X = torch.randn(60, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()
TRAIN, VAL = TensorDataset(X[:40], Y[:40]), TensorDataset(X[40:], Y[40:])
EXACT = {"device": "cpu", "dtype": "float64", "num_threads": 1, "schedule": "constant", "warmup_steps": 0, "lr": 0.05}


class Pairs(Dataset):
    def __len__(self):
        return len(TRAIN)

    def __getitem__(self, index):
        return TRAIN[index]


class Noisy(Pairs):
    def __init__(self, noise):
        self.noise = noise

    def __getitem__(self, index):
        x, y = TRAIN[index]
        return x + self.noise(), y


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TRAIN)


def net():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def nll(model, batch):
    return F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")


def scored(model, batch):
    logits = model(batch["x"])
    losses = F.cross_entropy(logits, batch["y"], reduction="none")
    return {"loss": losses, "accuracy": logits.argmax(1) == batch["y"]}


def fit(tmp_path, train=TRAIN, loss=nll, model=None, **settings):
    settings = {"names": NAMES, "save_dir": tmp_path / "run", "max_steps": 6, **EXACT, **settings}
    return trainer.fit(model or net(), train, loss, **settings)


def bare_loop(make_optimizer, num_steps=6, batch_size=8, model=None):
    """Returns the weights after some steps of a loop written by hand, on the batches that the trainer takes."""
    model = model or net()
    optimizer = make_optimizer(model.parameters())
    orders = (EpochOrder(0, epoch, 0, len(TRAIN)) for epoch in range(num_steps))
    batches = (order.take(i, i + batch_size) for order in orders for i in range(0, len(TRAIN), batch_size))
    for _, index in zip(range(num_steps), batches, strict=False):
        x, y = TRAIN[torch.from_numpy(index.copy())]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        optimizer.step()
    return model.state_dict()


# --- training ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "train", [TRAIN, Pairs(), DataLoader(Pairs(), 8), Subset(TRAIN, range(40)), {"x": X[:40], "y": Y[:40]}]
)
@pytest.mark.parametrize("more", [{}, {"batch_size": 3, "global_batch_size": 8}])
def test_matches_a_bare_loop(train, more, tmp_path):
    optimizer = partial(torch.optim.SGD, momentum=0.9)
    settings = {"batch_size": 8, "max_grad_norm": 0, "optimizer": optimizer, **more}
    _, run = fit(tmp_path, train, **settings)
    expected = bare_loop(lambda parameters: optimizer(parameters, lr=0.05))
    torch.testing.assert_close(run.load().state_dict(), expected, rtol=1e-12, atol=1e-14)


def test_a_result_can_be_copied_and_pickled(tmp_path):
    result = fit(tmp_path)
    metrics, run = pickle.loads(pickle.dumps(result))
    assert metrics == result.metrics == run.metrics
    with pytest.raises(UserError, match="can build this model; call `run"):
        run.load()
    assert_same_bits(deepcopy(result).run.load().state_dict(), result.run.load().state_dict())


@pytest.mark.parametrize("name", ["weight", "skipped_steps", "learning_rate"])
def test_a_metric_with_a_name_of_the_trainer_is_refused(name, tmp_path):
    with pytest.raises(UserError, match=f"fit: the loss in train mode returns '{name}', .*; rename it"):
        fit(tmp_path, loss=lambda model, batch: {"loss": nll(model, batch), name: batch["y"]})


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, partial(torch.optim.AdamW, weight_decay=0.5)])
def test_an_optimizer_keeps_its_settings(optimizer, tmp_path):
    _, run = fit(tmp_path, batch_size=8, max_grad_norm=0, optimizer=optimizer)
    expected = bare_loop(lambda parameters: optimizer(parameters, lr=0.05))
    torch.testing.assert_close(run.load().state_dict(), expected, rtol=1e-12, atol=1e-14)


def test_the_model_is_copied(tmp_path):
    model = net()
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    _, run = fit(tmp_path, model=model)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert not torch.equal(run.load()[0].weight, before["0.weight"])


def test_gradient_hooks_of_parameters_are_called(tmp_path):
    """Two rows and a layer keep their weights, and another gradient is changed after its accumulation."""

    def clamp(parameter):
        parameter.grad.clamp_(-0.01, 0.01)

    def hooked():
        model = net()
        model[0].weight.register_hook(lambda gradient: gradient * (torch.arange(8) > 1)[:, None])
        model[0].bias.register_post_accumulate_grad_hook(clamp)
        model[2].weight.register_hook(lambda gradient: gradient)
        model[2].weight.requires_grad_(False)
        return model

    _, run = fit(tmp_path, batch_size=8, max_grad_norm=0, optimizer=torch.optim.SGD, model=hooked())
    expected = bare_loop(lambda parameters: torch.optim.SGD(parameters, lr=0.05), model=hooked())
    torch.testing.assert_close(run.load().state_dict(), expected, rtol=1e-12, atol=1e-14)
    assert torch.equal(run.load()[0].weight[:2], net()[0].weight[:2])


def test_scores_come_from_the_best_epoch_and_nothing_is_scored_twice(tmp_path, monkeypatch):
    monkeypatch.setattr(build, "check_sums", lambda *arguments, **more: [])  # its forward passes would be counted
    forwards = []

    def counted(model, batch):
        forwards.append(model.training)
        return scored(model, batch)

    metrics, run = fit(tmp_path, loss=counted, val=VAL, batch_size=8, max_steps=None, epochs=3)
    assert set(metrics) == {"train/loss", "train/accuracy", "val/loss", "val/accuracy"}
    assert forwards.count(False) == 3 * -(-len(VAL) // 8)
    expected = nll(run.load(), {"x": X[40:], "y": Y[40:]}).mean().item()
    assert metrics["val/loss"] == pytest.approx(expected, rel=1e-12)
    assert run.results["scored"] == "val"
    assert fit(tmp_path, loss=counted, val=VAL, batch_size=8, max_steps=None, epochs=3)[0] == metrics


@pytest.mark.parametrize("val", [None, TensorDataset(X[40:], 1 - Y[40:])], ids=["no validation", "epoch 1 is best"])
def test_a_run_resumed_from_any_checkpoint_has_the_same_scores(val, tmp_path):
    settings = {"val": val, "max_steps": None, "epochs": 3, "save_every_steps": 1, "keep_checkpoints": 0}
    metrics, run = fit(tmp_path, **settings)
    assert "train/loss" in metrics and run.results["weights"]["epoch"] == (3 if val is None else 1)
    entries = json.loads((run.path / "manifest.json").read_text())["checkpoints"]
    for i in range(1, len(entries) + 1):
        cut_back(run.path, entries[:i], tmp_path / str(i))
        assert fit(tmp_path, save_dir=tmp_path / str(i), **settings)[0] == metrics


def test_a_given_test_set_is_scored(tmp_path):
    metrics, _ = fit(tmp_path, test=VAL)
    assert list(metrics) == ["test/loss"]


def test_no_validation_and_no_test_set(tmp_path):
    metrics, _ = fit(tmp_path)
    assert list(metrics) == ["train/loss"]


def test_weights_are_numbers_of_loss_terms(tmp_path, capsys):
    weight = torch.arange(1.0, 41)
    data = TensorDataset(X[:40], Y[:40], weight)

    def terms(model, batch):
        return nll(model, batch) * batch["weight"]

    settings = {"names": (*NAMES, "weight"), "loss": terms, "batch_size": 40, "max_steps": 1}
    metrics, _ = fit(tmp_path, data, **settings)
    expected = (nll(net(), {"x": X[:40], "y": Y[:40]}) * weight).sum() / weight.sum()
    assert metrics["train/loss"] == pytest.approx(expected.item(), rel=1e-12)
    assert "Weights: the field 'weight' of a few samples of train (1 to 40). The sums" in capsys.readouterr().out
    fit(tmp_path, TensorDataset(X, Y, torch.ones(60)), names=(*NAMES, "weight"), fresh=True)
    assert "Weights:" not in capsys.readouterr().out


def test_predicts_in_order(tmp_path):
    _, run = fit(tmp_path)
    model = run.load()
    assert torch.equal(run.predict(VAL, batch_size=7), model(X[40:]).detach())
    assert torch.equal(run.predict(TensorDataset(X[40:])), model(X[40:]).detach())
    assert torch.equal(run.predict({"x": X[40:]}), model(X[40:]).detach())
    classes = run.predict(DataLoader(VAL), lambda model, batch: model(batch["x"]).argmax(1))
    assert torch.equal(classes, model(X[40:]).argmax(1))


def test_unpredictable_models_are_reported(tmp_path):
    _, run = fit(tmp_path, model=nn.ModuleDict({"a": net()}), loss=lambda model, batch: nll(model["a"], batch))

    def ragged(model, batch):
        return torch.eye(len(batch["x"]))

    mapped, asked = "outputs(model, batch) returned", "; pass `outputs`, which maps the model and a batch to a tensor"
    for data, settings, message in (
        (VAL, {}, "model(batch['x']) raised NotImplementedError: Module [ModuleDict] is missing the required"),
        (VAL, {"outputs": lambda model, batch: {"a": batch["x"]}}, f"{mapped} a dict for 20 samples{asked}"),
        (VAL, {"outputs": lambda model, batch: batch["x"].mean()}, f"{mapped} shape () for 20 samples{asked}"),
        (VAL, {"batch_size": 0}, "batch_size 0: must be a whole number of at least 1"),
        (VAL, {"batch_size": 3.0}, "batch_size 3.0: must be a whole number of at least 1"),
        (VAL, {"outputs": 3}, "outputs 3: must be a function of the model and a batch"),
        (VAL, {"outputs": ragged, "batch_size": 15}, "outputs per sample differ in shape ((15,) and (5,)); pass"),
        (DataLoader(VAL, sampler=[0, 2]), {}, "the DataLoader has the sampler list, but outputs are"),
        (X[:0], {}, "the data set is empty"),
        (Stream(), {}, "its data set (Stream): an IterableDataset has no sample indices"),
        (None, {}, "its data set (NoneType): needs a map-style dataset"),
    ):
        with pytest.raises(UserError, match=f"^predict: {re.escape(message)}"):
            run.predict(data, **settings)


def test_a_resume_with_another_loss_warns(tmp_path, capsys):
    fit(tmp_path, max_steps=4)
    _, run = fit(tmp_path, max_steps=6)
    whole = trainer.fit(net(), TRAIN, nll, names=NAMES, save_dir=tmp_path / "whole", max_steps=6, **EXACT)[1]
    assert_same_bits(load(run.path / "last.pth"), load(whole.path / "last.pth"))
    capsys.readouterr()
    fit(tmp_path, loss=lambda model, batch: 2 * nll(model, batch), max_steps=8)
    line = next(line for line in capsys.readouterr().out.splitlines() if "--loss" in line)
    assert line.startswith("Changed since the checkpoint: --loss nll (") and "<lambda>" in line


def scaled(model, batch, by=1.0):
    return by * nll(model, batch)


def test_changed_numbers_settings_and_layers_are_reported(tmp_path, capsys):
    def changes(by, momentum, act, max_steps):
        model, optimizer = nn.Sequential(net(), act), partial(torch.optim.SGD, momentum=momentum)
        fit(tmp_path, model=model, loss=partial(scaled, by=by), optimizer=optimizer, max_steps=max_steps)
        out = capsys.readouterr().out
        return [name for name in ("--loss", "--network", "--given-optimizer") if name in out]

    assert changes(1.0, 0.9, nn.ReLU(), 2) == changes(1.0, 0.9, nn.ReLU(), 2) == []
    assert changes(2.0, 0.9, nn.ReLU(), 2) == ["--loss"]
    assert changes(1.0, 0.5, nn.Tanh(), 4) == ["--network", "--given-optimizer"]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("adamw", torch.optim.SGD, "are SGD, but the checkpoint was trained with AdamW; use the same"),
        (torch.optim.AdamW, partial(torch.optim.AdamW, amsgrad=True), "AdamW of phase 'train' has amsgrad=True, but"),
        (torch.optim.RMSprop, partial(torch.optim.RMSprop, momentum=0.9), "RMSprop of phase 'train' has momentum=0.9"),
        (torch.optim.SGD, partial(torch.optim.SGD, momentum=0.9), None),
        (partial(torch.optim.AdamW, amsgrad=True), torch.optim.AdamW, None),
    ],
)
def test_an_optimizer_resumes_only_from_a_fitting_state(before, after, message, tmp_path):
    fit(tmp_path, optimizer=before)
    with pytest.raises(UserError, match=re.escape(message)) if message else nullcontext():
        assert fit(tmp_path, optimizer=after, max_steps=8)[1].results["step"] == 8


def digest(train, seed=0):
    task_type = task_of(net(), train, nll, {"val": VAL, "names": NAMES})
    return digest_of_data(task_type(task_type.Config(), seed, Path()))


def test_a_few_samples_identify_the_data():
    assert digest(TRAIN) == digest(Pairs()) == digest(Subset(TRAIN, range(40)))
    assert digest(TRAIN) != digest(TensorDataset(X[:40] + 1, Y[:40])) != digest(Subset(TRAIN, range(39, -1, -1)))
    drawn = Noisy(lambda: torch.randn(4))
    assert digest(drawn) == digest(drawn) != digest(drawn, seed=1)
    assert digest(Noisy(np.random.default_rng(0).random)) is None  # each reading draws other noise


def test_a_resume_with_other_data_warns(tmp_path, capsys):
    fit(tmp_path, val=VAL, max_steps=4)
    capsys.readouterr()
    _, run = fit(tmp_path, TensorDataset(X[20:], Y[20:]), val=TensorDataset(X[:20], Y[:20]))
    assert "differs from the checkpoint's, or the data changed, so scores may include" in capsys.readouterr().out
    assert run.state == "finished"


def test_a_loss_that_works_only_in_training_is_refused_before_training(tmp_path):
    def loss(model, batch):
        return {"loss" if model.training else "other": nll(model, batch)}

    with pytest.raises(UserError, match="fit: the loss in eval mode returns other, but must return 'loss'"):
        fit(tmp_path, loss=loss, val=VAL)


def test_a_finished_run_returns_no_results_of_other_data(tmp_path):
    fit(tmp_path, val=VAL)
    with pytest.raises(
        UserError,
        match=r"a finished run on other data or with another helper, with --lr .* instead of .*; choose another",
    ):
        fit(tmp_path, TensorDataset(X[20:], Y[20:]), val=TensorDataset(X[:20], Y[:20]), lr=0.1)
    assert fit(tmp_path, val=VAL).metrics


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_losses_are_added_in_float32(dtype, tmp_path):
    """The sum of these losses is above the largest float16, and bfloat16 rounds it to a multiple of 512."""

    def large(model, batch):
        return (nll(model, batch) * 0 + 2001).to(dtype)

    metrics, _ = fit(tmp_path, loss=large, val=VAL, batch_size=40, eval_batch_size=40, max_steps=1)
    assert metrics["val/loss"] == float(torch.tensor(2001.0).to(dtype))


def test_a_monitor_that_is_never_a_number_is_named(tmp_path, capsys):
    fit(tmp_path, loss=lambda model, batch: nll(model, batch) * (1.0 if model.training else torch.nan), val=VAL)
    assert "No finite val/loss of a checkpoint is known; scoring the last weights." in capsys.readouterr().out


def test_a_workload_is_found_by_name(tmp_path):
    metrics, _ = trainer.fit("har", save_dir=tmp_path, max_steps=1, num_threads=1, device="cpu", no_test=True)
    assert "val/accuracy" in metrics


# --- several processes -------------------------------------------------------------------------------------------

SCRIPT = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import trainer
from tests.test_script import EXACT, NAMES, TRAIN, VAL, net, nll
settings = dict(names=NAMES, max_steps=6, global_batch_size=8, **EXACT)
print("begins")
first, _ = trainer.fit(net(), TRAIN, nll, save_dir="first", **settings, multi_gpu="ddp", nproc=2)
second, run = trainer.fit(net(), TRAIN, nll, val=VAL, save_dir="second", **settings, multi_gpu="ddp", nproc=2)
print("ends", first, second, run.results["world_size"])
"""


def test_a_script_is_rerun_for_each_rank(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("begins") == 5 and done.stdout.count("ends") == 1
    one, _ = fit(tmp_path, global_batch_size=8)
    ends = next(line for line in done.stdout.splitlines() if line.startswith("ends"))
    assert float(ends.split("'train/loss': ")[1].split("}")[0]) == pytest.approx(one["train/loss"], rel=1e-12)
    assert ends.endswith(" 2")


SWEEP = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import trainer
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from tests.test_script import EXACT, NAMES, TRAIN, net, nll
settings = dict(names=NAMES, max_steps=2, **EXACT, multi_gpu="ddp", nproc=2)

def in_pool(_):
    trainer.fit(net(), TRAIN, nll, save_dir="pool", **settings)

if __name__ == "__main__":
    losses = []
    for save_dir, steps in (("one", 2), ("one", 4), ("train.py", 2), ("last", 2)):
        try:
            metrics, _ = trainer.fit(net(), TRAIN, nll, save_dir=save_dir, **settings | {{"max_steps": steps}})
            losses.append(metrics["train/loss"])
        except trainer.UserError as error:
            losses.append("refused")
        print("seen", losses, flush=True)
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        [*pool.map(in_pool, [0])]
"""


def test_ranks_repeat_the_outcomes_of_earlier_calls_and_a_pool_is_refused(tmp_path):
    (tmp_path / "train.py").write_text(SWEEP)
    done = subprocess.run([sys.executable, "train.py"], cwd=tmp_path, capture_output=True, text=True)
    assert "cannot rerun the script once per rank; call fit outside the pool" in done.stderr
    seen = [line for line in done.stdout.splitlines() if line.startswith("seen")]
    last = seen[-1].removeprefix("seen ")[1:-1].split(", ")
    assert len(last) == 4 and last[2] == "'refused'" and last[0] == last[3] != last[1]
    assert {line.removeprefix("seen [").rstrip("]") for line in seen} == {", ".join(last[:n]) for n in range(1, 5)}


def test_autocast_around_fit_is_refused(tmp_path):
    with torch.autocast("cpu"), pytest.raises(UserError, match="autocast is on"):
        fit(tmp_path)


def test_a_loss_of_another_model_is_refused(tmp_path):
    other = net()
    with pytest.raises(UserError, match="depends on no trained parameter of the model that it receives"):
        fit(tmp_path, loss=lambda model, batch: nll(other, batch))


def of_teacher(teacher, moves=False):
    """Returns a loss that calls another function, which uses a teacher in a list."""
    teachers = [teacher]

    def expected(batch):
        with torch.no_grad():
            return teachers[0](batch["x"]).softmax(1)

    def loss(model, batch):
        if moves and model.training:
            teacher[0].weight.data.mul_(0.9)
        return F.cross_entropy(model(batch["x"]), expected(batch), reduction="none")

    return loss


class Holder:
    def __init__(self, loss):
        self.held = loss

    def loss(self, model, batch):
        return self.held(model, batch)


def frozen(factor=1.0, dtype=torch.float32):
    teacher = net().to(dtype).requires_grad_(False)
    teacher[0].weight.mul_(factor)
    return teacher


def test_a_frozen_module_of_the_loss_has_the_dtype_of_the_run_and_identifies_it(tmp_path, capsys):
    fit(tmp_path, loss=of_teacher(frozen()))
    assert "The loss uses frozen modules, which stay in eval mode: teachers.0." in capsys.readouterr().out
    assert fit(tmp_path, loss=of_teacher(frozen()))[1].state == "finished"
    with pytest.raises(UserError, match="a finished run on other data or with another helper"):
        fit(tmp_path, loss=of_teacher(frozen(2.0)))


@pytest.mark.parametrize("wrapped", [partial, lambda loss: Holder(loss).loss])
def test_a_teacher_that_the_loss_moves_is_refused(wrapped, tmp_path):
    with pytest.raises(UserError, match=r"the helper 'teacher.*' has changed after optimizer step 1"):
        fit(tmp_path, loss=wrapped(of_teacher(frozen(), moves=True)))


def test_a_module_of_the_loss_that_is_not_trained_is_named(tmp_path, capsys):
    fit(tmp_path, loss=of_teacher(net()))
    assert "The loss uses modules that are neither trained nor saved: teachers.0. Put" in capsys.readouterr().out


def test_a_prompt_shows_the_command_to_run(tmp_path):
    code = SCRIPT.replace('print("begins")', "")
    done = subprocess.run([sys.executable, "-"], input=code, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert "and run: torchrun --standalone --nproc_per_node=2 train.py" in done.stderr


# --- mistakes ----------------------------------------------------------------------------------------------------


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(()))

    def forward(self, model, batch):
        return nll(model, batch) * self.factor


class Growing(nn.Linear):
    def __init__(self):
        super().__init__(4, 2, dtype=torch.float64)
        self.register_buffer("seen", torch.zeros(0, 4))

    def forward(self, x):
        self.seen = torch.cat([self.seen, x])
        return super().forward(x)


class Stateful(nn.Linear):
    def __init__(self):
        super().__init__(4, 2, dtype=torch.float64)

    def get_extra_state(self):
        return {"a": 1}


def loader(**settings):
    return DataLoader(TRAIN, **{"batch_size": 4, **settings})


REFUSED = {
    "a mean": (
        {"loss": lambda model, batch: nll(model, batch).mean()},
        "fit: the loss returned a tensor of shape () for 'loss', but must return one number for each of the 2 samples",
    ),
    "rows of several terms": (
        {"loss": lambda model, batch: nll(model, batch)[:, None].expand(-1, 3)},
        "fit: the loss returned a tensor of shape (2, 3) for 'loss'",
    ),
    "a metric that is a mean": (
        {"loss": lambda model, batch: {"loss": nll(model, batch), "accuracy": torch.tensor(1.0)}},
        "fit: the loss returned a tensor of shape () for 'accuracy'",
    ),
    "a number": ({"loss": lambda model, batch: {"loss": nll(model, batch), "n": 3}}, "returned a int for 'n'"),
    "no loss": ({"loss": lambda model, batch: {"nll": nll(model, batch)}}, "in train mode returns nll, but must"),
    "no function": ({"loss": "nll"}, "fit: loss of type str: must map a model and a batch"),
    "a loss of torch": ({"loss": nn.CrossEntropyLoss()}, "fit: loss of type CrossEntropyLoss: must map a model"),
    "no data": ({"train": None}, "fit, train: its data set (NoneType): needs a map-style dataset with `__len__`"),
    "a name of the trainer": (
        {"names": ("x", "index"), "loss": lambda model, batch: model(batch["x"]).sum(1)},
        "the data have a field 'index', the trainer's name for a sample's number; rename the field",
    ),
    "whole weights": (
        {"train": {"x": X, "y": Y, "weight": Y + 1}, "names": None},
        "the data set must give batch['weight'] one floating-point number per sample, not torch.int64 of shape (4,)",
    ),
    "a file": ({"train": "a.csv"}, "fit, train: its data set (str): needs a data set, not the string 'a.csv'; if"),
    "a name twice": ({"names": ("x", "x")}, "its items have 2 value(s); give each its own name, as in names="),
    "a number as a name": (
        {"loss": lambda model, batch: {"loss": nll(model, batch), 3: batch["y"].double()}},
        "fit: the loss in train mode returns a value named 3 of type int; name it by a string",
    ),
    "a frozen model": (
        {"model": net().requires_grad_(False)},
        "fit, the model: phase 'train': trains no parameters",
    ),
    "no gradient": (
        {"loss": lambda model, batch: nll(model, batch).detach()},
        "fit: the loss in train mode returns a loss that depends on no parameter to train; compute it from the model's",
    ),
    "a loss with parameters": ({"loss": Scale()}, "fit: the loss holds loss.factor outside the model, but only the"),
    "a buffer that grows": (
        {"model": Growing()},
        "fit: the loss changes the shape of the persistent buffer model.seen from (0, 4) to (2, 4), so a new model",
    ),
    "extra state": ({"model": Stateful()}, "fit, the model: _extra_state is a dict, but checkpoints hold only tensors"),
    "text in items": (
        {"train": [{"x": x, "y": y, "file": "a"} for x, y in TRAIN], "names": None},
        "the data set must return a tensor for batch['file'], not a list; change the data, or make batches with",
    ),
    "no blocks": ({"grad_checkpointing": True}, "no modules of this model to recompute; leave the flag out, or call"),
    "a number among names": ({"names": ("x", 1)}, "the data set must name its values by strings, not by 1; change"),
    "no names of items": (
        {"train": Pairs(), "names": None},
        "fit, train: its data set (Pairs, names=None): its items have 2 value(s)",
    ),
    "no names": ({"names": None}, "fit, train: its data set (TensorDataset, names=None): its items have 2 value(s)"),
    "a lazy model": (
        {"model": nn.LazyLinear(2)},
        "has no shape before the first forward pass; call the model once",
    ),
    "a sampler": (
        {"train": loader(sampler=WeightedRandomSampler(torch.ones(40), 40))},
        "fit, train: the DataLoader has the sampler WeightedRandomSampler, which the trainer cannot reproduce",
    ),
    "a part of the samples": (
        {"train": loader(sampler=RandomSampler(TRAIN, num_samples=9))},
        "fit, train: the DataLoader has the sampler RandomSampler",
    ),
    "a batch sampler": (
        {"train": DataLoader(TRAIN, batch_sampler=[[0, 1], [2, 3]])},
        "fit, train: the DataLoader has a batch_sampler",
    ),
    "a stream": (
        {"train": DataLoader(Stream())},
        "fit, train: its data set (Stream): an IterableDataset has no sample indices",
    ),
    "a generator": (
        {"val": loader(generator=torch.Generator(), worker_init_fn=print)},
        "fit, val: the DataLoader has the worker_init_fn and the generator",
    ),
    "an optimizer": (
        {"optimizer": torch.optim.SGD(net().parameters(), lr=0.1)},
        "fit: optimizer SGD is an instance with the parameters of your model",
    ),
    "an optimizer with a rate": (
        {"optimizer": partial(torch.optim.SGD, lr=0.1)},
        "fit: the partial of SGD has its own lr; leave it out, and give fit lr=...",
    ),
    "an optimizer of the loss": (
        {"optimizer": torch.optim.LBFGS},
        "fit: optimizer LBFGS needs a closure that evaluates the loss again",
    ),
    "a setting of another optimizer": (
        {"optimizer": torch.optim.SGD, "momentum": 0.9},
        "fit: momentum 0.9: has no effect on the given optimizer class; leave it out, or give it to SGD with functools",
    ),
    "no optimizer": ({"optimizer": 3}, "fit: optimizer 3: must be a class, a functools.partial of a class"),
    "a flag that is none": ({"learning_rate": 0.1}, "learning_rate: no such"),
}


@pytest.mark.parametrize(("settings", "message"), REFUSED.values(), ids=REFUSED)
def test_errors_are_named(settings, message, tmp_path):
    with pytest.raises(UserError) as error:
        fit(tmp_path, **settings)
    assert message in str(error.value)
    assert not re.search(r"ScriptOfFit|Rows|build_objective|param_groups|collate in|task\.py", str(error.value))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((net(), TRAIN), r"fit\(model, train, loss\): pass training data and a loss"),
        (("har", TRAIN), "fit: too many positional arguments after the task; pass settings"),
        ((net, TRAIN, nll), r"fit: <function net .*>: must be an nn.Module, a subclass of trainer.Task, or the name"),
        ((nn.Linear, TRAIN, nll), r"fit: Linear is a class, not a model; pass an instance, such as Linear\(...\)"),
    ],
)
def test_invalid_first_arguments_are_named(arguments, message):
    with pytest.raises(UserError, match=message):
        trainer.fit(*arguments)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning", "ignore:The .grad attribute")
@pytest.mark.parametrize("compiled", [torch.jit.script, lambda model: torch.jit.trace(model, X)])
def test_a_model_of_torch_jit_is_refused(compiled, tmp_path):
    with pytest.raises(UserError, match=r"^fit: cannot copy a model made by torch\.jit; pass the model from which"):
        fit(tmp_path, model=compiled(net()))


def test_batch_dependence_is_reported_in_terms_of_the_script(tmp_path, capsys):
    fit(tmp_path, loss=lambda model, batch: nll(model, batch) + model(batch["x"]).mean() ** 2)
    out = capsys.readouterr().out
    assert "fit: the loss in train mode: 'loss' is " in out and "devices: let a sample's number depend on this" in out
    with pytest.raises(UserError, match=r"as if it were a mean; let a sample's number depend on this sample alone"):
        fit(tmp_path, loss=lambda model, batch: nll(model, batch) / len(batch["x"]), fresh=True)
    fit(tmp_path, Noisy(np.random.default_rng(0).random), fresh=True)
    assert "Training data: 'x' of the same samples differs when they are read again" in capsys.readouterr().out


def test_the_loss_of_another_file_is_refused(tmp_path):
    fit(tmp_path)
    with pytest.raises(UserError, match=r"^fit, with the loss in .*torch.*: the checkpoint is from fit, with the loss"):
        fit(tmp_path, loss=nn.functional.l1_loss, max_steps=8)


def test_a_dataloader_reports_which_settings_are_used(tmp_path, capsys):
    fit(tmp_path, loader(shuffle=True, drop_last=True, batch_size=7), val=loader(batch_size=5))
    out = capsys.readouterr().out
    assert "Taken from the DataLoader train: its data set, batch_size 7, drop_last True, num_workers 0." in out
    assert "Taken from the DataLoader val: its data set, eval_batch_size 5." in out
    fit(tmp_path / "own", loader(), batch_size=9)
    assert "train: its data set, drop_last False" in capsys.readouterr().out


def test_only_the_script_has_the_model(tmp_path, run_here):
    _, run = fit(tmp_path)
    message = "only test_script.py, which calls trainer.fit(model, ...), can build this model"
    with pytest.raises(UserError, match=r"which calls trainer\.fit"):
        trainer.load(run.path)
    for task in (["--task", run.results["task"]], []):
        (err,) = run_here(*task, "--predict", "x.csv", "--save-dir", run.path, status=2).err.splitlines()
        assert message in err


def test_a_custom_collate(tmp_path):
    def collate(items):
        return {"x": torch.stack([x for x, _ in items]), "y": torch.stack([y for _, y in items])}

    one, _ = fit(tmp_path, names=None, collate=collate)
    other, run = fit(tmp_path / "other", DataLoader(TRAIN, 32, collate_fn=collate), names=None)
    assert torch.equal(run.predict(DataLoader(VAL, collate_fn=collate)), run.predict(VAL))
    assert one == other == fit(tmp_path / "tensors")[0]
    assert np.isfinite(one["train/loss"])
