"""The console as a logger: lines, and a progress bar or what stands for it."""

from trainer.logs.console import ProgressBar, say
from trainer.logs.logger import Logger, Record


class ConsoleLogger(Logger):
    """`open_bar` and `close_bar` enclose the steps between two reports."""

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None

    def open_bar(self, description: str, num_samples: int, consumed: int) -> None:
        """A bar over the samples of the epoch. consumed: those trained on before."""
        self._bar = ProgressBar(num_samples, consumed, "samples", description)

    def advance(self, num_samples: int) -> None:
        """After every step."""
        assert self._bar is not None
        self._bar.bar.update(num_samples)

    def close_bar(self) -> None:
        """Takes it away."""
        if self._bar is not None:
            self._bar.close()

    def say(self, line: str) -> None:
        say(line)

    def metrics(self, record: Record) -> None:
        if record.event == "step":
            assert self._bar is not None
            loss, learning_rate, *_ = record.values.values()
            self._bar.report(f"loss={loss:.4f}, lr={learning_rate:.2e}", record.text)
        else:
            say(record.text)

    def end(self, state: str) -> None:
        self.close_bar()
