"""Low-rank adapters of linear layers (Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022)."""

import copy
import math
from collections.abc import Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainer.common.errors import UserError

_MOST_SHOWN = 12


class LoRALinear(nn.Linear):
    """A linear layer with frozen weight and bias, adding alpha / rank * B A to the weight (eq. 3).

    lora_a: (rank, in_features), initialised like a linear layer's weight. lora_b: (out_features, rank), initially 0, so
    the layer is unchanged. In a state dict they accompany `weight` and `bias`, which keep their names.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        """base: its parameters are used by this layer from then on."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight, self.bias = base.weight, base.bias
        self.lora_a = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_b = nn.Parameter(base.weight.new_zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.lora_a, a=math.sqrt(5))
        self.scale = alpha / rank

    @property
    def adapted_weight(self) -> Tensor:
        return self.weight + self.scale * (self.lora_b @ self.lora_a)

    def forward(self, x: Tensor) -> Tensor:
        # one product with the summed weight, instead of three products and a sum of results
        return F.linear(x, self.adapted_weight, self.bias)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Returns an equivalent plain layer."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(self.adapted_weight), self.bias
        return plain


def add_adapters(model: nn.Module, *, targets: Sequence[str] = ("*",), rank: int = 8, alpha: float = 16.0) -> list[str]:
    """Adds adapters to linear layers of a model, freezes everything else, and returns the layers' names.

    targets: file name patterns such as `*.query`; layers with matching names are adapted. rank: at least 1. Raises
    UserError for a pattern that matches no linear layer.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UserError(
                f"LoRA target {pattern!r}: matches no linear layer; there are {', '.join(list(layers)[:_MOST_SHOWN])}, "
                "..."
            )
    model.requires_grad_(False)
    chosen = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in targets)]
    for name in chosen:
        model.set_submodule(name, LoRALinear(layers[name], rank, alpha))
    return chosen


def merged(model: nn.Module) -> nn.Module:
    """Returns a plain copy of an adapted model; returns a model without adapters itself."""
    if not any(isinstance(module, LoRALinear) for module in model.modules()):
        return model
    plain = copy.deepcopy(model)
    merge_adapters(plain)
    return plain


def merge_adapters(model: nn.Module) -> None:
    """Merges adapters into an adapted model's weights in place.

    Afterwards all its parameters can be trained.
    """
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, module in adapted.items():
        model.set_submodule(name, module.merged())
    model.requires_grad_(True)
