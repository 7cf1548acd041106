"""The examples run, and learn what they promise."""

import json

import pytest

GAN = ["--task", "examples/gan.py:Gan", "--num-threads", 1]


def test_the_gan_trains_both_halves_in_turns(run_here, tmp_path):
    run_here(*GAN, "--num-points", 1000, "--epochs", 2, "--log-interval", 4, "--save-dir", tmp_path)
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [record for record in records if record["event"] == "step"]
    assert [record["step"] for record in steps[:4]] == [4, 5, 8, 9]
    assert "train/generator/loss" in steps[0] and "train/discriminator/loss" in steps[1]
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["step"] == 2 * 2 * 8 and {"test/near", "test/spots"} == results["metrics"].keys()


@pytest.mark.slow
def test_the_gan_finds_all_modes(run_here, tmp_path):
    run_here(*GAN, "--save-dir", tmp_path)
    metrics = json.loads((tmp_path / "results.json").read_text())["metrics"]
    assert metrics["test/spots"] == 8 and metrics["test/near"] > 0.75
