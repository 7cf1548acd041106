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
    """Linear layer that adds a trained matrix, alpha / rank * lora_b @ lora_a, to a frozen weight.

    lora_a: (rank, in_features), initialised like the weight of `nn.Linear`. lora_b: (out_features, rank), initially 0.
    In the state dict, `weight` and `bias` keep their names.
    """

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        """Adapts the layer `base`, and shares its weight and bias."""
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
        # One product of x with the adapted weight is cheaper than separate products with weight, lora_a and lora_b.
        return F.linear(x, self.adapted_weight, self.bias)

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """Returns an equivalent `nn.Linear`."""
        plain = nn.Linear(self.in_features, self.out_features, self.bias is not None, device="meta")
        plain.weight, plain.bias = nn.Parameter(self.adapted_weight), self.bias
        return plain


def add_adapters(model: nn.Module, *, targets: Sequence[str] = ("*",), rank: int = 8, alpha: float = 16.0) -> list[str]:
    """Adds adapters to linear layers, freezes all other parameters, and returns the names of the adapted layers.

    targets: shell-style patterns such as `*.query`; layers with matching names get adapters. rank: at least 1. Raises
    UserError if a pattern matches no linear layer.
    """
    layers = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    for pattern in targets:
        if not any(fnmatchcase(name, pattern) for name in layers):
            raise UserError(
                f"--lora-targets {pattern}: matches no linear layer; the layers include "
                f"{', '.join(list(layers)[:_MOST_SHOWN])}"
            )
    model.requires_grad_(False)
    chosen = [name for name in layers if any(fnmatchcase(name, pattern) for pattern in targets)]
    for name in chosen:
        model.set_submodule(name, LoRALinear(layers[name], rank, alpha))
    return chosen


def merged(model: nn.Module) -> nn.Module:
    """Returns a copy of the model with adapters merged into the weights, or the model itself if it has no adapters."""
    if not any(isinstance(module, LoRALinear) for module in model.modules()):
        return model
    plain = copy.deepcopy(model)
    merge_adapters(plain)
    return plain


def merge_adapters(model: nn.Module) -> None:
    """Merges a model's adapters into its weights, in place, and makes all parameters trainable."""
    adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoRALinear)}
    for name, module in adapted.items():
        model.set_submodule(name, module.merged())
    model.requires_grad_(True)
