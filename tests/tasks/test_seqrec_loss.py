"""Tests the training loss of sequential recommendation against slow forms, whole and in parts."""

from functools import partial
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from tasks import seqrec_objective
from tasks.seqrec_objective import by_length
from tests.helpers.small_seqrec import make_batch, make_task
from tests.models.sequential.test_ranking import slow_bce, slow_gbce, slow_sampled


def make_objective(task):
    torch.manual_seed(0)
    return task.build_objective().double()


def loss_and_gradients(objective, *batches):
    """Returns the summed loss of the batches, and its gradients."""
    loss = torch.stack([objective(batch)["loss"] for batch in batches]).sum()
    return loss, torch.autograd.grad(loss, list(objective.parameters()))


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=0)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def rows_of(batch, part):
    return {name: tensor[part] for name, tensor in batch.items()}


def slow_ce(state, target, negatives, table):
    return F.cross_entropy(table[1:] @ state, torch.tensor(target - 1))


LOSS_SETTINGS = {
    "ce": {},
    "bce": {},
    "sampled": {"num_negatives": 7},
    "gbce": {"num_negatives": 7, "gbce_calibration": 0.6},
}
SLOW_LOSSES = {"ce": slow_ce, "bce": slow_bce, "sampled": slow_sampled, "gbce": partial(slow_gbce, calibration=0.6)}
both_modes = pytest.mark.parametrize(
    "mode", [{"mhc": True, "mhc_sinkhorn_iters": 3}, {"no_time": True}], ids=["TiSASRec, mHC", "SASRec"]
)
every_loss = pytest.mark.parametrize("loss", LOSS_SETTINGS)


def slow_loss(objective, batch, of_position):
    """Sums the loss of each position of each user without padding."""
    total = torch.zeros((), dtype=torch.float64)
    for b, length in enumerate(batch["length"]):
        states = objective.model.encode(
            batch["items"][b : b + 1, :length], length.view(1), batch["times"][b : b + 1, :length]
        )[0]
        for t, state in enumerate(states):
            negatives = batch.get("negatives", torch.zeros(len(batch["length"]), 0))[b]
            own = negatives[t] if negatives.dim() == 2 else negatives
            total = total + of_position(state, int(batch["targets"][b, t]), own.tolist(), objective.model.items.weight)
    return total


@every_loss
def test_the_chosen_loss_applies_to_every_next_item(loss, cache_dir):
    task = make_task(cache_dir, loss=loss, **LOSS_SETTINGS[loss])
    objective, batch = make_objective(task), make_batch(task, index=range(100, 112))
    assert not batch["targets"].all()  # there is padding
    found = loss_and_gradients(objective, batch)
    expected = slow_loss(objective, batch, SLOW_LOSSES[loss])
    assert_same(found, (expected, torch.autograd.grad(expected, list(objective.parameters()))))


def test_each_next_item_is_one_loss_term_and_each_evaluated_user_another(cache_dir):
    task = make_task(cache_dir)
    batch = make_batch(task)
    assert torch.equal(batch["weight"], (batch["targets"] > 0).sum(1).float())
    assert batch["weight"].min() < batch["weight"].max() == 20
    assert batch["index"].tolist() == list(range(0, 200, 6))
    assert torch.equal(make_batch(task, "val")["weight"], torch.ones(34))


@pytest.mark.parametrize(
    ("settings", "negatives"), [({"loss": "sampled"}, (3000,)), ({"loss": "gbce"}, (256,)), ({"loss": "bce"}, (20, 1))]
)
def test_each_loss_draws_its_usual_number_of_negatives(settings, negatives, cache_dir):
    batch = make_batch(make_task(cache_dir, **settings), index=range(20))
    assert batch["negatives"].shape == (20, *negatives)
    assert "negatives" not in make_batch(make_task(cache_dir))


# --- parts of a batch by length ----------------------------------------------------------------------------------


@every_loss
@both_modes
def test_groups_of_similar_length_equal_the_whole_batch(loss, mode, cache_dir, monkeypatch):
    task = make_task(cache_dir, loss=loss, **LOSS_SETTINGS[loss], **mode)
    objective, batch = make_objective(task), make_batch(task)
    assert len(list(by_length(batch))) == 4
    in_parts = loss_and_gradients(objective, batch)
    monkeypatch.setattr(seqrec_objective, "_LENGTHS_PER_BATCH", 10**9)
    assert len(list(by_length(batch))) == 1
    assert_same(in_parts, loss_and_gradients(objective, batch))


@both_modes
def test_every_rank_calls_a_collective_model_equally_often(mode, cache_dir):
    task = make_task(cache_dir, **mode)
    objective, batch = make_objective(task), make_batch(task)
    calls = []
    objective.model.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    whole = loss_and_gradients(objective, batch)
    assert len(calls) == 4
    objective.call_equally()
    assert_same(loss_and_gradients(objective, batch), whole)
    assert len(calls) == 5


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 10, 34])
@pytest.mark.parametrize("loss", ["ce", "bce", "gbce"])
def test_cutting_batches_keeps_every_sample_and_drops_only_padding(size, loss, cache_dir):
    batch = rows_of(make_batch(make_task(cache_dir, loss=loss, last_items_only=True)), slice(size))
    parts = list(by_length(batch))
    splits = size >= 8 and int(batch["length"].sum()) < 0.9 * batch["items"].numel()  # else splitting does not pay
    assert splits == (size in (10, 34))
    assert len(parts) == (len(torch.arange(size).chunk(4)) if splits else 1)
    row = {index: b for b, index in enumerate(batch["index"].tolist())}
    assert sorted(chain_lists(part["index"] for part in parts)) == sorted(row)
    lengths = chain_lists(part["length"] for part in parts)
    assert not splits or lengths == sorted(lengths)
    for part in parts:
        width = int(part["length"].max()) if splits else batch["items"].shape[1]
        assert part.keys() == batch.keys()
        for b, index in enumerate(part["index"].tolist()):
            for name, tensor in part.items():
                whole = batch[name][row[index]]
                per_position = name in ("items", "targets", "times") or (name, loss) == ("negatives", "bce")
                assert torch.equal(tensor[b], whole[:width] if per_position else whole)
                assert not per_position or not whole[width:].any()


def chain_lists(tensors):
    return [value for tensor in tensors for value in tensor.tolist()]


@both_modes
def test_penalty_on_embeddings_counts_once_however_the_batch_is_split(mode, cache_dir):
    task = make_task(cache_dir, l2_emb=0.05, **mode)
    objective, batch = make_objective(task), make_batch(task)
    whole = loss_and_gradients(objective, batch)
    for bounds in ((0, 34), (0, 1, 34), (0, 5, 13, 34)):
        parts = [rows_of(batch, slice(a, b)) for a, b in pairwise(bounds)]
        assert_same(loss_and_gradients(objective, *parts), whole)
    objective.l2 = 0.0
    plain = loss_and_gradients(objective, batch)
    num_terms = batch["weight"].sum()
    tables = {name: p for name, p in objective.named_parameters() if p.dim() == 2 and is_embedding(name)}
    assert len(tables) == (5 if task.config.uses_times else 2)
    penalty = sum(0.05 / 2 * table.square().sum() for table in tables.values())
    torch.testing.assert_close(whole[0] - plain[0], penalty * num_terms, rtol=1e-9, atol=0)
    for (name, p), a, b in zip(objective.named_parameters(), whole[1], plain[1], strict=True):
        torch.testing.assert_close(a - b, 0.05 * p * num_terms if name in tables else torch.zeros_like(p))


def is_embedding(name):
    return any(word in name for word in ("items.", "position_", "interval_"))
