"""CUDA graphs: their results are copied, and replays are compared with eager runs."""

import torch

from trainer.loop.capture import REPLAYS, Packed, difference


def test_packed_tensors_are_unpacked_unchanged():
    values = {
        "loss": torch.tensor(1.5),
        "hits": torch.tensor([2, 3]),
        "table": torch.ones(2, 0, 3),
        "is": torch.tensor(True),
    }
    copies = Packed(values).after(lambda: None)
    assert all(copies[name].shape == value.shape and torch.equal(copies[name], value) for name, value in values.items())


def test_only_differences_larger_than_between_equal_runs_count(monkeypatch):
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)  # earlier tests may enable them
    value, nan = torch.tensor([1.0, -2.0]), torch.tensor([torch.nan, torch.inf])

    def differs(found, replayed=None, eager=None, expected=value):
        replays = iter([found if replayed is None else replayed, *[found] * REPLAYS])
        again = {"a": expected if eager is None else eager}
        return difference({"a": expected}, {"a": found}, lambda: {"a": next(replays)}, lambda: again, 1e-4) == "a"

    assert not differs(value) and not differs(nan, expected=nan)
    assert differs(value + 1e-6) and differs(value * 1.1)
    assert not differs(value + 1e-6, replayed=value + 1.5e-6)
    assert not differs(value + 1e-6, eager=value - 1e-6)
    assert differs(value * 1.1, replayed=value * 1.2)  # larger than rounding, although replays differ
    assert differs(torch.tensor([torch.nan, -2.0]), replayed=value + 1e-6)
    assert not differs(value + 1e-6j, replayed=value + 2e-6j, expected=value + 0j)
    assert differs(value + 1e-6j, expected=value + 0j)
    assert difference({"a": value}, {}, dict, dict, 1.0) == "a"
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
    assert differs(value + 1e-6, eager=value - 1e-6)  # eager runs then differ only by what a capture would freeze
