"""CTC loss of a speech recogniser, and greedy or beam-search decoding."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from data.speech.text import Alphabet
from models.speech.alignment import Aligned, align
from models.speech.beam_search import beam_search
from models.speech.ctc import ctc_loss, divergence, greedy
from models.speech.language_model import build_scorer, read_arpa
from models.speech.recogniser import Recognised, SpeechRecogniser
from trainer.common.errors import UserError
from trainer.loading.batches import Batch
from trainer.task import Objective, Outputs, PerSample

_TRIED = 64
"""Number of most probable symbols that beam search tries in each frame."""
_MASKS = {"freq_masks", "time_masks"}
"""Batch entries that, like dropout masks, differ between the two augmented copies of an utterance."""


class SpeechObjective(Objective):
    """Computes the CTC loss summed over utterances and, in evaluation, the decoded and the reference symbols."""

    model: SpeechRecogniser

    def __init__(
        self, model: SpeechRecogniser, decode: Callable[[Recognised], Tensor], longest: int, consistency: float = 0.0
    ) -> None:
        """decode: returns each utterance's symbols, padded with 0. longest: number of symbols of the longest
        text in evaluation. consistency: weight of the divergence between predictions for two augmented
        views of each training utterance; 0 uses one view.
        """
        super().__init__(model)
        self._consistency = consistency
        self.decode = decode
        self.longest = longest

    def recognise(self, batch: Batch) -> Recognised:
        """Runs the model on a batch, with the augmentations that a training batch specifies."""
        distortions = (batch.get(name) for name in ("warp", "freq_masks", "time_masks", "masking_db"))
        found: Recognised = self.model(batch["audio"], batch["num_samples"], *distortions)
        return found

    def forward(self, batch: Batch, phase: str = "train") -> Outputs:
        if self.training and self._consistency > 0:
            return {"loss": self._loss_of_both_views(batch)}
        found = self.recognise(batch)
        losses, _ = ctc_loss(found.log_probs, found.lengths, batch["targets"], batch["target_length"])
        sums = {"loss": losses.sum()}
        if self.training:
            return sums
        texts = {"decoded": self.decode(found), "said": batch["targets"]}
        outputs = {name: PerSample(self._in_one_shape(ids)) for name, ids in texts.items()}
        return sums | outputs | {"recordings": PerSample(batch["recordings"])}

    def _loss_of_both_views(self, batch: Batch) -> Tensor:
        both = {
            name: torch.cat(values.chunk(2, dim=1) if name in _MASKS else [values, values])
            for name, values in batch.items()
        }
        found = self.recognise(both)
        losses, _ = ctc_loss(found.log_probs, found.lengths, both["targets"], both["target_length"])
        (first, second), lengths = found.log_probs.chunk(2), found.lengths.chunk(2)[0]
        apart = divergence(first, second, lengths)
        return losses.sum() / 2 + self._consistency * apart.sum()

    def _in_one_shape(self, ids: Tensor) -> Tensor:
        return F.pad(ids, (0, self.longest - ids.shape[1]))


class AlignedText(NamedTuple):
    """Decoded symbols of an utterance, ids (U,) int64, with the frames of each symbol."""

    ids: np.ndarray
    aligned: Aligned


class Decoder:
    """Decodes log-probabilities to symbols, greedily or by beam search."""

    def __init__(
        self, alphabet: Alphabet, width: int, language_model: Path | None, weight: float, bonus: float
    ) -> None:
        """width: beam width; 1 decodes greedily, without a language model. Raises UserError for invalid arguments."""
        self._width = width
        if language_model is not None and width == 1:
            raise UserError(f"--language-model {language_model}: requires a beam search; add --beam 16")
        try:
            ngram = None if language_model is None else read_arpa(language_model)
            self._scorer = build_scorer(ngram, ["", *alphabet.symbols], weight, bonus)
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"--language-model {language_model}: {reason}; give an ARPA file") from None
        except ValueError as error:
            raise UserError(f"--language-model {language_model}: {error}; give another ARPA file") from None

    def __call__(self, found: Recognised) -> Tensor:
        """Returns the symbols of each utterance, (B, L) int64, padded with 0."""
        if self._width == 1:
            return greedy(found.log_probs, found.lengths).ids
        best = self._search(found)
        ids = np.zeros((len(best), max(1, *map(len, best))), np.int64)
        for row, text in zip(ids, best, strict=True):
            row[: len(text)] = text
        return torch.from_numpy(ids).to(found.log_probs.device)

    def aligned(self, found: Recognised) -> list[AlignedText]:
        """Returns the symbols of each utterance with the frames of each symbol."""
        if self._width == 1:
            decoded = greedy(found.log_probs, found.lengths)
            rows = zip(*(values.cpu().numpy() for values in decoded), strict=True)
            return [AlignedText(ids[:n], Aligned(a[:n], b[:n], c[:n])) for ids, a, b, c, n in rows]
        log_probs, lengths = found.log_probs.cpu().numpy(), found.lengths.tolist()
        return [
            AlignedText(ids, align(own[:length], ids))
            for own, length, ids in zip(log_probs, lengths, self._search(found), strict=True)
        ]

    def _search(self, found: Recognised) -> list[np.ndarray]:
        log_probs, lengths = found.log_probs.cpu().numpy(), found.lengths.cpu().numpy()
        texts = beam_search(log_probs, lengths, self._width, scorer=self._scorer, symbols_per_frame=_TRIED)
        return [np.array(hypotheses[0].ids, np.int64) for hypotheses in texts]
