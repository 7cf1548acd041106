"""KGAT-pytorch of LunaBlack as one side of benchmarks/kgat.py; needs its repository, and what that needs.

    PYTHON benchmarks/kgat_lunablack.py REPOSITORY FOLDER

Its own data loader, model, sampler and evaluation do all the work, with its default settings. Its training loop is
one function with the whole run in it: the two kinds of steps and the refresh are called from here, with the same
operations around them. `CHANGES` is everything that differs; nothing is written into the repository.
"""

import json
import logging
import random
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.turns import serve

CHANGES = (
    "random.sample and random.choice draw from list(...) of a dictionary's keys, as Python 3.11 demands",
    "--use_pretrain 0: no embeddings to start from",
    "on the CPU, in float32 and with the default dropout where time is measured",
    "float64 tensors and no dropout where results are compared",
)


class LunaBlack:
    """Its objects, and the pieces of its run."""

    def __init__(self, repository: str, folder: Path) -> None:
        sys.path.insert(0, repository)
        sys.dont_write_bytecode = True
        import main_kgat
        from data_loader import loader_base

        loader_base.random = DrawsFromLists
        flags = ["--use_pretrain", "0", "--data_dir", str(folder.parent), "--data_name", folder.name]
        with patch("sys.argv", ["main_kgat.py", *flags]):
            self.args = main_kgat.parse_kgat_args()
        for seed in (random.seed, np.random.seed, torch.manual_seed):
            seed(self.args.seed)
        self.program = main_kgat
        self.data = main_kgat.DataLoaderKGAT(self.args, logging)
        self.model = self.build()
        self.optimizers = [torch.optim.Adam(self.model.parameters(), lr=self.args.lr) for _ in range(2)]

    def build(self) -> Any:
        data = self.data
        return self.program.KGAT(self.args, data.n_users, data.n_entities, data.n_relations, data.A_in)

    def facts(self) -> dict[str, Any]:
        data = self.data
        return {
            "num_nodes": int(data.n_users_entities),
            "num_edges": data.n_kg_train,
            "num_relations": int(data.n_relations),
            "num_parameters": sum(p.numel() for p in self.model.parameters() if p.requires_grad),
            "cf_steps": data.n_cf_train // data.cf_batch_size + 1,
            "kg_steps": data.n_kg_train // data.kg_batch_size + 1,
            "changes": CHANGES,
        }

    def cf_batch(self) -> tuple[torch.Tensor, ...]:
        return self.data.generate_cf_batch(self.data.train_user_dict, self.data.cf_batch_size)

    def kg_batch(self) -> tuple[torch.Tensor, ...]:
        data = self.data
        return data.generate_kg_batch(data.train_kg_dict, data.kg_batch_size, data.n_users_entities)

    def cf_sampling(self) -> None:
        self.cf_batch()

    def kg_sampling(self) -> None:
        self.kg_batch()

    def cf(self) -> float:
        return self.step(self.cf_batch(), "train_cf", self.optimizers[0])

    def kg(self) -> float:
        return self.step(self.kg_batch(), "train_kg", self.optimizers[1])

    def step(self, batch: tuple[torch.Tensor, ...], mode: str, optimizer: torch.optim.Optimizer) -> float:
        self.model.train()
        loss = self.model(*batch, mode=mode)
        if np.isnan(loss.cpu().detach().numpy()):
            sys.exit("the loss is not a number")
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def attention(self) -> None:
        self.refresh(self.model)

    def refresh(self, model: Any) -> None:
        data = self.data
        model(data.h_list, data.t_list, data.r_list, list(data.laplacian_dict.keys()), mode="update_att")

    def evaluation(self) -> dict[str, float]:
        return self.metrics(self.model)

    def metrics(self, model: Any) -> dict[str, float]:
        _, metrics = self.program.evaluate(model, self.data, json.loads(self.args.Ks), torch.device("cpu"))
        return {f"{name}@20": float(metrics[20][name]) for name in ("recall", "precision", "ndcg")}

    # Results to compare

    def exact(self, request: str, answer: str) -> None:
        """Answers a file of weights and batches with one of losses, gradients and matrices; see benchmarks/kgat.py."""
        asked = torch.load(request, weights_only=True)
        self.args.aggregation_type, self.args.mess_dropout = asked["aggregator"], "[0, 0, 0]"
        self.data.convert_coo2tensor = in_float64
        self.data.laplacian_type = {"reference": "symmetric"}.get(asked["laplacian"], asked["laplacian"])
        self.data.create_laplacian_dict()
        model = self.build().double()
        weights = {renamed(name, NAMES): weight for name, weight in asked["weights"].items()}
        model.load_state_dict(weights | {"A_in": self.data.A_in})
        result = {"laplacian": model.A_in.detach().coalesce(), "cf": self.gradients(model, asked["cf"], "train_cf")}
        with torch.no_grad(), patch("torch.sparse.FloatTensor", torch.sparse_coo_tensor):
            self.refresh(model)
        result["attention"] = model.A_in.detach().coalesce()
        result["cf_with_attention"] = self.gradients(model, asked["cf"], "train_cf")
        result["kg"] = self.gradients(model, asked["kg"], "train_kg")
        torch.save(result | {"metrics": self.metrics(model)}, answer)

    def gradients(self, model: Any, batch: list[torch.Tensor], mode: str) -> dict[str, torch.Tensor]:
        model.zero_grad()
        loss = model(*batch, mode=mode)
        loss.backward()
        found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        backwards = [(own, reference) for reference, own in NAMES]
        return {"loss": loss.detach()} | {renamed(name, backwards): grad for name, grad in found.items()}


NAMES = (
    ("nodes.", "entity_user_embed."), ("relations.", "relation_embed."), ("projections", "trans_M"),
    ("layers.", "aggregator_layers."),
)  # fmt: skip
"""In parameters' names: the reference's word, and that of this program."""


def renamed(name: str, words: Iterable[tuple[str, str]]) -> str:
    for word, other in words:
        name = name.replace(word, other)
    return name


class DrawsFromLists:
    """The module `random`, as far as the sampler uses it."""

    @staticmethod
    def sample(population: Any, count: int) -> list[int]:
        return random.sample(list(population), count)

    @staticmethod
    def choice(population: Any) -> int:
        return random.choice(list(population))


def in_float64(matrix: Any) -> torch.Tensor:
    """A scipy COO matrix as a tensor."""
    indices = torch.from_numpy(np.vstack((matrix.row, matrix.col))).long()
    return torch.sparse_coo_tensor(indices, torch.from_numpy(matrix.data).double(), matrix.shape)


if __name__ == "__main__":
    serve(lambda: LunaBlack(sys.argv[1], Path(sys.argv[2])))
