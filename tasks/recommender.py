"""Base class of recommendation tasks, which train a network or fit a simple model such as item popularity."""

from abc import abstractmethod
from collections.abc import Mapping
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch

from models.simple.fitting import Buffers, TrainingHistories, candidates
from models.simple.recommenders import MOST_ITEMS_OF_EASE, SimpleRecommender
from trainer.config import options
from trainer.loading.cache import cached_arrays, cached_numbers, key_of
from trainer.loading.order import SampleKeys
from trainer.task import Baseline, Objective, Task

_FORMAT_VERSION = 2
_ROWS_PER_BATCH = 64
_ROWS_TO_CHOOSE_BY = 2000
"""Maximum number of validation samples on which the settings of a simple model are compared."""
_MOST_PAIRS, _MOST_INTERACTIONS = 10**9, 2 * 10**7
"""Largest numbers of item pairs and of interactions for which a baseline is fitted, in about a minute on one core."""


class RecommenderTask(Task):
    """Recommendation task that can fit simple models; the monitored validation metric selects their settings."""

    simple_models: ClassVar[tuple[str, ...]] = ()
    """Names of the models in `SIMPLE_MODELS` that the task supports."""

    most_scores: int = 10**8
    """Maximum number of scores to compute for a baseline; baselines of larger data sets are scored on fewer users."""

    @abstractmethod
    def training_histories(self) -> TrainingHistories:
        """Returns the users' training interactions, to which simple models are fitted."""

    @abstractmethod
    def simple_objective(self, kind: str) -> Objective:
        """Returns an objective whose `model` is an unfitted SimpleRecommender. kind: key of `SIMPLE_MODELS`."""

    @cached_property
    @abstractmethod
    def evaluation_key(self) -> tuple[object, ...]:
        """Key of cached scores: data, split and settings, which determine the scores of a fitted model."""

    def initialise(self, objective: Objective) -> None:
        if isinstance(objective.model, SimpleRecommender):
            objective.model.fill(self._fit(self.config.model, self.training_histories()))

    def fitted_objective(self, kind: str, histories: TrainingHistories) -> Objective:
        """Returns the objective of a simple model that is fitted to `histories` with its best settings."""
        objective = self.simple_objective(kind)
        assert isinstance(objective.model, SimpleRecommender)
        objective.model.fill(self._fit(kind, histories))
        return objective

    def _fit(self, kind: str, histories: TrainingHistories) -> Buffers:
        """Returns the buffers of a simple model fitted with its best settings, and caches them on disk."""

        def build() -> dict[str, np.ndarray]:
            objective = self.simple_objective(kind)
            assert isinstance(objective.model, SimpleRecommender)
            best: tuple[float, dict[str, np.ndarray]] | None = None
            for buffers in candidates(kind, histories, len(objective.model.recency)):
                objective.model.fill(buffers)
                metrics = {} if kind == "popularity" else self._scores(objective, "val", _ROWS_TO_CHOOSE_BY)
                value = metrics.get(self.monitor[0], 0.0)
                if best is None or value > best[0]:
                    best = value, dict(buffers)
            assert best is not None
            return best[1]

        return cached_arrays(self.cache_dir, key_of(kind, _FORMAT_VERSION, *self.evaluation_key), build)

    @torch.no_grad()
    def _scores(self, objective: Objective, split: str, most: int) -> dict[str, float]:
        """Evaluates at most `most` evenly spaced samples of a split, and returns metrics such as "val/ndcg@10"."""
        dataset, sums = self.splits()[split], dict[str, torch.Tensor]()
        num = min(most, len(dataset))
        index = np.linspace(0, len(dataset) - 1, num).round().astype(np.int64)
        objective.eval()
        objective.start_evaluation()
        for rows in np.array_split(index, -(-num // _ROWS_PER_BATCH)):
            keys = SampleKeys(rows, epoch=0)
            for name, value in objective(self.collate(dataset.__getitems__(keys), keys)).items():
                sums[name] = sums.get(name, 0) + value.double()
        sums["weight"] = torch.tensor(float(num), dtype=torch.float64)
        return {f"{split}/{name}": value for name, value in self.summarise(sums).items()}

    def baselines(self) -> Mapping[str, Baseline]:
        """Returns the scores of each simple model that can be fitted quickly to this data set."""
        histories = self.training_histories()
        too_long = {
            "ease": histories.num_items > MOST_ITEMS_OF_EASE,
            "itemknn": histories.num_items > MOST_ITEMS_OF_EASE and histories.num_pairs > _MOST_PAIRS,
        }
        if len(histories.items) > _MOST_INTERACTIONS:
            return {}
        kinds = [kind for kind in self.simple_models if not too_long.get(kind)]
        return {kind: Baseline(self._scores_of(kind, histories), self._flags_of(kind)) for kind in kinds}

    def _flags_of(self, kind: str) -> str:
        """Returns flags for a simple model: `--model`, and the flags from the command line that apply to this model."""
        config = self.config
        given = [
            option.as_typed(getattr(config, field))
            for field, option in options(type(config)).items()
            if getattr(config, field) != option.default and not {"model", "mhc", "loss"} & {*option.needs, field}
        ]
        return " ".join([f"--model {kind}", *given])

    def _scores_of(self, kind: str, histories: TrainingHistories) -> dict[str, float]:
        most = max(1, self.most_scores // histories.num_items)

        def build() -> dict[str, float]:
            objective = self.fitted_objective(kind, histories)
            return self._scores(objective, "val", most) | self._scores(objective, "test", most)

        key = key_of(f"{kind}-scores", _FORMAT_VERSION, self.seed, most, *self.evaluation_key)
        return cached_numbers(self.cache_dir, key, build)
