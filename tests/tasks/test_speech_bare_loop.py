"""Tests that a speech run learns what a bare loop learns with single utterances, torch's CTC and AdamW in float64.

The bare loop uses the model, the drawn samples and their division into steps, and never pads.
"""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import load
from tests.helpers.small_speech import SMALL, SMALL_LMU, write_digits, write_sentences
from tests.helpers.weights import difference
from trainer.loading.order import SampleKeys

EPOCHS, BATCH_SIZE, LR, DECAY, MAX_NORM = 3, 10, 0.01, 0.1, 8.0
FLAGS = [
    "--task", "speech", "--dropout", 0, "--dtype", "float64", "--num-threads", 1, "--epochs", EPOCHS,
    "--global-batch-size", BATCH_SIZE, "--lr", LR, "--weight-decay", DECAY, "--max-grad-norm", MAX_NORM,
    "--schedule", "constant", "--warmup-steps", 0, "--eval-every", EPOCHS,
]  # fmt: skip
CASES = {
    "utterances": (write_digits, SMALL),
    "streaming": (write_sentences, [*SMALL, "--streaming"]),
    "seconds": (write_digits, [*SMALL, "--batch-by", "seconds", "--augmentation", 0]),
    "words": (write_sentences, [*SMALL, "--units", "words"]),
    "strings": (write_digits, [*SMALL, "--strings", "1-3", "--num-strings", 33, "--growing-epochs", 2]),
    "two views": (write_digits, [*SMALL, "--augmentation", 1, "--consistency", 0.3]),
    "lmu": (write_sentences, SMALL_LMU),
}


def bare_loop(task, divide=lambda sample: 1):
    """Returns the final weights, and the mean loss of each epoch. divide: returns the divisor of a sample's loss."""
    torch.manual_seed(0)
    objective = task.build_objective().double()
    task.initialise(objective)
    model = objective.model.train()
    params, data, losses = list(model.parameters()), task.splits()["train"], []
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.98))
    for epoch in range(EPOCHS):
        total = 0.0
        for step in task.order("train", epoch, BATCH_SIZE):
            samples = [data.__getitems__(SampleKeys(np.array([i]), epoch)) for i in step]
            consistency = task.config.consistency
            of_sample = partial(ctc_of_two_views, consistency=consistency) if consistency else ctc
            loss = sum(of_sample(model, sample) / divide(sample) for sample in samples)
            optimizer.zero_grad()
            (loss / len(step)).backward()
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()
            total += loss.item()
        losses.append(total / len(data))
    return model.state_dict(), losses


def log_probs_of(model, sample, masks=slice(None)):
    names = ("warp", "freq_masks", "time_masks", "masking_db")
    distortions = [sample[name].double() if name in sample else None for name in names]
    distortions[1:3] = [None if values is None else values[:, masks] for values in distortions[1:3]]
    log_probs, lengths = model(sample["audio"].double(), sample["num_samples"], *distortions)
    assert lengths.tolist() == [log_probs.shape[1]]
    return log_probs[0]


def ctc(model, sample):
    sample = {name: torch.from_numpy(values) for name, values in sample.items()}
    return loss_of(log_probs_of(model, sample), sample)


def ctc_of_two_views(model, sample, consistency):
    """Computes CR-CTC as in its paper."""
    sample = {name: torch.from_numpy(values) for name, values in sample.items()}
    a, b = (log_probs_of(model, sample, masks) for masks in (slice(0, 2), slice(2, 4)))
    apart = [F.kl_div(x, y.detach(), reduction="sum", log_target=True) for x, y in ((a, b), (b, a))]
    return (loss_of(a, sample) + loss_of(b, sample)) / 2 + consistency * sum(apart) / 2


def loss_of(log_probs, sample):
    sizes = [torch.tensor([len(log_probs)]), sample["target_length"]]
    return F.ctc_loss(log_probs, sample["targets"][0], *sizes, reduction="sum")


def run_and_task(case, run_here, make_task, directory):
    """Returns the final weights of a run, and its task."""
    write, more = CASES[case]
    argv = [*FLAGS, *more, "--data-dir", write(directory / "data")]
    run_here(*argv, "--batch-size", 4, "--save-dir", directory / "run")
    return load(directory / "run" / "final.pth")["model"], make_task(*argv)


@pytest.mark.parametrize("case", CASES)
def test_a_run_matches_a_bare_loop(case, run_here, make_task, tmp_path):
    found, task = run_and_task(case, run_here, make_task, tmp_path)
    expected, losses = bare_loop(task)
    # The softmax ignores the bias of its keys, so Adam turns the rounding of its gradient into steps.
    assert difference(found, expected) < (1e-9 if case == "lmu" else 1e-12)
    assert losses[-1] < losses[0]


def test_ctc_is_not_divided_by_the_length_of_a_transcript(run_here, make_task, tmp_path):
    """This negative control takes torch's default mean, which does not add up over devices."""
    found, task = run_and_task("streaming", run_here, make_task, tmp_path)
    wrong, _ = bare_loop(task, divide=lambda sample: int(sample["target_length"][0]))
    assert difference(found, wrong) > 1e-3
