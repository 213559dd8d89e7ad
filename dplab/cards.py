"""Cards: small JSON files under data/ that describe a model or a GPU, found by name."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from dplab.errors import UsageError
from dplab.resources import DATA, folder


@cache
def cards(kind: str) -> dict[str, dict[str, Any]]:
    """All cards of a kind (`models` or `hardware`) by lower-case name and alias."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted((folder(DATA) / kind).glob("*.json")):
        for card in json.loads(path.read_text()):
            for name in (card["name"], *card.get("aliases", ())):
                found[name.lower()] = card
    return found


def names(kind: str) -> list[str]:
    """The cards' own names, sorted."""
    return sorted({card["name"] for card in cards(kind).values()})


def find(kind: str, name: str, *, what: str, otherwise: str = "") -> dict[str, Any]:
    """The card of a name or alias, case ignored. Raises UsageError that suggests the nearest names."""
    known = cards(kind)
    if name.lower() in known:
        return known[name.lower()]
    own = {alias: card["name"] for alias, card in known.items()}
    raise UsageError(f"{what} {name!r} is not known; {nearest(name, own, names(kind))}{otherwise}")


def nearest(name: str, known: Mapping[str, str], fallback: list[str]) -> str:
    """`the nearest are a, b`, or all names where none is near; `known` maps lower-case names to those that are told."""
    lower = name.lower()
    close = difflib.get_close_matches(lower, list(known), n=6, cutoff=0.5)
    close += [other for other in known if lower in other and other not in close]
    told = list(dict.fromkeys(known[other] for other in close))[:3]
    return f"the nearest are {', '.join(told)}" if told else f"there are {', '.join(fallback)}"


def read_json(path: Path, *, what: str) -> dict[str, Any]:
    """A JSON object from a file. Raises UsageError where there is none."""
    try:
        value = json.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"{what} {str(path)!r} cannot be read ({error.strerror}); give a name or a readable file"
                         ) from error
    except ValueError as error:
        raise UsageError(f"{what} {str(path)!r} is not JSON ({error}); give a Hugging Face config.json") from error
    if not isinstance(value, dict):
        raise UsageError(f"{what} {str(path)!r} holds no JSON object; give a Hugging Face config.json")
    return value
