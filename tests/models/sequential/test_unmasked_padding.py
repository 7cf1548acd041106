"""benchmarks/unmasked_padding.py against histories with explicit padding in front."""

import pytest
import torch

from benchmarks.unmasked_padding import SASRecSeesPadding

MAXLEN, WIDTH, HEADS = 8, 6, 2


def left_padded(model, history):
    """The last state of one history, by reproductions: zeros in front, a bias of keys, a causal mask alone."""
    empty = MAXLEN - len(history)
    place = torch.arange(MAXLEN - len(history), MAXLEN)
    x = model.items.weight[history] * WIDTH**0.5 + model.position_embedding.weight[place]
    x = torch.cat([x.new_zeros(empty, WIDTH), x])
    for block, key_bias in zip(model.blocks, torch.randn(2, HEADS, WIDTH // HEADS), strict=True):
        query_input = block.attention_connection.norm(x)
        projections = block.attention.projections
        query = projections.query(query_input).view(MAXLEN, HEADS, -1)
        key = projections.key(x).view(MAXLEN, HEADS, -1) + key_bias
        value = projections.value(x).view(MAXLEN, HEADS, -1)
        logits = torch.einsum("qhc,khc->hqk", query, key) / (WIDTH / HEADS) ** 0.5
        seen = torch.ones(MAXLEN, MAXLEN).tril().bool()
        attention = logits.masked_fill(~seen, -torch.inf).softmax(-1)
        x = query_input + torch.einsum("hqk,khc->qhc", attention, value).flatten(1)
        normalised = block.feed_forward_connection.norm(x)
        x = normalised + block.feed_forward(normalised)
        x = x * (torch.arange(MAXLEN) >= empty).unsqueeze(1)
    return model.norm(x)[-1]


@pytest.mark.parametrize("only_last", [True, False])
def test_attention_to_padding_is_that_of_padded_histories(only_last):
    torch.manual_seed(0)
    model = SASRecSeesPadding(20, MAXLEN, WIDTH, 2, HEADS, 0.2).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5)
        histories = [torch.randint(1, 21, (length,)) for length in (1, 3, 7, 8)]
        items = torch.nn.utils.rnn.pad_sequence(histories, batch_first=True)
        length = torch.tensor([len(history) for history in histories])
        states = model.encode(items, length, only_last=only_last)
        last = states[:, 0] if only_last else states[torch.arange(len(length)), length - 1]
        expected = torch.stack([left_padded(model, history) for history in histories])
    torch.testing.assert_close(last, expected)
