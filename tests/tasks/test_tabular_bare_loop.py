"""Tests that a tabular run learns what a bare loop learns with single tables and torch's AdamW in float64."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.conftest import load
from tests.helpers.small_table import SMALL_MODEL, SMALL_PRIOR, write_table
from tests.helpers.weights import difference
from trainer.loading.order import EpochOrder, SampleKeys

EPOCHS, BATCH_SIZE, LR, DECAY, MAX_NORM = 3, 10, 0.01, 0.1, 0.5
FLAGS = [
    "--task", "tabular", "--dtype", "float64", "--num-threads", 1, "--epochs", EPOCHS, *SMALL_MODEL,
    "--global-batch-size", BATCH_SIZE, "--lr", LR, "--weight-decay", DECAY, "--max-grad-norm", MAX_NORM,
    "--schedule", "constant", "--warmup-steps", 0, "--eval-every", EPOCHS, "--eval-start=false",
]  # fmt: skip


def bare_loop(task, divide=lambda sample: 1):
    """Returns the final weights. divide: returns the divisor of a table's loss."""
    torch.manual_seed(0)
    model = task.build_objective().double().model.train()
    params, data = list(model.parameters()), task.splits()["train"]
    groups = [
        {"params": [p for p in params if p.dim() >= 2], "weight_decay": DECAY},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR)
    for epoch in range(EPOCHS):
        for start in range(0, len(data), BATCH_SIZE):
            numbers = range(start, min(start + BATCH_SIZE, len(data)))
            tables = [data.__getitems__(SampleKeys(np.array([i]), epoch)) for i in numbers]
            loss = sum(cross_entropy(model, table) / divide(table) for table in tables)
            terms = sum(table["targets"].size / divide(table) for table in tables)
            optimizer.zero_grad()
            (loss / terms).backward()
            torch.nn.utils.clip_grad_norm_(params, MAX_NORM)
            optimizer.step()
    return model.state_dict()


def cross_entropy(model, table):
    table = {name: torch.from_numpy(values) for name, values in table.items()}
    logits = model(table["context"].double(), table["labels"], table["queries"].double())
    return F.cross_entropy(logits[0, :, : int(table["num_classes"])], table["targets"][0], reduction="sum")


@pytest.fixture
def run_and_task(run_here, make_task, tmp_path):
    """Returns the final weights of a run, and its task."""
    argv = [*FLAGS, *SMALL_PRIOR]
    run_here(*argv, "--batch-size", 4, "--save-dir", tmp_path / "run")
    return load(tmp_path / "run" / "final.pth")["model"], make_task(*argv)


def test_a_run_matches_a_bare_loop(run_and_task):
    found, task = run_and_task
    assert difference(found, bare_loop(task)) < 1e-10


def test_a_table_is_weighted_by_its_queries(run_and_task):
    """This negative control averages the means of tables, which differs if tables have different sizes."""
    found, task = run_and_task
    wrong = bare_loop(task, divide=lambda table: table["targets"].size)
    assert difference(found, wrong) > 1e-3


def test_tuning_matches_a_bare_loop(run_here, make_task, tmp_path):
    table = write_table(tmp_path / "table.csv")
    argv = [*FLAGS[: FLAGS.index("--epochs")], "--epochs", 2, "--data-dir", table, "--label", "kind", "--tune", "base"]
    argv += ["--num-episodes", 5, "--lr", LR, "--weight-decay", 0, "--max-grad-norm", 0, "--schedule", "constant"]
    argv += ["--global-batch-size", 2, "--num-estimators", 1, "--warmup-steps", 0]
    run_here(*argv, "--batch-size", 1, "--save-dir", tmp_path / "run")
    entries = load(tmp_path / "run" / "final.pth")["model"]
    task = make_task(*argv)
    objective = task.build_objective().double()
    objective.model.load_state_dict(torch.load(task.shipped_weights(), weights_only=True)["model"])
    (scale,) = {group["lr_scale"] for group in task.param_groups(objective, "train")}
    optimizer = torch.optim.AdamW(objective.model.parameters(), lr=LR * scale, weight_decay=0)
    data = task.splits()["train"]
    for epoch in range(2):
        order = EpochOrder(task.seed, epoch, 0, len(data)).take(0, len(data))
        for step in np.split(order, range(2, len(data), 2)):
            loss, terms = 0, 0
            for i in step:
                episode = data.__getitems__(SampleKeys(np.array([i]), epoch))
                known = episode["targets"][0] >= 0
                episode["targets"], episode["queries"] = episode["targets"][:, known], episode["queries"][:, known]
                loss, terms = loss + cross_entropy(objective.model, episode), terms + known.sum()
            optimizer.zero_grad()
            (loss / terms).backward()
            optimizer.step()
    assert difference(entries, objective.model.state_dict()) < 1e-10
