"""Data set of synthetic classification tables, each determined by the settings, a seed and its number."""

from pathlib import Path

import numpy as np
import torch
from numpy.lib.stride_tricks import sliding_window_view

from data.tabular.prior.causes import draw_causes
from data.tabular.prior.columns import draw_columns
from data.tabular.prior.graphs import draw_graph
from data.tabular.prior.randomness import TableRandom, padded
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.structure import NUM_CLASS_UNITS, draw_kinds, draw_structure, most_causes, width_of
from data.tabular.prior.targets import draw_labels, is_predictable, row_order
from data.tabular.prior.units import draw_units, taken
from trainer.common.files import refusing_disk_errors, written_as_a_whole
from trainer.loading.cache import Arrays
from trainer.loading.order import SampleKeys


class PriorTables:
    """Data set of num_tables synthetic tables. fresh_each_epoch: whether to draw new tables in every epoch.

    A batch is a dictionary of B tables with up to N context rows, Q query rows and m features:
        context (B, N, m), queries (B, Q, m): float32, NaN where missing
        labels (B, N), targets (B, Q): int64, padded at the end with labels 0 and targets -1
        num_context, num_features, num_classes (B,): int64, sizes without padding
    A table has at least two classes, and every class occurs in the context.
    """

    def __init__(self, settings: PriorSettings, seed: int, num_tables: int, *, fresh_each_epoch: bool = False) -> None:
        self._settings, self._seed, self._num_tables = settings, seed, num_tables
        self._fresh_each_epoch = fresh_each_epoch

    def __len__(self) -> int:
        return self._num_tables

    def __getitems__(self, keys: SampleKeys) -> Arrays:
        numbers = self._numbers(keys.index, keys.epoch)
        shapes, shape_of_table = self._shapes(numbers)
        places = [np.flatnonzero(shape_of_table == i) for i in range(len(shapes))]
        parts = [
            draw_tables(self._settings, self._seed, numbers[place], shape)
            for place, shape in zip(places, shapes, strict=True)
        ]
        return parts[0] if len(parts) == 1 else _padded(parts, places)

    def largest(self, epoch: int, count: int) -> np.ndarray:
        """Returns the indices (count,) of the consecutive samples of an epoch that form the largest padded batch."""
        shapes, shape_of_table = self._shapes(self._numbers(np.arange(self._num_tables), epoch))
        count = min(count, self._num_tables)
        windows = sliding_window_view(np.array(shapes)[shape_of_table], count, axis=0)
        num_context, num_queries, num_features = windows.max(axis=-1).T
        return np.argmax((num_context + num_queries) * num_features) + np.arange(count)

    def _numbers(self, index: np.ndarray, epoch: int) -> np.ndarray:
        return index.astype(np.int64) + (epoch * self._num_tables if self._fresh_each_epoch else 0)

    def _shapes(self, numbers: np.ndarray) -> tuple[list[tuple[int, int, int]], np.ndarray]:
        """Returns the distinct shapes of the tables, and the index of each table's shape."""
        groups, group_of_table = np.unique(numbers // self._settings.tables_per_shape, return_inverse=True)
        return [self._settings.shape(self._seed, int(group)) for group in groups], group_of_table


def write_tables(tables: PriorTables, path: Path) -> None:
    """Writes the tables of epoch 0 as one padded batch to an .npz file. Raises UserError if writing fails."""
    batch = tables.__getitems__(SampleKeys(np.arange(len(tables)), 0))
    with (
        refusing_disk_errors(f"--prior-only {path}", "choose a file that can be written"),
        written_as_a_whole(path, path.with_name(f"{path.name}.tmp"), binary=True) as file,
    ):
        np.savez_compressed(file, allow_pickle=False, **batch)


def draw_tables(settings: PriorSettings, seed: int, numbers: np.ndarray, shape: tuple[int, int, int]) -> Arrays:
    """Draws the tables with indices `numbers`, (B,), all of one shape, as a batch of `PriorTables`."""
    batch = _attempt(settings, seed, numbers, shape, 0)
    attempt = 0
    while len(failed := np.flatnonzero(batch["num_classes"] < 2)):
        attempt += 1
        for name, values in _attempt(settings, seed, numbers[failed], shape, attempt).items():
            batch[name][failed] = values
    return batch


def _attempt(
    settings: PriorSettings, seed: int, numbers: np.ndarray, shape: tuple[int, int, int], attempt: int
) -> Arrays:
    """Draws each table once. In the result, num_classes is 1 for tables that must be drawn again.

    In version 2 of the prior, these include tables whose classes are not predictable.
    """
    num_context, num_queries, num_features = shape
    num_rows = padded(num_context + num_queries)  # surplus rows are dropped at the end
    draw = _draw_layers if settings.version == 1 else _draw_graphs
    order_of_tables, random, seen, of_classes = draw(settings, seed, numbers, attempt, num_features, num_rows)
    columns = draw_columns(random, settings, seen)
    labels, num_classes = draw_labels(random, of_classes, settings.classes)
    order = row_order(random, labels, settings.classes)[:, : num_context + num_queries]
    back = torch.from_numpy(np.argsort(order_of_tables))
    rows = columns.gather(2, order[:, None, :].expand(-1, num_features, -1)).transpose(1, 2)[back].numpy()
    classes, counts = labels.gather(1, order)[back].numpy(), num_classes[back].numpy()
    if settings.version > 1:
        for i, number in enumerate(numbers.tolist()):
            if not is_predictable(rows[i], classes[i], num_context, (seed, number, attempt)):
                counts[i] = 1
    return {
        "context": rows[:, :num_context].copy(),
        "labels": classes[:, :num_context].copy(),
        "queries": rows[:, num_context:].copy(),
        "targets": classes[:, num_context:].copy(),
        "num_context": np.full(len(numbers), num_context),
        "num_features": np.full(len(numbers), num_features),
        "num_classes": counts,
    }


_Units = tuple[np.ndarray, TableRandom, torch.Tensor, torch.Tensor]
"""Order in which tables are drawn (G,), random numbers, units of columns (G, m, T), units of classes (G, U, T)."""


def _draw_layers(
    settings: PriorSettings, seed: int, numbers: np.ndarray, attempt: int, num_features: int, num_rows: int
) -> _Units:
    is_tree, depth = draw_kinds(seed, numbers, attempt, settings.tree_share)
    by_kind = np.lexsort((-depth, is_tree))
    random = TableRandom(seed, numbers[by_kind], attempt)
    is_tree, depth = is_tree[by_kind, None], depth[by_kind, None]
    structure = draw_structure(random, torch.from_numpy(is_tree), torch.from_numpy(depth), num_features)
    causes, shown = draw_causes(random, most_causes(num_features), num_rows)
    units = draw_units(random, structure, causes, width_of(num_features))
    seen = torch.where(structure.is_causal[..., None], taken(units, structure.features), shown[:, :num_features])
    return by_kind, random, seen, taken(units, structure.class_units)


def _draw_graphs(
    settings: PriorSettings, seed: int, numbers: np.ndarray, attempt: int, num_features: int, num_rows: int
) -> _Units:
    size = (num_features, NUM_CLASS_UNITS, num_rows)
    units = torch.from_numpy(np.stack([draw_graph(seed, number, attempt, *size) for number in numbers.tolist()]))
    random = TableRandom(seed, numbers, attempt)
    return np.arange(len(numbers)), random, units[:, :num_features], units[:, num_features:]


def _padded(parts: list[Arrays], places: list[np.ndarray]) -> Arrays:
    """Pads and concatenates batches of different shapes. places: positions of each batch's tables in the result."""
    batch = {}
    back = np.argsort(np.concatenate(places))
    for name in parts[0]:
        sizes = np.max([part[name].shape for part in parts], axis=0)
        filler = -1 if name == "targets" else 0
        batch[name] = np.concatenate([_widened(part[name], sizes[1:], filler) for part in parts])[back]
    return batch


def _widened(values: np.ndarray, sizes: np.ndarray, filler: int) -> np.ndarray:
    widths = [(0, 0), *((0, size - now) for size, now in zip(sizes, values.shape[1:], strict=True))]
    return np.pad(values, widths, constant_values=filler)
