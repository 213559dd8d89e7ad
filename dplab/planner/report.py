"""The planner's own errors as a page: every published case, its prediction, and what was set with it in view."""

from __future__ import annotations

from dplab.planner.scoring import Family, Score, score

__all__ = ["markdown", "score"]

_TITLES = {"formula": "Formulas of papers, to the digits they print", "memory": "Measured peaks of memory",
           "bubble": "Pipeline bubbles, simulated", "collective": "Collectives", "time": "Step times"}

_HEAD = """# What the planner predicts against what others measured

Made by `dplab plan --report`; a test holds this page to the code. Errors are of the prediction: +10 % says that it
is 10 % too high. Rates (tokens/s, TFLOP/s, MFU, HFU) are compared as ms a step. Sources stand in the JSON files of
this folder, one to a case.

"None fitted" is the mean absolute error of the prediction as it stands; "one constant" after a division by the
family's median ratio; "size left out" with that constant from the other model sizes alone. "Gaps filled": what was
not published (micro-batch, degrees) is what the planner's own search finds fastest.
"""

_FITTED = """## What was set with results in view

| constant | value | set on |
|---|---|---|
| sustained share of the dense peak, A100 | 0.78 | Megatron-LM 2021 |
| sustained share of the dense peak, H100 | 0.58 | between llm-foundry on H100 (0.56) and Megatron-Core's MFU of 48 % |
| share of the nominal network that collectives reach | 0.5 | vTrain multi-node, nanotron |
| memory traffic of eager PyTorch over fused kernels | 1.5 | llm-foundry |
| host seconds to launch a layer, Megatron-LM 2021 | 1 ms | vTrain single-node |
| network share of ZeRO-3 in 2021 | 0.082 | ZeRO-3 2021 |
| latency of a ring step in a node | 5.2 us | vTrain's all-reduce table |
| share of tensor collectives hidden by asynchronous ones | 0.4 | torchtitan's pairs with and without |
| nanotron keeps gathered inputs | yes | nanotron peaks |

Everything else is a data sheet, a published measurement of a part (flash attention, contention of overlap, bandwidth
inside a node) or what a program's authors say that it does. No constant was chosen to please the families marked "-",
but their errors were known while the model was written: only results that nobody here has seen can test it blind.

What falls short: the sweep of nanotron holds two runs (80B on 4 nodes, 1.34B on 64) that took three times as long as
predicted; fp8 with row-wise scales is slower than predicted, because its casts are not modelled; MT-NLG is slower than
predicted throughout. Bubbles of interleaved schedules are simulated here as in their publication, where a micro-batch
does not wait for its own transfer from the last stage to the first; plans do wait, and are up to 0.0035 worse. Only two
published grids can judge advice, and both are of one program on one cluster.
"""


def markdown(told: Score) -> str:
    """The whole page."""
    used = sum(len(family.rows) for family in told.families)
    left = sum(len(ids) for ids in told.unused.values())
    lines = [_HEAD, f"{used} cases are used, {left} are not (reasons at the end).\n", *_summary(told), _FITTED,
             *_advice(told)]
    for kind, title in _TITLES.items():
        lines.append(f"## {title}\n")
        for family in told.families:
            if family.kind == kind:
                lines += _table(family)
    lines += ["## Not used\n", "| reason | cases | such as |", "|---|---|---|"]
    lines += [f"| {reason} | {len(ids)} | {', '.join(ids[:3])} |" for reason, ids in sorted(told.unused.items())]
    return "\n".join(lines) + "\n"


def _summary(told: Score) -> list[str]:
    lines = ["| family | cases | none fitted | median ratio | one constant | size left out | set with it in view |",
             "|---|---|---|---|---|---|---|"]
    for family in told.families:
        left_out = "-" if family.left_out is None else f"{family.left_out:.1%}"
        lines.append(f"| {family.name} | {len(family.rows)} | {family.mape:.1%} | {family.bias:.2f} | "
                     f"{family.calibrated:.1%} | {left_out} | {family.seen or '-'} |")
    return [*lines, ""]


def _advice(told: Score) -> list[str]:
    """Regret and verdicts: what an error costs whoever follows the advice."""
    lines = ["## Advice\n", "How much slower the predicted best layout is than the measured best of a published set, "
             "and the best of the\nfirst three. A constant for a family changes no order.\n",
             "| set | layouts | regret@1 | regret@3 | picked |", "|---|---|---|---|---|"]
    lines += [f"| {regret.name} | {regret.layouts} | {regret.first:.1%} | {regret.third:.1%} | {regret.picked} |"
              for regret in told.regrets]
    wrong = [verdict for verdict in told.verdicts if not verdict.right]
    false_fits = sum(not verdict.fits for verdict in wrong)
    lines += ["", f"Of {len(told.verdicts)} published runs and refusals, {len(told.verdicts) - len(wrong)} are told "
              f"right from memory alone: {false_fits} said to\nfit that did not, {len(wrong) - false_fits} said not to "
              f"fit that ran.", ""]
    lines += [f"- {verdict.case.id}: {verdict.needed / 1e9:.1f} GB predicted, {verdict.limit / 1e9:.1f} GB there"
              for verdict in wrong]
    return [*lines, ""]


def _table(family: Family) -> list[str]:
    lines = [f"### {family.name}\n", "| case | unit | measured | predicted | error |", "|---|---|---|---|---|"]
    for row in family.rows:
        unit = "ms/step" if family.kind == "time" else row.case.unit.partition(" (")[0].partition(" = ")[0]
        lines.append(f"| {row.case.id} | {unit} | {row.measured:.5g} | {row.predicted:.5g} | {row.error:+.1%} |")
    return [*lines, ""]
