"""Weights of runs, compared."""


def difference(found, expected):
    """The largest one of any weight, relative to the largest value of that weight."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - w).abs().max() / w.abs().max()) for name, w in expected.items())
