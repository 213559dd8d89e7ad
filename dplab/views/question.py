"""A question to the planner (model, GPUs, links, batch) and its answer as a picture. All of it is predicted."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dplab import cards
from dplab.errors import UsageError
from dplab.planner import search, unequal
from dplab.planner.configs import model as profile_of
from dplab.planner.hardware import Cluster
from dplab.planner.hardware import cluster as parse_cluster
from dplab.planner.plans import Plan, Plans
from dplab.planner.unequal import Mixed, one_slower
from dplab.views.picture import Picture, picture
from dplab.views.planned import anatomy, memory_bars

SLOWER = 0.7
"""Speed of the one GPU that is slower."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """What is asked. `network`: GB/s between nodes, one GPU and direction; `samples` a step, of all GPUs together;
    `nic_fails`: one NIC of each node is gone; `one_slower`: one GPU runs at 70 %."""

    model: str = "llama-7b"
    gpu: str = "H100-SXM-80GB"
    gpus: int = 8
    network: float = 50.0
    samples: int = 256
    data_parallel: bool = False
    nic_fails: bool = False
    one_slower: bool = False

    def cluster(self) -> Cluster | Mixed:
        """Whole nodes, with what is asked for broken. UsageError for a number of GPUs that leaves a node partly
        filled."""
        place = parse_cluster(f"{self.gpus}x{self.gpu}", network=f"{self.network}GB/s")
        if self.nic_fails and place.nodes > 1:
            place = replace(place, network=place.network * (1 - 1 / place.per_node))
        return one_slower(place, SLOWER) if self.one_slower else place

    def plans(self) -> Plans:
        """The best layouts. UsageError where there are none."""
        place, tokens = self.cluster(), self.samples * profile_of(self.model).sequence
        if isinstance(place, Mixed):
            return unequal.plan(self.model, place, tokens)
        return search.plan(self.model, place, tokens, data_parallel_only=self.data_parallel)

    def __str__(self) -> str:
        broken = [text for asked, text in ((self.nic_fails, "a NIC a node failed"),
                                           (self.one_slower, "one GPU at 70 %")) if asked]
        return (f"{self.model} on {self.gpus} x {self.gpu}, {self.network:g} GB/s between nodes, {self.samples} "
                f"samples a step{''.join(f', {text}' for text in broken)}")


def label(place: int, plan: Plan) -> str:
    """A plan below a bar: `1 zero2 tp2`."""
    split = plan.split
    cut = "".join(f" {name}{degree}" for name, degree in (("tp", split.tp), ("pp", split.pp)) if degree > 1)
    return f"{place} {'zero' + str(split.zero) if split.zero else 'ddp'}{cut}"


def drawn(question: Question) -> Picture:
    """Memory and anatomy of the best layouts, and below them in words which those are; or why there is none."""
    title = f"{question}: predicted"
    try:
        plans = question.plans()
    except UsageError as reason:
        return Picture("", f"{title}\n{reason}")
    named = {label(place, plan): plan for place, plan in enumerate(plans.plans, start=1)}
    drawing = picture([memory_bars(named, limit=plans.limit), anatomy(named)], title=title)
    return Picture(drawing.svg, f"{drawing.words}\n\n{plans}")


def checked(question: Question, changes: dict[str, Any]) -> Question:
    """The question with these changes. UsageError for a name or a value that it does not have."""
    for name, value in changes.items():
        if name not in Question.__dataclass_fields__:
            raise UsageError(f"the explorer has no slider {name!r}; it has {', '.join(Question.__dataclass_fields__)}")
        kind = type(getattr(question, name))
        number = kind in (int, float) and isinstance(value, int | float) and not isinstance(value, bool)
        if not (isinstance(value, kind) or (kind is float and number)) or (kind is int and isinstance(value, bool)):
            raise UsageError(f"the explorer's {name}={value!r} is not allowed; it takes a {kind.__name__}")
        if number and not 0 < value < 1e9:
            raise UsageError(f"the explorer's {name}={value!r} is not allowed; it takes a number above 0")
    asked = replace(question, **changes)
    return replace(asked, model=cards.find("models", asked.model, what="model")["name"],
                   gpu=cards.find("hardware", asked.gpu, what="GPU")["name"], network=float(asked.network))
