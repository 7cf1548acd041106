"""Tests every built-in task on one simulated GPU, on the second of several, and on three."""

import numpy as np
import pytest
import torch

from tests.gpu.runs import EXACT, assert_same, run
from tests.gpu.test_graphs import learns_the_same, told
from tests.helpers import small_catalogue, small_seqrec, small_speech, small_table
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from trainer.commands.build import build_task
from trainer.commands.loaders import build_loaders
from trainer.commands.parse import parse
from trainer.loading.batches import gathered
from trainer.loading.on_device import DeviceLoader, moved
from trainer.loading.order import SampleKeys, evaluation_keys
from trainer.loading.workers import Workers

SEQREC = ["--task", "seqrec", *small_seqrec.SMALL, "--k-core", 0, "--dropout", 0, "--max-steps", 3]
KGAT = ["--task", "kgat", "--model", "kgat", "--ks", 2, 5, "--epochs", 1, "--lr", 0.01, "--dropout", 0,
        "--embed-dim", 8, "--layer-dims", 8, 4, "--relation-dim", 5]  # fmt: skip
HAR = ["--task", "har", "--data-on", "host"]  # a GPU rounds its random numbers, and audio features, differently
SPEECH = ["--task", "speech", "--data-on", "host", "--dropout", 0, "--max-steps", 3]
WORKLOADS = {
    "har": [*HAR, "--mode", "first", "--hidden-dims", 8, "--dropout", 0, "--max-steps", 3],
    "seqrec": [*SEQREC, *small_seqrec.MHC],
    "kgat": KGAT,
    "speech": [*SPEECH, *small_speech.SMALL],
    "tabular": ["--task", "tabular", *small_table.SMALL_PRIOR, *small_table.SMALL_MODEL, "--max-steps", 3],
}
VARIANTS = {
    "har tinyhar": [*HAR, "--model", "tinyhar", "--max-steps", 2, "--dropout", 0],
    "har deepconvlstm": [*HAR, "--model", "deepconvlstm", "--max-steps", 2, "--dropout", 0],
    "seqrec bce": [*SEQREC, "--loss", "bce", "--no-time"],
    "seqrec gbce": [*SEQREC, "--loss", "gbce", "--num-negatives", 20, "--no-time"],
    "seqrec sampled": [*SEQREC, "--loss", "sampled", "--num-negatives", 20],
    "seqrec rules": ["--task", "seqrec", "--k-core", 0, "--maxlen", 6, "--model", "rules"],
    "kgat bpr": [*KGAT, "--loss", "bpr"],
    "kgat deterministic": [*KGAT, "--deterministic"],
    "kgat itemknn": ["--task", "kgat", "--ks", 2, 5, "--model", "itemknn"],
    "speech strings": [*SPEECH, *small_speech.SMALL, "--strings", "1-3"],
    "speech lmu": [*SPEECH, *small_speech.SMALL_LMU],
    "speech streaming": [*SPEECH, *small_speech.SMALL, "--streaming", "--augmentation", 0],
}
GRAPH = ["--task", "kgat", "--model", "kgat", "--ks", 2, 5, "--lr", 0.01, "--embed-dim", 8, "--model"]
RECORDED = WORKLOADS | VARIANTS | {f"kgat {model}": [*GRAPH, model] for model in ("lightgcn", "kg-lightgcn", "bprmf")}
for name in ("seqrec rules", "kgat itemknn"):  # these models make no optimizer steps
    del RECORDED[name]
del RECORDED["kgat deterministic"], RECORDED["har deepconvlstm"]  # equal to "kgat" here; takes two minutes
DATA = {
    "seqrec": small_seqrec.write_interactions,
    "kgat": small_catalogue.write_catalogue,
    "speech": small_speech.write_digits,
}
FORMS = {
    "one": (["--device", "cuda"], False),
    "second": (["--device", "cuda:1"], False),
    "three": (["--multi-gpu", "dp", "--batch-size", 4], True),
}


def settings_of(name, tmp_path):
    domain = name.split()[0]
    data = ["--data-dir", DATA[domain](tmp_path / "data")] if domain in DATA else []
    return [*(WORKLOADS | VARIANTS)[name], *data, "--global-batch-size", 12]


def assert_learns_what_the_cpu_learns(name, tmp_path, cache_dir, forms):
    settings = [*settings_of(name, tmp_path), *EXACT]
    run(cache_dir, *settings, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    for form in forms:
        devices, several = FORMS[form]
        run(cache_dir, *settings, *devices, "--save-dir", tmp_path / form, several=several)
        assert_same(tmp_path / form, tmp_path / "cpu", 1e-7)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in ("har", "tabular") else []) for name in WORKLOADS]
)
@on_simulated_gpus(3)
def test_workloads_match_the_cpu(name, tmp_path, cache_dir):
    assert_learns_what_the_cpu_learns(name, tmp_path, cache_dir, ["second", "three"])


@on_simulated_gpus(1)
def test_padded_batches_have_few_lengths(cache_dir):
    argv = ["--task", "seqrec", "--maxlen", "200", "--cache-dir", str(cache_dir / "lockstep")]
    flags, _ = parse(argv, several_devices=False)
    task, widths = build_task(flags), {}
    for num_workers in (1, 0):
        loader = build_loaders(task, Workers(num_workers, for_gpu=True))["val"]
        own = [batch["items"].shape[1] for batch in loader(evaluation_keys(len(task.splits()["val"]), (0, 1), 16))]
        widths[num_workers] = [*own, loader.one(next(evaluation_keys(1, (0, 1), 1)))["items"].shape[1]]
        loader.close()
    assert widths[0] == widths[1] and set(widths[0]) <= set(range(16, 129, 16))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
@on_simulated_gpus(2)
def test_variants_match_the_cpu(name, tmp_path, cache_dir):
    assert_learns_what_the_cpu_learns(name, tmp_path, cache_dir, ["one"])


@pytest.mark.slow
@pytest.mark.parametrize("amp", ["bf16", "fp16", "off"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", WORKLOADS)
@on_simulated_gpus(3)
def test_every_workload_trains_in_every_precision_and_form(name, form, amp, tmp_path, cache_dir):
    devices, several = FORMS[form]
    argv = [*settings_of(name, tmp_path), *devices, "--amp", amp, "--log-interval", 2, "--save-dir", tmp_path / "run"]
    run(cache_dir, *argv, several=several)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name != "seqrec")) for name in RECORDED]
)
@on_simulated_gpus(1, may_wait=True)
def test_captured_workloads_train_bit_identically(name, tmp_path, cache_dir):
    """`may_wait` is set because the host waits for a constant at each new length of speech."""
    domain = name.split()[0]
    more = [*RECORDED[name], "--eval-every-steps", 3, "--warmup-epochs", 0]
    more += ["--dropout", 0.1] if domain not in ("kgat", "tabular") else []
    more += ["--epochs", 3] if domain == "kgat" else ["--max-steps", 8]
    data = ["--data-dir", DATA[domain](tmp_path / "data")] if domain in DATA else []
    learns_the_same(tmp_path, cache_dir, *more, *data, "--global-batch-size", 12)
    assert GPUS.num_replays > 5 and told() == []


@pytest.mark.parametrize("name", ["seqrec", "seqrec bce", "kgat", "speech", "speech strings"])
@on_simulated_gpus(1)
def test_drawing_batches_on_a_gpu_does_not_block_the_host(name, tmp_path, cache_dir):
    arguments = [*map(str, settings_of(name, tmp_path)), "--cache-dir", str(cache_dir / "lockstep")]
    flags, problems = parse(arguments, several_devices=False)
    assert problems == []
    task, device = build_task(flags), torch.device("cuda")
    datasets = [*map(task.training_data, task.phases), task.splits()["val"]]
    for own, there in zip(datasets, moved(datasets, device), strict=True):
        keys = [SampleKeys(np.arange(i, i + 4) % len(own), epoch=2, few_lengths=True) for i in range(5)]
        loader = DeviceLoader([there], task.collate, device)
        loader.one(keys[0])  # the first batch checks the weights, which may wait
        before = len(GPUS.waits)
        batches = list(loader(keys))
        assert GPUS.waits[before:] == []
        for key, batch in zip(keys, batches, strict=True):
            expected = gathered(own, task.collate, key)
            assert batch.keys() == expected.keys() and batch["weight"].device.type == "cpu"
            for part, values in expected.items():
                closeness = 1e-6 if part == "audio" else 0.0
                torch.testing.assert_close(batch[part].cpu(), values, rtol=0, atol=closeness)
