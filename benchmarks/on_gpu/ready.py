"""Measures steps on batches in memory: with a hand-written loop, the trainer's loop, CUDA graphs and other trainers."""

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from benchmarks.on_gpu.models import BATCH_SIZES, MODELS
from benchmarks.on_gpu.part import Report, Setting, graphs_watched, opened_model
from trainer.loading.batches import Batch
from trainer.loading.order import SampleKeys
from trainer.loading.workers import BatchLoader
from trainer.loop.run import Run
from trainer.loop.windows import Window
from trainer.parallel.devices import DeviceQueue, queue_of
from trainer.profiling.measure import MeasuredRun, with_at_most
from trainer.profiling.phase_clock import replaced

NUM_BATCHES, NUM_STEPS = 20, 60
CLOSE, CLOSE_MS, CLOSE_TO_EARLIER = 1.10, 0.15, 1.05
"""Maximum times of a step and of a replay, as ratios to their references; CLOSE_MS more is accepted in any case."""
EARLIER_MS = {
    "harnet": 1.25, "tinyhar": 3.5, "deepconvlstm": 9.8, "sasrec": 1.65, "tisasrec": 2.18, "tisasrec with mhc": 5.6,
    "kgat": 0.62, "kg-lightgcn": 0.32, "lightgcn": 0.25, "bprmf": 0.20, "plmu": 1.59, "plmu streaming": 1.57,
    "lmu": 14.8, "nano": 4.7, "tabicl": 30.7,
}  # fmt: skip
"""Milliseconds of a hand-captured CUDA graph of a float32 step on a task's first batch (forward, backward, clipping and
fused AdamW), measured on an H100 with torch 2.11."""
Step = Callable[[], Any]


class Ready:
    """Loader that loads the batches of an epoch once, and returns the same batches in every epoch."""

    def __init__(self, loader: BatchLoader) -> None:
        self._loader, self.close = loader, loader.close
        self._batches: defaultdict[int, list[Batch]] = defaultdict(list)

    def __call__(self, keys: Iterable[SampleKeys], ahead: bool = False) -> Iterator[Batch]:
        places: defaultdict[int, int] = defaultdict(int)
        for key in keys:
            batches = self._batches[key.phase]
            if places[key.phase] == len(batches):
                batches.extend(self._loader([key]))
            yield batches[places[key.phase]]
            places[key.phase] += 1


@contextmanager
def ready_run(setting: Setting, *flags: object) -> Iterator[tuple[Run, list[Window], int]]:
    """Opens a run of short epochs on batches in memory; yields run, accumulation windows and number of epochs."""
    with opened_model(setting, *flags, "--amp", "off", "--max-grad-norm", 1) as run:
        most = setting.pick(NUM_BATCHES, 2)
        orders = tuple(with_at_most(order, most * order.global_batch_size) for order in run.plan.orders)
        loader: Any = Ready(run.loaders["train"])
        run.plan, run.loaders["train"] = replace(run.plan, orders=orders), loader
        windows = [*run.windows(run.progress)]
        run.learner.train()
        yield run, windows, -(-setting.pick(NUM_STEPS, 2) // len(windows))


def model_flags(setting: Setting, name: str) -> list[object]:
    return [*MODELS[name], "--batch-size", setting.pick(BATCH_SIZES[MODELS[name][1]], 4)]


def between(queue: DeviceQueue, marks: Sequence[Any]) -> list[float]:
    """Waits for the device, and returns the milliseconds between successive marks."""
    return [1e3 * queue.seconds(*pair) for pair in pairwise(marks)]


def ms_of(run: Run, steps: Iterable[Step]) -> list[float]:
    queue = queue_of(run.strategy.device)
    marks = [queue.instant()]
    for step in steps:
        step()
        marks.append(queue.instant())
    return between(queue, marks)


def ms_of_loop(run: Run, num_steps: int) -> list[float]:
    """Returns the milliseconds of each step of the trainer's loop, except the first."""
    queue, marks, advance = queue_of(run.strategy.device), [], run.log.advance

    def advanced(num_samples: int) -> None:
        advance(num_samples)
        marks.append(queue.instant())

    with replaced(run.log, "advance", advanced):
        MeasuredRun(run).train(num_steps)
    return between(queue, marks)


def bare_step(run: Run, window: Window) -> None:
    """Runs a step as a hand-written loop would."""
    phase, learner, device = run.task.phases[window.step.phase], run.learner, run.strategy.device
    batch = {name: value.to(device, non_blocking=True) for name, value in window.micro_batches[0].batch.items()}
    (learner.enter(phase)(batch, phase)["loss"] / window.weight).backward()
    nn.utils.clip_grad_norm_(learner.params[phase], 1.0)
    for optimizer in learner.optimizers[phase]:
        vars(optimizer).pop("found_inf", None)  # set by the trainer's loop; it would add kernels
        optimizer.step()
        optimizer.zero_grad()


def in_turns(run: Run, windows: Sequence[Window], num_epochs: int) -> tuple[dict[str, float], list[float]]:
    """Alternates epochs of a hand-written and the trainer's loop; returns median step times and ratios of epochs."""
    steps = [partial(bare_step, run, window) for window in windows]
    turns = [(ms_of(run, steps), ms_of_loop(run, len(steps))) for _ in range(1 + num_epochs)][1:]
    bare, loop = (statistics.median(ms for epoch in own for ms in epoch) for own in zip(*turns, strict=True))
    ratios = [statistics.fmean(own) / statistics.fmean(other[1:]) for other, own in turns]
    return {"bare loop": round(bare, 4), "eager loop": round(loop, 4)}, ratios


def judge(setting: Setting, report: Report, name: str, holds: bool, value: Any) -> None:
    """Checks whether a speed reaches its goal; with --small, only reports the value."""
    report.figure(name, value) if setting.is_small else report.check(name, holds, value)


def speed(setting: Setting, report: Report, name: str) -> dict[str, float]:
    """Returns median milliseconds of a model's steps by kind of loop, including loops with CUDA graphs on a GPU."""
    flags = model_flags(setting, name)
    with ready_run(setting, *flags, "--cuda-graphs", "off") as (run, windows, num_epochs):
        ms, _ = in_turns(run, windows, num_epochs)
    pairs = [("eager loop", "bare loop")]
    if setting.is_gpu:
        with ready_run(setting, *flags, "--cuda-graphs", "on") as (run, windows, num_epochs):
            with graphs_watched() as found:
                for _ in range(2):  # until the graphs of all signatures are captured
                    MeasuredRun(run).train(len(windows))
                run.watches.remove(run.learner)  # otherwise each epoch would check graphs again
                found.replayed.clear()
                MeasuredRun(run).train(len(windows))
            size, rest = divmod(len(found.replayed), len(windows))
            report.check(f"{name}, all steps are replayed", size > 0 and rest == 0 and not found.lines, found.lines)
            graphs = [found.replayed[i : i + size] for i in range(0, len(found.replayed), size or 1)]
            steps = [partial(replay, of_step) for of_step in graphs]
            ms["loop with graphs"] = round(statistics.median(ms_of_loop(run, num_epochs * len(windows))), 4)
            ms["its replay"] = round(statistics.median(ms_of(run, num_epochs * steps)), 4)
            ms["its first replay"] = round(statistics.median(waited_for(setting, steps[0]) for _ in range(30)), 4)
        pairs.append(("loop with graphs", "its replay"))
    report.figure(f"{name}, ms", ms)
    for way, other in pairs:
        is_close = ms[way] <= max(CLOSE * ms[other], ms[other] + CLOSE_MS)
        judge(setting, report, f"{name}, {way} over {other}", is_close, round(ms[way] / ms[other], 3))
    if setting.is_gpu and "H100" in torch.cuda.get_device_name():
        own, earlier = ms["its first replay"], EARLIER_MS[name]
        is_close = own <= max(CLOSE_TO_EARLIER * earlier, earlier + CLOSE_MS)
        judge(setting, report, f"{name}, replay over an earlier one", is_close, round(own / earlier, 3))
    return ms


def replay(graphs: Iterable[torch.cuda.CUDAGraph]) -> None:
    for graph in graphs:
        graph.replay()


def waited_for(setting: Setting, step: Step) -> float:
    """Returns wall-clock milliseconds until the device has completed a step; EARLIER_MS were measured like this."""
    setting.synchronise()
    started = time.perf_counter()
    step()
    setting.synchronise()
    return 1e3 * (time.perf_counter() - started)


# --- other trainers ----------------------------------------------------------------------------------------------


def beside(setting: Setting, report: Report, name: str) -> dict[str, float]:
    """Returns milliseconds per step of other trainers, by name, with the run's model, optimizer and batches."""
    ms: dict[str, float] = {}
    for other, (package, steps_of) in OTHERS.items():
        if find_spec(package) is None:
            report.figure(f"{name}, {other}", f"left out: {package} is not installed")
            continue
        if "compiled" in other and name == "plmu":
            report.figure(f"{name}, {other}", "left out: it compiles every shape, for minutes")
            continue
        try:
            with ready_run(setting, *model_flags(setting, name), "--cuda-graphs", "off") as (run, windows, num_epochs):
                found = steps_of(setting, run, windows, 2 + num_epochs)[-num_epochs * len(windows) :]
        except Exception as error:
            refusal = f"{type(error).__name__}: {error}"[:300]
            report.check(f"{name}, {other}", "compiled" in other, refusal)  # not every model can be compiled
            continue
        ms[other] = round(statistics.median(found), 4)
        report.figure(f"{name}, {other}, ms", ms[other])
    return ms


def of_accelerate(setting: Setting, run: Run, windows: Any, num_epochs: int, mode: str | None = None) -> list[float]:
    from accelerate import Accelerator

    accelerator, phase, device = Accelerator(cpu=not setting.is_gpu), run.task.phases[0], run.strategy.device
    net: Any = run.learner.enter(phase)
    net, optimizer = accelerator.prepare(torch.compile(net, mode=mode) if mode else net, *run.learner.optimizers[phase])

    def step(window: Window) -> None:
        with accelerator.accumulate(net):
            batch = window.micro_batches[0].batch
            batch = {name: value.to(device, non_blocking=True) for name, value in batch.items()}
            accelerator.backward(net(batch, phase)["loss"] / window.weight)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(run.learner.params[phase], 1.0)
            optimizer.step()
            optimizer.zero_grad()

    return ms_of(run, [partial(step, window) for window in num_epochs * windows])


def of_lightning(setting: Setting, run: Run, windows: list[Window], num_epochs: int) -> list[float]:
    import lightning
    from lightning.pytorch.loggers import CSVLogger

    learner, phase, marks, queue = run.learner, run.task.phases[0], [], queue_of(run.strategy.device)

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = learner.enter(phase)

        def training_step(self, batch: Any, number: int) -> Any:
            loss = self.net(batch[0], phase)["loss"] / batch[1]
            self.log("loss", loss)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            marks.append(queue.instant())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return learner.optimizers[phase][0]

    trainer = lightning.Trainer(
        max_epochs=num_epochs, accelerator="gpu" if setting.is_gpu else "cpu", devices=1, gradient_clip_val=1.0,
        logger=CSVLogger(str(setting.folder)), enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    batches: Any = [(window.micro_batches[0].batch, float(window.weight)) for window in windows]
    trainer.fit(Module(), torch.utils.data.DataLoader(batches, batch_size=None))
    return between(queue, marks)


OTHERS: dict[str, tuple[str, Callable[..., list[float]]]] = {
    "Accelerate": ("accelerate", of_accelerate),
    "Lightning": ("lightning", of_lightning),
    "Accelerate, compiled": ("accelerate", partial(of_accelerate, mode="reduce-overhead")),
}
