import torch

from tasks.tabular_objective import area_under_curve


def slow_area(scores, targets):
    areas = []
    for c in range(scores.shape[1]):
        positive, negative = scores[targets == c, c].tolist(), scores[(targets != c) & (targets >= 0), c].tolist()
        pairs = [(p > n) + (p == n) / 2 for p in positive for n in negative]
        areas += [sum(pairs) / len(pairs)] if pairs else []
    return sum(areas) / len(areas)


def test_the_area_under_the_curve_equals_a_count_of_pairs():
    rng = torch.Generator().manual_seed(0)
    scores = torch.rand(6, 40, 4, generator=rng).mul(8).round()  # makes many ties
    targets = torch.randint(-1, 4, (6, 40), generator=rng)
    targets[5] = targets[5].clamp(max=2)  # no row of the last table has class 3
    found = area_under_curve(scores, targets)
    for area, of_table, its_targets in zip(found, scores, targets, strict=True):
        torch.testing.assert_close(float(area), slow_area(of_table, its_targets))


def test_no_decision_depends_on_rounding():
    scores = torch.tensor([[[0.3, 0.7], [0.3 + 1e-8, 0.7], [0.3 - 1e-8, 0.7]]], dtype=torch.float64)
    assert float(area_under_curve(scores, torch.tensor([[0, 1, 1]]))) == 0.5


def test_a_single_class_has_no_area_under_the_curve():
    assert area_under_curve(torch.rand(1, 3, 2), torch.tensor([[1, 1, -1]])).isnan().all()
