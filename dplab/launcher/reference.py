"""A function named as `package.module:function`: checked where it is launched, found where it runs.

The launching process does not import the user's module (that may cost minutes, and start what must start in a rank):
it reads which names the source binds.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import re
import symtable
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dplab.errors import UsageError

_NAME = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

_COMPUTED = re.compile(r"import\s*\*|\b(globals|exec)\(|\bvars\(\)|modules\[__name__\]")
"""Source that may bind names which it does not spell."""


def check(name: str) -> str:
    """The name itself; UsageError where it cannot be one of a function that a rank could import."""
    if not _NAME.fullmatch(name):
        raise UsageError(f"launch was given {name!r}, which names no function; write it as 'package.module:function'")
    module, _, attribute = name.partition(":")
    try:
        found = importlib.util.find_spec(module)
    except Exception as error:  # looking for a.b imports a, whose code may raise anything
        raise UsageError(f"launch was given {name!r}, but module {module!r} cannot be found ({error}); "
                         f"it must be importable from here") from error
    if found is None:
        raise UsageError(f"launch was given {name!r}, but there is no module {module!r} on sys.path; "
                         f"give a module that can be imported from here, or the function itself")
    names = _bound(found.origin)
    first = attribute.partition(".")[0]
    if names is not None and first not in names:
        raise UsageError(_absent(name, module, first, names))
    return name


def find(name: str) -> Callable[..., Any]:
    """In a rank: imports the module and returns the function. Whatever the import raises goes up as it is."""
    module, _, attribute = name.partition(":")
    found: Any = importlib.import_module(module)
    for part in attribute.split("."):
        if not hasattr(found, part):
            raise UsageError(_absent(name, module, part, set(dir(found))))
        found = getattr(found, part)
    if not callable(found):
        raise UsageError(f"launch was given {name!r}, which is a {type(found).__name__} and cannot be called; "
                         f"name a function")
    return found  # type: ignore[no-any-return]


def _absent(name: str, module: str, attribute: str, names: set[str]) -> str:
    close = difflib.get_close_matches(attribute, sorted(names), n=1)
    nearest = f" (did you mean {close[0]!r}?)" if close else ""
    return f"launch was given {name!r}, but module {module!r} has no {attribute!r}{nearest}; name a function of it"


def _bound(origin: str | None) -> set[str] | None:
    """Names that a module's source binds; None where only importing could tell (no source, a star import, names that
    are computed)."""
    if origin is None or not origin.endswith(".py"):
        return None
    try:
        source = Path(origin).read_text(encoding="utf-8")
        table = symtable.symtable(source, origin, "exec")
    except (OSError, ValueError, SyntaxError):
        return None      # the rank's own traceback says it better
    names = {symbol.get_name() for symbol in table.get_symbols()
             if symbol.is_assigned() or symbol.is_imported() or symbol.is_namespace()}
    names |= {symbol.get_name() for inner in _inner(table) for symbol in inner.get_symbols()
              if symbol.is_declared_global()}
    return None if "__getattr__" in names or _COMPUTED.search(source) else names


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)
