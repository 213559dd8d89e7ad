"""The numerics lens, in the program: what every weight was after every step, and the first gradient that broke.

`dplab.compare_runs` reads what it writes. Meant for small models: a step costs a copy of all weights.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch import nn

from dplab.engine import Engine
from dplab.errors import UsageError
from dplab.telemetry import numerics, recorder
from dplab.telemetry.recorder import now


class Lens:
    """Watches an engine. Call `record()` after every step that moved; collective.

    Rank 0 keeps the full weights of each step under `folder` (None: the run's own directory). A gradient with
    a NaN or an infinity in it is logged by the rank on which it arose, with parameter and step, before
    anything is summed.
    """

    def __init__(self, engine: Engine, folder: str | os.PathLike[str] | None = None) -> None:
        if folder is None and "DPLAB_RUN_DIR" not in os.environ:
            raise UsageError("Lens needs a place to keep the weights: launch the program with dplab.launch, or give "
                             "Lens(engine, folder=...)")
        self.engine = engine
        self.folder = Path(folder) if folder is not None else numerics.folder_of(Path(os.environ["DPLAB_RUN_DIR"]))
        if engine.world.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
        moment = now()
        recorder.current().span("log", numerics.WATCHED, moment, moment, text="a Lens watches the gradients")
        for name, parameter in engine.module.named_parameters():
            if parameter.requires_grad:
                self._watch(name, parameter)

    def record(self) -> None:
        """Keeps the weights as they are now, under the number of the step that has just ended."""
        state = self.engine.full_state_dict()
        if self.engine.world.rank == 0:
            floats = {name: value.float() if value.element_size() < 4 else value for name, value in state.items()
                      if value.is_floating_point()}
            counting = recorder.current() is not recorder.NULL
            step = recorder.current().step - 1 if counting else len(numerics.steps_in(self.folder))
            numerics.write(self.folder, step, {name: value.numpy() for name, value in floats.items()})

    def _watch(self, name: str, parameter: nn.Parameter) -> None:
        recorder_ = recorder.current()

        def check(grad: torch.Tensor) -> None:
            values = grad.coalesce().values() if grad.is_sparse else grad
            if not torch.isfinite(values).all():
                kind = "NaN" if torch.isnan(values).any() else "infinite"
                moment = now()
                recorder_.span("log", numerics.NOT_FINITE, moment, moment, parameter=name, what=kind,
                               text=f"the gradient of {name!r} is {kind}")

        parameter.register_hook(check)  # type: ignore[no-untyped-call]


