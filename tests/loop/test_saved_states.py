"""A run saves nothing that a resume refuses: unusual states are restored bit-identically, or refused by name."""

import decimal
import json
import pathlib
from collections import OrderedDict, deque
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from tasks import TASKS
from tests.conftest import ROOT, assert_messages, assert_same_bits, load
from tests.helpers.hoarding_task import Hoarder
from tests.helpers.shaped_task import Plus, Shaped, ShapedObjective
from trainer.commands.facts import digest_of_data, facts_of_data
from trainer.common.errors import UserError
from trainer.common.files import alike
from trainer.loop.contract import check_tensors

RUN = ["--task", "shaped", "--num-threads", 1, "--device", "cpu", "--save-dir"]


@pytest.fixture
def shaped(run_here, monkeypatch):
    """Trains a variant of the task `shaped` with the given members; returns the lines of standard error."""

    def train(directory, *more, status=0, **members):
        monkeypatch.setitem(TASKS, "shaped", type("Odd", (Shaped,), members))
        return run_here(*RUN, directory, *more, status=status)[1].splitlines()

    return train


def optimizing(kind):
    return {"build_optimizers": lambda self, phase, groups, lr: [kind(groups, lr=lr)]}


# --- optimizers --------------------------------------------------------------------------------------------------


def test_every_optimizer_state_is_restored(shaped, tmp_path):
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert shaped(whole, "--max-steps", 5, **optimizing(Hoarder)) == []
    for steps in (2, 3, 5):
        assert shaped(resumed, "--max-steps", steps, **optimizing(Hoarder)) == []
    assert_same_runs(whole, resumed)
    assert load(resumed / "final.pth")["optimizers"]["train"][0]["state"]["all"] == 5
    assert shaped(whole, "--eval-only", **optimizing(Hoarder)) == []


def assert_same_runs(whole, resumed):
    expected, found = load(whole / "final.pth"), load(resumed / "final.pth")
    assert_same_bits(expected["model"], found["model"])
    for own in (expected, found):  # NaN does not equal itself
        for kept in own["optimizers"]["train"][0]["state"].values():
            if isinstance(kept, dict):
                assert np.isnan(kept.pop("unset")) and kept.pop("unset_tensor").isnan()
    assert_same_bits(expected["optimizers"], found["optimizers"])


@pytest.mark.slow
@pytest.mark.parametrize("form", ["ddp", "fsdp"])
def test_every_optimizer_state_is_restored_on_all_processes(form, command, tmp_path):
    task = f"{ROOT}/tests/helpers/hoarding_task.py"
    argv = ["main_multi_gpu.py", "--multi-gpu", form, "--nproc", 2, "--device", "cpu", "--num-threads", 1]
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    command(*argv, "--task", f"{task}:Hoarding", "--max-steps", 4, "--save-dir", whole)
    for steps in (2, 4):
        command(*argv, "--task", f"{task}:Hoarding", "--max-steps", steps, "--save-dir", resumed)
    assert_same_runs(whole, resumed)
    refused = command(*argv, "--task", f"{task}:Spoiled", "--save-dir", tmp_path / "new", status=2)
    assert_messages(refused.stderr.splitlines(), "the state after optimizer step 1 cannot be saved")
    if form == "fsdp":
        refused = command(*argv, "--task", f"{task}:Slowed", "--save-dir", tmp_path / "new", status=2)
        assert_messages(refused.stderr.splitlines(), "--multi-gpu fsdp: Slow keeps 'slow_state' outside 'state'")


def keeping(**kept):
    class Keeping(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.state[self.param_groups[0]["params"][0]].update(kept)

    return Keeping


UNREADABLE = {
    "a decimal": (lambda: decimal.Decimal(1), "is of type decimal.Decimal"),
    "a path in a list": (lambda: [0, {"at": pathlib.Path("x")}], "is of type pathlib."),
    "a compressed matrix": (lambda: torch.eye(3).to_sparse_csr(), "is a sparse tensor (torch.sparse_csr)"),
    "a bytearray": (lambda: bytearray(b"abc"), "is of type builtins.bytearray"),
    "an array of texts": (lambda: np.array(["x"]), "is of type numpy.ndarray"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("kind", UNREADABLE)
def test_optimizer_state_of_other_types_is_refused_at_the_first_step(kind, shaped, tmp_path):
    build, reason = UNREADABLE[kind]
    err = shaped(tmp_path, "--max-steps", 3, status=2, **optimizing(keeping(odd=build())))
    told = "the state after optimizer step 1 cannot be saved: optimizers.train[0].state.0"
    assert_messages(err, told)
    assert reason in err[0] and "(of Keeping.state_dict())" in err[0]
    assert not list(tmp_path.glob("*.pth"))


def test_unsavable_state_that_appears_later_loses_no_earlier_checkpoint(shaped, tmp_path):
    class Late(torch.optim.SGD):
        def step(self, closure=None):
            super().step(closure)
            self.num_steps = getattr(self, "num_steps", 0) + 1
            if self.num_steps > 3:
                self.state["late"] = decimal.Decimal(1)

    err = shaped(tmp_path, "--max-steps", 6, "--save-every-steps", 2, status=2, **optimizing(Late))
    assert_messages(err, "because the new file could not be read back: optimizers.train[0].state.late Decimal('1')")
    assert load(tmp_path / "last.pth")["step"] == 3
    assert shaped(tmp_path, "--max-steps", 6, **optimizing(type("Late", (torch.optim.SGD,), {}))) == []


def test_optimizer_settings_that_files_cannot_hold_come_from_the_task(shaped, tmp_path):
    class Shrinking(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(
                [group | {"shrink": lambda p: p.mul_(0.9), "where": pathlib.Path()} for group in params], lr
            )

        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for group in self.param_groups:
                for p in group["params"]:
                    group["shrink"](p)

    for steps in (1, 2):
        assert shaped(tmp_path, "--max-steps", steps, **optimizing(Shrinking)) == []
    assert "shrink" not in load(tmp_path / "final.pth")["optimizers"]["train"][0]["param_groups"][0]


class Lookahead(torch.optim.SGD):
    """SGD that goes half of the way back every second step (Zhang et al., 2019), with an unusual state dict."""

    def __init__(self, params, lr):
        super().__init__(params, lr, momentum=0.9)
        self.slow = [p.detach().clone() for p in self.parameters()]
        self.num_steps = 0

    def parameters(self):
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        self.num_steps += 1
        if self.num_steps % 2 == 0:
            for slow, p in zip(self.slow, self.parameters(), strict=True):
                p.copy_(slow.lerp_(p, 0.5))

    def state_dict(self):
        fast = super().state_dict()
        return {
            "fast_state": fast["state"], "slow_state": dict(enumerate(self.slow)),
            "param_groups": fast["param_groups"], "num_steps": self.num_steps,
        }  # fmt: skip

    def load_state_dict(self, state):
        super().load_state_dict({"state": state["fast_state"], "param_groups": state["param_groups"]})
        self.slow, self.num_steps = [*state["slow_state"].values()], state["num_steps"]


def test_a_state_dict_with_other_entries_is_restored(shaped, tmp_path):
    assert shaped(tmp_path / "whole", "--max-steps", 5, **optimizing(Lookahead)) == []
    for steps in (1, 3, 5):
        assert shaped(tmp_path / "resumed", "--max-steps", steps, **optimizing(Lookahead)) == []
    assert_same_bits(load(tmp_path / "whole" / "final.pth")["model"], load(tmp_path / "resumed" / "final.pth")["model"])
    err = shaped(
        tmp_path / "resumed", "--max-steps", 6, status=2, **optimizing(type("Lookahead", (torch.optim.SGD,), {}))
    )
    assert_messages(err, "the optimizer Lookahead of phase 'train' keeps 'state', which the checkpoint does not have")


def test_a_state_dict_without_groups_is_refused(shaped, tmp_path):
    class Groupless(torch.optim.SGD):
        def state_dict(self):
            return {"inner": super().state_dict()}

    err = shaped(tmp_path, "--max-steps", 3, status=2, **optimizing(Groupless))
    assert_messages(err, "optimizers.train[0].param_groups is missing (of Groupless.state_dict())")


# --- models ------------------------------------------------------------------------------------------------------


def lengthen(model):
    model.table = torch.cat([model.table, torch.zeros(1)])


def lengthen_parameter(model):
    model.linear.bias.data = torch.zeros(3)


def add_parameter(model):
    model.more = nn.Parameter(torch.zeros(1))


def add_buffer(model):
    model.register_buffer("more", torch.zeros(1))


@pytest.mark.parametrize("change", [lengthen, lengthen_parameter, add_parameter, add_buffer])
def test_a_model_that_a_failing_forward_changed_is_never_saved(change, shaped, tmp_path):
    class Changing(ShapedObjective):
        def forward(self, batch, phase="train"):
            if self.training:
                self.num_forwards = getattr(self, "num_forwards", 0) + 1
            if getattr(self, "num_forwards", 0) == 6:  # the first is the trial forward pass
                change(self.model)
                raise RuntimeError("the sixth forward")
            return super().forward(batch, phase)

    def build_objective(self):
        return Changing(Plus(lambda model, x: 0.0, table=torch.zeros(2)))

    err = shaped(tmp_path, "--max-steps", 9, "--save-every-steps", 3, status=1, build_objective=build_objective)
    told = "\n".join(err)
    assert "the sixth forward" in told and "the model has changed since it was built: " in told
    assert load(tmp_path / "last.pth")["step"] == 3

    def build_again(self):
        return ShapedObjective(Plus(lambda model, x: 0.0, table=torch.zeros(2)))

    assert shaped(tmp_path, "--max-steps", 9, build_objective=build_again) == []


def test_a_model_that_gains_a_buffer_is_refused_at_the_first_step(shaped, tmp_path):
    class Growing(ShapedObjective):
        def after_step(self, phase):
            add_buffer(self.model)

    err = shaped(tmp_path, status=2, build_objective=lambda self: Growing(Plus(lambda model, x: 0.0)))
    assert_messages(err, "the model has changed since it was built: more was absent and is torch.float32 of shape (1,)")
    assert not list(tmp_path.glob("*.pth"))


def test_a_nan_buffer_is_not_blamed_on_the_learning_rate(shaped, tmp_path):
    class Spoiling(ShapedObjective):
        def after_step(self, phase):
            self.model.table.fill_(float("nan"))

    def build_objective(self):
        return Spoiling(Plus(lambda model, x: 0.0, table=torch.zeros(2)))

    err = shaped(tmp_path, status=2, build_objective=build_objective)
    assert_messages(err, "NaN in buffer(s) table after optimizer step 1, so this state is not saved")
    assert "--lr" not in err[0]


def nested():
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


REFUSED_BUFFERS = {
    "quantized": lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.quint8),
    "nested": nested,
    "on the meta device": lambda: torch.ones(3, device="meta"),
    "torch.sparse_csr": lambda: torch.eye(3).to_sparse_csr(),
}


@pytest.mark.filterwarnings("ignore")  # some of these kinds of tensors are in beta
@pytest.mark.parametrize("kind", REFUSED_BUFFERS)
def test_buffers_that_cannot_be_saved_are_refused_at_construction(kind):
    model = Plus(None)
    model.register_buffer("odd", REFUSED_BUFFERS[kind]())
    with pytest.raises(UserError, match=r"Mine.build_objective: odd .*register"):
        check_tensors(model, "Mine.build_objective")
    model = Plus(None)
    model.register_buffer("odd", REFUSED_BUFFERS[kind](), persistent=False)
    check_tensors(model, "Mine.build_objective")


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_buffers_of_other_dtypes_are_restored(shaped, tmp_path):
    buffers = {
        "eight_bits": torch.ones(4).to(torch.float8_e4m3fn), "bits": torch.ones(4, dtype=torch.uint8).view(torch.bits8),
        "half_complex": torch.ones(4, dtype=torch.complex32), "unsigned": torch.ones(4, dtype=torch.uint16),
        "negative": torch._neg_view(torch.ones(3)), "expanded": torch.ones(1).expand(1000, 10),
        "overlapping": torch.arange(5.0).as_strided((4, 2), (1, 1)), "empty": torch.zeros(0, 3),
        "large": torch.full((4,), 2**62),
    }  # fmt: skip

    def build_objective(self):
        return ShapedObjective(Plus(lambda model, x: 0.0, **{name: value.clone() for name, value in buffers.items()}))

    for steps in (1, 2):
        assert shaped(tmp_path, "--max-steps", steps, build_objective=build_objective) == []
    found = load(tmp_path / "final.pth")["model"]
    for name, value in buffers.items():  # floating-point buffers have the model's precision
        expected = value.clone().to(found[name].dtype).view(-1).view(torch.uint8)
        assert torch.equal(found[name].view(-1).view(torch.uint8), expected), name
    assert shaped(tmp_path, "--eval-only", build_objective=build_objective) == []


# --- facts of data -----------------------------------------------------------------------------------------------

FACTS = {
    "by number": {0: "a", 10: "b", 2: "c"}, "nan": float("nan"), "numpy": [np.float32(1), np.int64(3), np.bool_(True)],
    "array": np.arange(3), "tensor": torch.ones(2), "set": {"b", "a"}, "pair": (1, (2, float("inf"))),
    "order": OrderedDict(a=1), "view": MappingProxyType({"a": deque([1])}), "\x1b[31m": "\udcff", "large": 2**62,
}  # fmt: skip


def test_facts_of_any_type_are_equal_at_the_next_start(shaped, tmp_path):
    members = {"describe_data": lambda self: FACTS, "data_digest": lambda self: b"\x01\xff"}
    for steps in (1, 2):
        assert shaped(tmp_path, "--max-steps", steps, **members) == []
    saved = load(tmp_path / "final.pth")
    assert saved["data_facts"]["by number"] == FACTS["by number"]
    assert saved["data_facts"]["set"] == ["a", "b"]
    assert saved["data_facts"]["array"] == [0, 1, 2]
    assert saved["data_digest"] == "01ff"
    assert json.loads((tmp_path / "config.json").read_text())["data_facts"]["by number"]["10"] == "b"
    assert shaped(tmp_path, "--eval-only", **members) == []
    err = shaped(tmp_path, "--eval-only", status=2, describe_data=lambda self: FACTS | {"pair": (1, (2, 3))})
    assert_messages(err, "differ in pair: ")


@pytest.mark.parametrize(
    ("fact", "problem"),
    [
        (b"x", "m is a bytes, but must be a number"),
        ({"deep": [decimal.Decimal(1)]}, r"m.deep\[0\] is a Decimal"),
        (pathlib.Path("x"), "m is a PosixPath"),
        (2**63, "m is a whole number of more than 64 bits"),
        ({1.5: "x"}, "m has the key 1.5"),
        (1j, "m is a complex"),
    ],
)
def test_facts_that_cannot_be_saved_are_refused_by_name(fact, problem):
    task = type("Mine", (), {"describe_data": lambda self: {"m": fact}})()
    with pytest.raises(UserError, match=rf"^Mine.describe_data: {problem}"):
        facts_of_data(task)


def test_facts_that_are_nested_too_deeply_or_no_mapping_are_refused():
    deep: list = []
    for _ in range(3000):
        deep = [deep]
    for told, problem in [
        ({"m": deep}, "returned lists nested too deeply"),
        ([1], "must return a mapping"),
        ({1: 2}, "must return a mapping"),
    ]:
        with pytest.raises(UserError, match=rf"^Mine.describe_data: {problem}"):
            facts_of_data(type("Mine", (), {"describe_data": lambda self, told=told: told})())


def test_a_digest_is_a_string():
    def digest(value):
        return digest_of_data(type("Mine", (), {"data_digest": lambda self: value})())

    assert [digest(value) for value in ("x", 5, b"\x00")] == ["x", "5", "00"]
    with pytest.raises(UserError, match=r"^Mine.data_digest: must return a string or None, not \[1\]"):
        digest([1])


def test_alike_compares_nested_values():
    nan = float("nan")
    assert alike({"a": [1, nan]}, {"a": (1.0, nan)})
    for one, other in [({"a": 1}, {"b": 1}), ([1], [1, 2]), (nan, 1.0), (nan, None), ("1", 1), ([1], 1)]:
        assert not alike(one, other) and not alike(other, one)


def test_metrics_beyond_a_float_are_refused_by_name(shaped, tmp_path):
    err = shaped(tmp_path, status=2, summarise=lambda self, sums: {"loss": 10**400})
    assert_messages(err, "Odd.summarise: returns a whole number for 'loss' that is too large for a float")
