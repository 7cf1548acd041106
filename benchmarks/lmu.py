"""Legendre Memory Units at the shape of permuted sequential MNIST, against forms that are easier to write.

    python benchmarks/lmu.py
    python benchmarks/lmu.py --hrshtv pytorch-lmu      # a clone of github.com/hrshtv/pytorch-lmu, which needs scipy

Forward and backward over 784 steps of one input with 212 hidden units and a memory of 256: processor time of one
thread, all forms in turns, medians of the times and of the ratios within a turn. The recurrent layer is compared with
a loop over the time steps, the parallel layer with that loop and with Fourier transforms that form the whole memory.
"""

import argparse
import importlib.util
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from models.speech.legendre import discrete_system, impulse_response
from models.speech.lmu import LMU
from models.speech.parallel_lmu import ParallelLMU

NUM_STEPS, HIDDEN, MEMORY = 784, 212, 256
REPEATS_OF_LAST = 30


class TimeLoop(nn.Module):
    """The equations of the recurrent layer one after the other in each step, left to autograd."""

    def __init__(self, lmu: LMU) -> None:
        super().__init__()
        self.lmu = lmu
        a, b = discrete_system(lmu.memory_size, lmu.theta, torch.float32)
        self.a, self.b = a, b[:, None]

    def forward(self, x: Tensor) -> Tensor:
        lmu, outputs = self.lmu, []
        h, m = x.new_zeros(len(x), HIDDEN), x.new_zeros(len(x), MEMORY)
        for x_t in x.unbind(1):
            u = F.linear(x_t, lmu.e_x) + F.linear(h, lmu.e_h) + F.linear(m, lmu.e_m)
            m = F.linear(m, self.a) + F.linear(u, self.b)
            h = torch.tanh(F.linear(x_t, lmu.w_x) + F.linear(h, lmu.w_h) + F.linear(m, lmu.w_m))
            outputs.append(h)
        return torch.stack(outputs, dim=1)


class WholeMemory(nn.Module):
    """The parallel layer with its memory at all steps, by Fourier transforms that are left to autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.output = nn.Linear(1, 1), nn.Linear(MEMORY + 1, HIDDEN)
        self.spectrum = torch.fft.rfft(impulse_response(MEMORY, NUM_STEPS, NUM_STEPS).float(), 2 * NUM_STEPS)

    def forward(self, x: Tensor) -> Tensor:
        u = self.encode(x).relu().mT
        m = torch.fft.irfft(torch.fft.rfft(u, 2 * NUM_STEPS) * self.spectrum, 2 * NUM_STEPS)[..., :NUM_STEPS].mT
        return self.output(torch.cat([m, x], dim=2)).relu()


def hrshtv_code(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("hrshtv_lmu", path / "src" / "lmu.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(forward: Callable[[Tensor], Tensor], x: Tensor, repeats: int) -> float:
    """Of one forward and backward: processor time, which programs beside this one disturb least."""
    started = time.process_time()
    for _ in range(repeats):
        forward(x).sum().backward()
    return (time.process_time() - started) / repeats


def measure(
    forms: dict[str, Callable[[Tensor], Tensor]], pairs: list[tuple[str, str]], batch_size: int, rounds: int
) -> dict[str, dict[str, float]]:
    """Milliseconds of each form, and of each pair how many times as fast the second is."""
    x = torch.rand(batch_size, NUM_STEPS, 1)
    turns = [
        {name: seconds(form, x, REPEATS_OF_LAST if "last" in name else 1) for name, form in forms.items()}
        for _ in range(rounds + 1)
    ][1:]
    times = {name: round(1e3 * statistics.median(turn[name] for turn in turns), 3) for name in forms}
    speedups = {
        f"{quick} against {slow}": round(statistics.median(turn[slow] / turn[quick] for turn in turns), 2)
        for slow, quick in pairs
    }
    return {"ms": times, "speedup": speedups}


def difference(code: ModuleType) -> dict[str, float]:
    """The largest in outputs and in gradients between hrshtv's cell and ours with equal weights, in float64."""
    torch.manual_seed(0)
    theirs, ours = code.LMU(3, 24, 16, 40).double(), LMU(3, 24, 16, 40).double()
    a, b = discrete_system(16, 40)
    names = {"e_x": "e_x", "e_h": "e_h", "e_m": "e_m", "W_x": "w_x", "W_h": "w_h", "W_m": "w_m"}
    with torch.no_grad():
        theirs.cell.e_m.normal_(std=0.1)
        for their_name, name in names.items():
            getattr(ours, name).copy_(getattr(theirs.cell, their_name))
        # Theirs are rounded to single precision.
        rounding = max((theirs.cell.A - a).abs().max(), (theirs.cell.B - b[:, None]).abs().max()).item()
        theirs.cell.A.copy_(a)
        theirs.cell.B.copy_(b[:, None])
    x, start = torch.randn(4, 100, 3, dtype=torch.float64), [torch.randn(4, n, dtype=torch.float64) for n in (24, 16)]
    outputs = [layer(x, tuple(start))[0] for layer in (theirs, ours)]
    for output in outputs:
        output.square().sum().backward()
    gradients = (
        (getattr(ours, name).grad - getattr(theirs.cell, their_name).grad).abs().max().item()
        for their_name, name in names.items()
    )
    return {
        "of matrices, rounded there": rounding,
        "of outputs": (outputs[0] - outputs[1]).abs().max().item(),
        "of gradients": max(gradients),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="turns that are counted, at batch 32 a third of them")
    parser.add_argument("--hrshtv", type=Path, help="clone of github.com/hrshtv/pytorch-lmu, to compare with")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)

    recurrent, parallel = LMU(1, HIDDEN, MEMORY, NUM_STEPS), ParallelLMU(1, HIDDEN, MEMORY, NUM_STEPS)
    forms: dict[str, Callable[[Tensor], Tensor]] = {
        "time loop": TimeLoop(recurrent),
        "recurrent": lambda x: recurrent(x)[0],
        "whole memory": WholeMemory(),
        "parallel": parallel,
        "parallel, last step": parallel.last,
    }
    pairs = [
        ("time loop", "recurrent"),
        ("time loop", "parallel"),
        ("whole memory", "parallel"),
        ("time loop", "parallel, last step"),
    ]
    result: dict[str, object] = {}
    if options.hrshtv:
        code = hrshtv_code(options.hrshtv)
        result["difference from hrshtv in float64"] = difference(code)
        loop, memory = code.LMU(1, HIDDEN, MEMORY, NUM_STEPS), code.LMUFFT(1, HIDDEN, MEMORY, NUM_STEPS, NUM_STEPS)
        forms |= {"hrshtv LMU": lambda x: loop(x)[0], "hrshtv LMUFFT": lambda x: memory(x)[0]}
        pairs += [("hrshtv LMU", name) for name in ("recurrent", "parallel", "parallel, last step")]
        pairs += [("hrshtv LMUFFT", "parallel")]
    for batch_size, rounds in ((8, options.rounds), (32, -(-options.rounds // 3))):
        result[f"batch {batch_size}"] = measured = measure(forms, pairs, batch_size, rounds)
        for name, speedup in measured["speedup"].items():
            print(f"batch {batch_size}: {name}: {speedup} times as fast", flush=True)
    print(json.dumps(result | {"torch": torch.__version__}))


if __name__ == "__main__":
    main()
