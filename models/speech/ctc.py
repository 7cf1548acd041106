"""Connectionist temporal classification (Graves et al., ICML 2006): loss and greedy decoding.

Symbol 0 is the blank and also pads targets and decoded symbols.
"""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from models.layers.lengths import within_lengths

BLANK = 0

_IMPOSSIBLE = -1e30
"""Log-probability of impossible events; finite, because differences of infinities would be NaN."""


def ctc_loss(log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Returns two (B,) tensors: -log p(target) in at least float32, and whether the target has an alignment.

    Targets that need more frames than their utterance has (`shortest_alignment`) have loss and gradient 0.

    log_probs: (B, T, V); the gradient is correct only for the output of a log-softmax. lengths: (B,) int64, frames per
    utterance. targets: (B, U) int64 in [1, V). target_lengths: (B,) int64. Values beyond the lengths are ignored.
    """
    log_probs = log_probs.to(torch.promote_types(log_probs.dtype, torch.float32))
    targets = targets * within_lengths(target_lengths, targets.shape[1])
    fits = lengths >= shortest_alignment(targets)
    targets, target_lengths = targets * fits.unsqueeze(1), target_lengths * fits
    if log_probs.device.type == "cpu":
        loss = F.ctc_loss(log_probs.transpose(0, 1), targets, lengths, target_lengths, BLANK, "none")
    else:
        loss = loss_without_waiting(log_probs, lengths, targets)
    return torch.where(fits, loss, 0), fits


def divergence(log_probs: Tensor, others: Tensor, lengths: Tensor) -> Tensor:
    """Returns the divergence between two predictions for each utterance, (B,).

    The divergence is the sum over frames of the mean of KL(p || q) and KL(q || p). Each term passes a gradient only to
    its second argument. This is L_CR of CR-CTC (Yao et al., ICLR 2025).

    log_probs, others: (B, T, V). lengths: (B,) int64, number of frames of each utterance.
    """
    pairs = ((log_probs.detach(), others), (others.detach(), log_probs))
    of_frame = sum((target.exp() * (target - own)).sum(2) for target, own in pairs) / 2
    return (of_frame * within_lengths(lengths, log_probs.shape[1])).sum(1)


def loss_without_waiting(log_probs: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
    """Computes the CTC loss on a GPU without synchronisation and with a deterministic gradient, unlike `F.ctc_loss`.

    targets: (B, U), padded with 0; each target must have an alignment.
    """
    num_frames, num_symbols = log_probs.shape[1:]
    # Frames of padding get a blank with probability 1: all utterances end at the same frame, and losses do not change.
    silence = log_probs.new_full((num_symbols,), _IMPOSSIBLE)
    silence[BLANK].zero_()  # `= 0` would copy a number from the host and wait
    log_probs = torch.where(within_lengths(lengths, num_frames).unsqueeze(2), log_probs, silence)
    loss: Tensor = _Ctc.apply(log_probs, targets)
    return loss


def shortest_alignment(targets: Tensor) -> Tensor:
    """Returns each target's minimum number of frames, (B,): one per symbol and one per pair of adjacent equal symbols.

    targets: (B, U), padded with 0.
    """
    repeats = (targets[:, 1:] == targets[:, :-1]) & (targets[:, 1:] != BLANK)
    return (targets != BLANK).sum(1) + repeats.sum(1)


class _Ctc(torch.autograd.Function):
    """Computes the CTC loss with forward (alpha) and backward (beta) recursions over frames.

    A target of U symbols has S = 2 U + 1 states: blank, first symbol, blank, ..., last symbol, blank. A state s can
    follow s, s - 1 and, if s is a symbol that differs from the previous symbol, s - 2.
    """

    @staticmethod
    def forward(ctx: Any, log_probs: Tensor, targets: Tensor) -> Tensor:
        """Returns -log p(target), (B,). log_probs: (B, T, V). targets: (B, U), padded with blanks."""
        batch_size, num_frames, _ = log_probs.shape
        states = F.pad(F.pad(targets.unsqueeze(2), (1, 0)).flatten(1), (0, 1))  # (B, S)
        emitted = log_probs.gather(2, states.unsqueeze(1).expand(-1, num_frames, -1)).transpose(0, 1)  # (T, B, S)
        place = torch.arange(states.shape[1], device=states.device)
        last = 2 * (targets != BLANK).sum(1, keepdim=True)
        skips = (states != BLANK) & (states != F.pad(states, (2, 0))[:, :-2])

        # Betas are alphas of inputs reversed in time and states, so one loop computes both. sums[0] precedes frame 0.
        emitted_both = torch.cat([emitted, emitted.flip(0, 2)], 1)
        first = torch.cat([(place == 0).expand_as(states), (place == last).flip(1)])
        may_skip = torch.cat([skips, F.pad(skips, (0, 2))[:, 2:].flip(1)])
        skipping = torch.where(may_skip, 0, _IMPOSSIBLE).to(log_probs.dtype)
        sums = log_probs.new_full((num_frames + 1, 2 * batch_size, 2 + states.shape[1]), _IMPOSSIBLE)
        sums[0, :, 2:].masked_fill_(first, 0)
        same, one_back, two_back = (sums[:, :, i : i + states.shape[1]].unbind() for i in (2, 1, 0))
        for t, emission in enumerate(emitted_both.unbind()):
            here = torch.logaddexp(same[t], one_back[t], out=same[t + 1])
            torch.logaddexp(here, two_back[t] + skipping, out=here).add_(emission)
        is_end = (place == last) | (place == last - 1)
        loss = -sums[-1, :batch_size, 2:].masked_fill(~is_end, _IMPOSSIBLE).logsumexp(1)
        ctx.save_for_backward(states, emitted, sums, loss)
        ctx.num_symbols = log_probs.shape[2]
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Returns minus the incoming gradient times each symbol's posterior probability in each frame, (B, T, V)."""
        states, emitted, sums, loss = ctx.saved_tensors
        alpha, beta = sums[1:, :, 2:].chunk(2, 1)
        occupied = (alpha + beta.flip(0, 2) - emitted + loss.unsqueeze(1)).exp()  # (T, B, S)
        emits = states.unsqueeze(2) == torch.arange(ctx.num_symbols, device=states.device)  # (B, S, V)
        with torch.autocast(loss.device.type, enabled=False):
            of_symbol = occupied.transpose(0, 1) @ emits.to(occupied.dtype)
        return of_symbol * -grads[0].view(-1, 1, 1), None


class Decoded(NamedTuple):
    """Decoded symbols of each utterance. All tensors except `sizes` are (B, T), padded at the end with 0."""

    ids: Tensor
    """Symbols, int64 in [1, V)."""
    starts: Tensor
    """First frame of the symbol, int64."""
    ends: Tensor
    """Frame after the last frame of the symbol, int64."""
    confidence: Tensor
    """Highest probability of the symbol in its frames."""
    sizes: Tensor
    """Number of symbols of each utterance, (B,) int64."""


def greedy(log_probs: Tensor, lengths: Tensor) -> Decoded:
    """Decodes the most probable symbol of each frame, and drops repeats and blanks, without synchronising with a GPU.

    log_probs: (B, T, V). lengths: (B,) int64, number of frames of each utterance.
    """
    batch_size, num_frames, _ = log_probs.shape
    best, path = log_probs.detach().max(2)
    path = torch.where(within_lengths(lengths, num_frames), path, BLANK)
    is_symbol = path != BLANK
    begins = is_symbol & (path != F.pad(path, (1, 0), value=BLANK)[:, :-1])
    # Output position of each frame's symbol. Frames without a symbol write to a last column, which is dropped.
    place = begins.cumsum(1) - 1
    of_symbol = torch.where(is_symbol, place, num_frames)
    of_begin = torch.where(begins, place, num_frames)

    def packed(values: Tensor, place: Tensor, reduce: str) -> Tensor:
        table = values.new_zeros(batch_size, num_frames + 1)
        return table.scatter_reduce_(1, place, values, reduce)[:, :num_frames]

    frames = torch.arange(num_frames, device=path.device).expand_as(path)
    return Decoded(
        ids=packed(path, of_begin, "amax"),
        starts=packed(frames, of_begin, "amax"),
        ends=packed(frames + 1, of_symbol, "amax"),
        confidence=packed(best.exp(), of_symbol, "amax"),
        sizes=begins.sum(1),
    )
