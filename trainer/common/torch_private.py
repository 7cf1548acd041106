"""All private names of torch that the project uses, with a fallback for each name that torch may remove.

With a fallback a run computes the same results, but it may be slower, use more memory or report less.
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

# --- widely used names without a fallback -------------------------------------------------------------------------

foreach_norm, foreach_sub, foreach_mul_, foreach_add_ = (
    torch._foreach_norm, torch._foreach_sub, torch._foreach_mul_, torch._foreach_add_,
)  # fmt: skip
foreach_copy_: Callable[..., Any] = torch._foreach_copy_  # accepts parameters without a gradient
BATCH_NORMS: Any = nn.modules.batchnorm._BatchNorm
NOT_PERSISTENT = "_non_persistent_buffers_set"
"""Attribute of a module with the names of its non-persistent buffers."""
RNN_CACHES = frozenset(["_flat_weights", "_flat_weight_refs"])
"""Attributes of nn.RNN, nn.LSTM and nn.GRU that list the current weights."""


def num_writes(tensor: Tensor) -> int:
    """Returns a tensor's version counter, which every in-place operation increments."""
    return tensor._version


def sparse_parts(tensor: Tensor) -> list[Tensor]:
    """Returns the indices and values of a sparse tensor without coalescing it."""
    return [tensor._indices(), tensor._values()]


def own_buffers(module: nn.Module) -> dict[str, Any]:
    """Returns a module's mutable dictionary of its own buffers."""
    return module._buffers


def names_not_persistent(module: nn.Module) -> set[str]:
    """Returns the names of a module's own non-persistent buffers."""
    return module._non_persistent_buffers_set


def convert_tensors(module: nn.Module, convert: Callable[[Tensor], Tensor]) -> None:
    """Converts a module's parameters and buffers in place, as `Module.to` does."""
    module._apply(convert)


# --- hooks -------------------------------------------------------------------------------------------------------


def has_hooks(parameter: Tensor) -> bool:
    """Returns whether a parameter has gradient hooks; falls back to False."""
    return bool(getattr(parameter, "_backward_hooks", None) or getattr(parameter, "_post_accumulate_grad_hooks", None))


def copy_hooks(parameter: Tensor, twin: Tensor) -> None:
    """Registers a parameter's gradient hooks with its copy, too; falls back to copying none."""
    for hook in (getattr(parameter, "_backward_hooks", None) or {}).values():
        twin.register_hook(hook)
    for hook in (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values():
        twin.register_post_accumulate_grad_hook(hook)


def hooked_module(module: nn.Module) -> str | None:
    """Returns the path of the first submodule with hooks ("" for `module` itself), or None; falls back to None."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    hooked = (path for path, each in module.named_modules() if any(getattr(each, name, None) for name in names))
    return next(hooked, None)


# --- modules -----------------------------------------------------------------------------------------------------


class SeesConversions(nn.Module):
    """Module with a method that is called after `to`, `double` and similar conversions."""

    def also_converted(self) -> Iterable[nn.Module]:
        """Returns the modules that are converted together with this module but are not its submodules."""
        return ()

    def after_conversion(self) -> None:
        """Called when parameters and buffers have their new dtype and device."""

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
"""Equals torch.autograd.backward for two tuples, but does not import sympy."""


def is_in_backward() -> bool:
    """Returns whether this thread is in a backward pass, including activation recomputation; falls back to False."""
    number = getattr(torch._C, "_current_graph_task_id", None)
    return number is not None and number() != -1


def after_first_gradients(callback: Callable[[], None]) -> None:
    """Runs a callback at the end of the backward pass, before callbacks queued later. Fallback: runs it now."""
    engine: Any = getattr(torch.autograd.Variable, "_execution_engine", None)
    if hasattr(engine, "queue_callback"):
        engine.queue_callback(callback)
    else:
        callback()


def reads_found_inf(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether an optimizer skips steps if found_inf is set, as fused optimizers do; falls back to False."""
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Returns whether step hooks exist, for this optimizer or for all optimizers; falls back to False."""
    own = [getattr(optimizer, f"_optimizer_step_{place}_hooks", None) for place in ("pre", "post")]
    module = sys.modules.get(torch.optim.Optimizer.__module__)
    of_all = [getattr(module, f"_global_optimizer_{place}_hooks", None) for place in ("pre", "post")]
    return any([*own, *of_all])


# --- GPUs --------------------------------------------------------------------------------------------------------


def when_cuda_is_initialised(callback: Callable[[], None]) -> None:
    """Calls a function as soon as CUDA is initialised. Fallback: calls the function now, which initialises CUDA."""
    getattr(torch.cuda, "_lazy_call", lambda call: call())(callback)


# --- memory of a GPU ---------------------------------------------------------------------------------------------


def end_allocating(device: torch.device, pool: Any) -> None:
    """Stops allocating from a CUDA graph's memory pool after a failed capture.

    Until allocation ends, torch cannot return memory to the GPU. Newer versions of torch end it when the capture fails;
    this function then does nothing.
    """
    with suppress(AttributeError, RuntimeError):
        torch._C._cuda_endAllocateToPool(device.index, pool)


# --- processes ---------------------------------------------------------------------------------------------------


def num_exchanges(group: Any) -> int:
    """Returns the number of collectives started in a process group; falls back to 0, as if there were none."""
    try:
        return int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # the backend has no counter
        return 0


def set_timeout(group: Any, device: torch.device, limit: timedelta) -> None:
    """Sets the timeout of an existing process group. Fallback: the timeout stays unchanged."""
    if hasattr(group, "set_timeout"):
        group.set_timeout(limit)
        return
    with suppress(AttributeError):
        group._get_backend(device)._set_default_timeout(limit)


def rebuild_buckets(net: Any) -> None:
    """Rebuilds the gradient buckets of a DistributedDataParallel. Fallback: the next forward pass rebuilds them."""
    rebuild = getattr(net.reducer, "_rebuild_buckets", None)
    if rebuild is not None:
        rebuild()


def raise_for_ended_worker() -> None:
    """Raises RuntimeError if a DataLoader worker was killed. Fallback: torch raises the error at the next batch."""
    with suppress(AttributeError, ImportError):
        importlib.import_module("torch.utils.data._utils.signal_handling")._error_if_any_worker_fails()


def has_workers(loader: Any) -> bool:
    """Returns whether a DataLoader's persistent workers have started; falls back to False."""
    return getattr(loader, "_iterator", None) is not None


def kill_workers(loader: Any) -> None:
    """Kills a DataLoader's persistent workers, even if they hang. Fallback: torch ends the workers at exit."""
    iterator = getattr(loader, "_iterator", None)
    with suppress(AttributeError):
        iterator._shutdown_workers()  # type: ignore[union-attr]
    for process in getattr(iterator, "_workers", ()):
        process.kill()


# --- fully_shard -------------------------------------------------------------------------------------------------


def make_outermost(unit: nn.Module) -> None:
    """Makes a fully_shard module the FSDP root. Fallback: the first module whose forward runs becomes the root."""
    with suppress(AttributeError):
        unit._get_fsdp_state()._lazy_init()  # type: ignore[operator]


def group_of_unit(unit: Any) -> Any | None:
    """Returns the FSDP parameter group of a fully_shard module; falls back to None."""
    return getattr(unit._get_fsdp_state(), "_fsdp_param_group", None) if hasattr(unit, "_get_fsdp_state") else None


def unsharded(parameter: Any) -> Tensor | None:
    """Returns the all-gathered tensor of a parameter in an FSDP parameter group, or None."""
    return getattr(parameter, "_unsharded_param", None)


def pass_through(unit: Any, value: Tensor) -> Tensor:
    """Runs only the all-gather and reshard of a fully_shard module; returns `value`. Fallback: does nothing."""
    state: Any = unit._get_fsdp_state() if hasattr(unit, "_get_fsdp_state") else None
    if not (hasattr(state, "_pre_forward") and hasattr(state, "_post_forward")):
        return value
    (value,), _ = state._pre_forward(unit, (value,), {})
    return state._post_forward(unit, (value,), value.clone())


# --- the compiler ------------------------------------------------------------------------------------------------


def set_up_compiler(most_versions: int) -> type[Exception]:
    """Imports the compiler, which takes seconds, and sets its recompile limit. Returns the compiler's base exception.

    Falls back to torch's default limit, and to an exception class that the compiler never raises.
    """
    with suppress(AttributeError, ImportError):
        settings = importlib.import_module(f"{COMPILER}.config")
        settings.specialize_float = True  # type: ignore[attr-defined]  # compiles floats as constants
        settings.recompile_limit = max(most_versions, settings.recompile_limit)  # type: ignore[attr-defined]
    try:
        return importlib.import_module(f"{COMPILER}.exc").TorchDynamoException
    except (AttributeError, ImportError):
        return type("NoErrorOfTheCompiler", (Exception,), {})


def scan(step: Callable[[Any, Any], tuple[Any, Any]], start: Any, inputs: tuple[Tensor, ...]) -> tuple[Any, Tensor]:
    """Calls `step(state, slices)` for each index of dim 0 of `inputs`; returns (last state, stacked outputs).

    `step` returns (state, output). A call can be exported for any length; the fallback, a loop, for one length only.
    """
    try:
        from torch._higher_order_ops import scan as of_torch  # this imports the compiler
    except ImportError:
        outputs = []
        for now in zip(*inputs, strict=True):
            start, output = step(start, now)
            outputs.append(output)
        return start, torch.stack(outputs)
    return of_torch(step, start, inputs)


class WithoutCompiler:
    """Base class of a DistributedDataParallel that does not import the compiler.

    torch's class reads a compiler setting when constructed, and calls the compiler in each forward pass.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        with default_settings_of_compiler():
            super().__init__(*args, **kwargs)

    def _run_ddp_forward(self, *args: Any, **kwargs: Any) -> Any:
        if COMPILER in sys.modules:
            return super()._run_ddp_forward(*args, **kwargs)  # type: ignore[misc]
        return self.module(*args, **kwargs)  # type: ignore[attr-defined]


class _StandIn:
    """Replacement for a module, with some known attributes; reading any other attribute imports the module."""

    def __init__(self, module: str, **known: Any) -> None:
        self.__dict__.update(known)
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._module), name)


@contextmanager
def default_settings_of_compiler() -> Iterator[None]:
    """Gives DistributedDataParallel the compiler's default settings without importing the compiler."""
    if COMPILER in sys.modules:
        yield
        return
    utils = _StandIn(f"{COMPILER}.utils", get_optimize_ddp_mode=lambda: "ddp_optimizer")
    stand_in = _StandIn(COMPILER, utils=utils)
    vars(torch)["_dynamo"] = stand_in
    try:
        yield
    finally:
        if vars(torch)["_dynamo"] is stand_in:  # unless another thread has imported it
            del vars(torch)["_dynamo"]  # torch then imports the module on its next use
