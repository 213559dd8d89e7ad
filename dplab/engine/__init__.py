"""`parallelize()` and the engine it returns: a model that trains on several ranks under one strategy.

    forward -> engine.backward -> hooks -> bucket.accumulate -> the bucket fills -> reduce -> (backward goes on)
    -> the window closes -> engine.step: clip, optimizer on the owned runs, publish -> next forward: unshard

Everything hangs on module and parameter hooks, so calling the model or a part of it directly is the same.
"""

from dplab.engine.engine import Engine
from dplab.engine.setup import parallelize

__all__ = ["Engine", "parallelize"]
