"""Classifiers of tables side by side: the area under the ROC curve and the accuracy on 15 real tables.

    pip install scikit-learn catboost lightgbm xgboost
    python benchmarks/tabular.py --data-dir tables
    python benchmarks/tabular.py --methods "random forest" catboost    # generated tables, for choices in the making
    python benchmarks/tabular.py --data-dir tables --methods --weights checkpoints/tables/best.pth --num-estimators 1 8
    python benchmarks/tabular.py --data-dir tables --methods --num-estimators 4 --tune base lora --record tuned.jsonl

512 rows are learned from and 512 others predicted, both stratified, for each of three seeds. Columns that leak the
label are left out, and of some tables classes are joined; categories are numbered in the order of their names. The
classical methods are untuned: logistic regression on one-hot categories, 100 trees of a random forest, gradient
boosting on histograms and 15 nearest neighbours of scikit-learn; CatBoost, LightGBM and XGBoost, which know the
categorical columns. Beside them stand the weights that come with --task tabular, or those of checkpoints, also tuned on
the rows that are learned from: several minutes for each table and seed, so --record keeps every result, and the same
command measures only what is missing. Without --data-dir the tables are those of data/tabular/other_generators.py, with
as many rows. The last line is one JSON object.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import cast

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.compose import make_column_transformer
from sklearn.ensemble import HistGradientBoostingClassifier, RandomForestClassifier
from sklearn.impute import SimpleImputer
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from data.tabular.labels import class_labels
from data.tabular.other_generators import FAMILIES, OtherTables
from data.tabular.reader import read_table
from data.tabular.scores import scores
from data.tabular.table import Column
from models.tabular.predictor import TabularModel, predict
from tasks.tabular import SHIPPED, TabularTask
from tasks.tabular_classifier import Strategy, TabularClassifier
from trainer.checkpoint.weights import find_weights
from trainer.commands.weights import model_of
from trainer.loading.order import SampleKeys

NUM_TRAIN = NUM_TEST = 512
FEWEST_OF_CLASS = 3
GENERATOR_SEED = 2**42
"""Differs from the seeds of the validation tables of --task tabular."""
MEASURES = ("auc", "accuracy", "log_loss", "ece")


@dataclass(frozen=True)
class Source:
    """file: in the folder of tables. drop: leaks and ids. join: the classes (n,) to predict, of the numbers or texts
    of the label; None for its own. keep: the largest class, as text, that is kept.
    """

    file: str
    label: str
    drop: tuple[str, ...] = ()
    join: Callable[[np.ndarray], np.ndarray] | None = None
    keep: str | None = None

    @property
    def name(self) -> str:
        return self.file.split(".")[0]


def terciles(values: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values)


def quality(values: np.ndarray) -> np.ndarray:
    """Few wines are better than 7, or worse than 5."""
    return np.clip(values, 5, 7) - 5


SOURCES = (
    Source("adult_train.csv.gz", "income"),
    Source("bank_full.csv.gz", "y", drop=("duration",)),
    Source("winequality_red.csv", "quality", join=quality),
    Source("winequality_white.csv", "quality", join=quality),
    Source("german_credit.csv", "credit_risk"),
    Source("pima_diabetes.csv", "Outcome"),
    Source("titanic.csv", "survived", drop=("alive",)),
    Source("letter.csv.gz", "letter", keep="J"),
    Source("abalone.csv", "rings", join=terciles),
    Source("telco_churn.csv.gz", "Churn", drop=("customerID",)),
    Source("mushrooms.csv", "type"),
    Source("magic04.csv.gz", "class"),
    Source("phoneme.csv", "class"),
    Source("banknote.csv", "class"),
    Source("covtype_10k.csv.gz", "Cover_Type"),
)


@dataclass(frozen=True)
class Problem:
    """features: (n, m) float64, NaN where a value is missing. labels: (n,) int64. is_category: (m,) bool."""

    features: np.ndarray
    labels: np.ndarray
    test_features: np.ndarray
    test_labels: np.ndarray
    is_category: np.ndarray

    @property
    def num_classes(self) -> int:
        return int(self.labels.max()) + 1


Method = Callable[[Problem], np.ndarray]
"""Learns from a problem, and returns the probabilities of the classes of its test rows, (n, num_classes)."""


def problems(source: Source, folder: Path, seeds: Sequence[int]) -> Iterator[Problem]:
    """One for each seed."""
    table = read_table(folder / source.file)
    labels = class_labels(table, source.label)
    columns = [column.typed() for column in table.without([source.label, *source.drop]).columns]
    features = np.stack([column.values for column in columns], axis=1)
    classes = labels.values
    if source.join is not None:
        classes = source.join(np.array(labels.classes, float)[classes]).astype(np.int64)
    if source.keep is not None:
        kept = np.array([name <= source.keep for name in labels.classes])[classes]
        features, classes = features[kept], classes[kept]
    for seed in seeds:
        train, test = split(classes, seed)
        is_category = np.array([column.texts is not None and not is_boolean(column) for column in columns])
        yield Problem(features[train], classes[train], features[test], classes[test], is_category)


def generated(family: int, seeds: Sequence[int]) -> Iterator[Problem]:
    """Yields one table of a family of other generators for each seed; all columns are numbers."""
    tables = OtherTables(GENERATOR_SEED, len(FAMILIES) * (max(seeds) + 1), NUM_TRAIN, NUM_TEST)
    for seed in seeds:
        batch = tables.__getitems__(SampleKeys(np.array([family + len(FAMILIES) * seed]), 0))
        rows, labels, queries, targets = (batch[name][0] for name in ("context", "labels", "queries", "targets"))
        yield Problem(rows.astype(float), labels, queries.astype(float), targets, np.zeros(rows.shape[1], bool))


def is_boolean(column: Column) -> bool:
    return set(column.texts or ()) == {"False", "True"}


def split(labels: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """The rows to learn from and those to predict: of each class its share, but three at least."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(labels))
    train, test = [], []
    for c in np.unique(labels):
        rows = order[labels[order] == c]
        num_train, num_test = (
            max(FEWEST_OF_CLASS, round(num * len(rows) / len(labels))) for num in (NUM_TRAIN, NUM_TEST)
        )
        num_train = min(num_train, len(rows) // 2)
        train += rows[:num_train].tolist()
        test += rows[num_train : num_train + num_test].tolist()
    return rng.permutation(train), rng.permutation(test)


# --- methods -----------------------------------------------------------------------------------------------------


def logistic_regression(problem: Problem) -> np.ndarray:
    numbers = make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler())
    one_hot = make_pipeline(SimpleImputer(strategy="most_frequent"), OneHotEncoder(handle_unknown="ignore"))
    by_kind = make_column_transformer((numbers, ~problem.is_category), (one_hot, problem.is_category))
    return fitted(make_pipeline(by_kind, LogisticRegression(max_iter=2000)), problem)


def random_forest(problem: Problem) -> np.ndarray:
    forest = RandomForestClassifier(n_estimators=100, random_state=0)
    return fitted(make_pipeline(SimpleImputer(keep_empty_features=True), forest), problem)


def histogram_boosting(problem: Problem) -> np.ndarray:
    return fitted(HistGradientBoostingClassifier(random_state=0), problem)


def nearest_neighbours(problem: Problem) -> np.ndarray:
    neighbours = KNeighborsClassifier(n_neighbors=15)
    return fitted(make_pipeline(SimpleImputer(keep_empty_features=True), StandardScaler(), neighbours), problem)


def catboost(problem: Problem) -> np.ndarray:
    from catboost import CatBoostClassifier

    def with_texts(rows: np.ndarray) -> np.ndarray:
        return np.where(problem.is_category, rows.astype(str), rows.astype(object))

    columns = np.flatnonzero(problem.is_category)
    options = {"cat_features": columns, "random_seed": 0, "thread_count": 1, "verbose": False}
    estimator = CatBoostClassifier(**options, allow_writing_files=False)
    return estimator.fit(with_texts(problem.features), problem.labels).predict_proba(with_texts(problem.test_features))


def lightgbm(problem: Problem) -> np.ndarray:
    from lightgbm import LGBMClassifier

    estimator = LGBMClassifier(random_state=0, n_jobs=1, verbose=-1)
    columns = np.flatnonzero(problem.is_category).tolist()
    estimator.fit(problem.features, problem.labels, categorical_feature=columns)
    return estimator.predict_proba(problem.test_features)


def xgboost(problem: Problem) -> np.ndarray:
    from xgboost import XGBClassifier

    kinds = np.where(problem.is_category, "c", "q").tolist()
    return fitted(XGBClassifier(random_state=0, n_jobs=1, enable_categorical=True, feature_types=kinds), problem)


def fitted(estimator: BaseEstimator, problem: Problem) -> np.ndarray:
    return estimator.fit(problem.features, problem.labels).predict_proba(problem.test_features)


CLASSICAL: dict[str, Method] = {
    "logistic regression": logistic_regression,
    "random forest": random_forest,
    "histogram boosting": histogram_boosting,
    "nearest neighbours": nearest_neighbours,
    "catboost": catboost,
    "lightgbm": lightgbm,
    "xgboost": xgboost,
}


def in_context(model: TabularModel, num_estimators: int) -> Method:
    """A network that has learned from other tables, and predicts with so many members, untuned."""

    def method(problem: Problem) -> np.ndarray:
        arrays = (problem.features, problem.labels, problem.test_features)
        context, labels, queries = (torch.from_numpy(array) for array in arrays)
        return predict(model, context, labels, queries, problem.num_classes, num_estimators=num_estimators).numpy()

    return method


def tuned(strategy: Strategy, epochs: int, weights: Path, num_estimators: int) -> Method:
    """The same, after tuning on the rows that are learned from; what does not help on some of them is undone."""

    def method(problem: Problem) -> np.ndarray:
        classifier = TabularClassifier(
            strategy,
            num_estimators=num_estimators,
            epochs=epochs,
            weights=None if weights == SHIPPED else weights,
            device="cpu",
        )
        return classifier.fit(problem.features, problem.labels).predict_proba(problem.test_features)

    return method


def network(path: Path) -> TabularModel:
    """Of a checkpoint of --task tabular."""
    return cast(TabularModel, model_of(find_weights(path.parent, {"--weights": path}, print), TabularTask))


# --- results -----------------------------------------------------------------------------------------------------


class Record:
    """Results that have been measured, in a file of JSON lines; without a file none are kept."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self._known = {tuple(key): result for key, result in map(json.loads, lines)}

    def get(self, key: tuple[str, str, int], measure: Callable[[], dict[str, float]]) -> dict[str, float]:
        """key: of a method, a table and a seed. measure: is called, and its result kept, where there is none."""
        if key not in self._known:
            self._known[key] = measure()
            if self._path is not None:
                with open(self._path, "a") as file:
                    file.write(json.dumps([key, self._known[key]]) + "\n")
        return self._known[key]


def measure(
    methods: dict[str, Method], tables: dict[str, Iterator[Problem]], seeds: Sequence[int], record: Record
) -> dict[str, dict[str, dict[str, list[float]]]]:
    """Of each method and table the measures and the CPU seconds, one for each seed. Prints lines as it goes."""
    found: dict[str, dict[str, dict[str, list[float]]]] = {name: {} for name in methods}
    print(f"| AUC | {' | '.join(methods)} |\n| --- |{' --- |' * len(methods)}")
    for table, of_seeds in tables.items():
        for seed, problem in zip(seeds, of_seeds, strict=True):
            for name, method in methods.items():
                result = record.get((name, table, seed), partial(measured, method, problem))
                of_table = found[name].setdefault(table, {})
                for key in (*MEASURES, "cpu_s"):
                    of_table.setdefault(key, []).append(result[key])
        row = " | ".join(f"{mean(of_method[table]['auc']):.4f}" for of_method in found.values())
        print(f"| {table} | {row} |", flush=True)
    return found


def measured(method: Method, problem: Problem) -> dict[str, float]:
    before = time.process_time()
    probabilities = method(problem)
    return {"cpu_s": time.process_time() - before, **scores(problem.test_labels, probabilities)}


def summary(of_tables: dict[str, dict[str, list[float]]]) -> dict[str, float]:
    """Means over the tables: of the seeds' means, of the first seed alone, and the CPU seconds for all tables."""
    means = {key: mean(mean(table[key]) for table in of_tables.values()) for key in MEASURES}
    first = {f"{key}_first_seed": mean(table[key][0] for table in of_tables.values()) for key in ("auc", "accuracy")}
    return means | first | {"cpu_s": sum(mean(table["cpu_s"]) for table in of_tables.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, help="folder of the tables (default: generated ones)")
    parser.add_argument("--methods", nargs="*", choices=CLASSICAL, default=list(CLASSICAL), help="only these")
    parser.add_argument("--weights", nargs="*", type=Path, default=[SHIPPED], help="checkpoints of --task tabular")
    parser.add_argument("--num-estimators", nargs="*", type=int, default=[1, 8])
    parser.add_argument("--tune", nargs="*", choices=["base", "lora"], default=[], help="these too")
    parser.add_argument("--epochs", type=int, default=20, help="of tuning")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2], help="splits of each table")
    parser.add_argument("--record", type=Path, help="file of results, which are not measured again")
    args = parser.parse_args()
    torch.set_num_threads(1)
    methods = {name: CLASSICAL[name] for name in args.methods}
    for path in args.weights:
        model, label = network(path), "shipped" if path == SHIPPED else str(path)
        for number in args.num_estimators:
            methods[f"{label} x {number}"] = in_context(model, number)
            for how in args.tune:
                methods[f"{label} x {number}, {how}, {args.epochs} epochs"] = tuned(how, args.epochs, path, number)
    if args.data_dir is None:
        tables = {family.__name__[1:]: generated(i, args.seeds) for i, family in enumerate(FAMILIES)}
    else:
        tables = {source.name: problems(source, args.data_dir, args.seeds) for source in SOURCES}
    found = measure(methods, tables, args.seeds, Record(args.record))
    summaries = {name: summary(of_tables) for name, of_tables in found.items()}
    print(f"\n| mean | {' | '.join(summaries)} |\n| --- |{' --- |' * len(summaries)}")
    for key in next(iter(summaries.values())):
        print(f"| {key} | {' | '.join(f'{values[key]:.4f}' for values in summaries.values())} |")
    print(json.dumps({"summary": summaries, "tables": found}))


if __name__ == "__main__":
    main()
