"""Sequential recommendation: predicts a user's next item from earlier items and, optionally, their times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from data.interactions.columns import ColumnChoice
from data.interactions.histories import Histories
from data.interactions.hold_out import HoldOut, SplitKind
from data.interactions.item_sets import numbered
from data.interactions.reader import Interactions, load_interactions
from data.interactions.sequences import (
    NUM_EVALUATION_NEGATIVES,
    EvaluationNegatives,
    EvaluationSequences,
    Negatives,
    TrainSequences,
    split_interactions,
)
from data.interactions.synthetic import load_synthetic_interactions
from data.table_files import ENCODING, ON_BAD, Reading
from models.sequential.mhc import hyper_connections
from models.sequential.sasrec import NormOrder, SASRec, SequentialRecommender, residuals
from models.sequential.tisasrec import TiSASRec
from models.simple.fitting import TrainingHistories
from models.simple.recommenders import SIMPLE_MODELS
from tasks.recommender import RecommenderTask
from tasks.seqrec_objective import Loss, SeqrecObjective
from trainer.common.errors import UserError
from trainer.config import FlagGroup, flag, flags_without, refuse
from trainer.loading.batches import Batch
from trainer.loading.cache import digest_of
from trainer.loading.order import SampleKeys
from trainer.task import Exported, Objective

METRICS = ("hr", "ndcg", "mrr")

_OF_SHARES = {"split": ("ratio", "time")}
_OF_MHC = {"mhc": None}
_TRAINED = {"model": ("tisasrec", "sasrec")}
_USUAL_NEGATIVES = {"sampled": 3000, "gbce": 256}
_MANY_DRAWS = 0.5
"""Expected number of negatives equal to the true item, above which the task warns that metrics are unreliable."""


@dataclass
class SeqrecFlags(FlagGroup):
    """Task: sequential recommendation (--task seqrec)

    --predict takes a file of interactions in any format that --data-dir accepts. The output lists the --top-k most
    likely next items of each user in the file, with their scores.
    """

    data_dir: Path | None = flag(
        None, "file of interactions; one interaction per line, with columns named user, item, time or similar, or "
        "unnamed columns 'user item [rating] time'; CSV, text, JSON lines or parquet, also compressed; or a "
        "MovieLens folder or zip (default: a generated catalogue; no download)", common=True, local=True,
    )  # fmt: skip
    user_column: str | None = flag(
        None, "name or number (from 1) of the user column (default: recognised by its name)", metavar="COLUMN"
    )
    item_column: str | None = flag(
        None, "name or number (from 1) of the item column (default: recognised by its name)", metavar="COLUMN"
    )
    time_column: str | None = flag(
        None, "name or number (from 1) of the column with times, as numbers or dates; 'none': lines are in order "
        "of time (default: recognised by its name)", metavar="COLUMN",
    )  # fmt: skip
    encoding: str | None = flag(None, ENCODING, metavar="NAME", needs={"data_dir": None})
    on_bad: Literal["refuse", "drop"] = flag("refuse", ON_BAD)
    k_core: int = flag(
        5, "drop users and items with fewer interactions than this, repeatedly until all have enough; 0: keep all",
        at_least=0,
    )  # fmt: skip
    split: SplitKind = flag(
        "leave-one-out", "what to hold out; leave-one-out: each user's last item for testing, the item before it for "
        "validation; ratio: the latest share of each user's interactions; time: the latest share of all interactions",
    )  # fmt: skip
    val_share: float = flag(
        0.1, "with --split ratio or time: share of interactions for validation", above=0, below=1, needs=_OF_SHARES
    )
    test_share: float = flag(
        0.1, "with --split ratio or time: share of interactions for the test set", above=0, below=1, needs=_OF_SHARES
    )
    model: Literal["tisasrec", "sasrec", "popularity", "rules", "itemknn", "ease"] = flag(
        "tisasrec", "model; tisasrec: self-attention over items and the times between them; sasrec: self-attention "
        "without times; popularity: most popular items; rules: items that often follow the latest items; itemknn: "
        "items that share users with the user's items; ease: linear model that predicts an item from the user's other "
        "items; the last four are fitted in seconds, without training steps", common=True,
    )  # fmt: skip
    no_time: bool = flag(False, "the same as --model sasrec", hidden=True, excludes=("model",))
    mhc: bool = flag(
        False, "use manifold-constrained hyper-connections (mHC) instead of residual connections", needs=_TRAINED
    )
    maxlen: int = flag(
        50, "maximum number of a user's latest items that the model sees", metavar="ITEMS", common=True, at_least=1
    )
    last_items_only: bool = flag(
        False, "train only on each user's last --maxlen items, as in SASRec's paper; by default longer histories are "
        "split into several samples", needs=_TRAINED,
    )  # fmt: skip
    hidden_units: int = flag(50, "width of embeddings and attention blocks", at_least=1, needs=_TRAINED)
    num_blocks: int = flag(
        2, "number of blocks, each an attention layer plus a feed-forward layer", at_least=1, needs=_TRAINED
    )
    num_heads: int = flag(1, "number of attention heads; must evenly divide --hidden-units", at_least=1, needs=_TRAINED)
    dropout: float = flag(
        0.3, "dropout probability on embeddings, attention and feed-forward layers", at_least=0, below=1, needs=_TRAINED
    )
    norm: NormOrder | None = flag(
        None, "position of the layer norms in a block; original: as in SASRec's code; --mhc requires pre (default: "
        "original, or pre with --mhc)", needs=_TRAINED,
    )  # fmt: skip
    time_span: int = flag(
        256, "maximum time between two items, in units of the user's shortest gap; longer times are clipped",
        at_least=1, needs=_TRAINED,
    )  # fmt: skip
    l2_emb: float = flag(
        0.0, "factor of the L2 penalty on embedding tables; the penalty is half their sum of squares", at_least=0,
        needs=_TRAINED,
    )  # fmt: skip
    mhc_expansion_rate: int = flag(4, "with --mhc: number of residual streams", metavar="N", at_least=2, needs=_OF_MHC)
    mhc_init_gate: float = flag(
        0.01, "with --mhc: initial weight of the token-dependent part of each connection", at_least=0, needs=_OF_MHC
    )
    mhc_sinkhorn_iters: int = flag(
        20, "with --mhc: Sinkhorn iterations that make the residual matrix doubly stochastic", at_least=1, needs=_OF_MHC
    )
    mhc_no_amp: bool = flag(False, "with --mhc: compute hyper-connections in full precision under --amp", needs=_OF_MHC)
    loss: Loss = flag(
        "ce", "training loss; ce: softmax over all items; bce: binary cross-entropy with one negative per position, as "
        "in SASRec's paper; sampled: softmax over sampled items; gbce: binary cross-entropy with several negatives and "
        "--gbce-calibration", common=True, needs=_TRAINED,
    )  # fmt: skip
    num_negatives: int | None = flag(
        None, "negatives sampled per user; all positions of the user's sequence share them (default: 3000 for "
        "sampled, 256 for gbce)", at_least=1, needs={"loss": ("sampled", "gbce")},
    )  # fmt: skip
    gbce_calibration: float = flag(
        0.75, "calibration t of gbce; from 0 (plain BCE) to 1 (fully corrects the sampling bias)", metavar="T",
        at_least=0, at_most=1, needs={"loss": ("gbce",)},
    )  # fmt: skip
    eval_negatives: EvaluationNegatives = flag(
        "parity", "how to draw the 100 items ranked against the true item in sampled_* metrics; parity: with "
        "replacement, excluding the user's training items, as in SASRec's code; unseen: with replacement, excluding "
        "the user's items up to the end of the scored split, as in TiSASRec's code; clean: distinct items, excluding "
        "all of the user's items",
    )  # fmt: skip
    mask_seen: bool = flag(True, "also rank and recommend items that the user has already seen")
    ks: tuple[int, ...] = flag(
        (1, 5, 10, 20), "cut-offs of the metrics; the best epoch is chosen by ndcg@10, or by NDCG at the first "
        "cut-off if 10 is not listed", at_least=1,
    )  # fmt: skip
    top_k: int = flag(10, "with --predict: number of items per user", common=True, at_least=1)

    def __post_init__(self) -> None:
        if self.no_time and self.model == "tisasrec":
            self.model = "sasrec"
        self.no_time = False  # --model records this choice

    def problems(self) -> list[str]:
        found = []
        if self.data_dir is not None and not self.data_dir.exists():
            found.append(f"--data-dir {self.data_dir}: no such file or folder; give a file of interactions")
        if self.hidden_units % self.num_heads:
            found.append(f"--num-heads {self.num_heads}: must evenly divide --hidden-units {self.hidden_units}")
        if self.mhc and self.norm in ("original", "post"):
            found.append(f"--norm {self.norm}: --mhc needs --norm pre; leave out --mhc or --norm")
        if self.val_share + self.test_share >= 1:
            shares = f"--val-share {self.val_share:g} and --test-share {self.test_share:g}"
            found.append(f"{shares}: leave no interactions for training; choose smaller shares")
        return found

    @property
    def uses_times(self) -> bool:
        return self.model == "tisasrec"

    @property
    def hold_out(self) -> HoldOut:
        return HoldOut(self.split, self.val_share, self.test_share)

    @property
    def columns(self) -> ColumnChoice:
        return ColumnChoice(self.user_column, self.item_column, self.time_column)

    @property
    def reading(self) -> Reading:
        return Reading(self.encoding, self.on_bad)

    @property
    def negatives(self) -> Negatives | None:
        """Number of negatives per position ("bce") or per user ("sampled" and "gbce"); None for "ce"."""
        if self.loss == "ce":
            return None
        if self.loss == "bce":
            return Negatives(1, per_position=True)
        return Negatives(self.num_negatives or _USUAL_NEGATIVES[self.loss], per_position=False)


class SeqrecTask(RecommenderTask):
    """Task that trains SASRec or TiSASRec, optionally with hyper-connections, or fits a simple model."""

    Config = SeqrecFlags
    examples = (
        "--data-dir ml-1m.zip --save-dir checkpoints/ml-1m",
        "--data-dir ml-1m.zip --model rules --save-dir checkpoints/rules",
        "--save-dir checkpoints/ml-1m --predict histories.csv --output next.csv",
    )
    simple_models = tuple(SIMPLE_MODELS)
    # 64 histories fit into a CPU's cache; presets for GPUs set a larger eval_batch_size
    defaults = {
        "lr": 2e-3, "betas": (0.9, 0.98), "batch_size": 32, "weight_decay": 0.0, "epochs": 40, "eval_batch_size": 64,
    }  # fmt: skip
    predict_flags = ("user_column", "item_column", "time_column", "encoding", "on_bad", "top_k")

    _histories: Histories | None = None
    """Histories that `new_data` read for `--predict`."""

    def __init__(self, config: SeqrecFlags, seed: int, cache_dir: Path) -> None:
        super().__init__(config, seed, cache_dir)
        k = 10 if 10 in config.ks else config.ks[0]
        self.monitor = (f"val/ndcg@{k}", "max")
        self.headline = ("loss", f"hr@{k}", f"ndcg@{k}", f"sampled_hr@{k}", f"sampled_ndcg@{k}")
        self.fitted = config.model in SIMPLE_MODELS

    def splits(self) -> Mapping[str, TrainSequences | EvaluationSequences]:
        return self._splits

    @cached_property
    def _interactions(self) -> Interactions:
        config: SeqrecFlags = self.config
        if config.data_dir is None:
            refuse(flags_without(config, "--data-dir", ("user_column", "item_column", "time_column")))
            return load_synthetic_interactions(self.cache_dir)
        interactions = load_interactions(config.data_dir, config.k_core, self.cache_dir, config.columns, config.reading)
        if config.uses_times and interactions.times is None:
            raise UserError(
                f"--data-dir {config.data_dir}: has no times, but --model tisasrec needs times; use --model sasrec"
            )
        return interactions

    @cached_property
    def item_ids(self) -> Sequence[str]:
        """Names of items 1, 2, ..., taken from the checkpoint if the training data are absent."""
        if self.data_facts and "items" in self.data_facts:
            return str(self.data_facts["items"]).split("\n")
        return self._interactions.item_ids

    @property
    def num_items(self) -> int:
        return len(self.item_ids)

    def describe_data(self) -> Mapping[str, Any]:
        """Returns the names of all items, joined by line breaks."""
        return {"items": "\n".join(self.item_ids)}

    def data_digest(self) -> str:
        """Returns a digest of all interactions and their split."""
        data, config = self._interactions, self.config
        times = [data.times] if data.times is not None and config.uses_times else []
        return digest_of(data.offsets, data.items, *times, repr(config.hold_out))

    def remarks(self) -> Sequence[str]:
        """Returns notes for the user on detected columns, dropped items and users, and unreliable metrics."""
        if self._histories is not None:
            return self._histories.remarks
        remarks, draws = self._interactions.remarks, NUM_EVALUATION_NEGATIVES / self.num_items
        if self.config.eval_negatives != "parity" or draws < _MANY_DRAWS:
            return remarks
        return [
            *remarks,
            f"Warning: sampled_* metrics are unreliable, because the {NUM_EVALUATION_NEGATIVES} negatives, drawn with "
            f"replacement from {self.num_items} items, contain the true item {draws:.1f} times on average. Use the "
            "metrics over all items, or add --eval-negatives unseen.",
        ]

    @cached_property
    def _splits(self) -> Mapping[str, TrainSequences | EvaluationSequences]:
        config: SeqrecFlags = self.config
        splits = split_interactions(
            self._interactions,
            self.cache_dir,
            config.hold_out,
            seed=self.seed,
            maxlen=config.maxlen,
            whole_histories=not config.last_items_only,
            negatives=config.negatives,
            eval_negatives=config.eval_negatives,
            mask_seen=config.mask_seen,
        )
        for part, name in (("validation", "val"), ("test", "test")):
            if len(splits[name]) == 0:
                raise UserError(
                    f"{config.hold_out.flags}: no interaction in the {part} set follows an earlier "
                    "interaction of the same user; give more data, or change --split, --val-share or --test-share"
                )
        return splits

    def largest_samples(self, phase: str, epoch: int, count: int) -> np.ndarray:
        """Returns the indices of the longest training histories."""
        dataset = self.splits()["train"]
        assert isinstance(dataset, TrainSequences)
        lengths = dataset.num_terms(np.arange(len(dataset)))
        return np.argsort(-lengths, kind="stable")[:count]

    def collate(self, samples: Any, keys: SampleKeys) -> Batch:
        """Builds a batch; a sample's "weight" is its number of predicted items in training, and 1 in evaluation."""
        batch = super().collate(samples, keys)
        if "targets" in batch:
            batch["weight"] = batch["length"].float()
        return batch

    def training_histories(self) -> TrainingHistories:
        data, config = self._interactions, self.config
        num_train, _ = config.hold_out.bounds(data)
        users, position = numbered(np.diff(data.offsets))
        chosen = position < num_train[users]
        offsets = np.concatenate([[0], np.cumsum(num_train)])
        return TrainingHistories(offsets, data.items[chosen], data.num_items, is_ordered=True)

    @cached_property
    def evaluation_key(self) -> tuple[object, ...]:
        data, config = self._interactions, self.config
        return data.key, repr(config.hold_out), config.maxlen, config.mask_seen, config.ks, config.eval_negatives

    def simple_objective(self, kind: str) -> Objective:
        return SeqrecObjective(SIMPLE_MODELS[kind](self.num_items, self.config.maxlen), self.config.ks)

    def build_objective(self) -> Objective:
        config: SeqrecFlags = self.config
        if self.fitted:
            return self.simple_objective(config.model)
        connections: Sequence[nn.Module]
        if config.mhc:
            connections = hyper_connections(
                config.hidden_units,
                config.num_blocks,
                config.mhc_expansion_rate,
                config.mhc_init_gate,
                config.mhc_sinkhorn_iters,
                config.mhc_no_amp,
            )
        else:
            connections = residuals(config.hidden_units, config.num_blocks, config.norm or "original")
        size = (self.num_items, config.maxlen, config.hidden_units, config.num_blocks, config.num_heads, config.dropout)
        model = TiSASRec(*size, config.time_span, connections) if config.uses_times else SASRec(*size, connections)
        return SeqrecObjective(model, config.ks, config.loss, config.gbce_calibration, config.l2_emb)

    def blocks(self, model: nn.Module) -> Sequence[nn.Module]:
        return list(model.blocks) if isinstance(model, SequentialRecommender) else ()

    def exported(self, objective: Objective, batch: Batch) -> Exported:
        """Exports the model, which maps histories of up to --maxlen items to scores of all items."""
        names = ("items", "length", "times") if self.config.uses_times else ("items", "length")
        inputs = {name: batch[name] for name in names}
        return Exported(objective.model, inputs, objective.model(**inputs), {"items": (1,), "times": (1,)})

    def summarise(self, sums: dict[str, Tensor]) -> dict[str, float]:
        """Returns the mean loss per predicted item in training, and metrics at each cut-off of --ks in evaluation.

        hr, ndcg and mrr rank the true item among all items; sampled_hr, sampled_ndcg and sampled_mrr rank it among 100
        random items. Tied items share their mean rank. coverage is the share of items that are recommended to at least
        one user. popularity is the mean, over all recommendations, of the share of users who have the item in training.
        """
        weight, cutoffs = sums["weight"], self.config.ks
        if "loss" in sums:
            return {"loss": float(sums["loss"] / weight)}
        metrics = {
            f"{prefix}{metric}@{cutoff}": float(sums[protocol][i, j] / weight)
            for protocol, prefix in (("full", ""), ("sampled", "sampled_"))
            for i, metric in enumerate(METRICS)
            for j, cutoff in enumerate(cutoffs)
        }
        train = self.splits()["train"]
        assert isinstance(train, TrainSequences)
        popularity = torch.from_numpy(train.item_popularity)
        for counts, cutoff in zip(sums["recommended"], cutoffs, strict=True):
            metrics[f"coverage@{cutoff}"] = int((counts > 0).sum()) / self.num_items
            metrics[f"popularity@{cutoff}"] = float(counts @ popularity / counts.sum().clamp(min=1))
        return metrics

    # --- recommending -------------------------------------------------------------------------------------------

    def new_data(self, path: Path) -> Histories:
        """Reads the histories of the users for whom `--predict` recommends items."""
        config: SeqrecFlags = self.config
        self._histories = Histories(
            path,
            config.columns,
            self.item_ids,
            maxlen=config.maxlen,
            num_places=config.top_k,
            with_times=config.uses_times,
            mask_seen=config.mask_seen,
            reading=config.reading,
        )
        return self._histories

    def sample(self) -> Mapping[str, Sequence[Any]]:
        """Returns the histories of the first twenty users, as an example input of `--predict`."""
        found = self._interactions
        sizes = np.diff(found.offsets)[:20]
        items = found.items[: sizes.sum()]
        columns = {"user": np.arange(len(sizes)).repeat(sizes).tolist(), "item": [self.item_ids[i - 1] for i in items]}
        columns |= {} if found.times is None else {"time": found.times[: len(items)].tolist()}
        return self.config.columns.arranged(columns)

    def predictions(self, objective: Objective, batch: Batch) -> Mapping[str, Sequence[Any]]:
        """Returns a row for each recommended item: user, rank, item and score."""
        assert isinstance(objective, SeqrecObjective) and self._histories is not None
        _, row, count = batch["user"].unique_consecutive(return_inverse=True, return_counts=True)
        of_users = {name: tensor[count.cumsum(0) - 1] for name, tensor in batch.items()}
        scores, items = objective.recommend(of_users, self.config.top_k)
        place = batch["place"]
        return {
            "user": [self._histories.user_ids[user] for user in batch["user"].tolist()],
            "rank": (place + 1).tolist(),
            "item": [self.item_ids[item - 1] for item in items[row, place].tolist()],
            "score": [f"{score:.6g}" for score in scores[row, place].tolist()],
        }
