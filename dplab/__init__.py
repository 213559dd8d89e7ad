"""dplab: an interactive lab for data-parallel training.

In the program that every rank runs (torchrun, Slurm, or dplab.launch starts it):

    world = dplab.init()
    engine = dplab.parallelize(model, lambda params: torch.optim.AdamW(params, lr=1e-3), "zero2")
    for x, y in dplab.loader(dataset, batch_size=8):
        engine.backward(engine(x, y))
        engine.step()

In a notebook or any other process:

    run = dplab.launch(train, world_size=2, strategy="zero2")     # returns at once
    run.dashboard()                                               # the live board
    run.wait()                                                    # what each rank returned
    dplab.explain("zero2", 7.4e6, 2), dplab.estimate("llama-7b", 8, "zero3"), dplab.runs(), dplab.attach(id)

Each name's own docstring tells the rest; `dplab --help` is the command line.

Names are resolved on first use, so that `import dplab` costs no torch: a notebook that only reads a run,
a planner in a web page and `dplab --help` all start at once.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOME = {
    "init": "wire.world",
    "Topology": "topology",
    "World": "wire.world",
    "parallelize": "engine",
    "Engine": "engine",
    "CheckpointManager": "checkpoint.manager",
    "loader": "workloads.loader",
    "gather": "workloads.loader",
    "Placement": "specs",
    "Precision": "specs",
    "Sharding": "specs",
    "Strategy": "specs",
    "launch": "launcher.launch",
    "attach": "launcher.run",
    "runs": "launcher.run",
    "Run": "launcher.run",
    "Lens": "workloads.lens",
    "compare_runs": "telemetry.numerics",
    "not_finite": "telemetry.numerics",
    "estimate": "planner.footprint",
    "explain": "planner.explain",
    "plan": "planner.search",
    "calibrate": "planner.calibrate",
    "DplabError": "errors",
    "CheckpointError": "errors",
    "RankFailed": "errors",
    "RunError": "errors",
    "RunFailed": "errors",
    "StateError": "errors",
    "UsageError": "errors",
    "WireError": "errors",
}
"""Where each public name lives, below `dplab`."""

__all__ = [*sorted(_HOME), "__version__"]

if TYPE_CHECKING:  # `as` re-exports: type checkers see the public names, nothing is imported
    from dplab.checkpoint.manager import CheckpointManager as CheckpointManager
    from dplab.engine import Engine as Engine
    from dplab.engine import parallelize as parallelize
    from dplab.errors import CheckpointError as CheckpointError
    from dplab.errors import DplabError as DplabError
    from dplab.errors import RankFailed as RankFailed
    from dplab.errors import RunError as RunError
    from dplab.errors import RunFailed as RunFailed
    from dplab.errors import StateError as StateError
    from dplab.errors import UsageError as UsageError
    from dplab.errors import WireError as WireError
    from dplab.launcher.launch import launch as launch
    from dplab.launcher.run import Run as Run
    from dplab.launcher.run import attach as attach
    from dplab.launcher.run import runs as runs
    from dplab.planner.calibrate import calibrate as calibrate
    from dplab.planner.explain import explain as explain
    from dplab.planner.footprint import estimate as estimate
    from dplab.planner.search import plan as plan
    from dplab.specs import Placement as Placement
    from dplab.specs import Precision as Precision
    from dplab.specs import Sharding as Sharding
    from dplab.specs import Strategy as Strategy
    from dplab.telemetry.numerics import compare_runs as compare_runs
    from dplab.telemetry.numerics import not_finite as not_finite
    from dplab.topology import Topology as Topology
    from dplab.wire.world import World as World
    from dplab.wire.world import init as init
    from dplab.workloads.lens import Lens as Lens
    from dplab.workloads.loader import gather as gather
    from dplab.workloads.loader import loader as loader


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dplab' has no attribute {name!r}; it has {', '.join(sorted(_HOME))}")
    value = getattr(import_module(f"dplab.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
