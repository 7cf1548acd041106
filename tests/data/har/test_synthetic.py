import numpy as np
import pytest
import torch
from torch.nn import functional

from data.har import synthetic as har_synthetic
from data.har.augmentation import Augmentation
from data.har.synthetic import TEST_SUBJECTS, load_synthetic_har
from data.har.windows import CLASSES, SIGNALS, HarDataset, rotated_subjects, split_by_subject
from models.har.harnet import HarNet
from models.layers.standardised import Standardised
from tests.data.har.test_windows import everything
from trainer.loading.order import SampleKeys


def test_synthetic_recordings_have_the_shape_of_the_real_ones(cache_dir) -> None:
    recordings = load_synthetic_har(cache_dir)
    num_windows = len(recordings.labels)
    assert 4500 <= num_windows <= 6000
    assert recordings.signals.shape == (num_windows, 9, 128) and recordings.signals.dtype == np.float32
    assert np.isfinite(recordings.signals).all()
    assert sorted(set(recordings.subjects.tolist())) == list(range(1, 31))
    assert set(recordings.subjects[recordings.is_test].tolist()) == set(TEST_SUBJECTS)
    assert set(np.bincount(recordings.labels)) == {num_windows // len(CLASSES)}
    gravity = recordings.signals[:, 6:] - recordings.signals[:, :3]
    np.testing.assert_allclose(np.linalg.norm(gravity, axis=1), 1.0, rtol=1e-5)  # in g, at every moment
    splits = split_by_subject(recordings, 0, rotated_subjects(recordings, 0, 4))
    assert len(splits["val"]) == 4 * num_windows // 30 and len(splits["train"]) == 17 * num_windows // 30


def test_neighbouring_synthetic_windows_overlap_by_half() -> None:
    signals = har_synthetic.generate(0)["signals"]
    assert np.array_equal(signals[0, :, 64:], signals[1, :, :64])


def test_synthetic_recordings_depend_only_on_the_seed() -> None:
    first, again, other = har_synthetic.generate(3), har_synthetic.generate(3), har_synthetic.generate(4)
    for name in first:
        assert np.array_equal(first[name], again[name])
    assert not np.array_equal(first["signals"], other["signals"])


def standardised(network: torch.nn.Module, dataset: HarDataset) -> Standardised:
    model = Standardised(network, len(SIGNALS))
    model.set_statistics(*dataset.statistics)
    return model


def linear_accuracy(splits: dict[str, HarDataset]) -> float:
    samples = everything(splits["train"])
    x, y = torch.from_numpy(samples["signals"]), torch.from_numpy(samples["label"])
    linear = torch.nn.Linear(9 * 128, len(CLASSES))
    model = standardised(torch.nn.Sequential(torch.nn.Flatten(), linear), splits["train"])
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=60, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(x), y) + 0.1 * linear.weight.square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    return accuracy(model, splits["test"])


def accuracy(model: torch.nn.Module, dataset: HarDataset) -> float:
    samples = everything(dataset)
    with torch.no_grad():
        predicted = model(torch.from_numpy(samples["signals"])).argmax(dim=1)
    return float((predicted == torch.from_numpy(samples["label"])).float().mean())


@pytest.mark.slow
def test_a_linear_model_is_clearly_below_the_network(cache_dir) -> None:
    torch.manual_seed(0)
    recordings = load_synthetic_har(cache_dir)
    splits = split_by_subject(recordings, 0, rotated_subjects(recordings, 0, 4), Augmentation(15.0, 0.1, 0.1, 0.05))
    net = standardised(HarNet(), splits["train"])
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    for epoch in range(5):
        order = np.random.default_rng(epoch).permutation(len(splits["train"]))
        for start in range(0, len(order), 32):
            batch = splits["train"].__getitems__(SampleKeys(order[start : start + 32], epoch))
            logits = net(torch.from_numpy(batch["signals"]))
            optimizer.zero_grad()
            functional.cross_entropy(logits, torch.from_numpy(batch["label"])).backward()
            optimizer.step()
    net.eval()
    plain = split_by_subject(recordings, 0, rotated_subjects(recordings, 0, 4))
    assert accuracy(net, splits["test"]) > max(0.85, linear_accuracy(plain) + 0.1)
