"""Replacements of private names of torch do the same, or omit only what their docstrings state."""

import importlib.util
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from trainer.common import torch_private

NO_TIMEOUT = torch_private.timedelta(seconds=1)


@pytest.fixture
def without(monkeypatch):
    """Loads a new copy of the module without some names, given as (owner, name) pairs."""

    def load(*hidden):
        for owner, name in hidden:
            monkeypatch.delattr(owner, name)
        spec = importlib.util.spec_from_file_location("torch_private_without", torch_private.__file__)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    return load


def test_writes_hooks_and_sparse_parts_of_tensors_are_found():
    weight = torch.ones(2, requires_grad=True)
    assert torch_private.num_writes(weight.detach().add_(1)) == 1
    assert not torch_private.has_hooks(weight)
    weight.register_post_accumulate_grad_hook(print)
    assert torch_private.has_hooks(weight)
    sparse = torch.tensor([1.0, 2.0]).to_sparse()
    assert [part.shape[-1] for part in torch_private.sparse_parts(sparse)] == [2, 2]
    unknown = SimpleNamespace()  # as in a torch without the names
    torch_private.copy_hooks(unknown, weight)
    assert not torch_private.has_hooks(unknown) and not torch_private.reads_found_inf(unknown)


def test_hooks_of_modules_and_optimizers_are_found():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters())
    assert torch_private.hooked_module(model) is None and not torch_private.has_step_hooks(optimizer)
    model[1].register_forward_pre_hook(print)
    optimizer.register_step_post_hook(print)
    assert torch_private.hooked_module(model) == "1" and torch_private.has_step_hooks(optimizer)
    handle = register_optimizer_step_pre_hook(print)
    assert torch_private.has_step_hooks(torch.optim.SGD(model.parameters()))
    handle.remove()
    unknown = SimpleNamespace(named_modules=lambda: [("", SimpleNamespace())])
    assert torch_private.hooked_module(unknown) is None and not torch_private.has_step_hooks(unknown)


def test_tensors_of_modules_are_converted_and_their_buffers_are_named():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    parameters = list(model.parameters())
    torch_private.convert_tensors(model, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
    assert {tensor.dtype for tensor in model.state_dict().values()} == {torch.float64, torch.int64}
    assert all(map(lambda one, other: one is other, model.parameters(), parameters))
    assert [isinstance(module, torch_private.BATCH_NORMS) for module in model] == [False, True]
    model[1].register_buffer("kept", torch.ones(1), persistent=False)
    assert torch_private.own_buffers(model[1]) == dict(model[1].named_buffers())
    assert torch_private.names_not_persistent(model[1]) == {"kept"}


def test_dtype_conversions_are_detected():
    class Rounded(torch_private.SeesConversions):
        dtypes: tuple = ()

        def after_conversion(self):
            self.dtypes = (*self.dtypes, self.weight.dtype)

    module = Rounded()
    module.register_parameter("weight", nn.Parameter(torch.ones(1)))
    nn.Sequential(module).double()
    assert module.dtypes == (torch.float64,)


@pytest.mark.parametrize("is_hidden", [False, True])
def test_backward_works_with_and_without_private_names(is_hidden, without):
    hidden = [(torch.autograd.graph, "_engine_run_backward"), (torch._C, "_current_graph_task_id")]
    private = without(*hidden) if is_hidden else without()
    weight, seen = torch.ones(2, requires_grad=True), []
    weight.register_hook(lambda _: private.after_first_gradients(lambda: seen.append("queued")))
    weight.register_hook(lambda _: seen.append(private.is_in_backward()))
    private.run_backward(((weight * 2).sum(),), (torch.tensor(3.0),))
    assert weight.grad.tolist() == [6.0, 6.0]
    assert seen == [not is_hidden, "queued"] and not private.is_in_backward()


def test_a_callback_without_torchs_queue_runs_at_once(without):
    seen = []
    without((torch.autograd.Variable, "_execution_engine")).after_first_gradients(lambda: seen.append("at once"))
    assert seen == ["at once"]


def test_objects_without_private_names_are_left_unchanged():
    torch_private.set_timeout(SimpleNamespace(), torch.device("cpu"), NO_TIMEOUT)
    torch_private.rebuild_buckets(SimpleNamespace(reducer=object()))
    loader = SimpleNamespace()
    assert not torch_private.has_workers(loader)
    torch_private.kill_workers(loader)


def test_a_timeout_is_set_by_its_public_or_private_name():
    seen = []
    backend = SimpleNamespace(_set_default_timeout=seen.append)
    torch_private.set_timeout(SimpleNamespace(set_timeout=seen.append), torch.device("cpu"), NO_TIMEOUT)
    torch_private.set_timeout(SimpleNamespace(_get_backend=lambda _: backend), torch.device("cpu"), NO_TIMEOUT)
    assert seen == [NO_TIMEOUT, NO_TIMEOUT]


@pytest.mark.parametrize("is_hidden", [False, True])
def test_the_check_for_ended_workers_needs_no_private_module(is_hidden, monkeypatch):
    if is_hidden:
        monkeypatch.setitem(sys.modules, "torch.utils.data._utils.signal_handling", None)
    torch_private.raise_for_ended_worker()


def test_a_module_without_state_of_fsdp_passes_values_through():
    unit = nn.Linear(1, 1)
    torch_private.make_outermost(unit)
    assert torch_private.group_of_unit(unit) is None and torch_private.unsharded(unit.weight) is None
    value = torch.ones(1)
    assert torch_private.pass_through(unit, value) is value


def test_scan_equals_a_loop_without_a_compiler(monkeypatch):
    for name in ("", ".config", ".exc"):
        monkeypatch.setitem(sys.modules, f"torch._dynamo{name}", None)
    monkeypatch.setitem(sys.modules, "torch._higher_order_ops", None)
    assert issubclass(torch_private.set_up_compiler(8), Exception)
    last, sums = torch_private.scan(lambda state, now: (state + now[0], state * 1), torch.zeros(()), (torch.ones(3),))
    assert last == 3 and sums.tolist() == [0, 1, 2]
