"""Sequential recommendation end to end: its loss and metrics against slow forms, and every mode by the command line."""

import json
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.sequential.mhc import HyperConnection
from models.sequential.ranking import place_of_target, ranking_metrics
from models.sequential.sasrec import Residual, SASRec
from models.sequential.tisasrec import TiSASRec
from tests.conftest import assert_same_bits, cut_back, largest_difference, launcher, load, read_metrics
from tests.data.interactions.test_sequences import slow_scaled_times
from tests.helpers.replicas import ReplicasOnCpu, trained
from tests.models.sequential.test_ranking import slow_bce, slow_gbce, slow_metrics, slow_sampled
from trainer.cli import main
from trainer.commands.build import assemble_run, build_task
from trainer.commands.flags import parse
from trainer.loading.order import SampleKeys
from trainer.loop.train import evaluate
from trainer.parallel.base import SingleDevice
from trainer.tasks import seqrec
from trainer.tasks.seqrec import CUTOFFS, SeqrecFlags, SeqrecTask, by_length

CPU = torch.device("cpu")
MODES = {"default": [], "no time": ["--no-time"], "no mhc": ["--no-mhc"], "neither": ["--no-time", "--no-mhc"]}
LOSSES = {"ce": [], "bce": [], "sampled": ["--num-negatives", "9"], "gbce": ["--num-negatives", "9"]}
KINDS = ("hr", "ndcg", "mrr")
METRICS = [f"{protocol}{kind}@{cutoff}" for protocol in ("", "sampled_") for kind in KINDS for cutoff in CUTOFFS]
SMALL = ["--hidden-units", "8", "--num-heads", "2", "--maxlen", "6", "--time-span", "9", "--mhc-sinkhorn-iters", "3"]
NUM_USERS, NUM_ITEMS = 40, 130


def histories():
    """Items and times of each user; 1 to 15 interactions, repetitions and equal times among them."""
    rng = np.random.default_rng(0)
    counts = [1, 2, 3, 3, 14, *rng.integers(3, 15, NUM_USERS - 5).tolist()]
    flat = np.concatenate([rng.permutation(NUM_ITEMS) + 1, rng.integers(1, NUM_ITEMS + 1, sum(counts) - NUM_ITEMS)])
    items = [part.tolist() for part in np.split(flat, np.cumsum(counts)[:-1])]
    for row in items[4:12]:  # targets of the test or of the validation that the user has had before
        row.insert(len(row) - row[0] % 2, row[0])
    return items, [rng.choice([0, 1, 3, 50], len(row)).cumsum().tolist() for row in items]


ITEMS, TIMES = histories()


@pytest.fixture(scope="module")
def data_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("seqrec") / "interactions.txt"
    lines = [
        f"{user} {item} {time}\n" for user, row in enumerate(ITEMS) for item, time in zip(row, TIMES[user], strict=True)
    ]
    path.write_text("".join(lines))
    return path


@pytest.fixture
def argv(data_file, cache_dir):
    """A small model on the small file, one epoch."""
    return [
        "--task", "seqrec", "--data-dir", str(data_file), "--k-core", "0", "--cache-dir", str(cache_dir), *SMALL,
        "--epochs", "1", "--batch-size", "16", "--num-threads", "1",
    ]  # fmt: skip


def assembled(argv, *more):
    flags, problems = parse([*argv, "--dtype", "float64", *more], several_devices=False)
    assert problems == []
    return assemble_run(flags, build_task(flags), SingleDevice(CPU), None)


def make_task(cache_dir, **settings):
    """On the generated catalogue."""
    config = SeqrecFlags(**{"hidden_units": 8, "maxlen": 20, "dropout": 0.0, "mhc_sinkhorn_iters": 3} | settings)
    assert config.problems() == []
    return SeqrecTask(config, seed=0, cache_dir=cache_dir)


def make_batch(task, split="train", index=range(0, 200, 6)):
    keys = SampleKeys(np.array(index), epoch=0)
    return task.collate(task.splits()[split].__getitems__(keys), keys)


def make_objective(task):
    torch.manual_seed(0)
    return task.build_objective().double()


def loss_and_gradients(objective, *batches):
    """Of the sum over the batches."""
    loss = torch.stack([objective(batch)["loss"] for batch in batches]).sum()
    return loss, torch.autograd.grad(loss, list(objective.parameters()))


def assert_same(found, expected):
    torch.testing.assert_close(found[0], expected[0], rtol=1e-12, atol=0)
    for a, b in zip(found[1], expected[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)


def rows_of(batch, part):
    return {name: tensor[part] for name, tensor in batch.items()}


# --- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [[], ["--loss", "bce", "--no-time", "--no-mhc"]], ids=["default", "bce"])
def test_goes_on_with_the_same_bits(more, argv, tmp_path, signals_restored):
    """With dropout and drawn negatives, from the middle of the second epoch."""
    argv = [*argv, *more, "--epochs", "3", "--save-every-steps", "2", "--keep-checkpoints", "0"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_main(argv, whole)
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    middle = next(i for i, entry in enumerate(entries) if entry["epoch"] == 1 and entry["samples"] > 0)
    cut_back(whole, entries[: middle + 1], again)
    run_main(argv, again)
    assert_same_bits(load(whole / "final.pth"), load(again / "final.pth"))
    assert read_metrics(again, "result") == read_metrics(whole, "result")


# --- the training loss -------------------------------------------------------------------------------------------


def slow_ce(state, target, negatives, table):
    return F.cross_entropy(table[1:] @ state, torch.tensor(target - 1))


LOSS_SETTINGS = {
    "ce": {},
    "bce": {},
    "sampled": {"num_negatives": 7},
    "gbce": {"num_negatives": 7, "gbce_calibration": 0.6},
}
SLOW_LOSSES = {"ce": slow_ce, "bce": slow_bce, "sampled": slow_sampled, "gbce": partial(slow_gbce, calibration=0.6)}
every_loss = pytest.mark.parametrize("loss", LOSS_SETTINGS)


def slow_loss(objective, batch, of_position):
    """User by user, without padding, position by position."""
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
def test_loss_is_the_one_asked_for_at_every_next_item(loss, cache_dir):
    task = make_task(cache_dir, loss=loss, mhc=False, **LOSS_SETTINGS[loss])
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
def test_usual_numbers_of_negatives(settings, negatives, cache_dir):
    batch = make_batch(make_task(cache_dir, **settings), index=range(20))
    assert batch["negatives"].shape == (20, *negatives)
    assert "negatives" not in make_batch(make_task(cache_dir))


# --- parts of a batch by length ----------------------------------------------------------------------------------


@every_loss
@pytest.mark.parametrize("mode", [{}, {"time": False, "mhc": False}], ids=["default", "neither"])
def test_parts_of_similar_length_equal_the_whole_batch(loss, mode, cache_dir, monkeypatch):
    task = make_task(cache_dir, loss=loss, **LOSS_SETTINGS[loss], **mode)
    objective, batch = make_objective(task), make_batch(task)
    assert len(list(by_length(batch))) == 4
    in_parts = loss_and_gradients(objective, batch)
    monkeypatch.setattr(seqrec, "_LENGTHS_PER_BATCH", 10**9)
    assert len(list(by_length(batch))) == 1
    assert_same(in_parts, loss_and_gradients(objective, batch))


@pytest.mark.parametrize("size", [1, 3, 7, 8, 9, 10, 34])
@pytest.mark.parametrize("loss", ["ce", "bce", "gbce"])
def test_parts_keep_every_sample_and_drop_only_padding(size, loss, cache_dir):
    batch = rows_of(make_batch(make_task(cache_dir, loss=loss)), slice(size))
    parts = list(by_length(batch))
    splits = size >= 8 and int(batch["length"].sum()) < 0.9 * batch["items"].numel()  # else it does not pay
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


@pytest.mark.parametrize("mode", [{}, {"time": False, "mhc": False}], ids=["default", "neither"])
def test_penalty_on_embeddings_counts_once_however_the_batch_is_split(mode, cache_dir):
    task = make_task(cache_dir, l2_emb=0.05, **mode)
    objective, batch = make_objective(task), make_batch(task)
    whole = loss_and_gradients(objective, batch)
    for bounds in ((0, 34), (0, 1, 34), (0, 5, 13, 34)):
        parts = [rows_of(batch, slice(a, b)) for a, b in pairwise(bounds)]
        assert_same(loss_and_gradients(objective, *parts), whole)
    objective.config.l2_emb = 0.0
    plain = loss_and_gradients(objective, batch)
    num_terms = batch["weight"].sum()
    tables = {name: p for name, p in objective.named_parameters() if p.dim() == 2 and is_embedding(name)}
    assert len(tables) == (5 if task.config.time else 2)
    penalty = sum(0.05 / 2 * table.square().sum() for table in tables.values())
    torch.testing.assert_close(whole[0] - plain[0], penalty * num_terms, rtol=1e-9, atol=0)
    for (name, p), a, b in zip(objective.named_parameters(), whole[1], plain[1], strict=True):
        torch.testing.assert_close(a - b, 0.05 * p * num_terms if name in tables else torch.zeros_like(p))


def is_embedding(name):
    return any(word in name for word in ("items.", "position_", "interval_"))


# --- evaluation --------------------------------------------------------------------------------------------------


def slow_place(scores, target, rivals):
    """The middle of the places that the target can take where its score is tied."""
    above = sum(scores[rival] > scores[target] for rival in rivals)
    tied = sum(scores[rival] == scores[target] for rival in rivals)
    return above + tied / 2


def slow_scores(run, split, mask_seen):
    """The protocol in words, one user at a time: last item = test, the one before = validation, the rest = history.

    For the test the validation item is history too. All items are ranked, or all that the user has not had, and the
    target with its 100 candidates.
    """
    held_back = {"val": 2, "test": 1}[split]
    dataset, maxlen = run.task.splits()[split], run.task.config.maxlen
    places = {"": [], "sampled_": []}
    for i, user in enumerate(dataset.users):
        history, target = ITEMS[user][:-held_back], ITEMS[user][-held_back]
        times = slow_scaled_times(TIMES[user])[:-held_back]
        shown = torch.tensor([history[-maxlen:]]), torch.tensor([min(len(history), maxlen)])
        with torch.no_grad():
            scores = run.objective.model(*shown, torch.tensor([times[-maxlen:]]))[0].tolist()
        everything = set(range(1, NUM_ITEMS + 1)) - {target}
        candidates = dataset.__getitems__(SampleKeys(np.array([i]), epoch=0))["candidates"][0].tolist()
        places[""].append(slow_place(scores, target, everything - set(history) if mask_seen else everything))
        places["sampled_"].append(slow_place(scores, target, candidates))
    return {
        f"{split}/{prefix}{kind}@{cutoff}": total / len(of_users)
        for prefix, of_users in places.items()
        for cutoff in CUTOFFS
        for kind, total in zip(KINDS, slow_metrics(of_users, cutoff), strict=True)
    }


@pytest.mark.parametrize(
    ("more", "mask_seen"),
    [
        ([], True),
        (["--no-time", "--no-mhc", "--no-mask-seen", "--eval-negatives", "clean"], False),
        (["--no-mhc", "--maxlen", "50"], True),
    ],
)
def test_metrics_equal_the_protocol_user_by_user_with_any_batch(more, mask_seen, argv):
    expected = None
    for size in (1, 7, 512):
        run = assembled(argv, *more, "--eval-batch-size", str(size))
        for parameter in run.objective.parameters():  # the initial model of a small width hardly tells users apart
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)).double()
        run.objective.eval()
        if expected is None:
            expected = slow_scores(run, "val", mask_seen) | slow_scores(run, "test", mask_seen)
            assert len(run.task.splits()["val"]) == sum(len(row) >= 3 for row in ITEMS) < NUM_USERS
            assert 0 < expected["val/hr@20"] < 1 and 0 < expected["test/sampled_ndcg@10"] < 1
        metrics = run.metrics("val", evaluate(run, "val")) | run.metrics("test", evaluate(run, "test"))
        assert metrics.keys() == expected.keys()
        assert metrics == pytest.approx(expected, abs=1e-12)


def test_the_data_has_the_cases_that_matter(argv):
    evaluated = [row for row in ITEMS if len(row) >= 3]
    for held_back in (1, 2):
        assert any(row[-held_back] in row[:-held_back] for row in evaluated)  # which a mask must not remove
    assert any(len(set(row[:-2])) > 6 for row in evaluated)  # seen, but beyond --maxlen
    val = make_batch(assembled(argv).task, "val", range(len(evaluated)))
    assert (val["candidates"] == val["target"].unsqueeze(1)).any()  # a tie with itself


# --- the command line --------------------------------------------------------------------------------------------


def run_main(argv, directory, *more):
    assert main([*argv, "--save-dir", str(directory), *more], several_devices=False) == 0
    return json.loads((directory / "results.json").read_text())


def assert_complete(results, directory):
    """All 24 metrics, which make sense, and the best by the one that selects."""
    metrics = results["metrics"]
    assert set(metrics) == {f"test/{name}" for name in METRICS}
    assert all(0 <= value <= 1 for value in metrics.values())
    for protocol in ("test/", "test/sampled_"):
        for cutoff in CUTOFFS:
            hr, ndcg, mrr = (metrics[f"{protocol}{kind}@{cutoff}"] for kind in KINDS)
            assert mrr <= ndcg <= hr
    epochs = read_metrics(directory, "epoch")
    assert results["best"]["monitor"] == "val/ndcg@10"
    assert results["best"]["value"] == max(record["val/ndcg@10"] for record in epochs)
    assert {f"val/{name}" for name in METRICS} <= epochs[0].keys()
    assert np.isfinite(epochs[-1]["train/loss"])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_trains_with_every_loss(mode, loss, argv, tmp_path, signals_restored):
    results = run_main(argv, tmp_path, *MODES[mode], "--loss", loss, *LOSSES[loss])
    assert_complete(results, tmp_path)


@pytest.mark.parametrize(
    ("mode", "kind", "connection"),
    [
        ("default", TiSASRec, HyperConnection),
        ("no time", SASRec, HyperConnection),
        ("no mhc", TiSASRec, Residual),
        ("neither", SASRec, Residual),
    ],
)
def test_modes_are_the_models_that_they_say(mode, kind, connection, argv):
    model = assembled(argv, *MODES[mode]).objective.model
    assert type(model) is kind
    for block in model.blocks:
        assert type(block.attention_connection) is type(block.feed_forward_connection) is connection


def test_flags_of_the_model_reach_it(argv):
    more = "--num-blocks 3 --dropout 0.3 --mhc-expansion-rate 3 --mhc-init-gate 0.05 --mhc-no-amp".split()
    model = assembled(argv, *more).objective.model
    assert (len(model.blocks), model.maxlen, model.time_span) == (3, 6, 9)
    assert model.items.weight.shape == (NUM_ITEMS + 1, 8)
    attention, connection = model.blocks[1].attention, model.blocks[1].attention_connection
    assert (attention.projections.num_heads, attention.dropout.p, model.dropout.p) == (2, 0.3, 0.3)
    assert (connection.num_iterations, connection.in_full_precision) == (3, True)
    assert len(connection.post.bias) == 3 and connection.post.gate.item() == pytest.approx(0.05)
    orders = ["original", "pre", "post"]
    built = [assembled(argv, "--no-mhc", "--norm", order).objective.model for order in orders]
    assert [model.blocks[0].attention_connection.order for model in built] == orders
    assert assembled(argv, "--no-mhc").objective.model.blocks[0].attention_connection.order == "original"


def test_mixed_precision_trains(argv, tmp_path, signals_restored):
    for loss in LOSSES:
        results = run_main(argv, tmp_path / loss, "--loss", loss, *LOSSES[loss], "--amp", "bf16")
        assert_complete(results, tmp_path / loss)


def test_optimizer_has_the_published_memory_and_no_decay(argv):
    groups = assembled(argv).optimizers["train"].param_groups
    assert all(group["betas"] == (0.9, 0.98) and group["weight_decay"] == 0 for group in groups)


# --- several devices ---------------------------------------------------------------------------------------------

EXACT = ["--dropout", "0", "--dtype", "float64", "--global-batch-size", "16", "--epochs", "2", "--lr", "0.01"]


@pytest.mark.slow
def test_two_processes_equal_one(argv, command, tmp_path, signals_restored):
    same = [*argv, *EXACT, "--l2-emb", "0.01"]
    one = run_main(same, tmp_path / "one")
    other_split = ("--device", "cpu", "--batch-size", 5, "--eval-batch-size", 4, "--save-dir", tmp_path / "two")
    command(*launcher(2), *same, *other_split)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert_complete(two, tmp_path / "two")
    assert two["world_size"] == 2
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-9)
    assert largest_difference(*(load(tmp_path / name / "final.pth") for name in ("one", "two"))) < 1e-8


@pytest.mark.parametrize("more", [["--l2-emb", "0.01"], ["--loss", "bce", "--no-mhc"], ["--loss", "gbce", "--no-time"]])
def test_replicas_equal_one_device(more, argv, tmp_path):
    """Whole batches in parts by length on one device, small ones in one part on the replicas."""
    one, test_one = trained(SingleDevice(CPU), tmp_path / "one", *argv, *EXACT, *more)
    many, test_many = trained(ReplicasOnCpu(2), tmp_path / "many", *argv, *EXACT, *more, "--batch-size", "3")
    assert largest_difference(one, many) < 1e-8
    assert test_many == pytest.approx(test_one, abs=1e-9)


# --- bad input ---------------------------------------------------------------------------------------------------


@pytest.fixture
def refused(capsys, tmp_path, cache_dir):
    """A command line that must be refused with one line for each part, and write nothing."""

    def run(parts, *args):
        argv = ["--task", "seqrec", "--cache-dir", str(cache_dir), "--num-threads", "1", "--save-dir"]
        assert main([*argv, str(tmp_path / "run"), *map(str, args)], several_devices=False) == 2
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == len(parts), lines
        for part in parts:
            assert any(line.startswith("error: ") and part in line for line in lines), (part, lines)
        assert not (tmp_path / "run").exists()

    return run


def test_mistakes_are_shown_together(refused, tmp_path):
    refused(
        [
            f"--data-dir {tmp_path / 'missing'}: no such file or folder",
            "--num-heads 4: must divide --hidden-units 50",
            "--norm post: hyper-connections need pre; add --no-mhc",
            "--num-negatives 5: --loss ce has no use for it",
            "--gbce-calibration 2: ",
        ],
        *("--data-dir", tmp_path / "missing", "--hidden-units", 50, "--num-heads", 4, "--norm", "post"),
        *("--num-negatives", 5, "--gbce-calibration", 2),
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("--norm original", "--norm original: hyper-connections need pre"),
        ("--loss bce --num-negatives 2", "--num-negatives 2: --loss bce has no use for it"),
        ("--loss softmax", "--loss softmax: must be one of ce, bce, sampled, gbce"),
        ("--mhc-expansion-rate 1", "--mhc-expansion-rate 1: "),
        ("--l2-emb -1", "--l2-emb -1: "),
        ("--k-core 1000", "--k-core 1000: nothing of "),
    ],
)
def test_one_mistake(args, part, refused, data_file):
    refused([part], "--data-dir", data_file, *args.split())


@pytest.mark.parametrize(
    ("text", "args", "part"),
    [
        ("a 1\na 2\na 3\n", "--k-core 0", "has no times, which TiSASRec needs; add --no-time"),
        ("a 1 10\na 2 20\na 3 noon\n", "", "line 3: 'a 3 noon': 'noon' is not a time in seconds"),
        ("a 1 10\na 2\n", "", "line 2: 'a 2': 2 columns instead of 3"),
        ("", "", "is empty"),
        ("a 1 10\na 2 20\nb 1 5\nb 3 5\n", "--k-core 0", "its data set 'val' is empty"),
        ("a 1 1\na 2 2\na 3 3\na 4 4\n", "--k-core 0 --eval-negatives clean", "--eval-negatives clean: "),
        ("a 1 1\na 2 2\na 1 3\na 2 4\n", "--k-core 0", "one user leaves 0 of the 2 items"),
    ],
)
def test_unusable_data(text, args, part, refused, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text(text)
    refused([part], "--data-dir", path, *args.split())


def test_data_without_times_trains_without_them(argv, data_file, tmp_path, signals_restored):
    path = tmp_path / "pairs.txt"
    path.write_text("".join(" ".join(line.split()[:2]) + "\n" for line in data_file.read_text().splitlines()))
    results = run_main(argv, tmp_path / "run", "--data-dir", str(path), "--no-time")
    assert_complete(results, tmp_path / "run")


# --- learning ----------------------------------------------------------------------------------------------------


def popularity_ndcg_at_10(task):
    """Of ranking by how often an item is trained on, among what the user has not had."""
    train, val = (task.splits()[name] for name in ("train", "val"))
    batch = train.__getitems__(SampleKeys(np.arange(len(train)), epoch=0))
    trained_on = np.concatenate([batch["items"][:, 0], batch["targets"].ravel()])
    count = np.bincount(trained_on, minlength=task.num_items + 1)
    batch = val.__getitems__(SampleKeys(np.arange(len(val)), epoch=0))
    scores = torch.from_numpy(np.tile(count.astype(np.float64), (len(val), 1)))
    target = torch.from_numpy(batch["target"]).unsqueeze(1)
    of_target = scores.gather(1, target).squeeze(1)
    removed = torch.cat([torch.from_numpy(batch["seen"]), target, torch.zeros_like(target)], dim=1)
    place = place_of_target(of_target, scores.scatter_(1, removed, -torch.inf))
    return float(ranking_metrics(place, (10,))[1, 0] / len(val))


@pytest.mark.slow
def test_time_tells_more_than_order_and_both_more_than_popularity(cache_dir, tmp_path, signals_restored):
    """On the generated catalogue with the default training: popularity < SASRec < TiSASRec, plain and with mHC."""
    found = {}
    for mode in MODES:
        argv = ["--task", "seqrec", "--cache-dir", str(cache_dir), "--eval-every", "10", *MODES[mode]]
        found[mode] = run_main(argv, tmp_path / mode)["metrics"]["test/ndcg@10"]
    assert 3 * popularity_ndcg_at_10(make_task(cache_dir, maxlen=10**3)) < found["neither"]
    assert found["neither"] + 0.02 < found["no mhc"]
    assert found["no time"] + 0.02 < found["default"]


def test_a_short_training_beats_popularity_clearly(cache_dir, tmp_path, signals_restored):
    popularity = popularity_ndcg_at_10(make_task(cache_dir, maxlen=10**3))
    argv = [
        "--task", "seqrec", "--no-time", "--no-mhc", "--cache-dir", str(cache_dir), "--num-threads", "1",
        "--epochs", "3", "--eval-every", "3", "--batch-size", "32", "--lr", "0.005", "--dropout", "0.1",
        "--maxlen", "20", "--hidden-units", "32", "--num-blocks", "1",
    ]  # fmt: skip
    best = run_main(argv, tmp_path)["best"]["value"]
    assert 0.02 < popularity < 0.5 * best
