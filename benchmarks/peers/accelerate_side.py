"""Script for Accelerate that follows its documentation.

Gradients are accumulated as its guide recommends for samples of variable size, or with --mean-of-means by `accumulate`
only. Checkpoints are saved by `save_state` in folders named by the step, as in the example. The position in an epoch is
restored by `skip_first_batches`, or with --stateful by `use_stateful_dataloader`. Metrics use `gather_for_metrics`.
"""

import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed, tqdm
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.peers.peer_commands import peer_settings, write_results
from benchmarks.peers.tagging import (
    IGNORED,
    Settings,
    as_they_are,
    eval_data,
    loss_of,
    new_model,
    new_optimizer,
    train_data,
)
from benchmarks.peers.watch import Watch

Batch = dict[str, Tensor]


class Training:
    def __init__(self, settings: Settings, save_dir: Path, stateful: bool, mean_of_means: bool) -> None:
        self.settings, self.save_dir, self.stateful, self.mean_of_means = settings, save_dir, stateful, mean_of_means
        set_seed(0)
        loading = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=stateful)
        self.accelerator = Accelerator(
            cpu=True, gradient_accumulation_steps=settings.accumulate, dataloader_config=loading
        )
        model = new_model(settings)
        optimizer = new_optimizer(settings, model.parameters())
        train = DataLoader(train_data(settings), settings.micro_batch, shuffle=True, collate_fn=as_they_are)
        held_out = DataLoader(eval_data(settings), settings.micro_batch, collate_fn=as_they_are)
        self.model, self.optimizer, self.train, self.held_out = self.accelerator.prepare(
            model, optimizer, train, held_out
        )
        self.watch, self.trained = Watch(), model
        self.num_steps = 0

    def run(self) -> None:
        """Trains, after resuming from the newest checkpoint if there is one."""
        steps_per_epoch = math.ceil(len(self.train) / self.settings.accumulate)
        first_epoch, skipped = 0, 0
        checkpoints = sorted(self.save_dir.glob("step_*"), key=lambda path: path.stat().st_ctime)
        if checkpoints:
            self.accelerator.load_state(str(checkpoints[-1]))
            self.num_steps = int(checkpoints[-1].name.removeprefix("step_"))
            first_epoch, steps = divmod(self.num_steps, steps_per_epoch)
            skipped = steps * self.settings.accumulate
        for epoch in range(first_epoch, self.settings.epochs):
            self.train.set_epoch(epoch)
            batches: Iterable[Batch] = self.train
            if epoch == first_epoch and skipped and not self.stateful:
                batches = self.accelerator.skip_first_batches(self.train, skipped)
            self.train_epoch(batches, len(self.train) - (skipped if epoch == first_epoch else 0))

    def train_epoch(self, batches: Iterable[Batch], num_batches: int) -> None:
        self.model.train()
        bar = tqdm(total=math.ceil(num_batches / self.settings.accumulate), disable=not sys.stderr.isatty())
        for _ in self.steps_by_means(batches) if self.mean_of_means else self.steps(batches):
            bar.update()
            self.num_steps += 1
            if self.settings.save_every and self.num_steps % self.settings.save_every == 0:
                self.accelerator.save_state(str(self.save_dir / f"step_{self.num_steps}"))

    def steps_by_means(self, batches: Iterable[Batch]) -> Iterator[None]:
        """Accumulates gradients of the mean loss of each batch, as in the first example of the guide."""
        for batch in batches:
            with self.accelerator.accumulate(self.model):
                self.watch.seen(batch["index"], self.trained)
                self.accelerator.backward(loss_of(self.model(batch["tokens"]), batch["tags"]))
                self.update()
            if self.accelerator.sync_gradients:
                yield

    def steps(self, batches: Iterable[Batch]) -> Iterator[None]:
        """Counts the tokens of an accumulation window before training on it, as the guide does for variable sizes."""
        remaining = iter(batches)
        while window := list(islice(remaining, self.settings.accumulate)):
            num_items = torch.stack([(batch["tags"] != IGNORED).sum() for batch in window]).sum()
            num_items = self.accelerator.gather(num_items).sum().item()
            factor = self.settings.accumulate * self.accelerator.num_processes / num_items
            for i, batch in enumerate(window):
                is_last = i == len(window) - 1
                apart = self.accelerator.num_processes > 1 and not is_last
                with self.model.no_sync() if apart else nullcontext():
                    self.watch.seen(batch["index"], self.trained)
                    self.accelerator.backward(factor * loss_of(self.model(batch["tokens"]), batch["tags"], "sum"))
            self.update()
            yield

    def update(self) -> None:
        if self.settings.max_grad_norm and self.accelerator.sync_gradients:
            self.accelerator.clip_grad_norm_(self.model.parameters(), self.settings.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @torch.no_grad()
    def metrics(self) -> dict[str, float]:
        self.model.eval()
        rows = []
        for batch in self.held_out:
            scores, tags = self.model(batch["tokens"]), batch["tags"]
            own = [
                loss_of(scores, tags, "none").sum(1),
                (scores.argmax(2) == tags).sum(1).to(scores.dtype),
                (tags != IGNORED).sum(1).to(scores.dtype),
            ]
            rows.append(self.accelerator.gather_for_metrics(torch.stack(own, 1)))
        loss, hits, tokens = torch.cat(rows).sum(0).tolist()
        return {"loss": loss / tokens, "accuracy": hits / tokens, "num_samples": sum(map(len, rows))}


def main() -> None:
    settings, save_dir, asked = peer_settings(__doc__, "stateful", "mean_of_means")
    training = Training(settings, save_dir, **asked)
    training.run()
    weights = training.accelerator.unwrap_model(training.model).state_dict()
    metrics = training.metrics()
    if training.accelerator.is_main_process:
        write_results(save_dir, weights, metrics)
    training.accelerator.end_training()


if __name__ == "__main__":
    main()
