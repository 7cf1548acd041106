import numpy as np
import pytest

from trainer.common.errors import UserError
from trainer.loading.order import Position
from trainer.loop.plan import Plan, ShuffledOrder, TaskOrder, split_batch

POSITIONS = (Position(), Position(1, 0, 8), Position(1, 0, 10))


def plan_of(epochs, *sizes, global_batch_size=4, **more):
    orders = [ShuffledOrder(0, phase, size, global_batch_size, size) for phase, size in enumerate(sizes)]
    return Plan(epochs, tuple(orders), **more)


def test_global_batches_cover_the_rest_of_an_epoch():
    plan = plan_of(3, 10)
    bounds = [[(step.start, step.end) for step in plan.rest_of_epoch(position, 0)] for position in POSITIONS]
    assert bounds == [[(0, 4), (4, 8), (8, 10)], [(8, 10)], []]
    assert plan.steps_per_epoch == 3


@pytest.mark.parametrize(
    ("eval_every", "validated"), [(1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6, 7]), (7, [7]), (100, [7])]
)
def test_validation_runs_every_n_epochs_and_after_the_last(eval_every, validated):
    plan = plan_of(7, 10, eval_every=eval_every)
    assert [epoch for epoch in range(1, 8) if plan.validates_after(epoch, 3 * epoch)] == validated


def test_a_run_limited_in_steps_ends_within_an_epoch():
    plan = plan_of(None, 10, max_steps=4)
    steps = [list(plan.rest_of_epoch(Position(epoch), 3 * epoch)) for epoch in range(3)]
    assert [(step.start, step.end) for step in steps[0] + steps[1]] == [(0, 4), (4, 8), (8, 10), (0, 4)]
    assert [step.progress for step in steps[0] + steps[1]] == [0.5, 1.5, 2.5, 3.5] and not steps[2]
    assert (plan.total, plan.num_steps, plan.is_through(9, 3), plan.is_through(0, 4)) == (4, 4, False, True)
    assert not plan.is_end_of_epoch(steps[1][0].after) and plan.is_end_of_epoch(steps[0][-1].after)


def test_validation_runs_every_n_steps_and_at_the_end():
    plan = plan_of(2, 10, eval_every=None, eval_every_steps=4)
    assert [n for n in range(7) if plan.reports_after(n)] == [0, 4]
    assert [plan.validates_after(*at) for at in ((1, 3), (1, 4), (2, 6))] == [False, True, True]
    plan = plan_of(None, 10, eval_every=2, max_steps=8)
    assert [plan.validates_after(*at) for at in ((1, 3), (2, 6), (2, 8))] == [False, True, True]
    assert not plan_of(None, 10, eval_every=None, max_steps=8).validates_after(2, 8)


def test_progress_counts_samples_of_all_phases():
    plan = plan_of(2, 30, 10, global_batch_size=8)
    assert plan.epochs_done(Position()) == 0
    assert plan.epochs_done(Position(0, 0, 20)) == 0.5
    assert plan.epochs_done(Position(1, 1, 10)) == 2
    assert plan.steps_per_epoch == 4 + 2


@pytest.mark.parametrize("num_devices", [1, 2, 3, 4, 7, 64])
@pytest.mark.parametrize("global_batch_size", [1, 12, 100, 256])
def test_a_given_global_batch_is_kept_on_any_number_of_devices(global_batch_size, num_devices):
    split = split_batch(32, 1, global_batch_size, num_devices, num_devices)
    assert split.global_batch_size == global_batch_size
    assert 1 <= split.batch_size <= 32
    assert split.batch_size * split.grad_accum_steps * num_devices >= global_batch_size


def test_a_split_by_accumulation_equals_the_split_of_its_global_batch():
    for devices in (1, 2, 3, 5):
        for accumulation in (1, 2, 3):
            by_parts = split_batch(8, accumulation, None, devices, devices)
            assert by_parts.global_batch_size == 8 * accumulation * devices
            assert split_batch(8, 1, by_parts.global_batch_size, devices, devices) == by_parts


def test_one_process_feeds_all_replicas():
    assert split_batch(8, 2, None, num_devices=4, world_size=1).micro_batch_size == 32


def test_the_steps_from_any_position_are_the_rest_of_the_epoch():
    batches = [np.arange(3), np.arange(3, 5), np.arange(5, 9)]
    orders = (
        ShuffledOrder(0, 0, 10, 4, 10),
        ShuffledOrder(0, 1, 3, 2, 3),
        TaskOrder("order", lambda epoch: batches, 3, 9, 9),
    )
    for turns in ((), (1, 1, 1), (2, 1, 3)):
        plan = Plan(2, orders, turns)
        position, seen = Position(), []
        while position.epoch < 2:
            steps = list(plan.rest_of_epoch(position, 0))
            assert len(steps) == plan.steps_per_epoch
            for i, step in enumerate(steps):
                assert list(plan.rest_of_epoch(step.after, 0)) == steps[i + 1 :]
                assert plan.steps_done(step.after) == position.epoch * plan.steps_per_epoch + i + 1
                assert plan.epochs_done(position) < step.progress < position.epoch + 1
            seen += [(step.phase, step.epoch, step.start, step.end) for step in steps]
            assert steps[-1].after.epoch == position.epoch
            position = Position(position.epoch + 1, others=steps[-1].after.others)
        assert len(set(seen)) == len(seen)
        if turns == (2, 1, 3):
            assert [phase for phase, *_ in seen[:12]] == [0, 0, 1, 2, 2, 2, 0, 1, 2, 2, 2, 0]
            assert [step[1:] for step in seen if step[0] == 1] == [(0, 0, 2), (0, 2, 3), (1, 0, 2), (1, 2, 3)]


@pytest.mark.parametrize(("size", "expected"), [(10, {4, 2}), (8, {4}), (3, {3})])
def test_an_order_knows_the_sizes_of_its_steps(size, expected):
    (order,) = plan_of(1, size).orders
    assert order.step_sizes == expected == {end - start for start, end in order.bounds(0, 0)}


def test_a_run_with_a_new_batch_size_resumes_at_the_same_sample():
    plan = plan_of(1, 10, 5, global_batch_size=3, turns=(1, 1))
    steps = list(plan.rest_of_epoch(Position(0, 1, 4, 0, ((2, 1),)), 0))
    assert [(step.phase, step.epoch, step.start, step.end) for step in steps] == [
        (1, 2, 1, 4), (0, 0, 4, 7), (1, 2, 4, 5), (0, 0, 7, 10), (1, 3, 0, 3)
    ]  # fmt: skip


@pytest.mark.parametrize("wrong", [[4, 5], [-1, 0], [0.0, 1.0], [[0], [1]]])
@pytest.mark.parametrize("kind", [list, np.array])
def test_only_indices_of_samples_make_a_batch(kind, wrong):
    order = TaskOrder("Mine.order('train')", lambda epoch: [kind([3, 2]), kind(wrong)], 2, 4, 5)
    samples = order.samples(0, 0, 2)
    assert samples.dtype == np.int64 and samples.tolist() == [3, 2]
    with pytest.raises(UserError, match=r"gives .* as batch 2 of epoch 1; .* whole numbers from 0 to 4"):
        order.samples(0, 2, 4)


def test_a_task_order_that_changes_its_size_is_refused():
    order = TaskOrder("Mine.order('train')", lambda epoch: [np.arange(4 - epoch)], 4, 4, 4)
    assert list(order.bounds(0, 0)) == [(0, 4)]
    assert list(order.bounds(0, 1)) == [(1, 4)] and order.samples(0, 1, 4).tolist() == [1, 2, 3]
    with pytest.raises(UserError, match="gives 3 samples and 0 empty batches in epoch 2"):
        list(order.bounds(1, 0))
