"""The command line: `dplab VERB`, also `python -m dplab`.

Exit status 0, 1 for a failed run, 2 for bad usage or bad input, 130 after Ctrl-C. With --json standard output holds
one JSON object and nothing else. Nothing heavy is imported before a verb needs it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from dplab import __version__
from dplab.commands import compare, doctor, lab, predict, runs, train
from dplab.commands.base import Answer, Parser, without_nan
from dplab.errors import DplabError, RankFailed, RunFailed, UsageError

_EXAMPLES = """examples:
  dplab lab                                     explore in JupyterLab
  dplab train --strategy zero2 --world-size 2   train on real text, headless
  dplab compare ddp zero1 zero2 zero3           the same work under each strategy, side by side
  dplab estimate --params 7.5e9 --world-size 64 --strategy zero2

exit status: 0, 1 for a failed run, 2 for bad usage or bad input, 130 after Ctrl-C
"""


def parser() -> argparse.ArgumentParser:
    """All verbs with their arguments."""
    top = Parser(prog="dplab", description="An interactive lab for data-parallel training.", epilog=_EXAMPLES,
                 formatter_class=argparse.RawDescriptionHelpFormatter)
    top.add_argument("--version", action="version", version=f"dplab {__version__}")
    verbs = top.add_subparsers(metavar="VERB", parser_class=Parser)
    for module in (lab, train, compare, predict, runs, doctor):
        module.add(verbs)
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit status; errors of ours are one sentence on standard error."""
    try:
        answer, as_json = _answer(arguments)
        text = json.dumps(without_nan(answer.data), allow_nan=False) if as_json else answer.text
        if text:
            _print(text)
        return answer.status
    except DplabError as error:
        print(f"dplab: {error}", file=sys.stderr)
        return 1 if isinstance(error, RankFailed | RunFailed) else 2
    except KeyboardInterrupt:
        print("dplab: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:      # the reader (head, less) has gone: say nothing more, at exit neither
        _silence()
        return 1


def _answer(arguments: Sequence[str] | None) -> tuple[Answer, bool]:
    top = parser()
    args, rest = top.parse_known_args(arguments)
    if not hasattr(args, "run"):
        if rest:
            raise UsageError(f"unrecognized arguments: {' '.join(rest)}; see dplab --help")
        return Answer({}, top.format_help().rstrip()), False
    if rest and not getattr(args, "passes_on", False):
        raise UsageError(f"unrecognized arguments: {' '.join(rest)}; see dplab {args.verb} --help"
                         + (" (--json stands after the verb)" if "--json" in rest else ""))
    args.rest = rest
    try:
        os.getcwd()
    except FileNotFoundError:
        raise UsageError("the current folder no longer exists; change to one that does") from None
    return args.run(args), args.json


def _print(text: str) -> None:
    try:
        encoding = sys.stdout.encoding
        print(text.encode(encoding, "backslashreplace").decode(encoding), flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        _silence()
        raise UsageError(f"the answer cannot be written to standard output: {error.strerror}") from error


def _silence() -> None:
    """What is left in standard output's buffer goes nowhere, so that the interpreter's end does not fail on it."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    sys.exit(main())
