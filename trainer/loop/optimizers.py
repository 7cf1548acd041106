"""The optimizers of a run."""

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from trainer.loop.schedule import LearningFlags
from trainer.task import ParamGroup


def build_optimizers(
    learning: LearningFlags, groups: Mapping[str, list[ParamGroup]]
) -> dict[str, list[torch.optim.Optimizer]]:
    """One AdamW for each phase. groups: what each phase trains."""
    return {
        phase: [
            without_wrappers(torch.optim.AdamW)(own, lr=learning.lr, weight_decay=learning.weight_decay, fused=True)
        ]
        for phase, own in groups.items()
    }


def without_wrappers(optimizer_type: type[torch.optim.Optimizer]) -> Any:
    """The same class of optimizers without the wrappers that torch puts around its methods.

    They keep torch's compiler from tracing them, and import it for that, which takes longer than all else at the start
    of a run. Another one calls hooks around `step`, and tells a profiler its name: a few percent of a small model's
    step. It is there again for an optimizer that gets a hook.
    """
    names = ("add_param_group", "load_state_dict", "state_dict", "step", "zero_grad")
    members: dict[str, Any] = {name: inspect.unwrap(getattr(optimizer_type, name)) for name in names}
    members["step"] = torch.no_grad()(members["step"])  # the other duty of a wrapper
    members["step"].hooked = True  # or torch would wrap it
    for name in ("register_step_pre_hook", "register_step_post_hook"):
        members[name] = _calling_hooks(getattr(optimizer_type, name))
    return type(optimizer_type.__name__, (optimizer_type,), members)


def _calling_hooks(register: Callable[..., Any]) -> Callable[..., Any]:
    """The method that registers a hook, for an optimizer that does not call any so far."""

    def register_hook(self: torch.optim.Optimizer, hook: Callable[..., Any]) -> Any:
        self.step = partial(self.profile_hook_step(type(self).step), self)  # type: ignore[assignment]
        return register(self, hook)

    return register_hook
