"""A few columns that grow for ever within a bound."""

from __future__ import annotations

import numpy as np

from dplab.views.records import Floats


class Series:
    """Rows of named float64 columns; older rows thin out, the smallest and the largest of each four survive.

    The newest `capacity // 4` rows are always whole, and the past is thinned evenly, in at most half of the capacity:
    the present is sharp and the past a faithful outline from its first row on. `generation` counts the thinnings: rows
    below it keep their index until it moves.
    """

    def __init__(self, *columns: str, peak: str, capacity: int = 1024) -> None:
        self.columns = columns
        self.generation = 0
        self._peak = columns.index(peak)
        self._rows = np.empty((capacity, len(columns)))
        self._count = 0
        self._levels = np.zeros(capacity, dtype=np.uint8)
        """how often each row was thinned: the same or less than the one before"""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, column: str) -> Floats:
        return self._rows[: self._count, self.columns.index(column)]

    def append(self, *row: float) -> None:
        """One row, in the order of `columns`."""
        if self._count == len(self._rows):
            self._thin()
        self._rows[self._count], self._levels[self._count] = row, 0
        self._count += 1

    def rows(self, start: int = 0) -> Floats:
        """Rows from `start` on, shape (n, columns): a view, to be used before the next append."""
        return self._rows[start : self._count]

    def _thin(self) -> None:
        """Thins those rows of the past that were thinned the least, until it takes half of the room."""
        room = len(self._rows)
        past, levels = self._rows[: room * 3 // 4].copy(), self._levels[: room * 3 // 4].copy()
        newest = self._rows[room * 3 // 4 : self._count].copy()
        while len(past) > room // 2:
            start = int(np.argmax(levels == levels[-1]))
            end = start + (len(past) - start) // 4 * 4
            if end == start:      # too few of them: they count as thinned
                levels[start:] = levels[start - 1]
                continue
            thinner = self._extremes(past[start:end])
            level = np.full(len(thinner) + len(past) - end, levels[-1] + 1, dtype=np.uint8)
            past, levels = np.concatenate([past[:start], thinner, past[end:]]), np.concatenate([levels[:start], level])
        self._count = len(past) + len(newest)
        self._rows[: self._count] = np.concatenate([past, newest])
        self._levels[: self._count] = np.concatenate([levels, np.zeros(len(newest), dtype=np.uint8)])
        self.generation += 1

    def _extremes(self, rows: Floats) -> Floats:
        """Of each four rows (their number is a multiple of it) the two with the smallest and the largest peak."""
        groups = rows[:, self._peak].reshape(-1, 4)
        # nan counts as an extreme: a loss that is no number must stay on the picture
        low = np.argmin(np.where(np.isnan(groups), np.inf, groups), axis=1)
        high = np.argmax(np.where(np.isnan(groups), np.inf, groups), axis=1)
        high = np.where(low == high, 3, high)  # all four alike: both are 0
        kept = np.sort(np.stack([low, high], axis=1), axis=1) + 4 * np.arange(len(groups))[:, None]
        return rows[kept.ravel()]
