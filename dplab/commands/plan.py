"""`plan`: which layout trains a model fastest on a cluster, and what was published against what is predicted."""

from __future__ import annotations

import argparse

from dplab.commands.base import Answer, Verbs, verb, whole_number
from dplab.errors import UsageError

_NOTES = """--model is a card's name or the path of a Hugging Face config.json; --cluster is COUNTxGPU or
NODESxCOUNTxGPU, such as 4x8xA100-SXM-80GB; this-machine, as dplab calibrate measured it; or unequal GPUs joined with
+, such as 2xRTX3090+1xRTX3060, which get samples by their speed. Everything is predicted; steps that differ
by less than the errors in `dplab plan --report` are a tie."""


def add(verbs: Verbs) -> None:
    """Declares the verb."""
    parser = verb(verbs, "plan", plan, about="choose a layout for a model on a cluster, before renting it",
                  example="dplab plan --model llama-7b --cluster 8xH100-SXM-80GB --tokens-per-step 1048576",
                  notes=_NOTES)
    parser.add_argument("--model", help="such as llama-7b, gpt2-xl, or path/to/config.json")
    parser.add_argument("--cluster", help="such as 8xH100-SXM-80GB")
    parser.add_argument("--tokens-per-step", type=whole_number, metavar="T",
                        help="of all ranks together (samples for an image model)")
    parser.add_argument("--sequence", type=whole_number, help="tokens a sample (default: the card's)")
    parser.add_argument("--precision", action="append", help="fp32, bf16, fp16, amp-bf16 or amp-fp16; repeated, the "
                        "search chooses (default: bf16, or fp16 where the GPU has no bf16)")
    parser.add_argument("--network", help="between nodes, one GPU and direction, with its unit: 50GB/s or 400Gb/s")
    parser.add_argument("--memory-limit", help="of a GPU, with its unit: 75GiB or 80GB (default: 95 %% of what it has)")
    parser.add_argument("--recipe", help="the program whose facts are assumed (default: modern; dplab on this-machine)")
    parser.add_argument("--data-parallel", action="store_true", help="only layouts that dplab itself runs")
    parser.add_argument("--offload", action="store_true", help="the optimizer may leave the GPU for the host's memory")
    parser.add_argument("--top", type=whole_number, default=5, help="plans to print (default: 5)")
    parser.add_argument("--explain", action="store_true", help="the best plan's memory and time with their formulas")
    parser.add_argument("--trace", metavar="FILE", help="write the best plan's predicted step, for ui.perfetto.dev")
    parser.add_argument("--list", action="store_true", help="models and GPUs that have cards")
    parser.add_argument("--report", action="store_true", help="every published result against its prediction")


def plan(args: argparse.Namespace) -> Answer:
    """The best plans, or with --report the planner's own errors, with --list what it knows."""
    if args.list:
        from dplab import cards

        known = {kind: cards.names(kind) for kind in ("models", "hardware")}
        return Answer(known, "\n".join(f"{kind}: {', '.join(names)}" for kind, names in known.items()))
    if args.report:
        from dplab.planner import report

        told = report.score()
        return Answer(told.to_dict(), report.markdown(told).rstrip("\n"))
    missing = [f"--{name.replace('_', '-')}" for name in ("model", "cluster", "tokens_per_step")
               if getattr(args, name) is None]
    if missing:
        raise UsageError(f"plan needs {', '.join(missing)}; such as dplab plan --model llama-7b "
                         f"--cluster 8xH100-SXM-80GB --tokens-per-step 1048576")
    from dplab.planner import search
    from dplab.planner.grid import Space
    from dplab.planner.split import OFFLOAD
    from dplab.telemetry.trace import write

    plans = search.plan(args.model, args.cluster, args.tokens_per_step, sequence=args.sequence,
                        precision=_one(args.precision), recipe=args.recipe, network=args.network,
                        memory_limit=args.memory_limit, data_parallel_only=args.data_parallel, top=args.top,
                        space=Space(offload=OFFLOAD) if args.offload else None)
    text, data = str(plans), plans.to_dict()
    if args.explain:
        text += f"\n\n{plans.best.explain()}"
    if args.trace:
        try:
            write(plans.best.timeline().events, {"predicted": str(plans.best)}, args.trace)
        except OSError as error:
            raise UsageError(f"the trace cannot be written to {args.trace!r} ({error.strerror}); give a path that can "
                             f"be") from error
        data["trace"] = args.trace
        text += f"\n\n{data['trace']}: the best plan's step; open it in ui.perfetto.dev"
    return Answer(data, text)


def _one(given: list[str] | None) -> str | list[str] | None:
    """A single name alone."""
    return given[0] if given and len(given) == 1 else given
