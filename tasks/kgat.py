"""Recommendation with a knowledge graph, based on users' interactions and on facts about items."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from data.interactions.columns import ColumnChoice
from data.knowledge_graph.catalogue import Catalogue
from data.knowledge_graph.edges import Edges, collaborative_graph, named_relation
from data.knowledge_graph.new_users import Recommendations, read_users
from data.knowledge_graph.reader import load_catalogue
from data.knowledge_graph.samples import BprSamples, Triples, UserItems, UsersToRank
from data.knowledge_graph.synthetic import load_synthetic_catalogue
from data.overview import overview
from data.table_files import ENCODING, ON_BAD, Reading
from models.graph.aggregators import Aggregation
from models.graph.collaborative_graph import CollaborativeGraph, Laplacian, Softmax
from models.graph.kgat import KGAT
from models.graph.lightgcn import BPRMF, KnowledgeLightGCN, LightGCN
from models.graph.paths import PathFinder
from models.graph.recommender import FinalScores, Recommender
from models.graph.top_k import TopK
from models.layers.item_scores import hide, highest
from models.simple.fitting import TrainingHistories
from models.simple.recommenders import SIMPLE_MODELS
from tasks.kgat_objective import KgatObjective, RankingObjective, SimpleObjective
from tasks.pictures import draw_bars
from tasks.recommender import RecommenderTask
from trainer.common.errors import UserError
from trainer.config import FlagGroup, flag, flags_without, refuse
from trainer.loading.batch_orders import ConsecutiveBatches
from trainer.loading.batches import Batch, KeyedDataset
from trainer.loading.cache import digest_of
from trainer.task import Exported, Objective, ParamGroup, Picture, ProgressBar

_OF_KGAT = {"model": ("kgat",)}
_WITH_GRAPH = ("kgat", "kg-lightgcn")
_TRAINED = {"model": ("kgat", "kg-lightgcn", "lightgcn", "bprmf")}
_USUAL_L2 = {
    "softmax": {"kgat": 3e-2, "kg-lightgcn": 3e-2, "lightgcn": 3e-2, "bprmf": 1e-1},
    "bpr": {"kgat": 1e-5, "kg-lightgcn": 1e-3, "lightgcn": 1e-3, "bprmf": 1e-2},
}
_SPLIT_SEED = 0
"""Seed of the data split. All runs use it, so that --init-from never loads a model trained on this run's test data."""
_RELATIONS_SHOWN = 20


@dataclass
class KgatFlags(FlagGroup):
    """Task: recommendation with a knowledge graph (--task kgat)

    --predict takes a text or CSV file with one user id per line; a header such as `user_id` is optional. The output
    lists each user's --top-k best items with scores and, for --model kgat, the path of highest attention to each item.
    """

    data_dir: Path | None = flag(
        None, "interactions and a graph, in a folder or zip; either KGAT's train.txt, test.txt, kg_final.txt and "
        "optional valid.txt; or KGCN's ratings_final and kg_final; or a table of user, item, time and a table of "
        "head, relation, tail (default: a generated catalogue; no download)", common=True, local=True,
    )  # fmt: skip
    time_column: str | None = flag(
        None, "tables: name or number (from 1) of the column with times, as numbers or dates; without a test file, the "
        "latest fifth of each user's items becomes the test set; 'none': a random fifth (default: recognised by its "
        "name)", metavar="COLUMN",
    )  # fmt: skip
    encoding: str | None = flag(None, ENCODING, metavar="NAME", needs={"data_dir": None})
    on_bad: Literal["refuse", "drop"] = flag("refuse", ON_BAD)
    model: Literal["kgat", "kg-lightgcn", "lightgcn", "bprmf", "popularity", "itemknn", "ease"] = flag(
        "kg-lightgcn", "model; kg-lightgcn: LightGCN that adds to each item's embedding the mean embedding of the "
        "item's neighbours in the knowledge graph; kgat: attention over the knowledge graph; lightgcn: no knowledge "
        "graph; bprmf: matrix factorisation; popularity: most popular items; itemknn: items that share users with the "
        "user's items; ease: linear model that predicts an item from the user's other items; the last three are fitted "
        "in seconds, without training steps", common=True,
    )  # fmt: skip
    embed_dim: int = flag(128, "width of user, item and entity embeddings", common=True, at_least=1, needs=_TRAINED)
    layer_dims: tuple[int, ...] = flag(
        (64, 32, 16), "kgat: width of each propagation layer", at_least=1, needs=_OF_KGAT
    )
    relation_dim: int = flag(
        64, "kgat: width of the space into which each relation projects entities", at_least=1, needs=_OF_KGAT
    )
    num_layers: int = flag(
        2, "lightgcn, kg-lightgcn: number of propagation layers", at_least=1,
        needs={"model": ("kg-lightgcn", "lightgcn")},
    )  # fmt: skip
    aggregator: Aggregation = flag(
        "bi-interaction", "kgat: how a node combines its own embedding with its neighbours' messages", needs=_OF_KGAT
    )
    laplacian: Laplacian = flag(
        "random-walk", "kgat: edge weights until attention is first computed; random-walk: D^-1 A; symmetric: D^-1/2 A "
        "D^-1/2; reference: the weights that KGAT's public code calls symmetric, most of which are 0",
        needs=_OF_KGAT,
    )  # fmt: skip
    softmax: Softmax = flag(
        "separate", "kgat: how attention treats several edges between the same two nodes; separate: one softmax term "
        "for each edge, as in the paper; coalesced: one softmax term with the sum of their logits", needs=_OF_KGAT,
    )  # fmt: skip
    leaky_slope: float = flag(
        0.01, "kgat: negative slope of LeakyReLU; KGAT's TensorFlow code uses 0.2", at_least=0, needs=_OF_KGAT
    )
    dropout: float = flag(
        0.1, "kgat: dropout probability on the output of each layer", at_least=0, below=1, needs=_OF_KGAT
    )
    node_dropout: float = flag(
        0.0, "kgat: share of the graph's edges that is dropped in training", at_least=0, below=1, needs=_OF_KGAT
    )
    loss: Literal["softmax", "bpr"] = flag(
        "softmax", "training loss; softmax: cross-entropy over all items (a sample is a user with all of the user's "
        "items); bpr: pairwise ranking loss, as in KGAT's paper (a sample is one of a user's items and a random other "
        "item)", common=True, needs=_TRAINED, absent="bpr",
    )  # fmt: skip
    l2: float | None = flag(
        None, "factor of the L2 penalty; each pair of a user and one of the user's items adds half the sum of squares "
        "of their embeddings; with --loss bpr, this sum also includes a random other item's embedding (default: "
        "depends on --model and --loss)", at_least=0, needs=_TRAINED,
    )  # fmt: skip
    kg_l2: float = flag(
        1e-5, "kgat: factor of the L2 penalty on the embeddings of each knowledge-graph triple", at_least=0,
        needs=_OF_KGAT,
    )  # fmt: skip
    kg_batch_ratio: float = flag(
        8.0, "kgat: batch size for the graph's triples, as a multiple of --batch-size", above=0, needs=_OF_KGAT
    )
    kg_lr_scale: float = flag(
        1.0, "kgat: factor on --lr when training on the graph's triples; a small factor preserves pre-trained "
        "embeddings", at_least=0, needs=_OF_KGAT,
    )  # fmt: skip
    draw: Literal["users", "interactions"] = flag(
        "users", "with --loss bpr: how to draw samples; users: all users in turn, in random order, each with one of "
        "their items at random; interactions: each interaction once per epoch", needs={"loss": ("bpr",)},
    )  # fmt: skip
    val_share: float = flag(
        0.1, "share of each user's items to hold out for validation, unless the data contain valid.txt", above=0,
        below=1, excludes=("select_on_test",),
    )  # fmt: skip
    select_on_test: bool = flag(
        False, "choose the best epoch on the test set, as in the published protocol; holds out no validation items and "
        "ignores valid.txt",
    )  # fmt: skip
    ks: tuple[int, ...] = flag(
        (10, 20, 50), "cut-offs of the metrics; the best epoch is chosen by recall@20, or by recall at the first "
        "cut-off if 20 is not listed", at_least=1,
    )  # fmt: skip
    top_k: int = flag(10, "with --predict: number of items per user", common=True, at_least=1)

    def problems(self) -> list[str]:
        found = []
        if self.data_dir is not None and not self.data_dir.exists():
            found.append(f"--data-dir {self.data_dir}: no such file or folder; give a folder or a zip")
        return found

    @property
    def reading(self) -> Reading:
        return Reading(self.encoding, self.on_bad)


class Explanations:
    """Finds paths of highest attention from users to items in the graph. attention: (E,), one value per edge."""

    def __init__(self, catalogue: Catalogue, edges: Edges, attention: Tensor) -> None:
        self._catalogue = catalogue
        self._edges = edges
        self._attention = attention.double().cpu().numpy()
        self._finder = PathFinder(edges.head, edges.tail, self._attention, edges.num_nodes)

    def of(self, user: int, items: Sequence[int]) -> list[tuple[float, str]]:
        """Returns the best path to each item as (product of attention, text); (0, "") if no path exists."""
        paths = self._finder.best(self._catalogue.num_entities + user, np.asarray(items))
        return [(float(np.prod(self._attention[path])) if path else 0.0, self._text(path)) for path in paths]

    def _text(self, path: Sequence[int]) -> str:
        parts = [self._node(int(self._edges.head[path[0]]))] if path else []
        for edge in path:
            name, is_inverse = named_relation(self._catalogue, int(self._edges.relation[edge]))
            parts += [f"<-{name}-" if is_inverse else f"-{name}->", self._node(int(self._edges.tail[edge]))]
        return " ".join(parts)

    def _node(self, node: int) -> str:
        if node >= self._catalogue.num_entities:
            return f"user {self._catalogue.user_name(node - self._catalogue.num_entities)}"
        return f"{'item' if node < self._catalogue.num_items else 'entity'} {self._catalogue.entity_name(node)}"


class KgatTask(RecommenderTask):
    """Task that trains KGAT or a baseline; all models share data, sampling and evaluation."""

    Config = KgatFlags
    examples = (
        "--data-dir lfm1m.zip --save-dir checkpoints/lfm1m",
        "--save-dir checkpoints/lfm1m --predict users.csv --output items.csv",
    )
    simple_models = ("popularity", "itemknn", "ease")
    defaults = {
        "lr": 3e-3,
        "schedule": "constant",
        "warmup_epochs": 0.0,
        "weight_decay": 0.0,
        "batch_size": 256,
        "eval_batch_size": 256,
        "epochs": 100,
        "max_grad_norm": 0.0,
    }
    predict_flags = ("data_dir", "encoding", "on_bad", "top_k")
    hold_out_flags = ("val_share", "select_on_test")

    def __init__(self, config: KgatFlags, seed: int, cache_dir: Path) -> None:
        super().__init__(config, seed, cache_dir)
        self.phases = ("cf", "kg") if config.model == "kgat" else ("cf",)
        self.fitted = config.model in self.simple_models
        cutoff = 20 if 20 in config.ks else config.ks[0]
        self.monitor = (f"val/recall@{cutoff}", "max")
        self.headline = ("loss", f"recall@{cutoff}", f"ndcg@{cutoff}")
        self._explanations: Explanations | None = None
        self._of_new_users: list[str] = []

    # --- data ---------------------------------------------------------------------------------------------------

    @cached_property
    def catalogue(self) -> Catalogue:
        """Interactions and knowledge graph. Raises UserError if data are invalid, or if a required graph is missing."""
        config: KgatFlags = self.config
        split: dict[str, Any] = {
            "val_share": config.val_share,
            "seed": _SPLIT_SEED,
            "selects_on_test": config.select_on_test,
        }
        if config.data_dir is None:
            refuse(flags_without(config, "--data-dir", ("time_column",)))
            return load_synthetic_catalogue(self.cache_dir, **split)
        columns = ColumnChoice(time=config.time_column)
        catalogue = load_catalogue(config.data_dir, self.cache_dir, **split, columns=columns, reading=config.reading)
        if config.model in _WITH_GRAPH and not catalogue.has_graph:
            raise UserError(
                f"--data-dir {config.data_dir}: has no graph, which --model {config.model} needs; add kg_final.txt or "
                "a table with columns head, relation and tail, or use --model lightgcn"
            )
        return catalogue

    def data_digest(self) -> str:
        """Returns a digest of training, validation and test interactions, and of the graph if the model uses it."""
        catalogue = self.catalogue
        lists = (catalogue.train, catalogue.val, catalogue.test)
        graph = [catalogue.triples] if self.config.model in _WITH_GRAPH else []
        return digest_of(*(array for own in lists for array in (own.offsets, own.items)), *graph)

    def remarks(self) -> Sequence[str]:
        """Returns notes on the user's data, on items that are never recommended, and on dropped `--predict` lines."""
        if self.config.data_dir is None:
            return self._of_new_users
        catalogue, hidden = self.catalogue, self.catalogue.unknown_items
        parts = {"training": catalogue.train, "validation": catalogue.val, "test": catalogue.test}
        rows = [
            (name, f"{len(lists):,}", f"{np.count_nonzero(lists.sizes):,}", f"{len(np.unique(lists.items)):,}")
            for name, lists in parts.items()
        ]
        lines = [*catalogue.notes, *overview(("part", "interactions", "users", "items"), rows)]
        if catalogue.has_graph:
            entities, num_items = np.unique(catalogue.triples[:, [0, 2]]), catalogue.num_items
            lines.append(
                f"Graph: {len(catalogue.triples):,} triples of {catalogue.num_relations} relations, which connect "
                f"{np.count_nonzero(entities < num_items):,} of the {num_items:,} items and "
                f"{np.count_nonzero(entities >= num_items):,} other entities."
            )
        if len(hidden):
            lines.append(
                f"{len(hidden):,} of the {catalogue.num_items:,} item ids, such as {hidden[0]}, are never "
                "recommended, because they occur in no interaction, graph or list of items."
            )
        return lines + self._of_new_users

    @cached_property
    def edges(self) -> Edges:
        """Edges of the collaborative knowledge graph."""
        return collaborative_graph(self.catalogue)

    @cached_property
    def _datasets(self) -> Mapping[str, KeyedDataset]:
        datasets: dict[str, KeyedDataset] = {
            "cf": self._training_samples(),
            "val": UsersToRank(self.catalogue, "val"),
            "test": UsersToRank(self.catalogue, "test"),
        }
        return datasets | ({"kg": Triples(self.edges, self.seed)} if "kg" in self.phases else {})

    def _training_samples(self) -> KeyedDataset:
        if self.config.loss == "softmax":
            return UserItems(self.catalogue)
        return BprSamples(self.catalogue, self.seed, self.config.draw)

    def splits(self) -> Mapping[str, KeyedDataset]:
        return {"train": self._datasets["cf"], "val": self._datasets["val"], "test": self._datasets["test"]}

    def training_data(self, phase: str) -> KeyedDataset:
        return self._datasets[phase]

    def batch_size(self, phase: str, batch_size: int) -> int:
        return max(1, round(batch_size * self.config.kg_batch_ratio)) if phase == "kg" else batch_size

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """Returns the indices of the first samples or, if samples are users, of those with the most items."""
        dataset = self._datasets[phase]
        if not isinstance(dataset, UserItems):
            return super().largest_samples(phase, epoch, count)
        return np.argsort(-dataset.sizes, kind="stable")[:count]

    def order(self, phase: str, epoch: int, global_batch_size: int) -> Sequence[np.ndarray] | None:
        """Returns unshuffled batches if the data set itself draws random samples in each epoch, else None."""
        if phase == "cf" and (self.config.loss == "softmax" or self.config.draw == "interactions"):
            return None
        return ConsecutiveBatches(self.num_samples(phase), global_batch_size)

    # --- model --------------------------------------------------------------------------------------------------

    def build_objective(self) -> Objective:
        if self.fitted:
            return self.simple_objective(self.config.model)
        config = self.config
        l2 = _USUAL_L2[config.loss][config.model] if config.l2 is None else config.l2
        hidden = self.catalogue.unknown_items
        return KgatObjective(self._build_model(), config.ks, hidden, config.loss, l2, config.kg_l2)

    def training_histories(self) -> TrainingHistories:
        train = self.catalogue.train
        return TrainingHistories(train.offsets, train.items + 1, self.catalogue.num_items, is_ordered=False)

    @cached_property
    def evaluation_key(self) -> tuple[object, ...]:
        catalogue = self.catalogue
        lists = (catalogue.train, catalogue.val, catalogue.test)
        return digest_of(*(array for own in lists for array in (own.offsets, own.items))), self.config.ks

    def simple_objective(self, kind: str) -> Objective:
        train = self.catalogue.train
        model = SIMPLE_MODELS[kind](self.catalogue.num_items, int(train.sizes.max()))
        return SimpleObjective(model, self.config.ks, self.catalogue.unknown_items, train)

    def _build_model(self) -> Recommender:
        config, catalogue = self.config, self.catalogue
        size = (catalogue.num_users, catalogue.num_items, config.embed_dim)
        if config.model == "kgat":
            return self._build_kgat(*size)
        if config.model == "bprmf":
            return BPRMF(*size)
        interactions = torch.tensor(catalogue.train.users), torch.tensor(catalogue.train.items)
        if config.model == "lightgcn":
            return LightGCN(*interactions, *size, config.num_layers)
        graph = torch.tensor(catalogue.triples), catalogue.num_entities
        return KnowledgeLightGCN(*interactions, *graph, *size, config.num_layers)

    def _build_kgat(self, num_users: int, num_items: int, width: int) -> KGAT:
        config, edges = self.config, self.edges
        head, tail, relation = (torch.from_numpy(part) for part in (edges.head, edges.tail, edges.relation))
        return KGAT(
            CollaborativeGraph(head, tail, relation, edges.num_nodes, edges.num_relations),
            num_users,
            num_items,
            width,
            relation_width=config.relation_dim,
            layer_dims=config.layer_dims,
            aggregation=config.aggregator,
            slope=config.leaky_slope,
            message_dropout=config.dropout,
            node_dropout=config.node_dropout,
            laplacian=config.laplacian,
            softmax=config.softmax,
        )

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        """Returns KGAT's layers, each of which stores several activations per node for the backward pass."""
        return list(model.layers) if isinstance(model, KGAT) else ()

    def param_groups(self, objective: Objective, phase: str) -> list[ParamGroup]:
        """Returns the parameters that a training phase updates; both phases of KGAT update the node embeddings."""
        model = objective.model
        if not isinstance(model, KGAT):
            return [{"params": model.parameters()}]
        own = [model.layers] if phase == "cf" else [model.relations]
        params = [p for part in (model.items, model.entities, model.users, *own) for p in part.parameters()]
        if phase == "cf":
            return [{"params": params}]
        return [{"params": [*params, model.projections], "lr_scale": self.config.kg_lr_scale}]

    def on_epoch_start(self, objective: Objective, epoch: int, progress: ProgressBar) -> None:
        """Computes KGAT's attention from the current weights; epoch 0 uses the graph's Laplacian instead."""
        model = objective.model
        if isinstance(model, KGAT):
            if epoch == 0:
                model.set_laplacian(self.config.laplacian)  # recomputed in the run's precision
            else:
                model.refresh()

    # --- results ------------------------------------------------------------------------------------------------

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns mean losses in training, and each metric of `TopK` at each cut-off in evaluation."""
        weight = sums["weight"]
        if "loss" in sums:
            return {name: float(sums[name] / weight) for name in ("loss", "ranking")}
        return {
            f"{metric}@{cutoff}": float(sums[metric][i] / weight)
            for metric in TopK._fields
            for i, cutoff in enumerate(self.config.ks)
        }

    def details(self, sums: dict[str, Tensor]) -> dict[str, Any]:
        """Returns the data set, "test" or "val", whose metric selects the best epoch."""
        return {"selected_on": "test" if self.config.select_on_test else "val"}

    def example_pictures(self, objective: Objective, batch: Batch) -> Mapping[str, Picture]:
        """Draws the share of attention that nodes give to each relation, averaged over nodes."""
        model = objective.model
        if not isinstance(model, KGAT):
            return {}
        attention = model.compute_attention().double().cpu().numpy()
        shares = np.bincount(self.edges.relation, attention) / np.count_nonzero(np.diff(self.edges.head, prepend=-1))
        order = np.argsort(-shares, kind="stable")[:_RELATIONS_SHOWN]
        names = [
            name + "^-1" * is_inverse
            for name, is_inverse in (named_relation(self.catalogue, i) for i in order.tolist())
        ]
        return {"attention_by_relation": draw_bars(names, shares[order].tolist())}

    # --- recommending -------------------------------------------------------------------------------------------

    def new_data(self, path: Path) -> KeyedDataset:
        """Reads the users for whom `--predict` recommends items."""
        users, notes = read_users(path, self.catalogue, self.config.reading)
        self._of_new_users = notes
        return Recommendations(users, self.config.top_k, self.catalogue)

    def sample(self) -> Mapping[str, Sequence[Any]]:
        """Returns the first twenty users who have training items, as an example input of `--predict`."""
        return {"user": list(map(self.catalogue.user_name, np.flatnonzero(self.catalogue.train.sizes)[:20].tolist()))}

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns a row per recommended item: user, rank, item, score and, for KGAT, the path of highest attention."""
        assert isinstance(objective, RankingObjective)
        distinct, row, count = batch["user"].unique_consecutive(return_inverse=True, return_counts=True)
        scores = objective.scores(distinct)
        hide(scores, batch["seen"][count.cumsum(0) - 1])
        best, ranked = highest(scores, self.config.top_k)
        users, items = batch["user"].tolist(), ranked[row, batch["place"]].tolist()
        columns: dict[str, Sequence[Any]] = {
            "user": list(map(self.catalogue.user_name, users)),
            "rank": (batch["place"] + 1).tolist(),
            "item": list(map(self.catalogue.entity_name, items)),
            "score": [f"{score:.6g}" for score in best[row, batch["place"]].tolist()],
        }
        if not isinstance(objective.model, KGAT):
            return columns
        paths = self._explained(objective.model, users, items)
        return columns | {"attention": [f"{value:.3g}" for value, _ in paths], "path": [text for _, text in paths]}

    def exported(self, objective: Objective, batch: Batch) -> Exported:
        """Exports a module that maps users to scores of all items; it contains final embeddings, but no graph.

        A simple model is exported as is; it maps histories to scores. Items are numbered from 1, and 0 is padding.
        """
        if isinstance(objective, SimpleObjective):
            inputs = objective.histories(batch["user"])
            return Exported(objective.model, inputs, objective.model(**inputs), {"items": (1,)})
        assert isinstance(objective, KgatObjective) and objective.users is not None and objective.items is not None
        program = FinalScores(objective.users, objective.items, objective.hidden)
        return Exported(program, {"users": batch["user"]}, objective.scores(batch["user"]))

    def _explained(self, model: KGAT, users: Sequence[int], items: Sequence[int]) -> list[tuple[float, str]]:
        """Returns (attention, path) for each (user, item) pair. For speed, a user's pairs should be consecutive."""
        if self._explanations is None:
            self._explanations = Explanations(self.catalogue, self.edges, model.compute_attention())
        found: list[tuple[float, str]] = []
        for user, pairs in groupby(zip(users, items, strict=True), key=lambda pair: pair[0]):
            found += self._explanations.of(user, [item for _, item in pairs])
        return found
