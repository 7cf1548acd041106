"""A run builds the right optimizers for its parameters, and removing torch's compiler wrappers changes no result."""

import copy
import inspect
import pickle
from typing import get_args

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from tests.helpers.token_task import LayerWise, Sparse, TokenFlags, Tokens
from trainer.common.errors import UserError
from trainer.config import options, shown
from trainer.flags import OPTIMIZERS, LearningFlags, OptimizerName
from trainer.loop.optimizers import (
    SGD,
    build_optimizers,
    can_be_captured,
    completed_groups,
    hidden_matrices,
    moments_of,
    without_compiler,
)
from trainer.loop.precision import Precision, _step_on_device
from trainer.parallel.ddp import Replicated
from trainer.parallel.group import Group
from trainer.parallel.optimizer_states import load_states, state_of

needs_muon = pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="torch 2.9 or newer")


def trained(optimizer_type, num_steps, hook=None, state=None):
    """Returns the flattened weights after some steps, the optimizer's state dict, and the sums that the hook saw."""
    torch.manual_seed(0)
    weights = [torch.randn(4, 3, requires_grad=True), torch.randn(3, requires_grad=True)]
    optimizer = optimizer_type(
        [{"params": weights[:1]}, {"params": weights[1:], "weight_decay": 0.0}], lr=0.1, fused=True
    )
    if state is not None:
        optimizer.load_state_dict(copy.deepcopy(state))
    seen = []
    if hook is not None:
        getattr(optimizer, hook)(lambda *_: seen.append(weights[0].sum().item()))
    for i in range(num_steps):
        sum((weight * (i + 1)).sin().sum() for weight in weights).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([weight.detach().flatten() for weight in weights]), optimizer.state_dict(), seen


def momentum_sgd(*args, **settings):
    return torch.optim.SGD(*args, momentum=0.9, **settings)


def our_momentum_sgd(*args, **settings):
    return without_compiler(SGD)(*args, momentum=0.9, **settings)


@pytest.mark.parametrize("hook", [None, "register_step_pre_hook", "register_step_post_hook"])
@pytest.mark.parametrize(
    ("torchs", "plain"),
    [
        (torch.optim.AdamW, without_compiler(torch.optim.AdamW)),
        (torch.optim.Adam, without_compiler(torch.optim.Adam)),
        (momentum_sgd, our_momentum_sgd),
    ],
    ids=["adamw", "adam", "sgd"],
)
def test_optimizers_without_compiler_wrappers_equal_torchs_and_call_hooks(torchs, plain, hook):
    expected, ours = trained(torchs, 5, hook), trained(plain, 5, hook)
    assert torch.equal(ours[0], expected[0])
    assert ours[2] == expected[2] and len(ours[2]) == (5 if hook else 0)
    assert str(ours[1]) == str(expected[1])
    on = [trained(kind, 3, state=expected[1])[0] for kind in (torchs, plain)]
    assert torch.equal(*on)


def stepped_once(kind=torch.optim.AdamW):
    weight = torch.ones(3, requires_grad=True)
    optimizer = without_compiler(kind)([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    return optimizer


def test_global_hooks_of_optimizers_are_called():
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        optimizer = stepped_once()
    finally:
        handle.remove()
    assert seen == [optimizer]


def test_profilers_see_the_step():
    with torch.profiler.profile() as profile:
        stepped_once()
    assert "Optimizer.step#AdamW.step" in {event.name for event in profile.events()}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, SGD])
def test_optimizers_pickle(kind):
    optimizer = stepped_once(kind)
    loaded = pickle.loads(pickle.dumps(optimizer))
    assert type(loaded) is kind and str(loaded.state_dict()) == str(optimizer.state_dict())
    loaded.step()


def test_a_backward_pass_keeps_the_context_of_torch_for_device_threads():
    """A hook sees the same context as in loss.backward()."""
    seen = []
    for backward in (torch.Tensor.backward, lambda loss: Precision("off", loss.dtype, loss.device).backward(loss, 1.0)):
        weight = torch.ones(3, requires_grad=True)
        weight.register_hook(lambda _: seen.append(torch._C._is_key_in_tls("context")))
        backward(weight.sum())
    assert seen[0] == seen[1]  # torch 2.8 keeps none


def test_a_step_builds_no_graph():
    weights, _, _ = trained(without_compiler(torch.optim.AdamW), 2)
    assert not weights.requires_grad


# --- parameters of each optimizer --------------------------------------------------------------------------------


def built(task_type, **flags):
    """Returns the optimizers of a task's only phase, and its model."""
    task = task_type(TokenFlags(), seed=0, cache_dir=None)
    objective = task.build_objective()
    learning = LearningFlags(**flags)
    groups = completed_groups(task, objective, "train", learning.weight_decay)
    return build_optimizers(learning, task, objective, "train", groups), objective.model


def names_trained(optimizer, model):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[p] for group in optimizer.param_groups for p in group["params"]]


def test_sparse_embeddings_use_sparse_adam():
    (dense, sparse), model = built(Sparse, betas=(0.5, 0.6), eps=1e-3)
    assert isinstance(dense, torch.optim.AdamW) and isinstance(sparse, torch.optim.SparseAdam)
    assert names_trained(sparse, model) == ["embedding.weight"]
    assert "embedding.weight" not in names_trained(dense, model)
    for optimizer in (dense, sparse):
        assert all((group["betas"], group["eps"]) == ((0.5, 0.6), 1e-3) for group in optimizer.param_groups)


def test_sparse_embeddings_of_an_inactive_phase_use_sparse_adam():
    """Embeddings of an inactive phase are frozen while another phase trains."""
    task = Sparse(TokenFlags(), seed=0, cache_dir=None)
    objective, learning = task.build_objective(), LearningFlags()
    groups = completed_groups(task, objective, "train", learning.weight_decay)
    objective.requires_grad_(False)
    optimizers = build_optimizers(learning, task, objective, "train", groups)
    assert [type(optimizer).__name__ for optimizer in optimizers] == ["AdamW", "SparseAdam"]


@needs_muon
def test_muon_trains_hidden_matrices_and_adamw_the_rest():
    (muon, adamw), model = built(Tokens, optimizer="muon", momentum=0.8, betas=(0.5, 0.6), weight_decay=0.3)
    assert names_trained(muon, model) == ["hidden.weight"]
    assert {name for name, _ in model.named_parameters()} == {"hidden.weight", *names_trained(adamw, model)}
    (group,) = muon.param_groups
    assert (group["momentum"], group["adjust_lr_fn"], group["weight_decay"]) == (0.8, "match_rms_adamw", 0.3)
    assert all(group["betas"] == (0.5, 0.6) for group in adamw.param_groups)
    kinds = [type(optimizer).__name__ for optimizer in built(Sparse, optimizer="muon")[0]]
    assert kinds == ["Muon", "AdamW", "SparseAdam"]


@needs_muon
def test_muon_trains_the_matrices_of_named_blocks():
    class Blocks(Tokens):
        def blocks(self, model):
            return [model.head]

    (muon, _), model = built(Blocks, optimizer="muon")
    assert names_trained(muon, model) == ["head.weight"]


def test_muon_needs_a_hidden_matrix():
    task = Tokens(TokenFlags(), seed=0, cache_dir=None)
    with pytest.raises(UserError, match="--optimizer muon: trains hidden matrices, but this model has none"):
        hidden_matrices(task, nn.Sequential(nn.Embedding(3, 4), nn.Conv1d(4, 4, 3), nn.Linear(4, 2)))


@needs_muon
def test_a_muon_step_equals_pytorchs():
    """Both compute the same products in bfloat16 from the same gradients, so the results are bit-identical."""
    (muon, adamw), model = built(Tokens, optimizer="muon")
    _, twin = built(Tokens)
    twin.load_state_dict(model.state_dict())
    matrices = {"params": [twin.hidden.weight], "weight_decay": 0.01}
    theirs = [torch.optim.Muon([matrices], lr=1e-3, adjust_lr_fn="match_rms_adamw")]
    for step in range(3):
        for each in (model, twin):
            each.zero_grad()
            each(torch.arange(8).view(2, 4) + step).square().sum().backward()
        muon.step()
        theirs[0].step()
        assert torch.equal(model.hidden.weight, twin.hidden.weight)
    assert adamw.state == {}


# --- mistakes of a task ------------------------------------------------------------------------------------------


def with_groups(make):
    """Returns a task whose parameter groups are `make(model)`."""

    class Wrong(Tokens):
        sparse = True

        def param_groups(self, objective, phase):
            return make(objective.model)

    return Wrong


class WithoutRate(torch.optim.Optimizer):
    def step(self, closure=None):
        pass


def own(make):
    """Returns a task whose optimizers are `make(groups, lr)`."""

    class Wrong(Tokens):
        def build_optimizers(self, phase, groups, lr):
            return make(groups, lr)

    return Wrong


@pytest.mark.parametrize(
    ("task_type", "flags", "message"),
    [
        (
            with_groups(lambda model: [{"params": model.head.parameters(), "lr": 0.3}]), {},
            'Wrong.param_groups: phase \'train\': a group has "lr" 0.3, but the schedule sets it; '
            'give "lr_scale"',
        ),
        (
            with_groups(lambda model: [{"params": model.head.parameters(), "lr_scale": -1}]), {},
            'a group has "lr_scale" -1; it must be a finite number, at least 0',
        ),
        (
            with_groups(lambda model: [{"params": model.parameters()}]), {"weight_decay": 0.1},
            'a group with weight decay 0.1 contains parameters of sparse embeddings, whose rows a step may skip; '
            'put them into a group with "weight_decay": 0.0, or give --weight-decay 0',
        ),
        (
            with_groups(lambda model: [{"params": [], "weight_decay": 0.0}]), {},
            "phase 'train': trains no parameters",
        ),
        (
            LayerWise, {"optimizer": "sgd"},
            'LayerWise.param_groups: phase \'train\': a group has "betas", which is not a setting of --optimizer sgd',
        ),
        (
            own(lambda groups, lr: torch.optim.SGD(groups, lr=lr)), {},
            "Wrong.build_optimizers: phase 'train': must return a list of torch.optim.Optimizer, or None to use "
            "--optimizer, not SGD",
        ),
        (
            own(lambda groups, lr: [torch.optim.SGD(groups, lr=10 * lr)]), {"lr": 0.5},
            'SGD has the learning rate 5.0, but the schedule sets it; pass the given 0.5 instead, and to scale it add '
            '"lr_scale" to the group',
        ),
        (
            own(lambda groups, lr: [torch.optim.SGD(groups[:1], lr=lr)]), {},
            "must train each of the 5 parameters of param_groups once; they have 3, of which 3 are in param_groups",
        ),
        (
            own(lambda groups, lr: [torch.optim.SGD(groups, lr=lr), torch.optim.SGD(groups[:1], lr=lr)]), {},
            "must train each of the 5 parameters of param_groups once; they have 8, of which 5",
        ),
        (
            own(lambda groups, lr: [torch.optim.LBFGS(groups[0]["params"] + groups[1]["params"], lr=lr)]), {},
            "LBFGS needs a closure that evaluates the loss again",
        ),
        (
            own(lambda groups, lr: [torch.optim.SGD(groups, lr=lr)]), {"betas": (0.5, 0.9)},
            "Wrong.build_optimizers: phase 'train': --betas 0.5 0.9 would have no effect; leave it out",
        ),
        (own(lambda groups, lr: [WithoutRate(groups, {})]), {}, 'WithoutRate has a group without "lr"'),
    ],
)  # fmt: skip
def test_an_error_of_a_task_names_its_method(task_type, flags, message):
    with pytest.raises(UserError) as raised:
        built(task_type, **flags)
    assert message in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_nccl_refuses_sparse_gradients():
    group = Group([torch.device("cpu")])
    group.backend = "nccl"
    strategy = Replicated(group)
    with pytest.raises(
        UserError, match=r"--backend nccl: does not support sparse gradients.* use --backend gloo, or build"
    ):
        strategy.place(lambda: nn.Sequential(nn.Embedding(2, 2, sparse=True)), lambda model: [], lambda objective: None)


def test_without_weight_decay_sparse_embeddings_share_the_optimizer():
    task_type = with_groups(lambda model: [{"params": model.parameters()}])
    optimizers, _ = built(task_type, weight_decay=0.0)
    assert [len(optimizer.param_groups[0]["params"]) for optimizer in optimizers] == [4, 1]


def test_only_the_default_groups_exempt_vectors_from_weight_decay():
    (by_default,), _ = built(Tokens, weight_decay=0.1)
    (own_groups,), _ = built(with_groups(lambda model: [{"params": model.head.parameters()}]), weight_decay=0.1)
    decays = [
        {(p.dim() < 2, group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]}
        for optimizer in (by_default, own_groups)
    ]
    assert decays == [{(False, 0.1), (True, 0.0)}, {(False, 0.1), (True, 0.1)}]


# --- steps -------------------------------------------------------------------------------------------------------


def test_momentum_starts_at_zero_although_the_first_step_is_skipped(monkeypatch):
    """The fused kernel skips the step, as on a GPU. Uninitialised memory is NaN in this test."""
    torch.use_deterministic_algorithms(True)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)

    def weights_after(optimizer_type, gradients):
        weight = nn.Parameter(torch.ones(3))
        optimizer = optimizer_type([weight], lr=0.1, momentum=0.9, fused=True)
        for value in gradients:
            weight.grad = torch.full((3,), value)
            _step_on_device([optimizer], [weight.grad], weight.grad.norm(), 0.0)
        return weight.detach()

    spoilt, finite = [torch.inf, 1.0, 2.0], [1.0, 2.0]
    assert weights_after(torch.optim.SGD, spoilt).isnan().all()
    assert torch.equal(weights_after(SGD, spoilt), weights_after(torch.optim.SGD, finite))


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1])
@pytest.mark.parametrize("step", ["on host", "on device"])
def test_a_sparse_gradient_is_clipped_by_the_norm_of_its_rows(step, max_grad_norm):
    """Row 1 occurs twice, and its gradient is the sum of both."""
    embedding = nn.Embedding(5, 2, sparse=True)
    dense = nn.Parameter(torch.ones(2))
    params = [embedding.weight, dense]
    (embedding(torch.tensor([1, 1, 3])).sum() + dense.sum()).backward()
    expected = torch.cat([embedding.weight.grad.to_dense().flatten(), dense.grad])
    sgd = torch.optim.SGD(params, lr=1.0)
    before = torch.cat([p.detach().flatten().clone() for p in params])
    if step == "on host":
        norm = Precision("off", torch.float32, torch.device("cpu")).step([sgd], params, max_grad_norm).grad_norm
        assert norm.item() == pytest.approx(expected.norm().item())
    else:
        embedding.weight.grad = embedding.weight.grad.coalesce()
        grads = [embedding.weight.grad.values(), dense.grad]
        applied, _ = _step_on_device([sgd], grads, expected.norm(), max_grad_norm)
        assert applied
    moved = before - torch.cat([p.detach().flatten() for p in params])
    factor = max_grad_norm / expected.norm() if max_grad_norm else 1.0
    torch.testing.assert_close(moved, expected * factor, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("bad", [False, True])
def test_an_unfused_optimizer_is_not_called_for_a_nonfinite_gradient(bad):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.AdamW(weights[:1], fused=True), torch.optim.RMSprop(weights[1:])]
    for weight in weights:
        weight.grad = torch.ones(2)
    weights[0].grad[0] = torch.nan if bad else 1.0
    outcome = _step_on_device(optimizers, [w.grad for w in weights], weights[0].grad.norm(), 1.0)
    assert tuple(map(bool, outcome)) == (not bad, bad)
    assert all(torch.equal(weight, torch.ones(2)) == bad for weight in weights)
    assert all(bool(optimizer.state) != bad for optimizer in optimizers)


def test_the_gradient_scaler_unscales_what_each_optimizer_trains():
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=1.0) for weight in weights]
    precision = Precision("fp16", torch.float32, torch.device("cpu"))
    precision.backward(sum(weight.sum() for weight in weights), 1.0)
    outcome = precision.step(optimizers, weights, 0.0)
    assert outcome.applied and outcome.grad_norm.item() == pytest.approx(2)
    assert all(torch.equal(weight, torch.zeros(2)) for weight in weights)


# --- facts of OPTIMIZERS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("setting", ["None", "amsgrad", "centered", "momentum"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_does_what_its_facts_state(name, setting):
    """This includes the estimated memory, graphs, and the check of a resumed state."""
    facts = OPTIMIZERS[name]
    known = inspect.signature(facts.type).parameters if facts.type else {}
    if setting not in ("None", *known) or not known:
        pytest.skip("torch has no such optimizer or setting")
    params = [nn.Parameter(torch.ones(3, 2)) for _ in range(2)]
    given = {"fused": facts.has_fused, setting: True}
    optimizer = facts.type(params, lr=0.1, **{name: value for name, value in given.items() if name in known})
    assert can_be_captured(optimizer) == facts.has_fused == ("fused" in known)
    estimated = moments_of([optimizer])
    for parameter in params:
        parameter.grad = torch.ones(3, 2).to_sparse(1) if name == "sparse" else torch.ones(3, 2)
    optimizer.step()
    kept = [{k: v for k, v in optimizer.state[p].items() if isinstance(v, torch.Tensor) and v.dim()} for p in params]
    assert all(its.keys() <= facts.state.keys() for its in kept)
    assert sum(value.nbytes for its in kept for value in its.values()) == sum(p.nbytes for p in estimated)
    if estimated:
        assert moments_of([optimizer], only_to_come=True) == []
    for entry in kept[0]:
        saved = state_of(optimizer)
        del saved["state"][0][entry]
        with pytest.raises(UserError, match=r"checkpoint (has different entries|was trained without this setting)"):
            load_states("train", [optimizer], [saved], lambda state, _: state, torch.float32)


@pytest.mark.parametrize("name", get_args(OptimizerName))
def test_help_texts_state_each_optimizers_settings(name):
    facts, known = OPTIMIZERS[name], options(LearningFlags)
    assert name in known["weight_decay"].help
    for setting in facts.settings:
        assert name in known[setting].needs["optimizer"] and name in known[setting].help
        default = inspect.signature(facts.type).parameters[setting].default if facts.type else ""
        assert default is False or shown(default) in known[setting].without_value
