import pytest

from trainer.loading.order import Position
from trainer.loop.plan import Plan, split_batch


def test_global_batches_cover_the_rest_of_a_phase():
    plan = Plan(epochs=3, phase_sizes=(10,), global_batch_size=4)
    assert list(plan.rest_of_phase(Position())) == [(0, 4), (4, 8), (8, 10)]
    assert list(plan.rest_of_phase(Position(1, 0, 8))) == [(8, 10)]
    assert list(plan.rest_of_phase(Position(1, 0, 10))) == []
    assert plan.steps_per_epoch == 3


@pytest.mark.parametrize(
    ("eval_every", "validated"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7])]
)
def test_validation_after_every_so_many_epochs_and_the_last(eval_every, validated):
    plan = Plan(epochs=7, phase_sizes=(10,), global_batch_size=4, eval_every=eval_every)
    assert [epoch for epoch in range(1, 8) if plan.validates_after(epoch)] == validated


def test_progress_counts_samples_over_phases():
    plan = Plan(epochs=2, phase_sizes=(30, 10), global_batch_size=8)
    assert plan.epochs_done(Position()) == 0
    assert plan.epochs_done(Position(0, 0, 20)) == 0.5
    assert plan.epochs_done(Position(1, 1, 10)) == 2
    assert plan.steps_per_epoch == 4 + 2


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("global_batch_size", [1, 12, 100, 256])
def test_stated_global_batch_is_kept_on_any_number_of_devices(global_batch_size, num_devices):
    split = split_batch(32, 1, global_batch_size, num_devices, num_devices)
    assert split.global_batch_size == global_batch_size
    assert 1 <= split.batch_size <= 32
    assert split.batch_size * split.grad_accum_steps * num_devices >= global_batch_size


def test_product_and_its_statement_are_the_same_split():
    for devices in (1, 2, 3, 5):
        for accumulation in (1, 2, 3):
            by_parts = split_batch(8, accumulation, None, devices, devices)
            assert by_parts.global_batch_size == 8 * accumulation * devices
            assert split_batch(8, 1, by_parts.global_batch_size, devices, devices) == by_parts


def test_one_process_feeds_all_replicas():
    assert split_batch(8, 2, None, num_devices=4, world_size=1).micro_batch_size == 32
