"""A data set made from a stream gives every sample once and in order, with any workers and after a resume."""

import random
from itertools import count, islice

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate

from tests.conftest import assert_same_bits, load
from trainer import SampleKeys, UserError, from_stream
from trainer.loading import streams
from trainer.loading.order import split_global_batch
from trainer.task import Objective, Task

SIZE, GLOBAL_BATCH = 23, 7


def numbers():
    for number in count():
        yield {"number": number, "draws": torch.tensor([random.random(), np.random.rand(), torch.rand(())])}


def numbers_of(epoch):
    return islice(numbers(), 100 * epoch, None)


def keys_of(rank, world_size, micro_batch_size, epochs=2, start=0):
    for epoch in range(epochs):
        for i in range(start if epoch == 0 else 0, SIZE, GLOBAL_BATCH):
            samples = np.arange(i, min(i + GLOBAL_BATCH, SIZE))
            yield from split_global_batch(samples, (rank, world_size), micro_batch_size, epoch)


def read(dataset, keys):
    """Returns the draws of every sample that is not a placeholder, by its number."""
    batches = [(key, dataset.__getitems__(key)) for key in keys if not key.placeholder or dataset.__getitems__(key)]
    return {
        number: draws
        for key, batch in batches
        if not key.placeholder
        for number, draws in zip(batch["number"].tolist(), batch["draws"].tolist(), strict=True)
    }


@pytest.mark.parametrize(("make", "second"), [(numbers, SIZE), (numbers_of, 100)])
def test_every_sample_is_read_once_by_any_workers(make, second):
    expected = None
    for world_size, micro_batch_size, start in [(1, 7, 0), (1, 2, 0), (2, 3, 0), (3, 1, 0), (5, 2, 0), (2, 3, 7)]:
        found = {}
        for rank in range(world_size):
            dataset = from_stream(make, samples_per_epoch=SIZE, seed=1)
            found |= read(dataset, keys_of(rank, world_size, micro_batch_size, start=start))
        assert sorted(found) == [*range(start, SIZE), *range(second, second + SIZE)]
        expected = expected or found
        assert all(found[number] == expected[number] for number in found)
    assert len({tuple(draws) for draws in expected.values()}) == 2 * SIZE


def test_parts_in_one_process_read_the_stream_once():
    begun = []
    dataset = from_stream(lambda: begun.append(1) or numbers(), samples_per_epoch=SIZE, seed=1)
    found = []
    for i in range(0, SIZE, GLOBAL_BATCH):
        for part in range(4):
            (keys,) = split_global_batch(np.arange(i, min(i + GLOBAL_BATCH, SIZE)), (part, 4), 2, 0)
            found += dataset.__getitems__(keys)["number"].tolist() if not keys.placeholder else []
    assert sorted(found) == list(range(SIZE)) and len(begun) == 1


def test_skipped_samples_are_read_again():
    dataset = from_stream(numbers, samples_per_epoch=SIZE, seed=1)
    for _ in range(2):
        assert dataset.__getitems__(SampleKeys(np.array([2, 1]), 0))["number"].tolist() == [2, 1]
        assert dataset.__getitems__(SampleKeys(np.array([9]), 0, phase=1))["number"].tolist() == [9]


def short(epoch):
    return islice(numbers(), 20)


def changing():
    yield from [torch.zeros(2)] * 9
    yield from [torch.zeros(3)] * 9


@pytest.mark.parametrize(
    ("make", "more", "message"),
    [
        (short, {}, "from_stream(short): the stream ended after 20 samples, within epoch 1 of 23 samples; lower"),
        (lambda: short(0), {}, "samples; lower samples_per_epoch, or let make_iterator take the epoch"),
        (lambda: 5, {}, "from_stream(<lambda>) returned int, not an iterable; return an iterator"),
        (changing, {"names": "x"}, "from_stream(changing): its items cannot be stacked into a batch"),
        (changing, {}, "from_stream(changing, names=None): its items have 1 value(s)"),
        ([1, 2], {}, "from_stream(list): needs a function that starts the stream"),
        (numbers, {"samples_per_epoch": 0}, "from_stream: samples_per_epoch 0: must be a whole number, at least 1"),
    ],
)
def test_an_error_names_the_stream_and_its_cause(make, more, message):
    with pytest.raises(UserError) as refusal:
        read(from_stream(make, **{"samples_per_epoch": SIZE, "seed": 0, **more}), keys_of(0, 1, 7))
    assert message in str(refusal.value)


def test_collate_may_take_samples_of_any_shape():
    def padded(items):
        return {"x": torch.nn.utils.rnn.pad_sequence(items, batch_first=True)}

    dataset = from_stream(changing, padded, samples_per_epoch=10, seed=0)
    assert dataset.__getitems__(SampleKeys(np.arange(8, 10), 0))["x"].shape == (2, 3)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_a_state_is_kept_if_it_can_be_loaded(is_loaded, monkeypatch):
    """The iterator has no __dict__."""
    monkeypatch.setattr(streams, "STATE_EVERY_S", 0.0)

    class Slots:
        __slots__ = ("number",)

        def __init__(self):
            self.number = -1

        def __iter__(self):
            return self

        def __next__(self):
            self.number += 1
            return self.number

        def state_dict(self):
            return {"number": self.number}

        if is_loaded:

            def load_state_dict(self, state):
                self.number = state["number"]

    first, second = (from_stream(Slots, samples_per_epoch=SIZE, seed=0, names="x") for _ in range(2))
    for start in (0, 4, 8):
        first.__getitems__(SampleKeys(np.arange(start, start + 4), 0))
    place = first.place_before(0, 0, 10)
    assert (place is not None) == is_loaded
    if place is not None:
        second.begin_at(0, place)
        assert second.__getitems__(SampleKeys(np.array([place.position]), 0))["x"].tolist() == [place.position]
        assert second.num_read_again(0, 0, 10) == 10 - place.position > 0


# --- runs --------------------------------------------------------------------------------------------------------


class Points:
    """Stream with a state. read: number of samples that all instances have read."""

    read = 0

    def __init__(self):
        self.number = 0

    def __iter__(self):
        while True:
            x = torch.randn(3, generator=torch.Generator().manual_seed(self.number))
            self.number, Points.read = self.number + 1, Points.read + 1
            yield x, x.sum()

    def state_dict(self):
        return {"number": self.number}

    def load_state_dict(self, state):
        self.number = state["number"]


class Lasting:
    """Stream for all epochs, like Hugging Face's datasets: every epoch begins at the loaded position.

    Before the first sample of an epoch it has the state at the end of the previous epoch.
    """

    begins = now = 0

    def __iter__(self):
        for number in range(self.begins + 1, 21):
            self.now, x = number, torch.randn(3, generator=torch.Generator().manual_seed(number))
            yield x, x.sum()

    def state_dict(self):
        return {"number": self.now}

    def load_state_dict(self, state):
        self.begins = state["number"]

    def __getstate__(self):
        return self.__dict__

    def __setstate__(self, state):
        self.__dict__ = state  # a shallow copy shares this dictionary


class Squares(Objective):
    def forward(self, batch, phase="train"):
        return {"loss": (self.model(batch["x"]).squeeze(1) - batch["y"]).square().sum()}


class Streamed(Task):
    make = staticmethod(lambda: iter(Points()))
    _splits = None

    def splits(self):
        make, sizes = type(self).make, {"train": 20, "val": 5}
        self._splits = self._splits or {
            name: from_stream(make, samples_per_epoch=size, seed=self.seed, names="xy") for name, size in sizes.items()
        }
        return self._splits

    def build_objective(self):
        return Squares(torch.nn.Linear(3, 1))


class WithState(Streamed):
    make = Points


class OneForAll(Streamed):
    def splits(self):
        streams = {"train": Lasting(), "val": Lasting()}
        self._splits = self._splits or {
            name: from_stream(lambda epoch, own=own: own, samples_per_epoch=20, seed=self.seed, names="xy")
            for name, own in streams.items()
        }
        return self._splits


STREAMED = f"{__file__}:Streamed"
FLAGS = ["--device", "cpu", "--num-threads", 1, "--batch-size", 3, "--global-batch-size", 6, "--save-every-steps", 2]
FLAGS += ["--schedule", "constant", "--warmup-steps", 0, "--dtype", "float64", "--max-grad-norm", 0]


def bare_loop(num_steps):
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1).double()
    matrices, vectors = [model.weight], [model.bias]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0}], lr=0.01)
    stream = iter(Points())
    for step in range(num_steps):
        x, y = default_collate([next(stream) for _ in range(6 if step % 4 < 3 else 2)])
        optimizer.zero_grad()
        (model(x.double()).squeeze(1) - y.double()).square().mean().backward()
        optimizer.step()
    return {name: weight.detach() for name, weight in model.state_dict().items()}


def test_a_run_matches_a_bare_loop_with_workers_and_after_a_stop(run_here, tmp_path):
    flags = ["--task", STREAMED, *FLAGS, "--lr", 0.01, "--weight-decay", 0.01]
    run_here(*flags, "--max-steps", 9, "--save-dir", tmp_path / "whole")
    whole = load(tmp_path / "whole" / "last.pth")
    torch.testing.assert_close(whole["model"], bare_loop(9), rtol=1e-12, atol=1e-14)
    run_here(*flags, "--max-steps", 6, "--num-workers", 2, "--save-dir", tmp_path / "parts")
    out = run_here(*flags, "--max-steps", 9, "--save-dir", tmp_path / "parts").out
    assert "Stream: resuming first reads 32 samples again." in out
    assert_same_bits(whole["model"], load(tmp_path / "parts" / "last.pth")["model"])


def test_a_stream_with_a_state_is_read_again_only_from_its_saved_state(run_here, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "STATE_EVERY_S", 0.0)
    flags = ["--task", STREAMED.replace("Streamed", "WithState"), *FLAGS]
    run_here(*flags, "--max-steps", 9, "--save-dir", tmp_path / "whole")
    run_here(*flags, "--max-steps", 6, "--save-dir", tmp_path / "parts")
    saved = load(tmp_path / "parts" / "last.pth")["streams"]
    assert saved == {"train": {"epoch": 0, "position": 29, "state": {"number": 29}}}
    out = run_here(*flags, "--max-steps", 9, "--save-dir", tmp_path / "parts").out
    assert "reads 3 samples again" in out
    one, other = (load(tmp_path / name / "last.pth")["model"] for name in ("whole", "parts"))
    assert_same_bits(one, other)


@pytest.mark.parametrize("stopped_at", [4, 5, 6])
def test_one_stream_for_all_epochs_resumes_bit_identically(stopped_at, run_here, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "STATE_EVERY_S", 0.0)
    flags = ["--task", STREAMED.replace("Streamed", "OneForAll"), *FLAGS]
    run_here(*flags, "--max-steps", 11, "--save-dir", tmp_path / "whole")
    for num_steps in (stopped_at, 11):
        run_here(*flags, "--max-steps", num_steps, "--save-dir", tmp_path / "parts")
    assert_same_bits(*(load(tmp_path / name / "last.pth")["model"] for name in ("whole", "parts")))
