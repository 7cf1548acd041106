"""Every private name of torch that the project uses; of those that torch may drop, each with what takes its place.

A fallback learns the same; it is slower, takes more memory, or says less where something goes wrong.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten
from torch.utils._pytree import tree_unflatten as tree_unflatten

COMPILER = "torch._dynamo"

# --- names that the ecosystem of torch is built on: no torch lacks them -------------------------------------------

foreach_norm, foreach_sub, foreach_mul_, foreach_add_ = (
    torch._foreach_norm, torch._foreach_sub, torch._foreach_mul_, torch._foreach_add_,
)  # fmt: skip
foreach_copy_: Callable[..., Any] = torch._foreach_copy_  # of parameters without a gradient too
BATCH_NORMS: Any = nn.modules.batchnorm._BatchNorm
NOT_PERSISTENT = "_non_persistent_buffers_set"
"""The attribute of a module that names the buffers which checkpoints do not have."""


def num_writes(tensor: Tensor) -> int:
    """How often a tensor was written into."""
    return tensor._version


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Indices and values of a sparse tensor as they are in memory."""
    return [tensor._indices(), tensor._values()]


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """A module's own buffers by name, to be changed."""
    return module._buffers


def names_not_persistent(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that checkpoints do not have."""
    return module._non_persistent_buffers_set


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Puts converted parameters and buffers in the place of a module's, as `Module.to` does with its own conversion."""
    module._apply(convert)


# --- hooks -------------------------------------------------------------------------------------------------------


def has_hooks(parameter: Tensor) -> bool:
    """Whether hooks wait for the gradient of a parameter. Fallback: False."""
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))


def hooked_module(module: nn.Module) -> str | None:
    """The path of a module whose calls or backwards call hooks, "" for itself. Fallback: None."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = (path for path, each in module.named_modules() if any(getattr(each, name, None) for name in names))
    return next(hooked, None)


# --- modules -----------------------------------------------------------------------------------------------------


class SeesConversions(nn.Module):
    """A module whose `after_conversion` follows `to`, `double` and the like."""

    def also_converted(self) -> Iterable[nn.Module]:
        """Modules that are none of its submodules, and are converted with it."""
        return ()

    def after_conversion(self) -> None:
        """Called with parameters and buffers of the new type, on the new device."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "SeesConversions":
        super()._apply(fn, recurse)
        for module in self.also_converted():
            module._apply(fn, recurse)
        self.after_conversion()
        return self


# --- backward and step -------------------------------------------------------------------------------------------


def _run_backward(tensors: Sequence[Tensor], grad_tensors: Sequence[Tensor], **_: Any) -> None:
    torch.autograd.backward(tensors, grad_tensors)


run_backward: Callable[..., None] = partial(
    getattr(torch.autograd.graph, "_engine_run_backward", _run_backward),
    keep_graph=False, create_graph=False, inputs=(), allow_unreachable=True, accumulate_grad=True,
)  # fmt: skip
"""Does what torch.autograd.backward does with two tuples, without importing sympy for its checks."""


def is_in_backward() -> bool:
    """Whether a backward runs in this thread, as when it computes a block again. Fallback: False."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return number is not None and number() != -1


def after_first_gradients(callback: Callable[[], None]) -> None:
    """Has the backward that runs call it before what is queued later. Fallback: calls it at once."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if hasattr(engine, "queue_callback"):
        engine.queue_callback(callback)
    else:
        callback()


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Whether kernels of an optimizer skip a step themselves, as for a gradient scaler: fused ones. Fallback: False."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether hooks of an optimizer, or of all of them, wait for its steps. Fallback: False."""
    own = [getattr(optimizer, f"_optimizer_step_{place}_hooks", None) for place in ("pre", "post")]
    module = sys.modules.get(torch.optim.Optimizer.__module__)
    of_all = [getattr(module, f"_global_optimizer_{place}_hooks", None) for place in ("pre", "post")]
    return any([*own, *of_all])


# --- GPUs --------------------------------------------------------------------------------------------------------


def when_cuda_is_initialised(callback: Callable[[], None]) -> None:
    """Calls a function once CUDA is initialised, now if it is already. Fallback: now, which initialises CUDA."""
    getattr(torch.cuda, "_lazy_call", lambda call: call())(callback)


# --- memory of a GPU ---------------------------------------------------------------------------------------------


def end_allocating(device: torch.device, pool: Any) -> None:
    """Ends the use of a pool of memory for a CUDA graph whose recording broke off.

    Until then torch gives no memory back to the GPU, and fails where it is asked to. Fallback: that stays so. A newer
    torch has ended the use itself, and refuses.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)


# --- processes ---------------------------------------------------------------------------------------------------


def num_exchanges(group: Any) -> int:
    """How many exchanges processes have begun in a group. Fallback: 0, and a forward's own go unseen."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # of a backend that counts none
        return 0


def set_timeout(group: Any, device: torch.device, limit: timedelta) -> None:
    """Sets the time limit of a process group that exists. Fallback: the limit stays as it was.

    Its public form, which is tried first, is not in torch 2.8.
    """
    if hasattr(group, "set_timeout"):
        group.set_timeout(limit)
        return
    with suppress(AttributeError):
        group._get_backend(device)._set_default_timeout(limit)


def rebuild_buckets(net: Any) -> None:
    """Groups the gradients of a DistributedDataParallel. Fallback: its next forward does."""
    rebuild = getattr(net.reducer, "_rebuild_buckets", None)
    if rebuild is not None:
        rebuild()


def raise_for_ended_worker() -> None:
    """Raises RuntimeError if a data-loading process was killed. Fallback: torch does as the next batch is taken."""
    with suppress(AttributeError, ImportError):
        importlib.import_module("torch.utils.data._utils.signal_handling")._error_if_any_worker_fails()


def has_workers(loader: Any) -> bool:
    """Whether the persistent processes of a DataLoader have started. Fallback: False."""
    return getattr(loader, "_iterator", None) is not None


def kill_workers(loader: Any) -> None:
    """Ends the persistent processes of a DataLoader, also those that hang. Fallback: torch ends them at exit."""
    iterator = getattr(loader, "_iterator", None)
    with suppress(AttributeError):
        iterator._shutdown_workers()  # type: ignore[union-attr]
    for process in getattr(iterator, "_workers", ()):
        process.kill()


# --- fully_shard -------------------------------------------------------------------------------------------------


def make_outermost(unit: nn.Module) -> None:
    """Tells a unit that no other is around it. Fallback: the first unit that runs takes itself for the outermost."""
    with suppress(AttributeError):
        unit._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def group_of_unit(unit: Any) -> Any | None:
    """The parameters that a unit gathers and reduces. Fallback: None, and gradients stay as torch has them."""
    return getattr(unit._get_fsdp_state(), "_fsdp_param_group", None) if hasattr(unit, "_get_fsdp_state") else None


def unsharded(parameter: Any) -> Tensor | None:
    """The gathered tensor of a parameter of `group_of_unit`, or None."""
    return getattr(parameter, "_unsharded_param", None)


def pass_through(unit: Any, value: Tensor) -> Tensor:
    """The value, after a unit has gathered and freed its parameters around it. Fallback: the value alone."""
    state: Any = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    if not (hasattr(state, "_pre_forward") and hasattr(state, "_post_forward")):
        return value
    (value,), _ = state._pre_forward(unit, (value,), {})
    return state._post_forward(unit, (value,), value.clone())


# --- the compiler ------------------------------------------------------------------------------------------------


def set_up_compiler(most_versions: int) -> type[Exception]:
    """Imports the compiler, which takes seconds; it then keeps so many versions of a module. Returns its errors.

    Fallback: the compiler has the limits of torch, and its errors are told as they are.
    """
    with suppress(AttributeError, ImportError):
        settings = importlib.import_module(f"{COMPILER}.config")
        settings.specialize_float = True  # type: ignore[attr-defined]  # a model's numbers are not sizes
        settings.recompile_limit = max(most_versions, settings.recompile_limit)  # type: ignore[attr-defined]
    try:
        return importlib.import_module(f"{COMPILER}.exc").TorchDynamoException
    except (AttributeError, ImportError):
        return type("NoErrorOfTheCompiler", (Exception,), {})


def scan(step: Callable[[Any, Any], tuple[Any, Any]], start: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
    """(last state, outputs) of step(state, inputs of one time) -> (state, output); the first dimension is time.

    It is exported for any length. Fallback: a loop, which is exported for the length of the example.
    """
    try:
        from torch._higher_order_ops import scan as of_torch  # imports the compiler
    except ImportError:
        outputs = []
        for now in zip(*inputs, strict=True):
            start, output = step(start, now)
            outputs.append(output)
        return start, torch.stack(outputs)
    return of_torch(step, start, inputs)


class WithoutCompiler:
    """What keeps a DistributedDataParallel that inherits it from importing the compiler, unless it is in use.

    torch's own looks up one setting there as it is made, and tells the compiler of itself in each forward.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with default_settings_of_compiler():
            super().__init__(*args, **kwargs)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return super()._run_ddp_forward(*args, **kwargs)  # type: ignore[misc]
        return self.module(*args, **kwargs)  # type: ignore[attr-defined]


class _StandIn:
    """Has some attributes of a module, which is imported if another one is asked for."""

    def __init__(self, module: str, **known: Any) -> None:
        self.__dict__.update(known)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


@contextmanager
def default_settings_of_compiler() -> Iterator[None]:
    """Within it, unless the compiler is imported, torch finds the default of its setting for this wrapper.

    Fallback: where torch asks for anything else, the compiler is imported.
    """
    if COMPILER in sys.modules:
        yield
        return
    utils = _StandIn(f"{COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = _StandIn(COMPILER, utils=utils)
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:  # and no other thread has imported it
            del vars(torch)["_dynamo"]  # torch finds the module by itself as soon as it is asked for
