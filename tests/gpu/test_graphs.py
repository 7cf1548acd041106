"""Tests that training with CUDA graphs is bit-identical to eager training, on simulated GPUs."""

import pytest
import torch
import torch.distributed as dist

from tests.conftest import TINY, assert_same_bits, load
from tests.gpu.runs import results, run
from tests.gpu.test_ranks import run_on_ranks
from tests.gpu.test_training import HELPERS, POISONED
from tests.helpers.simulated_gpu import GPUS, on_simulated_gpus
from trainer.loop import blocks, graphs, obstacles
from trainer.loop.capture import GraphPool, Packed
from trainer.loop.captured_steps import Passes, Snapshot
from trainer.loop.graphs import GraphedLearner
from trainer.loop.memory import free_memory

GRAPHS = ["--cuda-graphs", "on"]
PIECES = [
    "--task", f"{HELPERS / 'pieces_task.py'}:Pieces", "--epochs", 3, "--batch-size", 2, "--global-batch-size", 4,
    "--lr", 0.02, "--max-grad-norm", 0.3, "--ema-decay", 0.9, "--poisoned", "--on-nonfinite", "skip",
]  # fmt: skip
LONGER = [*TINY, "--epochs", 3]


def own(name):
    return ["--task", f"{HELPERS / 'captured_task.py'}:{name}", "--epochs", 6]


SETTINGS = {
    "float32 with dropout": [*LONGER, "--amp", "off", "--dropout", 0.3],
    "bf16 and an average": [*LONGER, "--ema-decay", 0.9],
    "fp16": [*LONGER, "--amp", "fp16"],
    "accumulation": [*LONGER, "--batch-size", 3, "--grad-accum-steps", 3, "--max-grad-norm", 0],
    "sgd": [*LONGER, "--amp", "off", "--optimizer", "sgd", "--momentum", 0.9],
    "skipped steps": [*LONGER, *POISONED, "--epochs", 4, "--on-nonfinite", "skip", "--batch-norm", "--ema-decay", 0.9],
    "two phases": [*PIECES, "--amp", "off"],
    "parts": [
        *LONGER, *POISONED, "--epochs", 4, "--on-nonfinite", "skip", "--batch-norm", "--batch-size", 4, "--parts", 2,
    ],
    "batch norm, and a parameter without a gradient": own("Plain"),
    "a constant that a cache drops": own("CachingTask"),
    "an epoch's own number": [
        "--task", f"{HELPERS / 'refreshing_task.py'}:Refreshing", "--num-train", 24, "--epochs", 6,
    ],
    "a teacher that helps": ["--task", f"{HELPERS / 'distilling_task.py'}:Distil", "--epochs", 3],
    "a task that goes by its scores": [
        "--task", f"{HELPERS / 'told_task.py'}:Told", "--epochs", 4, "--optimizer", "adamw", "--schedule", "plateau",
    ],
    "weights changed after a step": own("AfterStep"),
    "a batch that the forward changes": [*own("Changing"), "--batch-size", 3, "--global-batch-size", 8],
    "what changes by epoch": ["--task", f"{HELPERS / 'captured_task.py'}:ChangingByEpoch", "--epochs", 4],
}  # fmt: skip


def learns_the_same(tmp_path, cache_dir, *argv, **options):
    for name, more in (("eager", []), ("graphed", GRAPHS)):
        run(cache_dir, *argv, "--device", "cuda", "--deterministic", "--save-dir", tmp_path / name, *more, **options)
    assert_same_bits(*(load(tmp_path / name / "last.pth") for name in ("eager", "graphed")))


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@on_simulated_gpus()
def test_graphs_train_bit_identically(settings, tmp_path, cache_dir):
    learns_the_same(tmp_path, cache_dir, *settings)
    assert GPUS.num_replays > 5
    assert set(told()) <= {OWN_STEP, OWN_STEP.replace("ClampedObjective", "Following")}


@on_simulated_gpus()
def test_a_part_trains_after_epochs_in_which_the_forward_freezes_it(tmp_path, cache_dir):
    """Python code that a graph does not repeat determines the first epoch that trains the part."""
    learns_the_same(tmp_path, cache_dir, "--task", f"{HELPERS / 'tuned_task.py'}:Tuned", "--epochs", 5)
    assert GPUS.num_replays > 3
    (line,) = told()
    assert "run without a graph: replays of a graph did not reproduce the gradient of model.trunk." in line


@on_simulated_gpus(may_wait=True)
def test_a_tasks_optimizer_runs_eagerly(tmp_path, cache_dir):
    """The optimizer makes the host wait. The second run detects this only when it captures the update."""
    learns_the_same(tmp_path / "known", cache_dir, *own("OwnOptimizer"))
    num_replays = GPUS.num_replays
    obstacles.can_be_captured = lambda optimizer: True
    learns_the_same(tmp_path / "unknown", cache_dir, *own("OwnOptimizer"))
    assert GPUS.num_replays > num_replays + 5 > 10
    opening = "CUDA graphs: updates run without a graph: "
    first, second = told()
    assert first == f"{opening}RMSprop is not a fused AdamW or Adam or SGD without hooks."
    assert "operation not permitted when stream is capturing (precision.py, line" in second.removeprefix(opening)


OBSTACLES = {
    "DrawingTask": "forward passes draw from the host's random generators",
    "DrawingByTorchTask": "forward passes draw from the host's random generators",
    "CountingTask": "forward passes change model.calls",
    "HookedTask": "hooks of model.first would not be called",
    "HookedLater": "hooks of model.first would not be called",
    "WaitingTask": "called a synchronizing CUDA operation (captured_task.py, line",
    "KeepingTask": "forward passes change model.kept",
    "Annealed": "a step replaces factor, but a graph would keep its old value",
    "RefusingTask": "nobody looks on (captured_task.py, line",
    "OwnRows": "gradients of sparse embeddings change size in every step",
    "PinningTask": "the captured code copies a tensor of shape (2,) from pinned memory, which may be reused",
    "FromHostTask": "operation not permitted when stream is capturing (captured_task.py, line",
}


OWN_STEP = "CUDA graphs: updates run without a graph: ClampedObjective has its own after_step."
SLOW = {"HookedLater", "CountingTask", "FromHostTask", "RefusingTask", "OwnRows"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in OBSTACLES])
@on_simulated_gpus(may_wait=True)
def test_steps_that_cannot_be_captured_run_eagerly(name, tmp_path, cache_dir):
    learns_the_same(tmp_path, cache_dir, *own(name))
    assert {line for line in told() if "CUDA graphs: updates run" not in line} == {OBSTACLES[name]}
    torch.cuda.empty_cache()  # raises an error if torch considers a capture to be active


def told():
    """Returns the obstacle that each printed line about CUDA graphs names, or the line itself if it names none."""
    lines = [line for line in GPUS.printed().splitlines() if "CUDA graphs: " in line]
    return [next((each for each in OBSTACLES.values() if each in line), line) for line in lines]


@on_simulated_gpus()
def test_a_number_frozen_by_a_capture_is_detected(tmp_path, cache_dir):
    run(cache_dir, "--task", f"{HELPERS / 'captured_task.py'}:CountingElsewhereTask", "--device", "cuda", *GRAPHS,
        "--save-dir", tmp_path)  # fmt: skip
    (line,) = told()
    assert "run without a graph: replays of a graph did not reproduce the gradient of model." in line


@on_simulated_gpus()
def test_each_epoch_starts_with_one_comparison(tmp_path, cache_dir):
    """Each graph is compared at its capture and once in the next epoch; later epochs compare only the first replay."""
    accumulate_and_compare, compared = GraphedLearner._accumulate_and_compare, []

    def noted(self, key, *rest):
        compared.append((self._progress.position.epoch, key[2][0]))
        return accumulate_and_compare(self, key, *rest)

    GraphedLearner._accumulate_and_compare = noted
    more = ["--batch-size", 3, "--grad-accum-steps", 2, "--epochs", 5, "--eval-every-steps", 3]
    learns_the_same(tmp_path, cache_dir, *TINY, *more)
    both = [False, True]  # whether earlier micro-batches of the step have left gradients
    assert compared == [(epoch, has) for epoch, its in enumerate((both, both, *[[False]] * 3)) for has in its]


@on_simulated_gpus()
def test_python_state_changed_between_epochs_is_detected_at_the_epochs_start(tmp_path, cache_dir):
    learns_the_same(tmp_path, cache_dir, "--task", f"{HELPERS / 'captured_task.py'}:ChangingElsewhere", "--epochs", 6)
    (line,) = told()
    assert "run without a graph: replays of a graph did not reproduce" in line and GPUS.num_replays > 5


@on_simulated_gpus()
def test_a_tensor_kept_outside_the_graph_is_detected(tmp_path, cache_dir):
    run(cache_dir, "--task", f"{HELPERS / 'captured_task.py'}:KeepingElsewhereTask", "--device", "cuda", *GRAPHS,
        "--save-dir", tmp_path)  # fmt: skip
    lines = [line for line in told() if "the captured code keeps a tensor of shape (8, 8)" in line]
    assert len(lines) == 2 and GPUS.num_replays == 0  # one about steps, one about evaluations


@on_simulated_gpus()
def test_resumes_from_eager_steps_with_graphs_and_back(tmp_path, cache_dir):
    """The runs resume in the middle of epochs of three steps."""
    more = [*TINY[:2], *TINY[4:], "--device", "cuda", "--ema-decay", 0.9, "--dropout", 0.2, "--deterministic",
            "--schedule", "constant", "--warmup-epochs", 0]  # fmt: skip
    run(cache_dir, *more, "--max-steps", 13, "--save-dir", tmp_path / "whole")
    for steps, choice in ((2, "off"), (7, "on"), (10, "off"), (13, "on")):
        run(cache_dir, *more, "--max-steps", steps, "--save-dir", tmp_path / "parts", "--cuda-graphs", choice)
    whole, parts = (load(tmp_path / name / "last.pth") for name in ("whole", "parts"))
    assert_same_bits(*({name: state[name] for name in ("model", "training_model", "optimizers")}
                       for state in (whole, parts)))  # fmt: skip


@on_simulated_gpus()
def test_evaluations_are_captured(tmp_path, cache_dir):
    """The task outputs sums and per-sample values, and evaluates averaged weights."""
    task = ["--task", f"{HELPERS / 'scored_task.py'}:Scored", "--eval-batch-size", 2, "--ema-decay", 0.9]
    learns_the_same(tmp_path, cache_dir, *task, "--epochs", 2)
    assert results(tmp_path / "eager") == results(tmp_path / "graphed")
    before = GPUS.num_replays
    run(cache_dir, *task, "--device", "cuda", "--eval-only", "--save-dir", tmp_path / "graphed", *GRAPHS)
    assert GPUS.num_replays > before


@on_simulated_gpus(2)
def test_ranks_train_bit_identically(tmp_path, cache_dir):
    for name, more in (("eager", []), ("graphed", GRAPHS)):
        (tmp_path / name).mkdir()
        run_on_ranks(tmp_path / name, cache_dir, *PIECES, "--num-threads", 1, *more)
    assert_same_bits(*(load(tmp_path / name / "ranks" / "last.pth") for name in ("eager", "graphed")))


@on_simulated_gpus(2)
def test_a_rank_that_alone_runs_eagerly_is_named(tmp_path, cache_dir):
    capture = Passes.capture

    def failing(self, *arguments):
        if self.strategy.group.rank == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return capture(self, *arguments)

    Passes.capture = failing
    run_on_ranks(tmp_path, cache_dir, *LONGER, *GRAPHS)
    assert told() == ["Rank 1: CUDA graphs: steps run without a graph: no memory for a graph."]


def lack_memory_in(name, after=Packed.after):
    """Makes the second "evaluation", "step" or "update" replay run out of memory, except on rank 0 of several."""
    replayed = []

    def lacking(self, replay):
        replayed.append("update" if "applied" in self._shapes else "step" if torch.is_grad_enabled() else "evaluation")
        on_rank_0 = dist.is_initialized() and dist.get_rank() == 0
        if on_rank_0 or replayed.count(name) != 2 or replayed[-1] != name:
            return after(self, replay)
        GPUS.limit_memory(GPUS.memory_in_use(1), 1)
        GPUS.limit_memory(GPUS.memory_in_use())
        try:
            return after(self, replay)
        finally:
            GPUS.limit_memory(2**34)
            GPUS.limit_memory(2**34, 1)

    Packed.after = lacking


@pytest.mark.parametrize("name", ["evaluation", "step", "update"])
@on_simulated_gpus()
def test_out_of_memory_drops_graphs_first(name, tmp_path, cache_dir):
    lack_memory_in(name)
    learns_the_same(tmp_path, cache_dir, *LONGER, "--amp", "fp16")
    assert GPUS.printed().count("Out of memory: continuing without CUDA graphs.") == 1


@on_simulated_gpus(2)
def test_a_rank_out_of_memory_continues_alone(tmp_path, cache_dir):
    lack_memory_in("step")
    argv = [*LONGER, *POISONED, "--on-nonfinite", "skip", "--batch-norm", "--batch-size", 4, "--global-batch-size", 8]
    for name, more in (("eager", []), ("graphed", GRAPHS)):
        (tmp_path / name).mkdir()
        run_on_ranks(tmp_path / name, cache_dir, *argv, *more)
    assert GPUS.printed().count("Rank 1: Out of memory: continuing without CUDA graphs.") == 1
    assert_same_bits(*(load(tmp_path / name / "ranks" / "last.pth") for name in ("eager", "graphed")))


@on_simulated_gpus()
def test_a_signature_is_captured_at_its_second_occurrence_only():
    pool, captured = GraphPool(torch.device("cuda", 0), most=2), []
    for key in "aabbccabcabc":
        if key not in pool and pool.is_wanted(key):
            pool[key] = key.upper()
            captured.append(key)
    assert captured == ["a", "b"] and len(pool) == 2
    pool.clear()
    assert all(pool.is_wanted(key) for key in "abc")


@on_simulated_gpus()
def test_a_capture_that_raises_frees_its_memory():
    pool = GraphPool(torch.device("cuda", 0), most=1)
    torch.ones(1, device="cuda")
    before = GPUS.memory_in_use()

    def work():
        torch.ones(2**20, device="cuda")
        raise ValueError("ends here")

    with pytest.raises(ValueError, match="ends here") as raised:
        pool.capture(work)
    del raised
    free_memory()
    assert GPUS.memory_in_use() == before


@pytest.mark.slow
@on_simulated_gpus(may_wait=True)
def test_out_of_memory_in_a_capture_leaves_no_trace(tmp_path, cache_dir):
    for owner, name in ((Snapshot, "__init__"), (Passes, "capture"), (Passes, "results"), (graphs, "capture_update")):
        function = getattr(owner, name)

        def lacking(*args, function=function):
            GPUS.limit_memory(GPUS.memory_in_use())
            try:
                return function(*args)
            finally:
                GPUS.limit_memory(2**34)

        setattr(owner, name, lacking)
        learns_the_same(tmp_path / f"{owner.__name__}.{name}", cache_dir, *LONGER, "--amp", "fp16")
        setattr(owner, name, function)
    assert GPUS.printed().count("without a graph: no memory for a graph.") == 4


@pytest.mark.slow
@on_simulated_gpus()
def test_compiled_code_is_captured(tmp_path, cache_dir):
    in_capture = []

    def backend(module, inputs):
        def compiled(*args):
            in_capture.append(torch.cuda.is_current_stream_capturing())
            return module(*args)

        return compiled

    blocks.BACKEND = backend
    learns_the_same(tmp_path, cache_dir, *LONGER, "--compile")
    assert any(in_capture) and GPUS.num_replays > 5
    assert "without a graph" not in GPUS.printed()


@on_simulated_gpus()
def test_alternating_captures_do_not_evict_each_other(tmp_path, cache_dir):
    graphs.MOST_GRAPHS = 2
    learns_the_same(tmp_path, cache_dir, "--task", f"{HELPERS / 'ragged_task.py'}:Ragged", "--epochs", 4,
                    "--batch-size", 4)  # fmt: skip
    assert GPUS.num_captures < 15 and GPUS.num_replays > 30
