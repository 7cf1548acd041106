"""Tests `--init-from` and `--init-from-partial`: a new run begins with the weights of a file."""

import pytest
import torch
from torch import nn

from tasks import TASKS
from tests.conftest import REFUSAL, TINY, assert_same_bits, contents, launcher, load
from tests.helpers.weighted_task import Weighted
from trainer.commands.build import assemble_run, build_task
from trainer.commands.parse import parse
from trainer.commands.weights import restore_weights, restore_what_fits, use_weights
from trainer.common.errors import UserError
from trainer.parallel.strategy import SingleDevice

ONE_DEVICE = SingleDevice(torch.device("cpu"))
STILL = ["--lr", 1e-12]
"""This learning rate changes at most the last bits of weights."""


@pytest.fixture(scope="module")
def source(command, tmp_path_factory):
    """Returns the weights of a run, by name."""
    directory = tmp_path_factory.mktemp("source")
    command("main.py", *TINY, "--seed", 3, "--save-dir", directory)
    return load(directory / "final.pth")["model"]


def save(weights, path):
    torch.save(weights, path)
    return path


def difference(weights, others):
    """Returns the largest absolute difference of two state dicts."""
    assert weights.keys() == others.keys()
    return max(float((value - others[name]).abs().max()) for name, value in weights.items())


# --- all weights -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix", ["", "model.", "module.", "module.model.", "my.own."])
def test_a_plain_state_dict_works_like_a_checkpoint(prefix, source, train, tmp_path):
    checkpoint = save({"model": source}, tmp_path / "checkpoint.pth")
    plain = save({f"{prefix}{name}": value for name, value in source.items()}, tmp_path / "plain.pth")
    for name, file in (("a", checkpoint), ("b", plain)):
        assert f"Starting with the weights of {file}." in train(tmp_path / name, "--init-from", file)
    assert_same_bits(load(tmp_path / "a" / "final.pth"), load(tmp_path / "b" / "final.pth"))


def test_a_plain_state_dict_is_scored(source, train, tmp_path):
    checkpoint = save({"model": source}, tmp_path / "checkpoint.pth")
    plain = save({f"module.{name}": value for name, value in source.items()}, tmp_path / "plain.pth")
    scores = [
        [line for line in train(tmp_path, "--eval-only", "--init-from", file).splitlines() if "val/" in line]
        for file in (checkpoint, plain)
    ]
    assert scores[0] == scores[1] and len(scores[0]) == 1


@pytest.mark.parametrize("flag", ["--init-from", "--init-from-partial"])
@pytest.mark.parametrize("content", [{"a": torch.ones(1), "b": 3}, {"model": 3}, {0: torch.ones(1)}, [torch.ones(1)]])
def test_a_file_that_is_neither_checkpoint_nor_state_dict_is_refused(flag, content, refused, tmp_path):
    file = save(content, tmp_path / "x.pth")
    message = (
        f"{flag} {file}: is not a checkpoint: it has no entry `model` with weights, and is not a state dict either"
    )
    refused([message], *TINY, flag, file, "--save-dir", tmp_path / "run")
    assert not contents(tmp_path / "run", REFUSAL)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (
            "x.ckpt",
            {"mean": torch.ones(2), "state_dict": {"a": torch.ones(1)}},
            "; save its entry 'state_dict' as",
        ),
        ("x.safetensors", None, ": torch cannot load it; convert it with safetensors and torch.save"),
    ],
)
def test_weights_of_other_trainers_are_refused_with_advice(name, content, told, run_here, tmp_path):
    file = tmp_path / name
    file.write_bytes(b'\x08\0\0\0\0\0\0\0{"a":{}}') if content is None else save(content, file)
    assert told in run_here(*TINY, "--init-from", file, "--save-dir", tmp_path / "run", status=2).err


def test_weights_are_restored_completely_or_not_at_all():
    """A prefix is dropped only if the remaining names are then known. Buffers count like parameters."""
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    own = {name: value.clone() for name, value in model.state_dict().items()}
    theirs = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    theirs[1].running_mean.fill_(5)
    weights = theirs.state_dict()
    wrong = [
        ({**weights, "2.bias": torch.ones(3)}, "2.bias is only in the file"),
        ({name: value for name, value in weights.items() if name != "1.running_mean"}, "1.running_mean is only in the"),
        ({**weights, "0.weight": torch.ones(3, 1)}, r"0.weight has shape \(3, 1\) in the file and \(3, 2\) in the "),
        ({f"a{name}": value for name, value in weights.items()}, "and 11 more; try another"),
        ({}, "is only in the model; .* and 4 more; try another"),
    ]
    for other, message in wrong:
        with pytest.raises(UserError, match=f"that does not fit the model: .*{message}"):
            restore_weights(model, other, ONE_DEVICE, "that", "try another")
        assert_same_bits(own, model.state_dict())
    restore_weights(model, weights, ONE_DEVICE, "that", "")
    assert_same_bits(weights, model.state_dict())
    outer = nn.Sequential(model)  # "0." begins names of the model, and is also a wrapper's prefix
    restore_weights(outer, {f"0.{name}": value for name, value in own.items()}, ONE_DEVICE, "that", "")
    assert_same_bits(own, model.state_dict())


def test_requested_weights_replace_the_moving_average(source):
    flags, _ = parse([*map(str, TINY), "--ema-decay", "0.9"], several_devices=False)
    run = assemble_run(flags, build_task(flags), ONE_DEVICE)
    use_weights(run.learner, source, "that", "")
    with run.learner.ema.applied():
        assert_same_bits(source, run.learner.objective.model.state_dict())


# --- weights that fit --------------------------------------------------------------------------------------------


@pytest.fixture
def partial(source, tmp_path):
    """Returns a file with a trunk and another head, and the names that fit."""
    weights = dict(source)
    del weights["layers.1.bias"]
    weights["layers.4.weight"] = torch.zeros(7, 16)
    weights["layers.5.bias"] = torch.zeros(2)
    return save(weights, tmp_path / "trunk.pth"), ["layers.0.weight", "layers.1.weight", "layers.4.bias"]


@pytest.mark.parametrize("more", [[], ["--ema-decay", 0.9]])
def test_fitting_weights_are_loaded_and_listed(more, source, partial, train, tmp_path):
    file, fitting = partial
    out = train(tmp_path / "run", "--init-from-partial", file, *STILL, *more).splitlines()
    at = out.index(f"Starting with 3 of the model's 5 weights from {file}: {', '.join(fitting)}.")
    assert out[at + 1 : at + 4] == [
        "Left out: layers.4.weight has shape (7, 16) in the file and (3, 16) in the model.",
        "Left out, because the model does not have them: layers.5.bias.",
        "Newly initialised, because the file does not have them: layers.1.bias.",
    ]
    train(tmp_path / "fresh", *STILL)
    fresh = load(tmp_path / "fresh" / "final.pth")["model"]
    found = load(tmp_path / "run" / "final.pth")["model"]
    assert difference(found, fresh | {name: source[name] for name in fitting}) < 1e-6
    assert all(difference({name: fresh[name]}, {name: source[name]}) > 1e-3 for name in fitting)


def test_a_run_started_from_partial_weights_resumes(partial, train, tmp_path):
    file, _ = partial
    train(tmp_path / "run", "--init-from-partial", file)
    out = train(tmp_path / "run", "--epochs", 2)
    assert [line for line in out.splitlines() if "Changed" in line or "Starting" in line] == [
        "Changed since the checkpoint: --epochs 1 -> 2"
    ]


def test_a_trunk_in_no_parameter_group_stays_unchanged(source, train, tmp_path, monkeypatch):
    class Tuned(Weighted):
        def param_groups(self, objective, phase):
            return [{"params": objective.model.layers[4].parameters()}]

    monkeypatch.setitem(TASKS, "tuned", Tuned)
    head = ("layers.4.weight", "layers.4.bias")
    trunk = {name: value for name, value in source.items() if name not in head}
    file = save(trunk, tmp_path / "trunk.pth")
    train(tmp_path / "run", "--task", "tuned", "--init-from-partial", file)
    train(tmp_path / "still", "--task", "tuned", "--init-from-partial", file, *STILL)
    tuned, still = (load(tmp_path / name / "final.pth")["model"] for name in ("run", "still"))
    assert_same_bits(trunk, {name: value for name, value in tuned.items() if name not in head})
    assert all(difference({name: tuned[name]}, {name: still[name]}) > 1e-4 for name in head)


@pytest.mark.slow
def test_two_processes_load_the_same_fitting_weights_as_one(partial, train, command, tmp_path):
    file, _ = partial
    train(tmp_path / "one", "--init-from-partial", file, *STILL)
    argv = [*TINY, "--init-from-partial", file, *STILL, "--save-dir", tmp_path / "two", "--device", "cpu"]
    command(*launcher(2), *argv)
    assert difference(*(load(tmp_path / name / "final.pth")["model"] for name in ("one", "two"))) < 1e-6


def test_a_file_without_a_fitting_weight_is_refused(refused, tmp_path):
    file = save({"a.weight": torch.ones(3, 3), "a.bias": torch.ones(3)}, tmp_path / "x.pth")
    parts = "no weight fits the model: the file has a.weight, a.bias, and the model has layers.0.weight, layers.1."
    refused([parts], *TINY, "--init-from-partial", file, "--save-dir", tmp_path / "run")
    assert not contents(tmp_path / "run", REFUSAL)


def test_buffers_are_loaded_like_parameters():
    model, theirs = (nn.ModuleDict({"norm": nn.BatchNorm1d(3), "head": nn.Linear(3, out)}) for out in (2, 4))
    theirs.norm.running_mean.fill_(5)
    theirs.norm.num_batches_tracked.fill_(8)
    head = model.head.weight.clone()
    weights = {f"module.{name}": value for name, value in theirs.state_dict().items()}
    comparison = restore_what_fits(model, weights, ONE_DEVICE, "that")
    assert set(comparison.fitting) == {f"norm.{name}" for name in theirs.norm.state_dict()}
    assert set(comparison.unlike) == {"head.weight", "head.bias"} and not comparison.missing and not comparison.unknown
    assert model.norm.running_mean.tolist() == [5] * 3 and int(model.norm.num_batches_tracked) == 8
    assert torch.equal(model.head.weight, head)
