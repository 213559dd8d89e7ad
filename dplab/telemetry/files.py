"""Files of a run: small JSON files that are there whole or not at all, and those that no full disk can prevent.

Files that tell of an end (`exit.json`, `error.json`) are written into space reserved at the start, so that a full
disk cannot silence the reason of a failure.
"""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

from dplab.errors import RunError

RESERVED_BYTES = 32 * 1024
"""Size of the reserved space of an end file; longer texts lose their middle."""


def damaged(path: Path, what: str) -> RunError:
    """The error of a file that is there and cannot be used."""
    return RunError(f"{path} is damaged: {what}; look at what else is in that run's directory, or delete it")


def read_json(path: Path) -> Any:
    """A JSON file's value, None where there is no file; files are renamed into place, so never half."""
    try:
        with open(path, "rb") as file:
            return json.loads(file.read().decode())      # of bytes json would guess the encoding
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}; only the run's owner may") from error
    except (ValueError, RecursionError) as error:
        raise RunError(f"{path} is not JSON ({error}); the run directory is damaged") from error


def write_json(path: Path, value: Any) -> None:
    """Writes a private file whole: another process sees the old one or the new one."""
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            json.dump(value, file)
        os.replace(partial, path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise


def reserve(path: Path) -> None:
    """Takes the disk space in which `write_reserved` will write `path`."""
    handle = os.open(_reserved(path), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.write(handle, b" " * RESERVED_BYTES)  # written, not only allocated: every file system honours that
    finally:
        os.close(handle)


def write_reserved(path: Path, value: dict[str, Any]) -> None:
    """Writes a JSON object into the space reserved for `path`; texts that do not fit lose their middle."""
    text = json.dumps(value)
    excess = len(text) - RESERVED_BYTES
    for key in [key for key in value if isinstance(value[key], str) and excess > 0]:
        keep = max(len(value[key]) - excess, 2048) // 4  # a quarter at each end: escapes may double a character
        if 2 * keep < len(value[key]):
            value = {**value, key: f"{value[key][:keep]}\n[...]\n{value[key][-keep:]}"}
            text = json.dumps(value)
            excess = len(text) - RESERVED_BYTES
    try:
        handle = os.open(_reserved(path), os.O_WRONLY)
    except OSError as error:
        if error.errno != errno.ENOENT:
            raise
        write_json(path, value)  # used up by an earlier end
        return
    try:
        os.write(handle, text.encode())
        os.ftruncate(handle, len(text.encode()))
    finally:
        os.close(handle)
    os.replace(_reserved(path), path)


def release(path: Path) -> None:
    """Gives back the space of an end that did not come."""
    _reserved(path).unlink(missing_ok=True)


def _reserved(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")
