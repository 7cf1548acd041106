"""Tests activation checkpointing of blocks on simulated GPUs."""

import pytest

from tests.gpu.runs import assert_same, run
from tests.gpu.test_ranks import PIECES
from tests.helpers.simulated_gpu import on_simulated_gpus


@pytest.mark.slow
@pytest.mark.parametrize("several", [False, True], ids=["one", "three"])
@on_simulated_gpus(3)
def test_checkpointed_blocks_match_the_cpu(several, tmp_path, cache_dir):
    more = ["--multi-gpu", "dp"] if several else ["--device", "cuda"]
    run(cache_dir, *PIECES, *more, "--grad-checkpointing", "--save-dir", tmp_path / "gpu", several=several)
    run(cache_dir, *PIECES, "--device", "cpu", "--save-dir", tmp_path / "cpu")
    assert_same(tmp_path / "gpu", tmp_path / "cpu")
