"""Cuts recordings into windows, and collects statistics of the recordings."""

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from data.har.clocks import is_same_rate, middle_rate_hz, num_disorders
from data.har.rows import Rows

_HARDLY = 1e-3
"""A column whose range in every recording is below this share of its total range does not measure motion."""


class Cut:
    """Windows cut from recordings (one array (n, C, T) per recording), with subjects, labels and statistics.

    subjects, labels: a normalised name per window (see `key_of_name`). spellings: how often each subject and
    each label occurs, as spelled in the files.
    """

    def __init__(self, length: int, hop: int, num_columns: int) -> None:
        self._length, self._hop = length, hop
        self.windows: list[np.ndarray] = []
        self.subjects: list[str] = []
        self.labels: list[str] = []
        self.spellings: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
        self.num_rows = self.num_short = self.num_short_rows = self.num_disorders = self.num_gaps = 0
        self.longest = 0
        self.unread: dict[str, str] = {}
        self.moments: dict[str, tuple[str, str]] = {}
        self._rates: list[tuple[str, float, int]] = []
        self._rises, self._falls = np.zeros(num_columns, bool), np.zeros(num_columns, bool)
        self._widest = np.zeros(num_columns)
        self.lowest, self.highest = np.full(num_columns, np.inf), np.full(num_columns, -np.inf)

    def add(self, rows: Rows) -> None:
        self.num_rows += len(rows.signals)
        for ours, theirs in zip(self.spellings, rows.spellings, strict=True):
            ours.update(theirs)
        self.unread = rows.unread | self.unread
        for name, (first, last) in rows.moments.items():
            self.moments[name] = self.moments.get(name, (first, last))[0], last
        for recording in rows.recordings(by_label=True):
            start, stop, *_ = recording
            self.num_gaps += recording.is_behind_gap
            self.longest = max(self.longest, stop - start)
            self.num_disorders += num_disorders(rows.clocks[start:stop])
            if stop - start < self._length:
                self.num_short, self.num_short_rows = self.num_short + 1, self.num_short_rows + stop - start
                continue
            num_windows = self._add_windows(rows.signals[start:stop])
            self.subjects += [rows.subjects[start]] * num_windows
            self.labels += [rows.labels[start]] * num_windows
            if recording.rate_hz is not None:
                self._rates.append((rows.subjects[start], recording.rate_hz, num_windows))

    def _add_windows(self, signals: np.ndarray) -> int:
        """Cuts a recording, signals (n, C), into windows; returns the number of windows."""
        steps = np.diff(signals, axis=0)
        self._rises |= (steps > 0).any(axis=0)
        self._falls |= (steps < 0).any(axis=0)
        low, high = signals.min(axis=0), signals.max(axis=0)
        self._widest = np.maximum(self._widest, high - low)
        self.lowest, self.highest = np.minimum(self.lowest, low), np.maximum(self.highest, high)
        windows = sliding_window_view(signals, self._length, axis=0)[:: self._hop]
        self.windows.append(windows)
        return len(windows)

    @property
    def rate_hz(self) -> float | None:
        """Median sample rate of the windows, in rows per second; None if no clock is usable."""
        return middle_rate_hz([(rate_hz, count) for _, rate_hz, count in self._rates])

    def rates_of_people(self) -> dict[str, float]:
        """Returns the median rows per second of each person whose recordings have a clock."""
        found = defaultdict(list)
        for subject, rate_hz, count in self._rates:
            found[subject].append((rate_hz, count))
        return {subject: middle for subject, rates in found.items() if (middle := middle_rate_hz(rates)) is not None}

    def windows_at_another_rate(self) -> list[float]:
        """Returns the sample rates, one per window, that differ from `rate_hz` (see `is_same_rate`)."""
        usual = self.rate_hz
        return [hz for _, hz, count in self._rates for _ in range(count) if usual and not is_same_rate(hz, usual)]

    def why_no_signal(self, column: int) -> str:
        """Returns why a column does not measure motion; "" if it may measure motion."""
        if not self._rises[column] and not self._falls[column]:
            return "never changes within a recording"
        if not self._falls[column]:
            return "only rises within recordings, like a clock or counter"
        if not self._rises[column]:
            return "only falls within recordings, like a battery level"
        if self._widest[column] < _HARDLY * (self.highest[column] - self.lowest[column]):
            return "hardly changes within a recording, only between recordings"
        return ""

    def signals(self, columns: Sequence[int]) -> np.ndarray:
        """Returns the chosen columns of all windows, (N, len(columns), T) float32."""
        signals = np.empty((len(self.labels), len(columns), self._length), np.float32)
        ends = np.cumsum([len(windows) for windows in self.windows])
        for windows, end in zip(self.windows, ends.tolist(), strict=True):
            signals[end - len(windows) : end] = windows[:, columns]
        return signals
