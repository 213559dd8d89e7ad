"""One theme for every renderer: a role has one colour, one label and perhaps a hatch, live and static.

The hues are those of Okabe and Ito's colour-blind-safe set; neighbours in a stack differ in lightness too.
"""

from __future__ import annotations

ROLES: dict[str, tuple[str, str]] = {
    # role: (colour, label)
    "loss": ("#56B4E9", "mean over ranks"),
    "loss_smooth": ("#D55E00", "smoothed"),
    "rate": ("#56B4E9", "each step"),
    "rate_smooth": ("#009E73", "the last steps"),
    "compute": ("#56B4E9", "compute"),
    "exposed": ("#D55E00", "exposed sync"),
    "data": ("#F0E442", "data"),
    "other_time": ("#999999", "other"),
    "tensor": ("#CC79A7", "tensor-parallel"),
    "bubble": ("#B8B8B8", "bubble"),
    "forward": ("#56B4E9", "forward"),
    "backward": ("#0072B2", "backward"),
    "step_optimizer": ("#009E73", "optimizer"),
    "waiting": ("#B8B8B8", "waiting"),
    "reduce": ("#E69F00", "gradients"),
    "gather": ("#CC79A7", "parameters"),
    "params": ("#0072B2", "params"),
    "grads": ("#E69F00", "grads"),
    "optimizer": ("#009E73", "optimizer"),
    "master": ("#56B4E9", "master"),
    "gathered": ("#CC79A7", "gathered"),
    "buckets": ("#D55E00", "buckets"),
    "activations": ("#F0E442", "activations"),
    "other": ("#999999", "other"),
    "process": ("#767676", "whole process"),
    "limit": ("#B34700", "limit"),
    "peak": ("#B34700", "peak"),
    "reserved": ("#767676", "reserved"),
    "disagree": ("#D00000", "not as predicted"),
    "earlier": ("#999999", "earlier run"),
    "full": ("#0072B2", "whole"),
    "owned": ("#009E73", "own slice"),
    "partial": ("#E69F00", "own sum, not reduced"),
    "stale": ("#B8B8B8", "old values"),
    "predicted": ("#0072B2", "predicted"),
    "measured": ("#E69F00", "measured"),
    "cpu": ("#0072B2", "CPU, % of one core"),
    "gpu": ("#E69F00", "GPU, %"),
}
HATCHED = ("exposed", "buckets", "disagree", "partial")
"""Roles drawn with a hatch besides their colour."""

TEXT = "#767676"
"""Readable on white (4.5:1) and on JupyterLab's dark ground (4.1:1): static pictures cannot know the theme."""
GRID = "rgba(128,128,128,0.25)"


STATES = {"running": "#00704F", "paused": "#005A8C", "stopping": "#00704F", "failed": "#B34700", "damaged": "#B34700"}
"""Ground of the pill that says a run's state, with white text on it."""
OTHER_STATE = "#5F5F5F"


ALERT = "#C00000"
"""A value that is not as it should be."""


def color(role: str) -> str:
    """The role's colour as `#RRGGBB`."""
    return ROLES[role][0]


def label(role: str) -> str:
    """The role's name in a legend."""
    return ROLES[role][1]
