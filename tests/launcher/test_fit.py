"""Arguments that a function cannot be called with are refused before anything starts."""

from __future__ import annotations

import functools

import pytest

import dplab
from dplab.errors import UsageError
from dplab.launcher.payload import require_fit


def train(steps: int, *, lr: float = 0.1) -> None:
    """Never runs here."""


@pytest.mark.parametrize(("args", "kwargs", "why"), [
    ((), {}, r"train\(steps: 'int', \*, lr: 'float' = 0.1\) -> 'None' with 0 args and kwargs \[\]: "
             r"missing a required argument: 'steps'"),
    ((1, 2), {}, "with 2 args and kwargs .*: too many positional arguments; give launch what fits"),
    ((), {"steps": 1, "rl": 2}, r"kwargs \['rl', 'steps'\]: got an unexpected keyword argument 'rl'"),
])
def test_arguments_that_do_not_fit(args, kwargs, why, runs_folder):
    with pytest.raises(UsageError, match=f"launch cannot call .*{why}"):
        dplab.launch(train, args=args, kwargs=kwargs)
    assert not runs_folder.exists()


def test_what_fits_or_cannot_be_told_is_let_through():
    @functools.wraps(train)
    def decorated(*args: object) -> None:
        """Gives `train` its steps."""

    require_fit(train, (1,), {"lr": 1.0})
    require_fit(functools.partial(train, lr=1.0), (1,), {})
    require_fit(decorated, (), {})
    require_fit("module:function", (1, 2, 3), {})
    require_fit(print, (1,), {"end": ""})
