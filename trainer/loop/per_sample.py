"""Outputs per sample of an evaluation: collected in host memory, and put in order on the main process."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.common.errors import UserError
from trainer.parallel.base import Parallel
from trainer.task import Outputs, PerSample

MOST_IN_FLIGHT = 32
"""Batches whose outputs are on their way from a GPU; a wait for so many at once costs next to nothing."""


class PerSampleOutputs:
    """What the objective returned as `PerSample` for this process's samples; nothing, at no cost, where it did not."""

    def __init__(self) -> None:
        self._index: list[Tensor] = []
        self._parts: list[dict[str, Tensor]] = []
        self._num_in_flight = 0
        self._names: set[str] | None = None

    def add(self, index: Tensor, outputs: Outputs) -> None:
        """index: (B,) int64 in host memory, the samples of the batch, which may be a placeholder's.

        Raises UserError where the outputs are not the ones of earlier batches.
        """
        found = {name: value.values for name, value in outputs.items() if isinstance(value, PerSample)}
        self._names = set(found) if self._names is None else self._names
        if found.keys() != self._names:
            name = min(found.keys() ^ self._names)
            raise UserError(f"PerSample {name!r}: the objective returned it for some batches only; it must for all")
        if found:
            self._index.append(index)
            # A copy of its own: a slice would keep the whole alive. From a GPU it is not waited for.
            self._parts.append({k: values.to("cpu", non_blocking=True, copy=True) for k, values in found.items()})
            device = next(iter(found.values())).device
            self._num_in_flight += device.type == "cuda"
            if self._num_in_flight == MOST_IN_FLIGHT:
                self._land(device)

    def _land(self, device: torch.device) -> None:
        """Puts what is in flight from a GPU into ordinary memory: torch locks the pages that it does not wait for."""
        torch.cuda.current_stream(device).synchronize()
        landed = self._parts[-self._num_in_flight :]
        self._parts[-self._num_in_flight :] = [{k: values.clone() for k, values in part.items()} for part in landed]
        self._num_in_flight = 0

    def gathered(self, parallel: Parallel, num_samples: int) -> dict[str, Tensor]:
        """On the main process each output of the whole data set, (num_samples, ...); nothing on the others.

        All processes call it. Raises UserError on all of them.
        """
        names = {"PerSample outputs": sorted(self._names or ())}
        parallel.require_same(names, "the objective must return the same ones for all batches, on all ranks")
        if not self._index:
            return {}
        if parallel.device.type == "cuda":
            torch.cuda.current_stream(parallel.device).synchronize()
        shares = parallel.gather_on_main((torch.cat(self._index), parallel.together(self._joined)))
        whole: dict[str, Tensor] = {}
        parallel.on_main(lambda: whole.update(in_order(shares, num_samples)))
        return whole

    def _joined(self) -> dict[str, Tensor]:
        for index, part in zip(self._index, self._parts, strict=True):
            for name, values in part.items():
                if values.shape[:1] != index.shape:
                    raise UserError(
                        f"PerSample {name!r}: the objective returned the shape {tuple(values.shape)} for a batch of "
                        f"{len(index)} samples; it must return a row for each of them"
                    )
        return joined(self._parts)


def joined(parts: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Outputs of the same names, one behind the other. Raises UserError where the rows are unlike."""
    for name in parts[0]:
        kinds = {(tuple(part[name].shape[1:]), part[name].dtype) for part in parts}
        if len(kinds) > 1:
            (one, _), (other, _) = sorted(kinds, key=str)[:2]
            raise UserError(
                f"PerSample {name!r}: the objective returned rows of the shape {one} and of {other}, or of two types; "
                "they must be alike in all batches: pad them to a length that does not depend on the batch"
            )
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def in_order(shares: Sequence[tuple[Tensor, dict[str, Tensor]]], num_samples: int) -> dict[str, Tensor]:
    """Each output in order of index, each sample once. shares: (index, outputs) of each process. Raises UserError.

    Of the rows of a sample the first one counts, which is never a placeholder's: those repeat the first samples of a
    global batch, behind the batch of the process whose they are, or on a later process.
    """
    samples, first = np.unique(torch.cat([index for index, _ in shares]).numpy(), return_index=True)
    if len(samples) != num_samples:
        raise UserError(
            f"PerSample: batch['index'] names {len(samples)} of the {num_samples} samples of the data set; it must be "
            "`keys.index` as `collate` gets it"
        )
    outputs = joined([share for _, share in shares])
    return {name: values[torch.from_numpy(first)] for name, values in outputs.items()}
