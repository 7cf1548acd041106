"""Steps recorded as CUDA graphs: the number of recordings is bounded, and replays are compared with eager steps."""

import torch

from trainer.loop.recording import Packed, Recordings, difference


def test_a_signature_is_captured_at_its_second_occurrence_only():
    kept = Recordings(most=2)
    made = []
    for key in "aabbccabcabc":
        if kept.get(key) is None and kept.is_wanted(key):
            kept[key] = key.upper()
            made.append(key)
    assert made == ["a", "b"] and len(kept) == 2
    kept.clear()
    assert all(kept.is_wanted(key) for key in "abc")


def test_packed_tensors_are_unpacked_unchanged():
    values = {
        "loss": torch.tensor(1.5),
        "hits": torch.tensor([2, 3]),
        "table": torch.ones(2, 0, 3),
        "is": torch.tensor(True),
    }
    copies = Packed(values).after(lambda: None)
    assert all(copies[name].shape == value.shape and torch.equal(copies[name], value) for name, value in values.items())


def test_only_differences_larger_than_between_replays_count():
    value = {"x": torch.tensor([1.0, torch.nan, torch.inf])}

    def near(error):
        return {"x": value["x"] + torch.tensor([error, 0.0, 0.0])}

    assert difference(value, near(0.0), replayed=dict, rounding=0.0) is None
    assert difference(value, near(1e-6), lambda: near(2e-6), rounding=1e-4) is None
    assert difference(value, near(1e-6), lambda: near(1e-6), rounding=1e-4) == "x"
    assert difference(value, near(1e-2), lambda: near(2e-2), rounding=1e-4) == "x"
    assert difference(value, {}, replayed=dict, rounding=1.0) == "x"
