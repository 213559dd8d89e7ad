"""What the verbs share: their parser and their answer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from dplab.errors import UsageError
from dplab.peers.catalog import PEERS

_MOST = 10**12


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


def verb(verbs: Verbs, name: str, run: Callable[[argparse.Namespace], Answer], *, about: str, example: str,
         notes: str = "") -> argparse.ArgumentParser:
    """Declares a verb: `about` is its line in `dplab --help`; `example` and `notes` stand below its own."""
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=about, description=about[0].upper() + about[1:] + ".",
        epilog=f"example:\n  {example}" + (f"\n\n{notes}" if notes else ""),
        formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true",
                        help="one JSON object on standard output, everything else on standard error; null for what is "
                             "not recorded or no number")
    parser.set_defaults(run=run, verb=name)
    return parser


def count(number: int, noun: str) -> str:
    """`1 run`, `2 runs`, `no runs`."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def without_nan(value: Any) -> Any:
    """The same with null for what is no number (a loss that diverged): JSON has no NaN and no infinity."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: without_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(part) for part in value]
    return value


def whole_number(text: str) -> int:
    """An argparse type: a number >= 1, also as 1e3."""
    value = _number(text)
    if value != int(value) or value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number >= 1")
    if value > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; give a whole number up to {_MOST:.0e}")
    return int(value)


def seed(text: str) -> int:
    """An argparse type: what torch's generators take as a seed."""
    try:
        value = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^63 - 1") from None
    if not 0 <= value < 2**63:
        raise argparse.ArgumentTypeError(f"{text[:40]!r} is not a whole number from 0 to 2^63 - 1")
    return value


def learning_rate(text: str) -> float:
    """An argparse type: a number above 0 that fp32 can hold after an optimizer's bias correction."""
    if _number(text) > 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is too large for a learning rate; give one up to 1e6")
    return positive(text)


def positive(text: str) -> float:
    """An argparse type: a number above 0."""
    value = _number(text)
    if value <= 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    if value > _MOST**2:
        raise argparse.ArgumentTypeError(f"{text!r} is too large; give a number up to {_MOST**2:.0e}")
    return value


_SUFFIXES = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_FEWEST = 1000


def parameters(text: str) -> float:
    """An argparse type: a number of parameters, such as 7.5e9, 7.5B or 350M; below 1000 it is taken for a slip."""
    factor = _SUFFIXES.get(text[-1:].upper(), 1)
    value = factor * positive(text[:-1] if factor > 1 and len(text) > 1 else text)
    if value < _FEWEST:
        raise argparse.ArgumentTypeError(f"{text!r} is below {_FEWEST} parameters; write 7.5e9 or 7.5B for 7.5 billion")
    return value


def strategy_name(text: str) -> str:
    """The text itself; UsageError where it names another system, which only `compare` runs."""
    if text in PEERS or text.partition(":")[0] in {name.partition(":")[0] for name in (*PEERS, "deepspeed:")}:
        name, joined, _ = text.partition("+")
        alone = ", by itself" if joined else ""
        raise UsageError(f"{text!r} is another system and no strategy of dplab; dplab compare ddp {name} measures it "
                         f"beside them{alone}")
    return text


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not abs(value) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a finite number")
    return value
