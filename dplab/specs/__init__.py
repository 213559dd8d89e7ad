"""What a run is asked to do, as values: placements, precision, strategy, run.

Everything here is frozen, checked when it is made, and survives a round trip through a dict (JSON) and,
for a strategy, through its one-line form. No torch: a planner, a notebook and a command line share these.
"""

from dplab.specs.compression import POWERSGD
from dplab.specs.precision import DTYPE_BYTES, PRECISIONS, Precision
from dplab.specs.recompute import Recompute
from dplab.specs.run_spec import BACKENDS, RunSpec
from dplab.specs.sharding import DDP, SHARDINGS, ZERO1, ZERO2, ZERO3, Placement, Sharding
from dplab.specs.strategy import AccumulateMode, Strategy

__all__ = ["BACKENDS", "DDP", "DTYPE_BYTES", "POWERSGD", "PRECISIONS", "SHARDINGS", "ZERO1", "ZERO2", "ZERO3",
           "AccumulateMode", "Placement", "Precision", "Recompute", "RunSpec", "Sharding", "Strategy"]
