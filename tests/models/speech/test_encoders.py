"""Tests encoders: their size, that padding changes nothing, and streaming."""

import pytest
import torch
from torch import Tensor, nn

from models.speech.encoders import AttentionLMU, ParallelLMUEncoder

NUM_FEATURES = 6


def attention_lmu() -> nn.Module:
    return AttentionLMU(NUM_FEATURES, width=8, num_layers=2, num_heads=2, memory_size=5, theta=20)


def parallel_lmu(**options) -> nn.Module:
    return ParallelLMUEncoder(NUM_FEATURES, width=8, num_blocks=2, memory_size=5, theta=6, channels=3, **options)


ENCODERS = {
    "attention": attention_lmu,
    **{
        f"parallel, {s} to 1, {'two directions' if both else 'one direction'}": (
            lambda s=s, both=both: parallel_lmu(subsampling=s, bidirectional=both)
        )
        for s in (1, 2, 4)
        for both in (True, False)
    },
}


@pytest.fixture(params=ENCODERS)
def encoder(request) -> nn.Module:
    torch.manual_seed(0)
    return ENCODERS[request.param]().double().eval()


def features(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_recurrent_recogniser_has_the_stated_size():
    encoder = AttentionLMU()
    assert sum(p.numel() for p in encoder.parameters()) + encoder.out_features * 34 + 34 == 7_158_818


def test_padding_changes_nothing(encoder):
    """States and gradients depend neither on the padding nor on the other utterances of the batch."""
    lengths = torch.tensor([29, 13, 1])
    x = features(3, 29, NUM_FEATURES).requires_grad_()
    states, num_states = encoder(x, lengths)
    for row, length in enumerate(lengths):
        alone, (num,) = encoder(x[row : row + 1, :length], lengths[row : row + 1])
        assert alone.shape == (1, num, encoder.out_features)
        assert num == num_states[row]
        torch.testing.assert_close(states[row : row + 1, :num], alone, rtol=0, atol=1e-12)
        (grad,) = torch.autograd.grad(states[row, :num].square().sum(), x, retain_graph=True)
        assert grad[row, :length].any()
        assert not grad[row, length:].any()


def test_an_empty_utterance_changes_no_other_loss(encoder):
    x = features(2, 9, NUM_FEATURES)
    states, lengths = encoder(x, torch.tensor([9, 0]))
    assert lengths[1] == 0
    assert states.isfinite().all()


def test_all_parameters_are_trained(encoder):
    states, _ = encoder.train()(features(2, 12, NUM_FEATURES), torch.tensor([12, 7]))
    (states * features(*states.shape, seed=2)).sum().backward()
    assert not [name for name, p in encoder.named_parameters() if p.grad is None or not p.grad.any()]


@pytest.mark.parametrize("subsampling", [1, 2, 4])
@pytest.mark.parametrize("sizes", [[40], [1] * 40, [0, 3, 1, 0, 10, 2, 24], [2, 38]])
def test_a_stream_gives_the_result_of_the_whole(subsampling, sizes):
    torch.manual_seed(0)
    encoder = parallel_lmu(subsampling=subsampling, bidirectional=False).double().eval()
    x = features(2, 40, NUM_FEATURES)
    whole, _ = encoder(x, torch.tensor([40, 40]))
    pieces, state, num_frames = [], None, 0
    for piece in x.split(sizes, dim=1):
        states, state = encoder.stream(piece, state)
        pieces.append(states)
        num_frames += piece.shape[1]
        assert sum(p.shape[1] for p in pieces) == -(-num_frames // subsampling), "as soon as they are complete"
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, rtol=0, atol=1e-12)


def test_bidirectional_models_do_not_stream():
    with pytest.raises(AssertionError, match="cannot be streamed"):
        parallel_lmu().stream(torch.zeros(1, 4, NUM_FEATURES))
