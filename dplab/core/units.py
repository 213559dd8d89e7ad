"""Units of ZeRO-3: modules whose weights are gathered together, and which parameter belongs to which.

A parameter belongs to the innermost unit that holds every module using it, so tied weights live in the
unit around both uses. What no other unit holds is the root unit's, which is kept after its forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import nn

from dplab.errors import UsageError

UnitRule = Sequence[type[nn.Module] | str] | None


@dataclass
class Unit:
    """`name` is the module's path, '' for the root; `parameters` are (qualified name, parameter)."""

    name: str
    module: nn.Module
    parameters: list[tuple[str, nn.Parameter]] = field(default_factory=list)

    @property
    def is_root(self) -> bool:
        return self.name == ""


def find_units(model: nn.Module, rule: UnitRule = None) -> list[Unit]:
    """The model's units in order of registration, the root first; each has its parameters.

    `rule` names module classes or paths; None: the model's own `shard_units`, else the children of its
    outermost ModuleLists and Sequentials (the blocks of a transformer, the layers of an MLP).
    """
    chosen = rule if rule is not None else getattr(model, "shard_units", None)
    paths = _by_structure(model) if chosen is None else _by_rule(model, chosen)
    units = {path: Unit(path, module) for path, module in model.named_modules() if path == "" or path in paths}
    uses: dict[nn.Parameter, list[str]] = {}
    for path, parameter in model.named_parameters(remove_duplicate=False):
        uses.setdefault(parameter, []).append(path)
    for name, parameter in model.named_parameters():
        chains = [[unit for unit in units if unit == "" or path.startswith(unit + ".")] for path in uses[parameter]]
        common = set(chains[0]).intersection(*chains[1:])
        units[max(common, key=len)].parameters.append((name, parameter))
    return [unit for unit in units.values() if unit.parameters]


def _by_rule(model: nn.Module, rule: Sequence[type[nn.Module] | str]) -> set[str]:
    paths: set[str] = set()
    for each in rule:
        if isinstance(each, str):
            found = {path for path, _ in model.named_modules() if path == each and path}
        else:
            found = {path for path, module in model.named_modules() if isinstance(module, each) and path}
        if not found:
            raise UsageError(f"units: no module of the model is {each!r}; give module classes or paths as in "
                             f"model.named_modules(), or None")
        paths |= found
    return paths


def _by_structure(model: nn.Module) -> set[str]:
    paths: set[str] = set()

    def visit(path: str, module: nn.Module) -> None:
        for name, child in module.named_children():
            inner = f"{path}.{name}" if path else name
            listed = isinstance(module, nn.ModuleList | nn.Sequential)
            # a module without a forward of its own (a ModuleList, a ParameterDict) is never called: it cannot gather
            callable_ = type(child).forward is not nn.Module.forward
            if listed and callable_ and next(child.parameters(), None) is not None:
                paths.add(inner)
            else:
                visit(inner, child)

    visit("", model)
    return paths
