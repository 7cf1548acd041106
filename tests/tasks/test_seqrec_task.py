"""Tests sequential recommendation on the command line: modes, several devices, mistakes, and learning."""

import json

import numpy as np
import pytest
import torch

from models.sequential.mhc import HyperConnection
from models.sequential.ranking import place_of_target, ranking_metrics
from models.sequential.sasrec import Residual, SASRec
from models.sequential.tisasrec import TiSASRec
from tests.conftest import ROOT, assert_same_bits, cut_back, largest_difference, launcher, load, read_metrics
from tests.helpers.replicas import ReplicasOnCpu, trained
from tests.helpers.small_seqrec import CPU, ITEMS, KINDS, MHC, NUM_ITEMS, assembled, make_task
from trainer.cli import main
from trainer.loading.order import SampleKeys
from trainer.parallel.strategy import SingleDevice

MODES = {"TiSASRec": [], "SASRec": ["--no-time"], "TiSASRec, mHC": MHC, "SASRec, mHC": ["--no-time", *MHC]}
LOSSES = {"ce": [], "bce": [], "sampled": ["--num-negatives", "9"], "gbce": ["--num-negatives", "9"]}
CUTOFFS = (1, 5, 10, 20)
METRICS = [f"{protocol}{kind}@{cutoff}" for protocol in ("", "sampled_") for kind in KINDS for cutoff in CUTOFFS]
METRICS += [f"{kind}@{cutoff}" for kind in ("coverage", "popularity") for cutoff in CUTOFFS]


def run_main(argv, directory, *more):
    assert main([*argv, "--save-dir", str(directory), *more], several_devices=False) == 0
    return json.loads((directory / "results.json").read_text())


def assert_complete(results, directory):
    """Asserts that all 32 metrics exist and are consistent, and that the monitored metric determines the best epoch."""
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
        ("TiSASRec", TiSASRec, Residual),
        ("SASRec", SASRec, Residual),
        ("TiSASRec, mHC", TiSASRec, HyperConnection),
        ("SASRec, mHC", SASRec, HyperConnection),
    ],
)
def test_modes_are_the_described_models(mode, kind, connection, argv):
    model = assembled(argv, *MODES[mode]).learner.objective.model
    assert type(model) is kind
    for block in model.blocks:
        assert type(block.attention_connection) is type(block.feed_forward_connection) is connection


def test_flags_of_the_model_reach_it(argv):
    more = "--num-blocks 3 --dropout 0.3 --mhc-expansion-rate 3 --mhc-init-gate 0.05 --mhc-no-amp".split()
    model = assembled(argv, *MHC, *more).learner.objective.model
    assert (len(model.blocks), model.maxlen, model.time_span) == (3, 6, 9)
    assert model.items.weight.shape == (NUM_ITEMS + 1, 8)
    attention, connection = model.blocks[1].attention, model.blocks[1].attention_connection
    assert (attention.projections.num_heads, attention.dropout.p, model.dropout.p) == (2, 0.3, 0.3)
    assert (connection.residual.num_iterations, connection.in_full_precision) == (3, True)
    assert len(connection.post.bias) == 3 and connection.post.gate.item() == pytest.approx(0.05)
    orders = ["original", "pre", "post"]
    built = [assembled(argv, "--norm", order).learner.objective.model for order in orders]
    assert [model.blocks[0].attention_connection.order for model in built] == orders
    assert assembled(argv).learner.objective.model.blocks[0].attention_connection.order == "original"


def test_whole_histories_are_predicted_once_an_epoch(argv):
    whole, last = (assembled(argv, *more).task.splits()["train"] for more in ([], ["--last-items-only"]))
    num_terms, of_last = (int(data.num_terms(np.arange(len(data))).sum()) for data in (whole, last))
    in_training = [len(row) - 2 if len(row) >= 3 else len(row) for row in ITEMS]
    assert num_terms == sum(in_training) - len(ITEMS) > of_last


@pytest.mark.parametrize("split", ["ratio", "time"])
def test_other_splits_and_cut_offs_work(split, argv, tmp_path, signals_restored):
    results = run_main(argv, tmp_path, "--split", split, "--val-share", "0.2", "--ks", "3", "7", "--eval-start")
    kinds = [*KINDS, *(f"sampled_{kind}" for kind in KINDS), "coverage", "popularity"]
    assert set(results["metrics"]) == {f"test/{kind}@{k}" for kind in kinds for k in (3, 7)}
    assert results["best"]["monitor"] == "val/ndcg@3" and 0 < results["metrics"]["test/coverage@3"] < 1


def test_mixed_precision_training_works(argv, tmp_path, signals_restored):
    for loss in LOSSES:
        results = run_main(argv, tmp_path / loss, "--loss", loss, *LOSSES[loss], *MHC, "--amp", "bf16")
        assert_complete(results, tmp_path / loss)


def test_optimizer_has_the_published_memory_and_no_decay(argv):
    groups = assembled(argv).learner.optimizers["train"][0].param_groups
    assert all(group["betas"] == (0.9, 0.98) and group["weight_decay"] == 0 for group in groups)
    groups = assembled(argv, "--betas", "0.8", "0.9").learner.optimizers["train"][0].param_groups
    assert all(group["betas"] == (0.8, 0.9) for group in groups)
    assert isinstance(assembled(argv, "--optimizer", "sgd").learner.optimizers["train"][0], torch.optim.SGD)


# --- resume ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "more",
    [MHC, ["--loss", "bce", "--no-time"], ["--loss", "sampled", "--num-negatives", "5", "--last-items-only"]],
    ids=["TiSASRec, mHC", "SASRec, bce", "TiSASRec, whole histories"],
)
def test_resumes_bit_identically(more, argv, tmp_path, signals_restored):
    """The run has dropout and drawn negatives, and resumes in the middle of the second epoch."""
    argv = [*argv, *more, "--epochs", "3", "--save-every-steps", "2", "--keep-checkpoints", "0"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    run_main(argv, whole)
    entries = json.loads((whole / "manifest.json").read_text())["checkpoints"]
    middle = next(i for i, entry in enumerate(entries) if entry["epoch"] == 1 and entry["samples"] > 0)
    cut_back(whole, entries[: middle + 1], again)
    run_main(argv, again)
    assert_same_bits(load(whole / "final.pth"), load(again / "final.pth"))
    assert read_metrics(again, "result") == read_metrics(whole, "result")


# --- several devices ---------------------------------------------------------------------------------------------

EXACT = ["--dropout", "0", "--dtype", "float64", "--global-batch-size", "16", "--epochs", "2", "--lr", "0.01"]


def write_small(path, item_of=lambda number: number):
    """Writes eight users with six of nine items each, one item per second."""
    rows = [(user, item_of((3 * user + day) % 9), 978300000 + day) for user in range(8) for day in range(6)]
    path.write_text("".join(f"{user} {item} {time}\n" for user, item, time in rows))


def test_changed_interactions_are_reported(run_here, tmp_path):
    """The other interactions have the same items and counts; another split of the same ones is reported too."""
    data, said = tmp_path / "data.txt", "The split into training and held-out data differs from the checkpoint"
    argv = ["--task", "seqrec", "--data-dir", data, "--hidden-units", 8, "--k-core", 0, "--num-threads", 1]
    argv += ["--epochs", 1, "--save-dir", tmp_path / "run"]
    write_small(data)
    assert said not in run_here(*argv)[0]
    assert said not in run_here(*argv, "--epochs", 2)[0]
    assert said in run_here(*argv, "--epochs", 3, "--split", "time")[0]
    write_small(data, item_of=lambda number: 8 - number)
    for more in (["--eval-only"], ["--epochs", 4]):
        assert said in run_here(*argv, *more)[0]


def test_many_negatives_from_few_items_cause_a_warning(make_task, tmp_path):
    data = tmp_path / "data.txt"
    write_small(data)
    argv = ["--task", "seqrec", "--data-dir", data, "--k-core", 0]
    said = "contain the true item 11.1 times on average. Use the metrics over all items"
    assert said in " ".join(make_task(*argv).remarks())
    assert said not in " ".join(make_task(*argv, "--eval-negatives", "unseen").remarks())
    assert "are unreliable" not in " ".join(make_task("--task", "seqrec").remarks())


def test_scoring_weights_with_other_flags_is_reported(run_here, tmp_path):
    data, run = tmp_path / "data.txt", tmp_path / "run"
    write_small(data)
    argv = ["--task", "seqrec", "--data-dir", data, "--hidden-units", 8, "--k-core", 0, "--num-threads", 1]
    argv += ["--save-dir", run]
    run_here(*argv, "--epochs", 1, "--no-mask-seen", "--seed", 3)
    out, _ = run_here(*argv, "--eval-only", "--seed", 0, "--no-mask-seen=false")
    assert "Changed since the checkpoint: --seed 3 -> 0\n" in out
    assert "Changed since the checkpoint: --no-mask-seen True -> False\n" in out
    out, _ = run_here(*argv, "--eval-only")
    assert f"From the run in {run}: --seed 3, --no-mask-seen\n" in out and "Changed since" not in out
    assert "Changed since" not in run_here("--config", run / "config.json", "--save-dir", run, "--eval-only")[0]
    out, _ = run_here(*argv, "--epochs", 1, "--lr", 0.5)
    assert "is finished" in out and "instead of 0.5" in out and "choose another --save-dir" in out


@pytest.mark.slow
def test_two_processes_equal_one(argv, command, tmp_path, signals_restored):
    same = [*argv, *EXACT, "--l2-emb", "0.01", *MHC]
    one = run_main(same, tmp_path / "one")
    other_split = ("--device", "cpu", "--batch-size", 5, "--eval-batch-size", 4, "--save-dir", tmp_path / "two")
    command(*launcher(2), *same, *other_split)
    two = json.loads((tmp_path / "two" / "results.json").read_text())
    assert_complete(two, tmp_path / "two")
    assert two["world_size"] == 2
    assert two["metrics"] == pytest.approx(one["metrics"], abs=1e-9)
    assert largest_difference(*(load(tmp_path / name / "final.pth") for name in ("one", "two"))) < 1e-8


@pytest.mark.parametrize("more", [["--l2-emb", "0.01", *MHC], ["--loss", "bce"], ["--loss", "gbce", "--no-time", *MHC]])
def test_replicas_equal_one_device(more, argv, tmp_path):
    """One device computes whole batches in parts by length, while the replicas compute small batches in one part."""
    one, test_one = trained(SingleDevice(CPU), tmp_path / "one", *argv, *EXACT, *more)
    many, test_many = trained(ReplicasOnCpu(2), tmp_path / "many", *argv, *EXACT, *more, "--batch-size", "3")
    assert largest_difference(one, many) < 1e-8
    assert test_many == pytest.approx(test_one, abs=1e-9)


# --- bad input ---------------------------------------------------------------------------------------------------

HEAD = "user item time\n"


@pytest.fixture
def refused(refused, tmp_path, cache_dir):
    """Returns a function that asserts that a command line is refused with one line per part and writes nothing."""

    def run(parts, *args):
        refused(parts, "--task", "seqrec", "--cache-dir", cache_dir, "--save-dir", tmp_path / "run", *args)
        assert not (tmp_path / "run").exists()

    return run


def test_errors_are_shown_together(refused, tmp_path):
    refused(
        [
            f"--data-dir {tmp_path / 'missing'}: no such file or folder",
            "--num-heads 4: must evenly divide --hidden-units 50",
            "--norm post: --mhc needs --norm pre; leave out --mhc or --norm",
            "--num-negatives 5: --loss ce does not use it",
            "--gbce-calibration 2: ",
        ],
        *("--data-dir", tmp_path / "missing", "--hidden-units", 50, "--num-heads", 4, "--norm", "post", "--mhc"),
        *("--num-negatives", 5, "--gbce-calibration", 2),
    )


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ("--mhc --norm original", "--norm original: --mhc needs --norm pre"),
        ("--gbce-calibration 0.1", "--gbce-calibration 0.1: --loss ce does not use it; leave it out"),
        ("--loss bce --num-negatives 2", "--num-negatives 2: --loss bce does not use it"),
        ("--val-share 0.2", "--val-share 0.2: --split leave-one-out does not use it; leave it out"),
        ("--split ratio --val-share 0.5 --test-share 0.5", "--val-share 0.5 and --test-share 0.5: leave no inter"),
        ("--split time --time-column none --no-time --k-core 0", "--split time: the interactions have no times; use"),
        ("--loss softmax", "--loss softmax: must be one of ce, bce, sampled, gbce"),
        ("--mhc --mhc-expansion-rate 1", "--mhc-expansion-rate 1: "),
        ("--mhc-init-gate 0.1", "--mhc-init-gate 0.1: does nothing without --mhc"),
        ("--l2-emb -1", "--l2-emb -1: "),
        ("--k-core 1000", "--k-core 1000: no interaction in "),
    ],
)
def test_one_error_is_named(args, part, refused, data_file):
    refused([part], "--data-dir", data_file, *args.split())


def test_column_flags_without_a_file_are_refused(refused):
    refused(["--user-column buyer: does nothing without --data-dir; add --data-dir"], "--user-column", "buyer")


@pytest.mark.parametrize(
    ("text", "args", "part"),
    [
        ("a 1\na 2\na 3\n", "--k-core 0", "has no times, but --model tisasrec needs times; use --model sasrec"),
        (f"{HEAD}a 1 10\na 2 20\na 3 noon\n", "", "line 4: 'a 3 noon': 'noon' is not a time"),
        (f"{HEAD}a 1 10\n", "--time-column at", "--time-column at: "),
        (
            f"{HEAD}a 1 10\na 2 20\nb 1 5\nb 3 5\n",
            "--k-core 0",
            "--split leave-one-out: no interaction in the validation set",
        ),
        (
            f"{HEAD}a 1 1\na 2 1\na 3 1\n",
            "--k-core 0 --split time",
            "--split time --val-share 0.1 --test-share 0.1: leaves ",
        ),
        (f"{HEAD}a 1 1\na 2 2\na 3 3\na 4 4\n", "--k-core 0 --eval-negatives clean", "--eval-negatives clean: "),
        (f"{HEAD}a 1 1\na 2 2\na 1 3\na 2 4\n", "--k-core 0", "a user with 4 interactions leaves only 0"),
    ],
)
def test_unusable_data_are_refused(text, args, part, refused, tmp_path):
    path = tmp_path / "data.txt"
    path.write_text(text)
    refused([part], "--data-dir", path, *args.split())


def test_data_without_times_trains_without_them(argv, data_file, tmp_path, signals_restored):
    path = tmp_path / "pairs.txt"
    path.write_text("".join(" ".join(line.split()[:2]) + "\n" for line in data_file.read_text().splitlines()[1:]))
    results = run_main(argv, tmp_path / "run", "--data-dir", str(path), "--no-time")
    assert_complete(results, tmp_path / "run")


# --- learning ----------------------------------------------------------------------------------------------------


def popularity_ndcg_at_10(task):
    """Returns NDCG@10 of a ranking by how often an item is trained on, without items that the user has had."""
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
def test_times_predict_better_than_order_and_order_better_than_popularity(cache_dir, tmp_path, signals_restored):
    """On the generated catalogue with default training, popularity < SASRec < TiSASRec, with and without mHC."""
    found = {}
    for mode in MODES:
        argv = ["--task", "seqrec", "--cache-dir", str(cache_dir), "--eval-every", "10", *MODES[mode]]
        found[mode] = run_main(argv, tmp_path / mode)["metrics"]["test/ndcg@10"]
    assert 3 * popularity_ndcg_at_10(make_task(cache_dir, maxlen=10**3)) < found["SASRec"]
    assert found["SASRec"] + 0.02 < found["TiSASRec"]
    assert found["SASRec, mHC"] + 0.02 < found["TiSASRec, mHC"]


@pytest.mark.parametrize(("preset", "kind"), [("sasrec", SASRec), ("tisasrec", TiSASRec)])
def test_published_settings_step_at_one_rate_without_clipping(preset, kind, argv, tmp_path, signals_restored):
    argv = ["--config", str(ROOT / "configs" / "seqrec" / f"{preset}_published.toml"), *argv]
    run = assembled(argv)
    assert type(run.learner.objective.model) is kind and run.learner.max_grad_norm == 0
    run_main(argv, tmp_path, "--epochs", "2", "--log-interval", "1")
    steps = read_metrics(tmp_path, "step")
    assert steps and {record["learning_rate"] for record in steps} == {0.001}


def test_a_short_run_clearly_beats_popularity(cache_dir, tmp_path, signals_restored):
    popularity = popularity_ndcg_at_10(make_task(cache_dir, maxlen=10**3))
    argv = [
        "--task", "seqrec", "--no-time", "--cache-dir", str(cache_dir), "--num-threads", "1",
        "--epochs", "3", "--eval-every", "3", "--batch-size", "32", "--lr", "0.005", "--dropout", "0.1",
        "--maxlen", "20", "--hidden-units", "32", "--num-blocks", "1",
    ]  # fmt: skip
    best = run_main(argv, tmp_path)["best"]["value"]
    assert 0.02 < popularity < 0.5 * best
