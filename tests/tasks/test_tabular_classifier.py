"""Tests that the classifier of tables keeps to scikit-learn's convention and predicts what the model predicts."""

import os
import signal
import threading
import time

import numpy as np
import pytest
import torch

from tasks.tabular import SHIPPED
from tasks.tabular_classifier import TabularClassifier
from tests.helpers.one_thread import on_one_thread
from tests.helpers.small_table import SMALL_MODEL, SMALL_PRIOR
from trainer.common.errors import UserError
from trainer.failure.signals import StopRequest


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    with on_one_thread():
        yield


def moons(num_rows, seed):
    rng = np.random.default_rng(seed)
    angle, y = rng.uniform(0, np.pi, num_rows), rng.integers(0, 2, num_rows)
    x = np.stack([np.cos(angle) + y, np.where(y == 1, 0.5 - np.sin(angle), np.sin(angle))], axis=1)
    return x + rng.normal(0, 0.1, x.shape), np.array(["lower", "upper"])[1 - y]


class Frame(dict):
    """Columns by name, like a data frame."""

    @property
    def columns(self):
        return list(self)


@pytest.fixture(scope="module")
def fitted():
    return TabularClassifier(num_estimators=2).fit(*moons(120, 0))


def test_the_shipped_model_predicts_without_training(fitted):
    x, y = moons(80, 1)
    probabilities = fitted.predict_proba(x)
    assert probabilities.shape == (80, 2) and list(fitted.classes_) == ["lower", "upper"]
    np.testing.assert_allclose(probabilities.sum(1), 1)
    assert (fitted.predict(x) == fitted.classes_[probabilities.argmax(1)]).all()
    assert fitted.score(x, y) > 0.9
    assert fitted.evaluate(x, y)["accuracy"] == fitted.score(x, y)


def test_a_saved_classifier_predicts_equally(fitted, tmp_path):
    x, _ = moons(30, 2)
    fitted.save(tmp_path / "model.pth")
    loaded = TabularClassifier.load(tmp_path / "model.pth")
    np.testing.assert_array_equal(loaded.predict_proba(x), fitted.predict_proba(x))
    assert loaded.get_params() == fitted.get_params()
    torch.save({"model": {}}, tmp_path / "other.pth")
    with pytest.raises(UserError, match="was not written by TabularClassifier"):
        TabularClassifier.load(tmp_path / "other.pth")


def test_strings_gaps_and_ids_are_accepted(fitted):
    """Texts become categories, gaps become missing values, and a column that names rows is left out."""
    rng = np.random.default_rng(0)
    colour = rng.choice(["red", "green", "blue"], 90)
    x = np.empty((90, 3), object)
    x[:, 0], x[:, 1], x[:, 2] = colour, rng.normal(size=90), [f"row-{i}" for i in range(90)]
    x[3, 1] = None
    classifier = TabularClassifier(num_estimators=2).fit(x, colour == "red")
    assert any("x2" in note for note in classifier.notes_)
    assert classifier.predict(x[:20]).dtype == bool
    assert classifier.score(x, colour == "red") > 0.9


def test_values_are_equal_with_and_without_gaps():
    rng = np.random.default_rng(0)
    flag, noise = rng.random(80) < 0.5, rng.normal(size=80)
    gaps = np.where(np.arange(80) == 0, None, flag)
    with_all = TabularClassifier(num_estimators=1).fit(Frame(flag=flag, noise=noise), flag)
    with_gaps = TabularClassifier(num_estimators=1).fit(Frame(flag=gaps, noise=noise), flag)
    for classifier in (with_all, with_gaps):
        assert min(classifier.score(Frame(flag=each, noise=noise), flag) for each in (flag, gaps)) > 0.95
    mixed = np.array(["a", 1, 1.0, 2.5] * 20, object)
    classifier = TabularClassifier(num_estimators=1).fit(Frame(mixed=mixed), mixed == "a")
    np.testing.assert_array_equal(*classifier.predict_proba(Frame(mixed=np.array([1, 1.0], object))))


def test_labels_to_score_are_one_per_row(fitted):
    x, y = moons(40, 1)
    with pytest.warns(UserWarning, match="column-vector"):
        assert fitted.score(x, y[:, None]) == fitted.score(x, y)
    for score in (fitted.score, fitted.evaluate):
        with pytest.raises(ValueError, match="X has 40 rows, but y has 1"):
            score(x, y[:1])


def test_numpy_parameters_and_datetime_classes_are_saved(tmp_path):
    x, y = moons(40, 0)
    days = np.array(["2024-05-31", "2024-06-01"], "M8[D]")
    numpys = {"num_estimators": np.int64(2), "temperature": np.float64(0.9), "random_state": np.int64(3)}
    classifier = TabularClassifier(**numpys).fit(x, days[(y == "upper").astype(int)])
    classifier.save(tmp_path / "model.pth")
    loaded = TabularClassifier.load(tmp_path / "model.pth")
    assert loaded.predict(x).dtype == days.dtype
    np.testing.assert_array_equal(loaded.predict(x), classifier.predict(x))
    assert [path.name for path in tmp_path.iterdir()] == ["model.pth"]


def test_weights_that_cannot_be_tuned_or_used_are_refused(tmp_path):
    shipped = torch.load(SHIPPED, weights_only=True)
    adapters = {"blocks.0.over_rows.query.lora_a": torch.zeros(2, 2)}
    torch.save(shipped | {"model": shipped["model"] | adapters}, tmp_path / "adapted.pth")
    torch.save({"model": shipped["model"]}, tmp_path / "alone.pth")
    with pytest.raises(UserError, match=r"adapted\.pth: contains adapters from an earlier tuning"):
        TabularClassifier("base", weights=tmp_path / "adapted.pth").fit(*moons(40, 0))
    with pytest.raises(UserError, match=r"alone\.pth: contains only weights"):
        TabularClassifier(weights=tmp_path / "alone.pth").fit(*moons(40, 0))


def test_tuning_and_prediction_use_equal_inputs(monkeypatch):
    """Both lack the id column, infinite numbers are missing, and long texts take no memory."""
    seen = []

    def stop(task, data_dir, **_):
        with np.load(data_dir) as table:
            seen.extend((table["X"], table["y"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("tasks.tabular_classifier.fit", stop)
    x, y = moons(60, 0)
    numbers = np.where(np.arange(60) % 10 == 0, np.inf, x[:, 0])
    frame = Frame(customerId=np.arange(60)[::-1] * 3, numbers=numbers, texts=np.array(["a" * 10_000, "b"] * 30))
    with pytest.raises(KeyboardInterrupt):
        TabularClassifier("lora").fit(frame, y)
    assert seen[0].shape == (60, 2) and seen[0].dtype == np.float32
    np.testing.assert_array_equal(np.isnan(seen[0][:, 0]), np.isinf(numbers))
    np.testing.assert_array_equal(seen[0][:, 1], [0, 1] * 30)
    np.testing.assert_array_equal(seen[1], y == "upper")


def test_random_states_of_the_process_are_restored():
    torch.manual_seed(0)
    TabularClassifier(num_estimators=1).fit(*moons(20, 0))
    number = torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(torch.rand(1), number)


@pytest.mark.parametrize("strategy", ["base", "lora"])
def test_tuned_classifiers_predict_well_and_can_be_saved(strategy, tmp_path, capsys):
    x, y = moons(60, 0)
    classifier = TabularClassifier(strategy, num_estimators=1, epochs=1).fit(x, y)
    assert capsys.readouterr().out == ""
    new, truth = moons(40, 1)
    assert classifier.score(new, truth) > 0.8
    classifier.save(tmp_path / "model.pth")
    again = TabularClassifier.load(tmp_path / "model.pth")
    np.testing.assert_allclose(again.predict_proba(new), classifier.predict_proba(new), atol=1e-6)


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros(5), np.zeros(5), "Expected 2D array, got 1D array"),
        (np.zeros((4, 2)), np.zeros(3), "X has 4 rows, but y has 3"),
        (Frame(), np.zeros(3), "0 feature"),
        (Frame({f"x{i}": np.zeros(3) for i in range(1001)}), np.zeros(3), "X has 1,001 columns, but at most 1,000"),
        (np.random.default_rng(0).normal(size=(9, 2)), np.zeros(9), "has only one class,"),
        (np.random.default_rng(0).normal(size=(9, 2)), np.linspace(0, 1, 9), "Unknown label type: continuous"),
    ],
)
def test_errors_are_value_errors(x, y, message):
    with pytest.raises(ValueError, match=message):
        TabularClassifier().fit(x, y)


def test_other_columns_are_refused(fitted):
    with pytest.raises(ValueError, match="X has 3 features, but TabularClassifier is expecting 2 features"):
        fitted.predict(np.zeros((4, 3)))
    with pytest.raises(ValueError, match="is not fitted"):
        TabularClassifier().predict(np.zeros((4, 2)))


def test_without_names_columns_are_matched_by_order(fitted):
    x, y = moons(60, 0)
    frame, turned = Frame(width=x[:, 0], height=x[:, 1]), Frame(height=x[:, 1], width=x[:, 0])
    by_name = TabularClassifier(num_estimators=1).fit(frame, y)
    np.testing.assert_array_equal(by_name.predict_proba(x), by_name.predict_proba(frame))
    np.testing.assert_array_equal(by_name.predict_proba(turned), by_name.predict_proba(frame))
    np.testing.assert_array_equal(fitted.predict_proba(frame), fitted.predict_proba(x))
    by_order = by_name.fit(x, y)
    assert not hasattr(by_order, "feature_names_in_") and by_order.score(frame, y) > 0.9


def stop_when_training(number):
    """Sends a signal to this process as soon as training handles it."""

    def send():
        while not isinstance(getattr(signal.getsignal(number), "__self__", None), StopRequest):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    threading.Thread(target=send, daemon=True).start()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_tuning_and_still_reaches_its_process(number):
    received = []
    x, y = moons(60, 0)
    classifier = TabularClassifier("lora", num_estimators=1, epochs=50)
    before = signal.signal(number, lambda *which: received.append(which[0]))
    try:
        stop_when_training(number)
        with pytest.raises(KeyboardInterrupt):
            classifier.fit(x, y)
    finally:
        signal.signal(number, before)
    assert received == [number]
    with pytest.raises(ValueError, match="is not fitted"):
        classifier.predict(x)


def test_parameters_match_the_constructor():
    classifier = TabularClassifier("lora", epochs=3)
    assert repr(classifier) == "TabularClassifier(strategy='lora', epochs=3)"
    assert TabularClassifier(**classifier.get_params()).get_params() == classifier.get_params()
    with pytest.raises(ValueError, match="depth: no such parameter"):
        classifier.set_params(depth=3)


@pytest.mark.parametrize(
    ("parameter", "message"),
    [
        ({"strategy": "lorra"}, "strategy 'lorra': must be one of none, base, lora"),
        ({"num_estimators": 0}, "num_estimators 0: must be a whole number, at least 1"),
        ({"random_state": "a"}, "random_state 'a': must be a whole number, at least 0, or None"),
        ({"random_state": -1}, "random_state -1: must be a whole number, at least 0, or None"),
        ({"temperature": 0}, "temperature 0: must be a finite number above 0"),
        ({"device": "gpu"}, 'device \'gpu\': must be "auto" or "cpu"'),
    ],
)
def test_parameters_are_checked(parameter, message):
    with pytest.raises(ValueError, match=message):
        TabularClassifier(**parameter).fit(*moons(20, 0))


def test_any_column_name_is_accepted():
    x, y = moons(40, 0)
    frame = Frame({"label": x[:, 0], "y": x[:, 1], "label's class": x[:, 0] + x[:, 1]})
    classifier = TabularClassifier(num_estimators=1).fit(frame, y)
    assert list(classifier.feature_names_in_) == ["label", "y", "label's class"]


@pytest.mark.slow
def test_tuning_on_two_devices_matches_one_device(capsys):
    x, y = moons(60, 0)
    one, two = (
        TabularClassifier("base", num_estimators=1, epochs=1, num_devices=n, device="cpu").fit(x, y) for n in (1, 2)
    )
    np.testing.assert_allclose(two.predict_proba(x), one.predict_proba(x), atol=1e-4)


@pytest.mark.slow
def test_the_classifier_passes_the_checks_of_scikit_learn(monkeypatch):
    for name in ("KMP_DUPLICATE_LIB_OK", "KMP_INIT_AT_FORK"):  # scikit-learn sets these permanently
        monkeypatch.setenv(name, "TRUE")
    checks = pytest.importorskip("sklearn.utils.estimator_checks")
    results = checks.check_estimator(TabularClassifier(num_estimators=1), on_fail=None)
    failed = {result["check_name"]: result["exception"] for result in results if result["status"] == "failed"}
    assert failed == {}


def test_tuning_keeps_thinking_rows(run_here, tmp_path):
    run_here("--task", "tabular", *SMALL_PRIOR, *SMALL_MODEL, "--thinking-rows", 2, "--save-dir", tmp_path / "run",
             "--max-steps", 1, "--warmup-steps", 0)  # fmt: skip
    classifier = TabularClassifier("base", epochs=1, weights=tmp_path / "run" / "final.pth", device="cpu")
    assert classifier.fit(*moons(40, 0))._flags_of_weights()["thinking_rows"] == 2
    classifier.save(tmp_path / "model.pth")
    kept = torch.load(tmp_path / "model.pth", weights_only=True)
    assert any("thinking_rows" in name for name in kept["model"])
