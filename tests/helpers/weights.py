def difference(found, expected):
    """Returns the largest difference of any weight tensor, relative to the largest value of the tensor."""
    assert found.keys() == expected.keys()
    return max(float((found[name] - w).abs().max() / w.abs().max()) for name, w in expected.items())
