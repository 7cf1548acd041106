"""Buffers and attributes are restored after trial forward passes and skipped steps, and changes are reported."""

import random
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple

import numpy as np
import pytest
import torch
from torch import nn

from tests.conftest import assert_same_bits
from tests.helpers.stateful_task import KINDS, WIDTH, build
from trainer.common.errors import UserError
from trainer.common.torch_private import RNN_CACHES
from trainer.loop.buffers import ForwardState
from trainer.loop.module_state import WholeState, leaving_no_trace, outline, persistent_buffers
from trainer.parallel.strategy import SingleDevice
from trainer.profiling.performance import _untouched as untouched

Pair = namedtuple("Pair", "first second")


class Meter:
    def __init__(self):
        self.sum = 0.0


class Everything(nn.Module):
    """Module with attributes and buffers of all kinds. Each function of `CHANGES` changes one of them."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.register_buffer("buffer", torch.arange(3.0))
        self.register_buffer("local", torch.arange(3.0), persistent=False)
        self.register_buffer("nothing", None)
        self.number, self.text, self.flag, self.none, self.nan = 1, "a", False, None, float("nan")
        self.tensor, self.array = torch.arange(4.0), np.arange(4.0)
        self.alias = self.tensor
        self.list, self.deque, self.set = [1, [torch.zeros(2)]], deque([1, 2], maxlen=2), {1}
        self.dict = {"x": {"y": torch.zeros(2)}}
        self.ordered, self.default = OrderedDict(a=1), defaultdict(list, a=[1])
        self.counter, self.pair, self.tuple = Counter("aab"), Pair(torch.zeros(2), 1), ([1], 2)
        self.list.append(self.list)
        self.meter, self.random, self.generator = Meter(), random.Random(0), torch.Generator()
        self.numpy = np.random.default_rng(0)
        self.device, self.function = torch.device("cpu"), len


CHANGES = {
    "buffer": lambda m: m.buffer.add_(1),
    "local": lambda m: m.register_buffer("local", torch.zeros(5), persistent=False),
    "nothing": lambda m: setattr(m, "nothing", torch.ones(1)),
    "made": lambda m: m.register_buffer("made", torch.ones(1), persistent=False),
    "inner.attribute": lambda m: setattr(m.inner, "attribute", 5),
    "number": lambda m: setattr(m, "number", 2),
    "text": lambda m: setattr(m, "text", m.text + "b"),
    "flag": lambda m: setattr(m, "flag", True),
    "none": lambda m: setattr(m, "none", torch.ones(2)),
    "array": lambda m: m.array.fill(3),
    "list": lambda m: m.list[1][0].add_(1),
    "deque": lambda m: m.deque.append(3),
    "set": lambda m: m.set.add(2),
    "dict": lambda m: m.dict["x"].update(z=1),
    "ordered": lambda m: m.ordered.move_to_end("a") or m.ordered.update(b=2),
    "default": lambda m: m.default["b"].append(1),
    "counter": lambda m: m.counter.update("c"),
    "pair": lambda m: m.pair.first.add_(1),
    "tuple": lambda m: m.tuple[0].append(2),
    "removed": lambda m: delattr(m, "buffer"),
    ".data": lambda m: m.buffer.data.add_(1),
}


def described(value, seen=()):
    """Returns the content of a value in nested tuples, with the id of every mutable object."""
    if id(value) in seen:
        return "again"
    seen = (*seen, id(value))
    if isinstance(value, torch.Tensor | np.ndarray):
        return id(value), tuple(value.reshape(-1).tolist())
    if isinstance(value, dict):
        return id(value), type(value), tuple((name, described(item, seen)) for name, item in value.items())
    if isinstance(value, list | deque | set | tuple):
        return id(value), type(value), tuple(described(item, seen) for item in value)
    return repr(value) if isinstance(value, float) else value


def state_of(module):
    return [described(vars(each)) for each in module.modules()]


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_buffer_or_attribute_is_reported_and_restored(name):
    module = Everything()
    before = state_of(module)
    with leaving_no_trace(module) as changes:
        assert changes() == []
        CHANGES[name](module)
        found = changes()
    assert [change.path for change in found] == [{"removed": "buffer", ".data": "buffer"}.get(name, name)]
    assert found[0].is_seen
    assert state_of(module) == before


IN_PLACE = {"buffer", "list", "pair", ".data"}
SHOWN_ALONE = {
    "a weight elsewhere": lambda m: setattr(m.inner.weight, "data", m.inner.weight.data.clone()),
    "a frozen weight": lambda m: m.inner.weight.requires_grad_(False),
    "a number of an object": lambda m: setattr(m.meter, "sum", 1.0),
}


@pytest.mark.parametrize("name", CHANGES | SHOWN_ALONE)
def test_an_outline_shows_every_change_except_in_place_changes_of_tensors(name):
    module = Everything()
    before = outline(module)
    assert list(before.items()) == list(outline(module).items())
    (CHANGES | SHOWN_ALONE)[name](module)
    assert (outline(module) == before) == (name in IN_PLACE)


ODD = {
    "a NaN": torch.full((3,), float("nan")),
    "nothing": torch.zeros(0, 3),
    "nothing, of integers": torch.tensor(np.empty(0, np.int64)),
    "expanded": torch.zeros(1).expand(9, 2),
    "transposed": torch.arange(6.0).view(2, 3).t(),
    "conjugated": torch.ones(3, dtype=torch.complex64).conj(),
    "negated": torch._neg_view(torch.ones(3)),
    "sparse": torch.eye(3).to_sparse(),
    "float8": torch.ones(4).to(torch.float8_e4m3fn),
    "without content": torch.ones(3, device="meta"),
    "of inference mode": torch.inference_mode()(lambda: torch.ones(3))(),
}


@pytest.mark.parametrize("name", ODD)
def test_tensors_of_unusual_kinds_are_restored(name):
    module = nn.Linear(2, 2)
    module.register_buffer("buffer", ODD[name])
    module.attribute = [ODD[name]]
    with leaving_no_trace(module) as changes:
        module(torch.ones(1, 2))
        assert changes() == []
        assert module.buffer is not ODD[name] and outline(module)
    assert module.buffer is ODD[name] and module.attribute[0] is ODD[name]


def test_a_tensor_with_two_names_stays_one_tensor():
    module = Everything()
    with leaving_no_trace(module) as changes:
        module.tensor.add_(1)
        assert module.alias is module.tensor
        assert [change.path for change in changes()] == ["tensor", "alias"]
    assert module.alias is module.tensor and torch.equal(module.tensor, torch.arange(4.0))


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("meter", lambda m: setattr(m.meter, "sum", 1.0)),
        ("random", lambda m: m.random.random()),
        ("generator", lambda m: torch.rand(1, generator=m.generator)),
        ("numpy", lambda m: m.numpy.random()),
    ],
)
def test_changes_that_cannot_be_undone_are_reported(name, change):
    module = Everything()
    with leaving_no_trace(module) as changes:
        change(module)
        (found,) = changes()
    assert (found.path, found.is_seen) == (name, False)
    state = ForwardState(module, without=[])
    state.learn([found])
    (line,) = state.remarks(world_size=1)
    assert f"objects that cannot be restored: {name} ({type(getattr(module, name)).__name__})." in line


def test_equal_values_and_caches_of_other_objects_are_no_change():
    module = Everything()
    with leaving_no_trace(module) as changes:
        module.meter.cache = 1
        module.device, module.nan, module.number = torch.device("cpu"), float("nan"), 1
        assert changes() == []


def test_buffers_and_attributes_are_restored_after_an_error():
    module = Everything()
    before = state_of(module)
    with pytest.raises(ZeroDivisionError), leaving_no_trace(module):
        module.number = 1 / 0 if module.buffer.add_(1).sum() else 2
    assert state_of(module) == before


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`:FutureWarning")
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_measurement_does_not_change_models(kind):
    model = build(kind)
    before = model.state_dict(), [*WholeState(model).entries]
    copies = {name: value.clone() for name, value in before[0].items()}
    with untouched(model, torch.device("cpu")):
        for _ in range(2):
            model(torch.randn(3, 4)).sum().backward()
    assert model.state_dict().keys() == copies.keys()
    assert all(torch.equal(value, copies[name]) for name, value in model.state_dict().items())
    after = WholeState(model).entries
    assert all(one[2] is other[2] for one, other in zip(before[1], after, strict=True))


def test_lists_of_parameters_that_pytorch_updates_are_not_restored():
    module = nn.LSTM(2, 2)
    with leaving_no_trace(module) as changes:
        module.weight_ih_l0 = nn.Parameter(torch.zeros(8, 2))
        assert module._flat_weights[0] is module.weight_ih_l0
        assert changes() == []
    assert module._flat_weights[0] is module.weight_ih_l0


class Shifted(nn.Module):
    """Subtracts a running mean from normalised values; TorchScript can compile it."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        self.mean.add_(x.detach().mean(0))
        return self.norm(x) - self.mean


class Replacing(Shifted):
    def forward(self, x):
        self.mean = self.mean + x.detach().mean(0)
        return x - self.mean


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize(
    "compiled", [torch.jit.script, lambda module: torch.jit.trace(module, torch.rand(2, 3), check_trace=False)]
)
def test_buffers_of_torchscript_are_restored_in_place(compiled):
    model = nn.Sequential(nn.Linear(3, 3), compiled(Shifted()))
    model[1].mean.zero_()  # tracing ran a forward pass
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with leaving_no_trace(model) as changes:
        model(torch.rand(4, 3)).sum().backward()
        found = changes()
    assert {change.path for change in found} == {
        "1.mean", "1.norm.running_mean", "1.norm.running_var", "1.norm.num_batches_tracked"
    }  # fmt: skip
    assert_same_bits(dict(model.state_dict()), before)

    state = ForwardState(model, [model[1].norm])
    state.learn(found)
    state.keep()
    model(torch.rand(4, 3))
    assert model[1].mean.any()
    state.undo()
    assert not model[1].mean.any()
    state.agree(SingleDevice(torch.device("cpu")))
    (remark,) = state.remarks(2)
    assert "Forward passes change the buffers 1.mean. After each step, all ranks copy" in remark


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_torchscript_that_replaces_a_buffer_is_refused():
    model = torch.jit.script(Replacing())
    with (
        pytest.raises(UserError, match=r"^mean: a TorchScript forward replaces"),
        leaving_no_trace(model) as changes,
    ):
        model(torch.rand(4, 3))
        changes()
    assert not model.mean.any()


def test_persistent_buffers_exclude_local_and_empty_buffers():
    assert persistent_buffers(Everything()).keys() == {"buffer"}


# --- in a step ---------------------------------------------------------------------------------------------------


def learnt(kind):
    torch.manual_seed(0)
    model = build(kind)
    state = ForwardState(model, without=[])
    with leaving_no_trace(model) as changes:
        model(torch.randn(3, 4) * 9)
        state.learn(changes())
    return model, state


@pytest.mark.parametrize("kind", ["Scaled", "ScaledLocally", "Quantised", "Queued", "LargestSeen"])
def test_a_placeholder_changes_no_buffer_and_its_backward_reads_its_own_values(kind):
    model, state = learnt(kind)
    for buffer in model.buffers():
        buffer.data.zero_()  # the backward pass would divide by 0 if it read them
    before = {name: (id(buffer), buffer.clone()) for name, buffer in model.named_buffers()}
    with state.unchanged():
        (model(torch.randn(3, 4)).sum() * 0).backward()
    assert all(bool((p.grad == 0).all()) for p in model.parameters() if p.grad is not None)
    after = dict(model.named_buffers())
    assert all(id(after[name]) == key and torch.equal(after[name], value) for name, (key, value) in before.items())


def test_a_placeholder_counts_as_a_forward_pass():
    model, state = learnt("Counting")
    counting = model[0][1]
    with state.unchanged():
        model(torch.randn(3, 4))
    assert (counting.calls, counting.names) == (1, "call 1")
    assert torch.equal(counting.mean, torch.zeros(WIDTH)) and len(counting.history) == 0


@pytest.mark.parametrize("kind", ["Scaled", "ScaledLocally", "Queued", "Counting", "Rotary", "LargestSeen"])
def test_a_skipped_step_leaves_no_trace(kind):
    model, state = learnt(kind)
    before = [described(vars(each)) for each in model[0][1].modules()]
    for _ in range(2):
        state.keep()
        model(torch.randn(3, 4) * 9)
        state.undo()
        assert [described(vars(each)) for each in model[0][1].modules()] == before


@pytest.mark.parametrize("kind", ["Scaled", "ScaledLocally", "Queued", "LargestSeen", "Counting"])
@pytest.mark.parametrize("applied", [True, False])
def test_undo_unless_restores_tensors_only_if_the_step_was_not_applied(applied, kind):
    model, state = learnt(kind)
    layer = model[0][1]
    tensors = [name for name, value in [*vars(layer).items(), *layer._buffers.items()] if torch.is_tensor(value)]
    before = {name: getattr(layer, name).clone() for name in tensors}
    state.keep()
    model(torch.randn(3, 4) * 9)
    changed = {name: getattr(layer, name).clone() for name in tensors}
    state.undo_unless(torch.tensor(applied))
    for name in tensors:
        assert not torch.equal(before[name], changed[name])
        assert torch.equal(getattr(layer, name), changed[name] if applied else before[name])


def test_an_outline_ignores_pytorchs_own_lists_of_weights():
    """FSDP replaces the weights before each forward pass, and nn.LSTM updates the lists by itself."""
    lstm = nn.LSTM(2, 3)
    before = outline(lstm)
    assert vars(lstm).keys() >= RNN_CACHES
    lstm._flat_weights, lstm._flat_weight_refs = [], []
    assert outline(lstm) == before
