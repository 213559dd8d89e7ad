"""`estimate` and `explain`: what a strategy costs before anything runs; `calibrate`: what this machine can do."""

from __future__ import annotations

import argparse
import sys

from dplab.commands import plan
from dplab.commands.base import Answer, Verbs, parameters, strategy_name, verb, whole_number
from dplab.errors import UsageError

_CALIBRATE = """Two ranks measure products, copies, the benchmark GPT's passes, AdamW and collectives: about two minutes
on a quiet machine. The figures lie in the user's data folder, one private file a kind of machine; dplab plan
--cluster this-machine reads them. Without them stand defaults, which may be off by a factor of two."""


def add(verbs: Verbs) -> None:
    """Declares the verbs."""
    parser = verb(verbs, "estimate", estimate,
                  about="predict the memory of one rank, from a parameter count or a model",
                  example="dplab estimate --params 7.5B --world-size 64 --strategy zero2\n"
                          "  dplab estimate --model llama-7b --world-size 8 --strategy zero3")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--params", type=parameters, metavar="P", help="parameters, such as 7.5e9, 7.5B or 350M")
    what.add_argument("--model", help="such as llama-7b, or path/to/config.json: predicts the whole peak")
    parser.add_argument("--world-size", type=whole_number, required=True, metavar="N", help="ranks")
    parser.add_argument("--strategy", default="ddp", help="such as zero2, or zero3+bf16+accum4 (default: ddp; without "
                        "a precision bf16 weights and gradients with an fp32 master copy are counted)")
    parser.add_argument("--optimizer", default="adamw", help="such as adamw or sgd-momentum (default: adamw)")
    parser.add_argument("--shard", type=whole_number, help="ranks that share a shard, where fewer than all (hybrid)")
    shape = parser.add_argument_group("activations of a GPT", "predicted when layers, hidden and sequence are given")
    for name in ("layers", "hidden", "sequence"):
        shape.add_argument(f"--{name}", type=whole_number)
    shape.add_argument("--heads", type=whole_number, help="needed with --no-flash")
    shape.add_argument("--micro-batch", type=whole_number, default=1, help="sequences a rank (default: 1)")
    shape.add_argument("--vocabulary", type=whole_number, help="adds the logits")
    shape.add_argument("--no-flash", action="store_true", help="the attention matrix is stored")

    parser = verb(verbs, "explain", explain, about="tell what a strategy does with parameters, gradients and the wire",
                  example="dplab explain zero2 --params 7.4e6 --world-size 4")
    parser.add_argument("strategy", help="such as zero2, or zero3+bf16+accum4")
    parser.add_argument("--params", type=parameters, default=7.4e6, metavar="P",
                        help="parameters, such as 350M or 7.5B (default: 7.4e6)")
    parser.add_argument("--world-size", type=whole_number, default=2, metavar="N", help="ranks (default: 2)")

    plan.add(verbs)
    parser = verb(verbs, "calibrate", calibrate, about="measure this machine, for predictions of it",
                  example="dplab calibrate", notes=_CALIBRATE)
    parser.add_argument("--quick", action="store_true", help="a quarter of a minute, and more noise")
    parser.add_argument("--backend", action="append", choices=("gloo", "shm"),
                        help="measure this wire only; may be repeated (default: those that there are)")
    parser.add_argument("--show", action="store_true", help="print what is stored, or the defaults; measure nothing")


def estimate(args: argparse.Namespace) -> Answer:
    """Model states, and activations where a shape was given."""
    from dplab.planner import footprint
    from dplab.planner.shape import ModelShape

    strategy_name(args.strategy)
    if args.model:
        if args.layers or args.hidden or args.heads or args.vocabulary or args.no_flash:
            raise UsageError("--layers, --hidden, --heads, --vocabulary and --no-flash describe a model by hand; "
                             "leave them out where --model names one")
        told = footprint.estimate(args.model, args.world_size, args.strategy, args.optimizer, args.shard,
                                  micro_batch=args.micro_batch, sequence=args.sequence)
        return Answer(told.to_dict(), str(told))
    shape = None
    given = {name: getattr(args, name) for name in ("layers", "hidden", "sequence")}
    if any(given.values()):
        missing = [f"--{name}" for name, value in given.items() if value is None]
        if missing:
            raise UsageError(f"activations need --layers, --hidden and --sequence; {', '.join(missing)} "
                             f"{'is' if len(missing) == 1 else 'are'} missing")
        if args.no_flash and args.heads is None:
            raise UsageError("--no-flash needs --heads, the number of attention matrices that are stored")
        shape = ModelShape(**given, heads=args.heads or 1, micro_batch=args.micro_batch,
                           vocabulary=args.vocabulary or 0, flash=not args.no_flash)
    elif args.heads or args.vocabulary or args.micro_batch > 1 or args.no_flash:
        raise UsageError("--heads, --micro-batch, --vocabulary and --no-flash are about activations, which need "
                         "--layers, --hidden and --sequence; give those too")
    result = footprint.estimate(params=args.params, world_size=args.world_size, strategy=args.strategy,
                                optimizer=args.optimizer, shard=args.shard, shape=shape)
    return Answer(result.to_dict(), str(result))


def explain(args: argparse.Namespace) -> Answer:
    """The strategy's row with this many parameters."""
    from dplab.planner.explain import explain as told

    result = told(strategy_name(args.strategy), args.params, args.world_size)
    return Answer(result.to_dict(), str(result))


def calibrate(args: argparse.Namespace) -> Answer:
    """Measures and stores, or shows what is stored."""
    from dplab.planner import machine

    if args.show:
        if args.quick or args.backend:
            raise UsageError("--show measures nothing; leave --quick and --backend out")
        known = machine.load()
        return Answer({**known.to_dict(), "file": str(machine.path()) if known.calibrated else None}, str(known))
    from dplab.planner.calibrate import calibrate as measured

    print("measuring ...", file=sys.stderr)
    made = measured(quick=args.quick, backends=args.backend)
    return Answer({**made.to_dict(), "file": str(machine.path())}, f"{made}\nfile        {machine.path()}")
