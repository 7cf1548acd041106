import numpy as np
import pytest
import torch

from data.tabular.prior.causes import draw_causes
from data.tabular.prior.columns import MOST_LEVELS, _missing, _rolled, _with_categories, draw_columns, without_outliers
from data.tabular.prior.randomness import TableRandom
from data.tabular.prior.settings import PriorSettings
from data.tabular.prior.units import standardise

NUM_TABLES, NUM_FEATURES, NUM_ROWS = 200, 6, 80
PLAIN = PriorSettings(categorical_share=0.0, missing_share=0.0)


@pytest.fixture
def random() -> TableRandom:
    return TableRandom(0, np.arange(NUM_TABLES), 0)


@pytest.fixture
def units(random) -> torch.Tensor:
    return random.of(slice(None)).normal(NUM_FEATURES, NUM_ROWS)


def shares_of_small(columns: torch.Tensor) -> float:
    """Returns the share of columns with at most MOST_LEVELS different values."""
    return np.mean([len(column.unique()) <= MOST_LEVELS for column in columns.flatten(0, 1)])


def test_shares_follow_the_settings(random, units):
    plain = draw_columns(TableRandom(0, np.arange(NUM_TABLES), 0), PLAIN, units)
    assert plain.isfinite().all() and shares_of_small(plain) < 0.3
    every = PriorSettings(categorical_share=1.0, missing_share=1.0)
    rich = draw_columns(TableRandom(0, np.arange(NUM_TABLES), 0), every, units)
    assert 0.05 < rich.isnan().float().mean() < 0.2 and not rich.isinf().any()
    assert shares_of_small(torch.where(rich.isnan(), 0.0, rich)) > 0.5
    # The share of columns with gaps ranges from 0 to 1 between tables.
    rates = rich.isnan().any(2).float().mean(1)
    assert rates.min() == 0 and rates.max() == 1


def test_equal_settings_give_equal_columns(units):
    drawn = [draw_columns(TableRandom(0, np.arange(NUM_TABLES), 0), PriorSettings(), units) for _ in range(2)]
    assert torch.equal(drawn[0].nan_to_num(-9.0), drawn[1].nan_to_num(-9.0))


def test_outliers_are_clipped():
    usual = torch.randn(1, 3, 199, generator=torch.Generator().manual_seed(0))
    x = standardise(torch.cat([usual, torch.full((1, 3, 1), 50.0)], 2))
    clipped = without_outliers(x)
    assert x.amax() > 10 and clipped.abs().amax() < 6
    assert torch.equal(clipped[..., :-1].argsort(2), x[..., :-1].argsort(2))
    assert clipped.mean(2).abs().max() < 1e-5 and (clipped.square().mean(2) - 1).abs().max() < 1e-5


def test_categories_are_intervals_in_some_order(random, units):
    chosen = random.chance(0.5, NUM_FEATURES)[..., None]
    columns = _with_categories(random, units, chosen, 1)
    num_levels, num_ordered = [], 0
    for column, x, is_chosen in zip(columns.flatten(0, 1), units.flatten(0, 1), chosen.flatten(), strict=True):
        if not is_chosen:
            assert torch.equal(column, x)
            continue
        codes = column[x.argsort()].long()
        values = codes.unique()
        assert torch.equal(codes.float(), column[x.argsort()]) and codes.min() >= 0 and codes.max() < MOST_LEVELS
        # Each code covers one run of sorted rows.
        assert int((codes.diff() != 0).sum()) == len(values) - 1
        num_ordered += bool((codes.diff() >= 0).all())
        num_levels.append(len(values))
    assert np.median(num_levels) in range(4, 10) and np.mean(np.array(num_levels) <= 2) > 0.15
    assert 0.3 < num_ordered / len(num_levels) < 0.6  # few levels are often ordered by chance


def test_shuffled_columns_keep_their_values_without_information(random, units):
    rolled = _rolled(random, units)
    assert torch.equal(rolled.sort(2).values, units.sort(2).values)
    assert (rolled != units).any(2).all()
    correlation = (standardise(rolled) * standardise(units)).mean(2)
    assert abs(correlation.mean()) < 0.02 and correlation.std() < 2 / NUM_ROWS**0.5


def test_missingness_may_depend_on_the_value(random, units):
    gaps = _missing(random, units, torch.ones(NUM_TABLES, NUM_FEATURES, 1, dtype=torch.bool), 1)
    assert gaps.float().mean(2).max() < 0.9
    x = standardise(units)
    difference = (x * gaps).sum(2) / gaps.sum(2).clamp(min=1)
    assert (difference > 0.5).float().mean() > 0.1 and (difference.abs() < 0.5).float().mean() > 0.5
    assert not _missing(random, units, torch.zeros(NUM_TABLES, NUM_FEATURES, 1, dtype=torch.bool), 1).any()


def test_causes_are_numbers_and_categories(random):
    effects, shown = draw_causes(random, 8, NUM_ROWS)
    assert effects.isfinite().all() and shown.isfinite().all()
    num_categories = 0
    for effect, column in zip(effects.flatten(0, 1), shown.flatten(0, 1), strict=True):
        if len(column.unique()) > 20:
            continue
        num_categories += 1
        assert torch.equal(column, column.round())
        # Each code has one effect.
        assert len(torch.stack([column, effect]).unique(dim=1)[0]) == len(column.unique())
    assert 0.2 < num_categories / (NUM_TABLES * 8) < 0.5
    correlations = torch.bmm(standardise(shown), standardise(shown).transpose(1, 2)) / NUM_ROWS
    strongest = (correlations - torch.eye(8)).abs().amax((1, 2))
    assert (strongest > 0.6).float().mean() > 0.2 and (strongest < 0.5).float().mean() > 0.3
