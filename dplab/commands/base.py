"""What the verbs share: their parser and their answer."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from dplab.errors import UsageError


@dataclass(frozen=True)
class Answer:
    """What a verb says: `data` with --json, else `text`; `status` is the exit status."""

    data: dict[str, Any]
    text: str
    status: int = 0


Verbs = Any
"""argparse's sub-parsers, whose class has no public name."""


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, without the usage that --help prints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see {self.prog} --help")


def verb(verbs: Verbs, name: str, run: Callable[[argparse.Namespace], Answer], *, about: str,
         example: str) -> argparse.ArgumentParser:
    """Declares a verb: `about` is its line in `dplab --help`, `example` stands below its own."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=about, description=about[0].upper() + about[1:] + ".", epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true",
                        help="one JSON object on standard output, everything else on standard error")
    parser.set_defaults(run=run)
    return parser


def whole_number(text: str) -> int:
    """An argparse type: a number >= 1, also as 1e3."""
    value = _number(text)
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    return int(value)


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = _number(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value
