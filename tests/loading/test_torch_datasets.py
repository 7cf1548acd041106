"""A torch data set adapted by `from_dataset` gives the same items in any process and in any batch."""

import json
import random
from collections import namedtuple

import numpy as np
import pytest
import torch
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
)

from tests.conftest import ROOT, assert_same_bits, cut_back, load
from trainer import SampleKeys, UserError, from_dataset, random_bits
from trainer.loading.on_device import Movable, moved
from trainer.loading.order import EpochOrder, split_global_batch
from trainer.loading.torch_datasets import require_keyed
from trainer.loading.workers import BatchLoader, Workers
from trainer.loop.contract import check_batch
from trainer.task import Task

SEED = 7
SIZE = 23


class Noisy(Dataset):
    """Data set whose items draw from every generator that a transform may use, some more often than others."""

    def __len__(self):
        return SIZE

    def __getitem__(self, index):
        draws = [random.random(), np.random.rand(), torch.rand(()).item()]
        for _ in range(index % 3):
            random.gauss(0, 1), np.random.randn(3), torch.randn(3)
        return {"draws": torch.tensor([*draws, torch.randn(()).item()]), "number": index}


def collate(samples, keys):
    return Task.collate(None, samples, keys)


def plain_loop(epoch):
    """Makes one item after another, each with freshly seeded generators."""
    items = []
    for index in range(SIZE):
        for_random, for_numpy, for_torch = random_bits(SEED, epoch, np.array([index]), 3)[0].tolist()
        random.seed(for_random)
        np.random.seed(for_numpy >> 32)
        torch.manual_seed(for_torch)
        items.append(Noisy()[index])
    return items


def test_items_equal_a_plain_loop_on_any_ranks_and_workers():
    """Some epochs begin in the middle."""
    expected = {epoch: plain_loop(epoch) for epoch in (0, 1)}
    assert not any(torch.equal(a["draws"], b["draws"]) for a, b in zip(*expected.values(), strict=True))
    dataset = from_dataset(Noisy(), seed=SEED)
    assert len(dataset) == SIZE
    for num_workers, world_size, micro_batch_size, start in [(0, 1, 5, 0), (2, 1, 4, 0), (0, 3, 2, 7), (2, 2, 3, 7)]:
        load = BatchLoader([dataset], collate, Workers(num_workers))
        for epoch in (1, 0):
            order = EpochOrder(SEED, epoch, 0, SIZE)
            seen = []
            for rank in range(world_size):
                keys = [
                    key
                    for i in range(start, SIZE, 7)
                    for key in split_global_batch(
                        order.take(i, min(i + 7, SIZE)), (rank, world_size), micro_batch_size, epoch
                    )
                ]
                for batch in load(keys):
                    check_batch(None, batch, len(batch["index"]))
                    for i, number in enumerate(batch["number"].tolist()):
                        assert batch["index"][i] == number
                        assert torch.equal(batch["draws"][i], expected[epoch][number]["draws"])
                        seen += [number] * bool(batch["weight"][i])
            assert sorted(seen) == sorted(order.take(start, SIZE))
        load.close()


def states():
    return (
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2:],
        torch.get_rng_state().tolist(),
    )


def test_random_generators_are_restored():
    class Broken(Noisy):
        def __getitem__(self, index):
            super().__getitem__(index)
            raise OSError("gone")

    random.gauss(0, 1), np.random.randn()  # both generators keep the second number of a pair
    before = states()
    from_dataset(Noisy(), seed=SEED).__getitems__(SampleKeys(np.arange(3), 0))
    assert states() == before
    with pytest.raises(OSError, match="gone"):
        from_dataset(Broken(), seed=SEED).__getitems__(SampleKeys(np.arange(3), 0))
    assert states() == before


def test_seeds_epochs_and_items_draw_different_numbers():
    def draws(seed, epoch):
        samples = from_dataset(Noisy(), seed=seed).__getitems__(SampleKeys(np.arange(SIZE), epoch))
        return samples["draws"].flatten().tolist()

    assert len({*draws(0, 0), *draws(1, 0), *draws(0, 1)}) == 3 * 4 * SIZE


# --- kinds of items ----------------------------------------------------------------------------------------------

Named = namedtuple("Named", ["image", "label"])
IMAGE = torch.arange(6.0).view(2, 3)
EXPECTED = {"image": torch.stack([IMAGE, IMAGE]), "label": torch.tensor([4, 4])}


@pytest.mark.parametrize(
    ("item", "names"),
    [
        ({"image": IMAGE, "label": 4}, None),
        ({"image": IMAGE.numpy(), "label": np.int64(4)}, None),
        ((IMAGE, 4), ("image", "label")),
        ([IMAGE.numpy(), torch.tensor(4)], ["image", "label"]),
        (Named(IMAGE, 4), None),
    ],
)
def test_elements_of_an_item_get_names(item, names):
    keys = SampleKeys(np.array([1, 0]), 0)
    batch = collate(from_dataset([item] * 2, seed=0, names=names).__getitems__(keys), keys)
    check_batch(None, batch, len(batch["index"]))
    expected = EXPECTED | {"index": torch.tensor([1, 0]), "weight": torch.ones(2)}
    assert batch.keys() == expected.keys()
    assert all(torch.equal(batch[name], value) and batch[name].dtype == value.dtype for name, value in expected.items())


def test_a_single_value_gets_a_name():
    samples = from_dataset(IMAGE, seed=0, names=("row",)).__getitems__(SampleKeys(np.array([1, 1, 0]), 0))
    assert torch.equal(samples["row"], IMAGE[[1, 1, 0]])


@pytest.mark.parametrize(
    ("pad", "names"),
    [
        (lambda rows: (torch.nn.utils.rnn.pad_sequence(rows, True), np.array([len(r) for r in rows])), ("row", "len")),
        (lambda rows: {"row": torch.nn.utils.rnn.pad_sequence(rows, True), "len": np.array([*map(len, rows)])}, None),
    ],
)
def test_a_custom_collate_makes_a_batch_of_items(pad, names):
    dataset = from_dataset([torch.ones(i) for i in range(5)], pad, seed=0, names=names)
    keys = SampleKeys(np.array([2, 4]), 0)
    batch = collate(dataset.__getitems__(keys), keys)
    check_batch(None, batch, len(batch["index"]))
    assert batch["row"].tolist() == [[1, 1, 0, 0], [1, 1, 1, 1]]
    assert batch["len"].tolist() == [2, 4]


@pytest.mark.parametrize(
    ("items", "names", "message"),
    [
        ([(1, 2)], None, "items have 2 value(s); give each its own name"),
        ([(1, 2)], ("image", "label", "more"), "items have 2 value(s)"),
        ([1], None, "items have 1 value(s)"),
        ([{"image": 1}], ("image",), "have names already (image); omit `names`"),
        ([np.zeros(2), np.zeros(3)], ("row",), "cannot be stacked into a batch"),
        ([object()], ("thing",), "pass `collate`"),
    ],
)
def test_items_that_cannot_form_a_batch_are_refused(items, names, message):
    with pytest.raises(UserError) as raised:
        from_dataset(items, seed=0, names=names).__getitems__(SampleKeys(np.arange(len(items)), 0))
    assert str(raised.value).startswith("from_dataset(list")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


# --- data sets ---------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class Unsized(Dataset):
    def __getitem__(self, index):
        return index


def test_data_sets_without_numbered_samples_are_refused():
    with pytest.raises(
        UserError, match=r"from_dataset\(Stream\): an IterableDataset has no sample indices; .*from_stream"
    ):
        from_dataset(Stream(), seed=0)
    with pytest.raises(UserError, match=r"with `__len__`$"):
        from_dataset(Unsized(), seed=0)
    with pytest.raises(UserError, match=r"with `__getitem__`$"):
        from_dataset({1, 2}, seed=0)


def test_samples_that_are_not_dictionaries_need_a_collate():
    with pytest.raises(UserError, match=r"`__getitems__` of the data set returned a tuple, not a dictionary of arrays"):
        collate((torch.zeros(2), torch.zeros(2)), SampleKeys(np.arange(2), 0))


def test_a_data_set_without_keys_is_refused_until_it_is_adapted():
    tensors = TensorDataset(torch.zeros(3))
    stack = StackDataset(tensors)
    for dataset in (tensors, Subset(tensors, [0, 1]), stack, ConcatDataset([tensors, tensors]), [1, 2]):
        with pytest.raises(UserError, match=r"train: .* has no `__getitems__\(keys\)`; return trainer.from_dataset"):
            require_keyed(dataset, "train")
        require_keyed(from_dataset(dataset, seed=0, names=("x",)), "train")
    with pytest.raises(UserError, match="train: an IterableDataset"):
        require_keyed(Stream(), "train")
    loader = DataLoader(tensors, 2)
    with pytest.raises(UserError, match=r"train: DataLoader makes its own batches, .*from_dataset\(loader.dataset, s"):
        require_keyed(loader, "train")
    with pytest.raises(UserError, match=r"from_dataset\(DataLoader\): .* pass `loader.dataset`"):
        from_dataset(loader, seed=0)


class InBatches(Noisy):
    """A data set with the method by which torch's DataLoader requests a whole batch."""

    def __getitems__(self, indices):
        return [self[index] for index in indices]


class Keyed(Noisy):
    """A keyed data set that gives single items as well."""

    def __getitems__(self, keys):
        return {"x": torch.zeros(len(keys.index))}


def test_a_method_for_batches_of_indices_does_not_count_as_keyed():
    before = torch.get_rng_state()
    with pytest.raises(UserError, match=r"train: InBatches has no `__getitems__\(keys\)`; return trainer.from_dataset"):
        require_keyed(InBatches(), "train")
    require_keyed(Keyed(), "train")
    assert torch.equal(torch.get_rng_state(), before)
    one, other = (from_dataset(kind(), seed=0) for kind in (Noisy, InBatches))
    keys = SampleKeys(np.arange(3), 0)
    assert_same_bits(one.__getitems__(keys), other.__getitems__(keys))


# --- runs --------------------------------------------------------------------------------------------------------

LINES = f"{ROOT / 'tests' / 'helpers' / 'torch_task.py'}:Lines"
RUN = ["--task", LINES, "--epochs", 2, "--batch-size", 4, "--save-every-steps", 2, "--keep-checkpoints", 0]


def test_a_run_is_the_same_with_workers_and_after_a_kill(run_here, tmp_path):
    run_here(*RUN, "--save-dir", tmp_path / "here")
    run_here(*RUN, "--save-dir", tmp_path / "workers", "--num-workers", 2)
    final = load(tmp_path / "here" / "final.pth")
    assert_same_bits(final, load(tmp_path / "workers" / "final.pth"))
    entries = json.loads((tmp_path / "here" / "manifest.json").read_text())["checkpoints"]
    cut_back(tmp_path / "here", entries[:1], tmp_path / "again")  # in the middle of the first epoch
    run_here(*RUN, "--save-dir", tmp_path / "again", "--num-workers", 2)
    assert_same_bits(final, load(tmp_path / "again" / "final.pth"))


def test_a_plain_torch_dataset_returned_by_a_task_is_explained(run_here, tmp_path):
    _, error = run_here(*RUN, "--save-dir", tmp_path / "run", "--no-adapted", status=2)
    assert "its data set 'train': Subset has no `__getitems__(keys)`; return trainer.from_dataset(" in error
    assert "Traceback" not in error


@pytest.mark.parametrize("subset", [False, True])
def test_gathered_tensors_equal_single_items_and_may_be_on_a_device(subset):
    whole = TensorDataset(torch.randn(20, 3), torch.arange(20), torch.arange(20.0))
    dataset = Subset(Subset(whole, range(2, 17)), [4, 1, 9]) if subset else whole
    names = ("x", "label", "weight")
    keyed, one_by_one = (from_dataset(dataset, seed=0, names=names, collate=own) for own in (None, default_collate))
    assert isinstance(keyed, Movable) and not isinstance(one_by_one, Movable)
    assert len(keyed) == len(one_by_one) == len(dataset)
    (there,) = moved([keyed], torch.device("cpu"))
    keys = SampleKeys(np.array([2, 0, 2]), epoch=1)
    expected = one_by_one.__getitems__(keys)
    for found in (keyed.__getitems__(keys), there.__getitems__(keys)):
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert there.weights(keys).tolist() == expected["weight"].tolist()
    assert from_dataset(TensorDataset(torch.zeros(2)), seed=0, names=("x",)).weights(keys) is None


def test_a_dictionary_of_arrays_is_a_data_set():
    arrays = {"x": np.random.default_rng(0).normal(size=(9, 2)), "y": torch.arange(9)}
    keyed = from_dataset(arrays, seed=0)
    batch = keyed.__getitems__(SampleKeys(np.array([4, 0]), 0))
    assert len(keyed) == 9 and isinstance(keyed, Movable)
    assert np.array_equal(batch["x"].numpy(), arrays["x"][[4, 0]]) and batch["y"].tolist() == [4, 0]


@pytest.mark.parametrize("arrays", [{"x": np.zeros(3), "y": np.zeros(4)}, {"x": np.zeros(3), "n": 3}, {}])
def test_values_that_are_not_arrays_of_one_length_are_refused(arrays):
    with pytest.raises(UserError, match="from_dataset: all values of a dictionary must be arrays of equal length"):
        from_dataset(arrays, seed=0)


@pytest.mark.parametrize("array", [[{}], np.array(["a", "b"]), np.arange(4)[::-1], np.arange(4).astype(">i4")])
def test_an_array_that_is_not_a_tensor_is_refused_with_the_reason(array):
    with pytest.raises(
        UserError, match=r"torch cannot convert 'x' to a tensor \((Type|Value|Runtime)Error: .+\); pass"
    ):
        from_dataset({"x": array}, seed=0)


def test_several_data_sets_need_a_task():
    with pytest.raises(UserError, match=r"'far' is a data set, not an array; several data sets need a task$"):
        from_dataset({"far": TensorDataset(torch.zeros(3))}, seed=0)
