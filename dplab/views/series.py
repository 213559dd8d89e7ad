"""A few columns that grow for ever within a bound."""

from __future__ import annotations

import numpy as np

from dplab.views.records import Floats


class Series:
    """Rows of named float64 columns; older rows thin out, the smallest and the largest of each four survive.

    The newest `capacity // 4` rows are always whole, so that the present is sharp and the past a faithful
    outline. `generation` counts the thinnings: rows below it keep their index until it moves.
    """

    def __init__(self, *columns: str, peak: str, capacity: int = 1024) -> None:
        self.columns = columns
        self.generation = 0
        self._peak = columns.index(peak)
        self._rows = np.empty((capacity, len(columns)))
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, column: str) -> Floats:
        return self._rows[: self._count, self.columns.index(column)]

    def append(self, *row: float) -> None:
        """One row, in the order of `columns`."""
        if self._count == len(self._rows):
            self._thin()
        self._rows[self._count] = row
        self._count += 1

    def rows(self, start: int = 0) -> Floats:
        """Rows from `start` on, shape (n, columns): a view, to be used before the next append."""
        return self._rows[start : self._count]

    def _thin(self) -> None:
        old = (len(self._rows) * 3 // 4) // 4 * 4
        groups = self._rows[:old, self._peak].reshape(-1, 4)
        # nan counts as an extreme: a loss that is no number must stay on the picture
        low = np.argmin(np.where(np.isnan(groups), np.inf, groups), axis=1)
        high = np.argmax(np.where(np.isnan(groups), np.inf, groups), axis=1)
        high = np.where(low == high, 3, high)  # all four alike: both are 0
        kept = np.sort(np.stack([low, high], axis=1), axis=1) + 4 * np.arange(len(groups))[:, None]
        recent = self._rows[old : self._count].copy()
        thinned = self._rows[kept.ravel()]
        self._rows[: len(thinned)] = thinned
        self._rows[len(thinned) : len(thinned) + len(recent)] = recent
        self._count = len(thinned) + len(recent)
        self.generation += 1
