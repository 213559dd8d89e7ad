"""How a function travels to the ranks: by value where it was defined in a notebook or script, else by name.

cloudpickle carries functions, classes and lambdas of `__main__` by value, so what a cell defined last is what
runs. What a module defines goes by name and is imported afresh in the rank, so an edited file counts at once; a
module that no fresh interpreter could find (made by hand, loaded from a path) travels by value as well.
"""

from __future__ import annotations

import inspect
import io
import linecache
import os
import sys
import threading
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

import cloudpickle  # type: ignore[import-untyped]

from dplab.errors import RunError, UsageError
from dplab.launcher import reference
from dplab.launcher.job import CALL
from dplab.telemetry.rundir import RunDirectory

Function = Callable[..., Any] | str

_BY_VALUE = threading.Lock()
"""cloudpickle's list of modules that travel by value is one for the process."""


def _reduce_code(code: CodeType) -> tuple[Any, ...]:
    make, values = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if value == "<dynamic-code>" else value for value in values)


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """cloudpickle's, but code keeps the name of its file, which tracebacks show (3.1.3 blanks it)."""

    dispatch_table: ClassVar[Any] = ChainMap({CodeType: _reduce_code}, cloudpickle.Pickler.dispatch_table)


def function_name(function: Function) -> str:
    """What the run's spec says: `module:name`. UsageError where it is nothing that a rank could call."""
    if isinstance(function, str):
        return reference.check(function)
    if not callable(function):
        raise UsageError(f"launch was given {function!r} ({type(function).__name__}), which cannot be called; "
                         f"give a function, or its name as 'package.module:function'")
    if inspect.iscoroutinefunction(function):
        raise UsageError(f"launch was given the async function {function.__name__}, which a rank cannot await; "
                         f"give a plain function (it may call asyncio.run)")
    named = function if hasattr(function, "__qualname__") else getattr(function, "func", type(function))
    return f"{getattr(named, '__module__', '?')}:{getattr(named, '__qualname__', type(named).__name__)}"


def require_fit(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """UsageError where the call cannot be made; a function given by name, or without a signature, is let through."""
    if isinstance(function, str):
        return
    try:
        # what a decorator wraps may take other arguments than what it returns
        signature = inspect.signature(function, follow_wrapped=False)
    except (TypeError, ValueError):      # a builtin
        return
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        name = function_name(function).partition(":")[2]
        raise UsageError(f"launch cannot call {name}{signature} with {len(args)} args and kwargs "
                         f"{sorted(map(str, kwargs))}: {error}; give launch what fits") from None


def encode(function: Function, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bytes:
    """The call as bytes; UsageError naming the object that cannot travel, and what to do."""
    module = None if isinstance(function, str) else _unfindable_module(function)
    with _BY_VALUE:
        if module is not None:
            cloudpickle.register_pickle_by_value(module)
        try:
            stream = io.BytesIO()
            _Pickler(stream).dump((function, tuple(args), dict(kwargs), _sources()))
            return stream.getvalue()
        except Exception as error:  # pickling runs any class's own code, which may raise anything
            where = _culprit("the function", function) or next(
                (found for name, value in [*((f"args[{i}]", value) for i, value in enumerate(args)),
                                           *((f"kwargs[{name!r}]", value) for name, value in kwargs.items())]
                 if (found := _culprit(name, value))), "an argument")
            raise UsageError(f"{function_name(function)} cannot travel to the ranks: {where} cannot be pickled "
                             f"({error}); make it inside the function, or pass what it is made from") from error
        finally:
            if module is not None:
                cloudpickle.unregister_pickle_by_value(module)


def load_call(directory: RunDirectory) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """In a rank: function, args and kwargs. Whatever importing or unpickling raises goes up as it is."""
    function, args, kwargs, sources = _load(directory, directory.path / CALL)
    for name, lines in sources.items():  # so that tracebacks show the cell's own lines
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    if isinstance(function, str):
        function = reference.find(function)
    return function, args, kwargs


def save_result(path: Path, rank: int, result: Any) -> None:
    """In a rank: writes what the function returned; RunError where it cannot travel back."""
    try:
        data = cloudpickle.dumps(result)
    except Exception as error:
        where = _culprit("the returned value", result) or "the returned value"
        raise RunError(f"rank {rank} returned something that cannot travel back: {where} cannot be pickled "
                       f"({error}); return plain values, tensors or state dicts") from error
    partial = path.with_suffix(".partial")
    try:
        write_private(partial, data)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"rank {rank} cannot write its result of {len(data)} bytes to {path}: {error.strerror}; "
                       f"free space there, return less, or set DPLAB_RUNS to another disk") from error
    partial.rename(path)


def load_result(directory: RunDirectory, rank: int) -> Any:
    """What a rank returned; None where it returned nothing. RunError unless the directory is this user's alone."""
    path = directory.rank(rank) / "result.pkl"
    if not path.exists():
        return None
    try:
        return _load(directory, path)
    except RunError:
        raise
    except Exception as error:  # unpickling runs any class's own code, which may raise anything
        told = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise RunError(f"what rank {rank} returned cannot be read from {path} ({told}); make its classes importable "
                       f"here, or the file is damaged") from error


def write_private(path: Path, data: bytes) -> None:
    """Writes a file that only its owner may read."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _load(directory: RunDirectory, path: Path) -> Any:
    directory.require_private()
    with open(path, "rb") as file:
        if os.fstat(file.fileno()).st_uid != os.geteuid():
            raise RunError(f"{path} is not loaded: it belongs to another user, and unpickling it would run their code")
        return cloudpickle.load(file)


def _unfindable_module(function: Callable[..., Any]) -> ModuleType | None:
    name = getattr(function, "__module__", None)
    module = sys.modules.get(name) if name else None
    if module is None or name is None or name == "__main__":
        return None
    top = name.partition(".")[0]
    finders = [finder for finder in sys.meta_path if hasattr(finder, "find_spec")]
    return None if any(finder.find_spec(top, None) for finder in finders) else module


def _sources() -> dict[str, list[str]]:
    """Lines of notebook cells: code whose file does not exist anywhere but in this process."""
    return {name: entry[2] for name, entry in linecache.cache.items()
            if len(entry) == 4 and entry[1] is None and "ipy" in name and not os.path.exists(name)}


def _culprit(name: str, value: Any, depth: int = 0) -> str | None:
    """Names the innermost thing below `value` that cannot be pickled; None if `value` can."""
    try:
        cloudpickle.dumps(value)
        return None
    except Exception:  # which one, is what we are here to find out
        if depth < 6:
            for inner, part in _parts(name, value):
                found = _culprit(inner, part, depth + 1)
                if found:
                    return found
    return f"{name} (a {type(value).__module__}.{type(value).__qualname__})"


def _parts(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, FunctionType):
        used = inspect.getclosurevars(value)
        return [(f"{variable!r}, which {value.__name__} uses,", part)
                for variable, part in {**used.globals, **used.nonlocals}.items()]
    if isinstance(value, Mapping):
        return [(f"{name}[{key!r}]", part) for key, part in value.items()]
    if isinstance(value, list | tuple | set):
        return [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    if isinstance(value, type):
        return [(f"{value.__name__}.{attribute}", part) for attribute, part in vars(value).items()
                if isinstance(part, FunctionType)]
    return [(f"{name}.{attribute}", part) for attribute, part in getattr(value, "__dict__", {}).items()]
