"""Tests what TensorBoard shows of a finished run in a browser."""

import json
import shutil
import socket
import subprocess
import sys
import time
import urllib.parse
import urllib.request

import pytest

pytest.importorskip("selenium", reason="needs selenium, see requirements-dev.txt")

from selenium import webdriver
from selenium.webdriver.chrome.service import Service

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER), reason="needs chromium and chromedriver: apt-get install chromium chromium-driver"
)

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=2600,4000",  # large, because what is out of sight is not drawn
)  # fmt: skip
PATIENCE_S = 60

# TensorBoard is made of nested components, each with a tree of elements of its own.
EVERYTHING = """
    function everything(root) {
        return [...root.querySelectorAll('*')].flatMap(e => [e, ...(e.shadowRoot ? everything(e.shadowRoot) : [])]);
    }
    const visible = everything(document).filter(e => e.getClientRects().length > 0);
"""
CARDS_WITH_A_CURVE = """
    return visible.filter(e => e.matches('scalar-card') && /[0-9]/.test(e.querySelector('tb-data-table')?.innerText))
        .map(card => card.innerText.split('Alt +')[0].replace(/\\s/g, ''));
"""
SIZES_OF_PICTURES = """
    return visible.filter(e => e.matches('img') && e.complete && e.naturalWidth > 0).map(e => {
        const key = new URL(e.src).searchParams.get('blob_key').replace(/-/g, '+').replace(/_/g, '/');
        return [JSON.parse(atob(key))[2], e.naturalWidth];
    });
"""
TEXT = "return visible.filter(e => e.children.length === 0).map(e => e.textContent.trim()).filter(text => text);"


@pytest.fixture(scope="module")
def finished_run(command, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tensorboard") / "run"
    command("main.py", "--epochs", 1, "--mode", "first", "--hidden-dims", 16, "--save-dir", directory)
    return directory


@pytest.fixture(scope="module")
def address(finished_run, environment):
    """Starts a TensorBoard that shows the run; yields its address."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = ["--logdir", finished_run, "--host", "127.0.0.1", "--port", str(port)]
    server = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", *place],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        runs = f"http://127.0.0.1:{port}/data/runs"
        wait_until(lambda: json.loads(urllib.request.urlopen(runs, timeout=5).read()) == ["logs"])
        yield f"http://127.0.0.1:{port}"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    driver = webdriver.Chrome(options, Service(executable_path=DRIVER))
    yield driver
    driver.quit()


def wait_until(is_true):
    """Waits until a function returns a true value; fails with its last error or answer."""
    give_up = time.monotonic() + PATIENCE_S
    while True:
        try:
            answer = is_true()
        except OSError as error:
            answer, problem = False, error
        else:
            problem = answer
        if answer:
            return
        assert time.monotonic() < give_up, problem
        time.sleep(0.2)


def wait_for(browser, script, wanted):
    """Waits until a script finds all wanted items on the page; returns what it found."""
    found = []

    def is_there():
        found[:] = browser.execute_script(EVERYTHING + script)
        return wanted <= {item if isinstance(item, str) else item[0] for item in found}

    try:
        wait_until(is_there)
    except AssertionError:
        missing = wanted - {item if isinstance(item, str) else item[0] for item in found}
        raise AssertionError(f"TensorBoard does not show {sorted(missing)}, but {found}") from None
    return found


def test_tensorboard_shows_curves(address, browser):
    wanted = {
        "train/learning_rate", "train/grad_norm", "train/samples_per_second", "train/data_wait_seconds", "train/loss",
        "val/accuracy", "val/recall/WALKING", "val/recall/LAYING",
    }  # fmt: skip
    tags = "|".join(f"^{tag}$" for tag in sorted(wanted))
    browser.get(f"{address}/?tagFilter={urllib.parse.quote(tags)}#timeseries")
    wait_for(browser, CARDS_WITH_A_CURVE, wanted)


def test_pictures_appear_in_tensorboard(address, browser):
    browser.get(f"{address}/#images")
    wanted = {f"{split}/{name}" for split in ("val", "test") for name in ("confusion_matrix", "windows")}
    found = wait_for(browser, SIZES_OF_PICTURES, wanted)
    assert all(width == 350 for _, width in found)


def test_hyperparameters_appear_beside_the_final_scores(finished_run, address, browser):
    metrics = json.loads((finished_run / "results.json").read_text())["metrics"]
    browser.get(f"{address}/#hparams")
    names = {"lr", "hidden-dims", "no-augmentation", "best/test/accuracy", "best/test/macro_f1"}
    scores = {f"{metrics[name]:#.5g}" for name in ("test/accuracy", "test/macro_f1")}
    wait_for(browser, TEXT, names | scores | {"32.000"})  # the batch size
