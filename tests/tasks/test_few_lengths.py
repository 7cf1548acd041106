"""Tests that padding to few lengths for a GPU changes no loss, gradient or score.

TabICL begins as the identity and is tested in tests/models/tabular/test_in_context.py instead.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.helpers.small_speech import SMALL, SMALL_LMU
from tests.helpers.small_table import SMALL_MODEL
from trainer.loading.batches import gathered, of_dtype
from trainer.loading.order import EpochOrder, SampleKeys, evaluation_keys
from trainer.loop.precision import module_in_dtype
from trainer.task import PerSample

SEQREC = ["--task", "seqrec", "--dropout", 0, "--hidden-units", 8, "--time-span", 9]
KGAT = ["--task", "kgat", "--model", "kgat", "--dropout", 0, "--embed-dim", 8, "--layer-dims", 8, "--relation-dim", 8]
SPEECH = ["--task", "speech", "--dropout", 0]
TASKS = {
    "sasrec": [*SEQREC, "--no-time", "--norm", "pre"],
    "tisasrec": [*SEQREC, "--maxlen", 90],
    "tisasrec with mhc": [*SEQREC, "--mhc"],
    "sasrec, bce": [*SEQREC, "--no-time", "--loss", "bce"],
    "sasrec, gbce": [*SEQREC, "--no-time", "--loss", "gbce", "--num-negatives", 20],
    "kgat": KGAT,
    "plmu": [*SPEECH, *SMALL],
    "plmu, by transforms": [*SPEECH, *SMALL, "--memory-size", 40],
    "plmu, streaming": [*SPEECH, *SMALL, "--streaming"],
    "plmu, consistency": [*SPEECH, *SMALL, "--consistency", 0.2],
    "lmu": [*SPEECH, *SMALL_LMU],
    "nano": ["--task", "tabular", "--num-val-tables", 2, *SMALL_MODEL],
}
MOST_SHAPES = {"seqrec": 7, "kgat": 2, "speech": 9, "tabular": 15}
"""Largest number of batch shapes in an epoch or an evaluation of generated data; the last batch may have its own."""


def assert_same_outputs(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        own, other = ((x.values if isinstance(x, PerSample) else x).double() for x in (found[name], value))
        torch.testing.assert_close(own, other, rtol=1e-12, atol=1e-12, equal_nan=True, msg=name)


def gradients(objective):
    return {name: p.grad for name, p in objective.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", TASKS)
def test_padding_to_few_lengths_changes_nothing(name, make_task):
    task = make_task(*TASKS[name])
    torch.manual_seed(0)
    objective = module_in_dtype(task.build_objective(), torch.float64)
    objective.call_equally()

    def both(dataset, index, phase=0):
        """Returns the batch of these samples, and the same batch padded to few lengths."""
        keys = SampleKeys(np.asarray(index), epoch=1, phase=phase)
        batches = (gathered(dataset, task.collate, own) for own in (keys, replace(keys, few_lengths=True)))
        short, long = (of_dtype(batch, torch.float64) for batch in batches)
        own = {key: value.shape for key, value in long.items()}
        has_grown.append(any(own[key] != value.shape for key, value in short.items()))
        return short, long

    has_grown = []
    for phase, phase_name in enumerate(task.phases):
        results = []
        for batch in both(task.training_data(phase_name), range(3, 60, 7), phase):
            objective.zero_grad()
            outputs = objective(batch, phase_name)
            outputs["loss"].backward()
            results.append((outputs, gradients(objective)))
        (outputs, own), (of_long, others) = results
        assert_same_outputs(of_long, outputs)
        assert_same_outputs(others, own)
    objective.eval()
    with torch.no_grad():
        objective.start_evaluation()
        for split, dataset in task.splits().items():
            if split != "train":
                short, long = both(dataset, range(min(5, len(dataset))))
                assert_same_outputs(objective(long), objective(short))
    assert any(has_grown)


@pytest.mark.parametrize("name", MOST_SHAPES)
def test_the_batches_of_an_epoch_have_few_shapes(name, make_task):
    task = make_task("--task", name)
    batch_size = task.defaults.get("batch_size", 32)

    def num_shapes(dataset, keys):
        batches = (gathered(dataset, task.collate, replace(key, few_lengths=True)) for key in keys)
        return len({tuple((key, value.shape) for key, value in batch.items()) for batch in batches})

    for phase, phase_name in enumerate(task.phases):
        size = task.batch_size(phase_name, batch_size)
        num_samples = task.num_samples(phase_name)
        order = task.order(phase_name, 0, size) or np.split(
            EpochOrder(0, 0, phase, num_samples).take(0, num_samples), range(size, num_samples, size)
        )
        found = num_shapes(task.training_data(phase_name), [SampleKeys(index, 0, phase) for index in order])
        assert found <= MOST_SHAPES[name]
    for split, dataset in task.splits().items():
        if split != "train":
            keys = evaluation_keys(len(dataset), (0, 1), task.defaults.get("eval_batch_size", batch_size))
            assert num_shapes(dataset, keys) <= MOST_SHAPES[name]
