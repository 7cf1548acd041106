"""The profiling library measures known times, and leaves the model unchanged."""

import json
import math
import random
import re
import time

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from profiler import PerformanceProfiler, compare_amp_performance
from tests.helpers.sleepy_task import Rest


class Resting(nn.Module):
    """Sleeps in forward, also per sample, and in backward."""

    def __init__(self, forward_s=0.0, backward_s=0.0, per_sample_s=0.0):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.seconds = forward_s, backward_s, per_sample_s

    def forward(self, x):
        forward_s, backward_s, per_sample_s = self.seconds
        time.sleep(forward_s + per_sample_s * len(x))
        return Rest.apply(self.linear(x), backward_s)


class Sums(nn.Module):
    """Returns sums for a batch that is a dictionary, as Lockstep's objectives do."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, batch):
        return {"loss": F.cross_entropy(self.linear(batch["x"]), batch["y"], reduction="sum"), "n": torch.ones(1)}


def loader(kind, num_batches=3, size=4):
    for _ in range(num_batches):
        x, y = torch.randn(size, 3), torch.randint(2, (size,))
        yield {"tensor": x, "mapping": {"x": x, "y": y}, "pair": (x, y)}[kind]


def quick(model, batches, **options):
    return PerformanceProfiler(model, batches, **{"repeats": 5, "warm_up": 1, **options})


def test_sleep_in_forward_is_attributed_to_forward():
    profiler = quick(Resting(forward_s=0.02), loader("tensor"))
    forward, backward = profiler.profile_forward_pass(), profiler.profile_backward_pass()
    assert 20 <= forward["forward_ms_p10"] <= forward["forward_ms_median"] <= forward["forward_ms_p90"]
    assert forward["inference_ms_median"] >= 20
    assert forward["samples_per_second"] == pytest.approx(4e3 / forward["forward_ms_median"])
    assert backward["backward_ms_p10"] < 10
    assert backward["forward_backward_ms_p10"] >= 20


def test_sleep_in_backward_is_attributed_to_backward():
    profiler = quick(Resting(backward_s=0.02), loader("tensor"))
    assert profiler.profile_forward_pass()["forward_ms_p10"] < 10
    backward = profiler.profile_backward_pass()
    assert 20 <= backward["backward_ms_median"] <= backward["forward_backward_ms_median"]


@pytest.mark.parametrize(("kind", "model", "loss"), [
    ("tensor", nn.Linear(3, 2), None),
    ("mapping", Sums(), None),
    ("pair", nn.Linear(3, 2), F.cross_entropy),
    ("pair", nn.Linear(3, 2), None),
])  # fmt: skip
def test_a_full_profile_supports_every_kind_of_batch(kind, model, loss, tmp_path):
    profiler = quick(model, loader(kind), loss=loss, repeats=2)
    with profiler.timer("augmentation"):
        time.sleep(0.01)
    report = profiler.run_full_profile(tmp_path / "profile.json")
    assert json.loads((tmp_path / "profile.json").read_text()) == report
    assert report["environment"]["device"] == "cpu"
    assert report["forward"]["batch_size"] == report["backward"]["batch_size"] == 4
    assert [row["batch_size"] for row in report["batch_sizes"]["batch_sizes"]] == [2, 4, 8, 16]
    assert report["timings"]["augmentation"]["ms_median"] >= 10
    assert report["timings"]["augmentation"]["count"] == 1
    found = [item for part in ("forward", "backward", "memory") for item in report[part].items()]
    numbers = [value for name, value in found if name != "loss"]
    assert all(math.isfinite(value) and value >= 0 for value in numbers)


def test_a_full_profile_creates_the_folder_of_its_file(tmp_path):
    path = tmp_path / "deep" / "missing" / "profile.json"
    report = quick(nn.Linear(3, 2), loader("tensor"), repeats=1).run_full_profile(path)
    assert json.loads(path.read_text()) == report


def test_a_full_profile_that_cannot_be_written_is_refused_before_measuring(tmp_path):
    (tmp_path / "file").touch()
    batches = loader("tensor")
    with pytest.raises(NotADirectoryError, match=re.escape(f"'{tmp_path / 'file'}'")):
        quick(nn.Linear(3, 2), batches).run_full_profile(tmp_path / "file" / "profile.json")
    assert len(list(batches)) == 3  # all batches remain, so none was read


def test_counted_memory_equals_the_tensors_sizes():
    second = nn.Linear(512, 512, bias=False)
    model = nn.Sequential(nn.Linear(1024, 512, bias=False), nn.BatchNorm1d(512, affine=False), second)
    memory = quick(model, [torch.randn(256, 1024)]).profile_memory()
    assert memory["parameters_mib"] == memory["gradients_mib"] == 3
    assert memory["buffers_mib"] == pytest.approx((2 * 512 * 4 + 8) / 2**20)
    # The values are the inputs of the three layers, and a few numbers for each feature.
    assert memory["saved_for_backward_mib"] == pytest.approx(1 + 0.5 + 0.5, rel=0.02)
    assert memory["peak_memory_mib"] > 50


def test_warm_up_steps_are_not_measured():
    class SlowAtFirst(nn.Linear):
        calls = 0

        def forward(self, x):
            self.calls += 1
            time.sleep(0.03 if self.calls <= 2 else 0)
            return super().forward(x)

    def longest(method):
        profiler = quick(SlowAtFirst(3, 2), loader("tensor"), warm_up=2, repeats=2)
        return max(value for name, value in getattr(profiler, method)().items() if name.endswith("_p90"))

    assert longest("profile_forward_pass") < 20 and longest("profile_backward_pass") < 20


def test_batch_sizes_are_compared_by_samples_per_second():
    """A forward pass takes 8 ms and 1 ms per sample, so larger batches are faster."""
    profiler = quick(Resting(forward_s=0.008, per_sample_s=0.001), loader("tensor"), repeats=3)
    result = profiler.benchmark_batch_sizes([2, 16])
    two, sixteen = result["batch_sizes"]
    assert 10 <= two["forward_backward_ms_p10"] < 24 <= sixteen["forward_backward_ms_p10"]
    assert result["fastest_batch_size"] == result["largest_batch_size"] == 16


@pytest.mark.parametrize("error", [
    torch.OutOfMemoryError("no room"),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory"),
])  # fmt: skip
def test_a_batch_that_does_not_fit_is_reported(error):
    class Small(nn.Linear):
        def forward(self, x):
            if len(x) > 8:
                raise error
            return super().forward(x)

    result = quick(Small(3, 2), loader("tensor")).benchmark_batch_sizes([4, 8, 16])
    assert [row["fits"] for row in result["batch_sizes"]] == [True, True, False]
    assert result["largest_batch_size"] == 8


def test_other_failures_are_not_reported_as_out_of_memory():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        quick(nn.Linear(4, 2), loader("tensor")).benchmark_batch_sizes([4])


def state_of(model):
    gradients = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    return {
        "weights": [value.clone() for value in model.state_dict().values()],
        "gradients": gradients,
        "modes": [module.training for module in model.modules()],
        "torch": torch.get_rng_state(),
        "numpy": torch.from_numpy(np.random.get_state()[1].copy()),
        "python": random.getstate(),
    }


def same(a, b):
    if isinstance(a, list):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_measuring_does_not_change_the_model():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 2))
    model[1].eval()
    model(torch.randn(5, 3)).sum().backward()
    model[0].bias.grad = None
    own_gradient = model[0].weight.grad
    batches = list(loader("pair"))

    class Drawing(list):
        def __iter__(self):
            for batch in super().__iter__():
                random.random(), np.random.random(), torch.rand(1)
                yield batch

    before = state_of(model)
    quick(model, Drawing(batches), loss=F.cross_entropy, repeats=2).run_full_profile()
    compare_amp_performance(model, Drawing(batches), loss=F.cross_entropy, repeats=2, warm_up=1)
    after = state_of(model)
    assert [name for name in before if not same(before[name], after[name])] == []
    assert model[0].weight.grad is own_gradient


def test_a_failing_model_leaves_no_change():
    class Failing(nn.BatchNorm1d):
        def forward(self, x):
            super().forward(x)
            raise ArithmeticError

    model = Failing(3).eval()
    before = state_of(model)
    with pytest.raises(ArithmeticError):
        quick(model, loader("tensor")).profile_forward_pass()
    assert same(before["weights"], state_of(model)["weights"])
    assert not model.training


def test_amp_is_compared_on_the_same_batches():
    seen = []

    class Watched(nn.Linear):
        def forward(self, x):
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().forward(x)

    found = compare_amp_performance(Watched(3, 2), loader("pair"), loss=F.cross_entropy, repeats=2, warm_up=1)
    assert seen == [False, True] * 3
    assert found.keys() == {"float32", "bf16"}
    assert 0 < found["bf16"]["loss_relative_difference"] < 0.05
    ratio = found["float32"]["forward_backward_ms_median"] / found["bf16"]["forward_backward_ms_median"]
    assert found["bf16"]["speedup"] == pytest.approx(ratio)


class Detached(nn.Linear):
    def forward(self, x):
        return super().forward(x).detach()


class Named(nn.Linear):
    def forward(self, x):
        return {"output": super().forward(x)}


def test_errors_of_the_caller_are_named():
    with pytest.raises(ValueError, match="yields no batch"):
        quick(nn.Linear(3, 2), []).profile_forward_pass()
    with pytest.raises(TypeError, match="pass a loss function"):
        quick(Detached(3, 2), loader("tensor")).profile_backward_pass()
    with pytest.raises(TypeError, match=r"model's dict: return a \"loss\" entry, or pass a loss function with bat"):
        quick(Named(3, 2), loader("tensor")).profile_backward_pass()
    with pytest.raises(TypeError, match=r"\(inputs, targets\), not a dict"):
        quick(Sums(), loader("mapping"), loss=F.cross_entropy).profile_backward_pass()
    with pytest.raises(TypeError, match=r"a batch must be \(inputs, targets\), not a Tensor"):
        quick(nn.Linear(3, 2), loader("tensor"), loss=F.cross_entropy).profile_backward_pass()
    with pytest.raises(ValueError, match="at least 1"):
        quick(nn.Linear(3, 2), loader("tensor")).benchmark_batch_sizes([0])


@pytest.mark.parametrize("method", ["profile_backward_pass", "profile_memory"])
@pytest.mark.parametrize("loss", [None, F.cross_entropy])
def test_a_model_without_parameters_to_train_is_refused(method, loss):
    profiler = quick(nn.Linear(3, 2).requires_grad_(False), loader("pair"), loss=loss)
    with pytest.raises(ValueError, match="the Linear has no parameter to train"):
        getattr(profiler, method)()


def test_an_empty_first_batch_is_refused():
    with pytest.raises(ValueError, match="first batch is empty"):
        quick(nn.Linear(3, 2), loader("tensor", size=0)).run_full_profile()
    with pytest.raises(ValueError, match="first batch is empty"):
        quick(nn.Linear(3, 2), loader("tensor", size=0)).benchmark_batch_sizes([4])
