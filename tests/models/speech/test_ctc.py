"""Tests the loss against sums over all alignments and PyTorch's loss, and greedy decoding against a loop."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from models.speech.ctc import ctc_loss, divergence, greedy, loss_without_waiting, shortest_alignment


def merged(path):
    """Returns the symbols of a path over frames, with repeats merged and blanks dropped."""
    return [symbol for symbol, _ in itertools.groupby(path) if symbol != 0]


def slow_loss(log_probs, target):
    """Returns the loss of one utterance with log_probs of shape (T, V)."""
    num_frames, num_symbols = log_probs.shape
    rows = log_probs.tolist()
    total = sum(
        math.exp(sum(row[symbol] for row, symbol in zip(rows, path, strict=True)))
        for path in itertools.product(range(num_symbols), repeat=num_frames)
        if merged(path) == target
    )
    return -math.log(total) if total else math.inf


def make_batch(batch_size=9, num_frames=40, num_symbols=7, target_size=11, dtype=torch.float64):
    """Returns ragged utterances with repeats; the first one fills the batch, and the last one has an empty target."""
    random = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(batch_size, num_frames, num_symbols, dtype=dtype, generator=random)
    lengths = torch.randint(num_frames * 2 // 3, num_frames + 1, (batch_size,), generator=random)
    target_lengths = torch.randint(1, target_size + 1, (batch_size,), generator=random)
    lengths[0], target_lengths[0], target_lengths[-1] = num_frames, target_size, 0
    targets = torch.randint(1, num_symbols, (batch_size, target_size), generator=random)
    targets[1, :3] = 2
    return logits, lengths, targets, target_lengths


def on_gpu(log_probs, lengths, targets, target_lengths):
    """Returns what `ctc_loss` computes on a GPU."""
    within = torch.arange(targets.shape[1]) < target_lengths.unsqueeze(1)
    return loss_without_waiting(log_probs, lengths, targets * within)


def on_cpu(*batch):
    return ctc_loss(*batch)[0]


BOTH = pytest.mark.parametrize("loss", [on_cpu, on_gpu])


@BOTH
@pytest.mark.parametrize("target", [[], [1], [1, 2], [1, 1], [2, 1, 2], [2, 2, 1], [1, 1, 1]])
def test_the_loss_sums_over_alignments(loss, target):
    """The utterance has five frames of three symbols, beside a longer one."""
    torch.manual_seed(len(target))
    log_probs = torch.randn(2, 8, 3, dtype=torch.float64).log_softmax(2)
    targets = torch.tensor([target + [0] * (4 - len(target)), [1, 2, 1, 2]])
    found = loss(log_probs, torch.tensor([5, 8]), targets, torch.tensor([len(target), 4]))
    assert found[0].item() == pytest.approx(slow_loss(log_probs[0, :5], target), rel=0, abs=1e-12)


@BOTH
def test_loss_and_gradient_equal_those_of_pytorch(loss):
    logits, *batch = make_batch()
    weight = torch.linspace(-1, 2, len(logits), dtype=torch.float64)
    lengths, targets, target_lengths = batch
    grads = []
    for form in (loss, lambda p, *_: F.ctc_loss(p.transpose(0, 1), targets, lengths, target_lengths, 0, "none")):
        leaf = logits.clone().requires_grad_()
        losses = form(leaf.log_softmax(2), *batch)
        (losses @ weight).backward()
        grads.append(torch.cat([losses.detach(), leaf.grad.flatten()]))
    torch.testing.assert_close(*grads, rtol=0, atol=1e-12)


@BOTH
def test_padding_changes_nothing(loss):
    """Neither content nor length of padding matters, and frames beyond the end get no gradient."""
    logits, lengths, targets, target_lengths = make_batch()
    expected = loss(logits.log_softmax(2), lengths, targets, target_lengths)
    frames = torch.arange(logits.shape[1] + 5) >= lengths.unsqueeze(1)
    padded = F.pad(logits, (0, 0, 0, 5)).log_softmax(2).masked_fill(frames.unsqueeze(2), torch.nan).requires_grad_()
    targets = F.pad(targets, (0, 3)).where(torch.arange(targets.shape[1] + 3) < target_lengths.unsqueeze(1), 1)
    found = loss(padded, lengths, targets, target_lengths)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    found.sum().backward()
    assert padded.grad[frames].eq(0).all() and padded.grad[~frames].ne(0).any()


def test_an_unalignable_utterance_is_reported_and_has_no_loss():
    """The first and the last utterance are one frame too short; the other two keep their losses."""
    targets = torch.tensor([[1, 1, 2], [1, 1, 2], [0, 0, 0], [2, 2, 2]])
    target_lengths, lengths = torch.tensor([3, 3, 0, 3]), torch.tensor([3, 4, 4, 4])
    assert shortest_alignment(targets).tolist() == [4, 4, 0, 5]
    logits = torch.randn(4, 4, 3, dtype=torch.float64, requires_grad=True)
    losses, fits = ctc_loss(logits.log_softmax(2), lengths, targets, target_lengths)
    assert fits.tolist() == [False, True, True, False]
    assert [loss > 0 for loss in losses.tolist()] == fits.tolist()
    assert losses[1].item() == pytest.approx(slow_loss(logits[1].log_softmax(1).detach(), [1, 1, 2]))
    losses.sum().backward()
    assert logits.grad.flatten(1).ne(0).any(1).tolist() == fits.tolist()


@BOTH
def test_an_utterance_of_no_frames_has_zero_loss(loss):
    log_probs = torch.randn(2, 3, 4).log_softmax(2)
    losses = loss(log_probs, torch.tensor([0, 3]), torch.zeros(2, 1, dtype=torch.int64), torch.tensor([0, 0]))
    assert losses[0] == 0 and losses[1].item() == pytest.approx(-log_probs[1, :, 0].sum().item())


def test_low_precision_values_are_summed_in_float32():
    logits, *batch = make_batch(dtype=torch.float32)
    log_probs = logits.log_softmax(2).bfloat16()
    losses, _ = ctc_loss(log_probs, *batch)
    assert losses.dtype == torch.float32 and torch.equal(losses, ctc_loss(log_probs.float(), *batch)[0])


def test_the_gradient_of_the_loss_for_gpus_equals_finite_differences():
    logits, lengths, targets, _ = make_batch(3, 6, 3, 2)
    log_probs = logits.log_softmax(2).requires_grad_()
    assert torch.autograd.gradcheck(lambda p: loss_without_waiting(p, lengths, targets), log_probs)


def slow_greedy(log_probs):
    """Returns (symbol, start, end, confidence) of each symbol, given log_probs of shape (T, V)."""
    found, before = [], 0
    for t, row in enumerate(log_probs.exp().tolist()):
        best = row.index(max(row))
        if best != 0 and best != before:
            found.append([best, t, t + 1, row[best]])
        elif best != 0:
            found[-1][2:] = [t + 1, max(found[-1][3], row[best])]
        before = best
    return found


def test_the_divergence_pulls_both_readings_together():
    """The divergence of an utterance equals torch's KL divergence, and padding does not count."""
    a, b = (torch.randn(3, 7, 5, dtype=torch.float64).log_softmax(2).requires_grad_() for _ in range(2))
    lengths = torch.tensor([7, 3, 0])
    found = divergence(a, b, lengths)
    grads = torch.autograd.grad(found.sum(), (a, b))
    for i, length in enumerate(lengths.tolist()):
        pairs = [(x[i, :length], y[i, :length].detach()) for x, y in ((a, b), (b, a))]
        expected = sum(F.kl_div(own, target, reduction="sum", log_target=True) for own, target in pairs) / 2
        torch.testing.assert_close(found[i], expected)
        if length:
            for grad, own in zip(torch.autograd.grad(expected, (a, b)), grads, strict=True):
                torch.testing.assert_close(grad[i], own[i])
    assert not any(grad[1, 3:].any() or grad[2].any() for grad in grads)
    assert divergence(a, a, lengths).abs().max() == 0


def test_greedy_decoding_equals_a_loop():
    logits, lengths, *_ = make_batch(12, 60, 4)
    logits = 0.3 * logits + logits.roll(1, 1)  # makes symbols last
    logits[3, :, 0] = 50  # silence
    decoded = greedy(logits.log_softmax(2), lengths)
    assert decoded.sizes[3] == 0
    for i, (row, length) in enumerate(zip(logits.log_softmax(2), lengths, strict=True)):
        expected = slow_greedy(row[:length])
        size = int(decoded.sizes[i])
        columns = [column[i] for column in decoded[:4]]
        assert [[value[j].item() for value in columns] for j in range(size)] == expected, i
        assert all(value[size:].eq(0).all() for value in columns)
    lasting = decoded.ends - decoded.starts
    assert lasting.max() > 1


def test_greedy_decoding_ignores_padding():
    logits, lengths, *_ = make_batch()
    frames = torch.arange(logits.shape[1]) >= lengths.unsqueeze(1)
    changed = logits.masked_fill(frames.unsqueeze(2), torch.nan)
    for found, expected in zip(greedy(changed, lengths), greedy(logits, lengths), strict=True):
        assert torch.equal(found, expected)
