"""Tests the metrics of sequential recommendation against the protocol, one user at a time."""

import numpy as np
import pytest
import torch

from tests.data.interactions.test_sequences import slow_scaled_times
from tests.helpers.small_seqrec import ITEMS, KINDS, MHC, NUM_ITEMS, NUM_USERS, TIMES, assembled, make_batch
from tests.models.sequential.test_ranking import slow_metrics
from trainer.loading.order import SampleKeys
from trainer.loop.evaluate import evaluate, metrics_of

CUTOFFS = (1, 5, 10, 20)


def slow_place(scores, target, rivals):
    """Returns the middle of the places that a target can take among ties."""
    above = sum(scores[rival] > scores[target] for rival in rivals)
    tied = sum(scores[rival] == scores[target] for rival in rivals)
    return above + tied / 2


def slow_lists(rankings, split):
    """Returns the recommended share of the catalogue, and the mean share of users that have the items in training."""
    trained_on = [set(row[:-2] if len(row) >= 3 else row) for row in ITEMS]
    found = {}
    for k in CUTOFFS:
        shown = [item for ranking in rankings for item in ranking[:k]]
        shares = [sum(item in own for own in trained_on) / NUM_USERS for item in shown]
        found[f"{split}/coverage@{k}"] = len(set(shown)) / NUM_ITEMS
        found[f"{split}/popularity@{k}"] = sum(shares) / len(shares)
    return found


def slow_scores(run, split, mask_seen):
    """Computes the protocol one user at a time: the last item is for the test, the one before for validation.

    The other items are the history, which includes the validation item for the test. All items are ranked, or all
    that are new to the user, and the target with its 100 candidates.
    """
    held_back = {"val": 2, "test": 1}[split]
    dataset, maxlen = run.task.splits()[split], run.task.config.maxlen
    places, rankings = {"": [], "sampled_": []}, []
    for i, user in enumerate(dataset.users):
        history, target = ITEMS[user][:-held_back], ITEMS[user][-held_back]
        times = slow_scaled_times(TIMES[user][:-held_back])
        shown = torch.tensor([history[-maxlen:]]), torch.tensor([min(len(history), maxlen)])
        with torch.no_grad():
            scores = run.learner.objective.model(*shown, torch.tensor([times[-maxlen:]]))[0].tolist()
        everything = set(range(1, NUM_ITEMS + 1)) - {target}
        candidates = dataset.__getitems__(SampleKeys(np.array([i]), epoch=0))["candidates"][0].tolist()
        places[""].append(slow_place(scores, target, everything - set(history) if mask_seen else everything))
        places["sampled_"].append(slow_place(scores, target, candidates))
        pool = everything | {target} if not mask_seen else everything - set(history) | {target}
        rankings.append(sorted(pool, key=lambda item: -scores[item])[: CUTOFFS[-1]])
    return slow_lists(rankings, split) | {
        f"{split}/{prefix}{kind}@{cutoff}": total / len(of_users)
        for prefix, of_users in places.items()
        for cutoff in CUTOFFS
        for kind, total in zip(KINDS, slow_metrics(of_users, cutoff), strict=True)
    }


@pytest.mark.parametrize(
    ("more", "mask_seen"),
    [
        ([], True),
        (["--no-time", "--no-mask-seen", "--eval-negatives", "clean"], False),
        ([*MHC, "--maxlen", "50"], True),
    ],
)
def test_metrics_equal_the_protocol_for_each_user_and_any_batch_size(more, mask_seen, argv):
    expected = None
    for size in (1, 7, 512):
        run = assembled(argv, *more, "--eval-batch-size", str(size))
        for parameter in run.learner.objective.parameters():  # initial weights hardly tell users apart
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        run.learner.objective.eval()
        if expected is None:
            expected = slow_scores(run, "val", mask_seen) | slow_scores(run, "test", mask_seen)
            assert len(run.task.splits()["val"]) == sum(len(row) >= 3 for row in ITEMS) < NUM_USERS
            assert 0 < expected["val/hr@20"] < 1 and 0 < expected["test/sampled_ndcg@10"] < 1
        metrics = metrics_of(run.task, run.group, {split: evaluate(run, split) for split in ("val", "test")})
        assert metrics.keys() == expected.keys()
        assert metrics == pytest.approx(expected, abs=1e-12)


def test_the_test_data_cover_the_relevant_cases(argv):
    evaluated = [row for row in ITEMS if len(row) >= 3]
    for held_back in (1, 2):
        assert any(row[-held_back] in row[:-held_back] for row in evaluated)  # a mask must not remove it
    assert any(len(set(row[:-2])) > 6 for row in evaluated)  # seen, but beyond --maxlen
    val = make_batch(assembled(argv).task, "val", range(len(evaluated)))
    assert (val["candidates"] == val["target"].unsqueeze(1)).any()  # the target ties with itself
