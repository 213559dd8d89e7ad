"""Shares of a data set, and results back in its order."""

from __future__ import annotations

from itertools import chain

import pytest
import torch

import dplab
from dplab.errors import UsageError
from tests.worlds import in_threads


def epochs(count: int, samples: int = 12, batch: int = 2) -> list[list[int]]:
    batches = dplab.loader(range(samples), batch_size=batch, seed=5)
    return [[int(i) for x in batches for i in x] for _ in range(count)]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_h44_every_epoch_is_another_permutation_and_the_same_at_every_world_size(size: int) -> None:
    per_rank = in_threads(size, epochs, 3)
    whole = []
    for epoch in range(3):
        seen = [ranks[epoch] for ranks in per_rank]
        assert sorted(chain.from_iterable(seen)) == list(range(12))
        whole.append([seen[i % size][i // size] for i in range(12)])
    assert whole == [[int(i) for i in one] for one in in_threads(1, epochs, 3)[0]]
    assert whole[0] != whole[1] != whole[2]


def test_h44_a_resumed_epoch_goes_on_in_the_same_order() -> None:
    def resumed() -> tuple[list[int], list[int]]:
        first = dplab.loader(range(12), batch_size=2, seed=5)
        walk = iter(first)
        next(walk)
        state = first.state_dict()
        rest = [int(i) for x in walk for i in x]
        again = dplab.loader(range(12), batch_size=2, seed=99)
        again.load_state_dict(state)
        return rest, [int(i) for x in again for i in x]

    for rest, again in in_threads(2, resumed):
        assert rest == again
        assert len(rest) == 4


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7])
def test_h14_gather_returns_ten_rows_in_order_whatever_the_world(size: int) -> None:
    def evaluate() -> tuple[torch.Tensor, list[int]]:
        rows = [int(i) for x in dplab.loader(range(10), batch_size=2, shuffle=False) for i in x]
        return dplab.gather(torch.tensor(rows)), dplab.gather(rows)

    for rows, listed in in_threads(size, evaluate):
        assert listed == list(range(10))
        assert [int(row) for row in rows] == listed


def test_too_few_samples_for_the_ranks_is_one_sentence() -> None:
    with pytest.raises(UsageError, match=r"has 5 samples, and 1 rank x batch_size 6 need 6; use a smaller batch"):
        dplab.loader(range(5), batch_size=6)
    with pytest.raises(UsageError, match=r"has 5 samples, and 3 ranks x batch_size 2 need 6; use a smaller batch"):
        in_threads(3, lambda: dplab.loader(range(5), batch_size=2))


@pytest.mark.parametrize("batch_size", [0, -1, True, 2.0])
def test_a_batch_size_that_is_none_is_refused(batch_size: object) -> None:
    with pytest.raises(UsageError, match=r"batch_size=.* is not allowed; it is the samples of one batch on one rank"):
        dplab.loader(range(5), batch_size=batch_size)  # type: ignore[arg-type]


def test_a_stream_is_refused() -> None:
    with pytest.raises(UsageError, match=r"dataset is a generator; dplab\.loader takes anything with a length"):
        dplab.loader((i for i in range(3)), batch_size=1)
