"""The planner behind sliders: model, GPUs, links and batch, and at once memory, step and best layouts. All predicted.

Where nobody can watch a widget (nbval, nbconvert, a script) the same question stands as a still picture.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dplab.errors import UsageError

try:
    import ipywidgets as controls  # type: ignore[import-untyped]
except ImportError as error:
    raise UsageError(f"the explorer needs {error.name}, which is not installed; install dplab's extra 'lab' "
                     f"(pip install 'dplab[lab]'), or call dplab.plan") from error

from dplab import cards
from dplab.views.picture import Picture
from dplab.views.question import Question, checked, drawn
from dplab.widgets import frontend

_GPUS = tuple(2**power for power in range(11))
_NETWORKS = (3.125, 6.25, 12.5, 25.0, 50.0, 100.0)
_SAMPLES = tuple(2**power for power in range(3, 13))
_TEXT = "font-family:monospace;font-size:12px;white-space:pre;overflow-x:auto;line-height:1.35"


class Explorer:
    """Sliders over a question. `ask(...)` moves them from code; `picture` is what stands now.

    `live`: True makes widgets, False shows still pictures; None finds out whether somebody watches. Raises UsageError
    for a name or a value that no slider has.
    """

    def __init__(self, *, live: bool | None = None, **question: Any) -> None:
        self.live = frontend.watched() if live is None else live
        self.question = checked(Question(), question)
        self._asking = False
        self.picture = drawn(self.question)
        self.box: Any = self._box() if self.live else None

    def ask(self, **changes: Any) -> Picture:
        """Asks something else: `ask(gpus=16, nic_fails=True)`."""
        self._show(checked(self.question, changes))
        if self.live:
            self._asking = True  # the sliders follow; what they tell meanwhile is no question
            try:
                for name, control in self._controls.items():
                    _set(control, getattr(self.question, name))
            finally:
                self._asking = False
        return self.picture

    def _box(self) -> Any:
        wide: dict[str, Any] = {"style": {"description_width": "110px"}, "layout": {"width": "420px"}}
        asked = self.question
        networks = sorted({*_NETWORKS, asked.network})
        self._controls: dict[str, Any] = {
            "model": controls.Dropdown(options=cards.names("models"), value=asked.model, description="model", **wide),
            "gpu": controls.Dropdown(options=cards.names("hardware"), value=asked.gpu, description="GPU", **wide),
            "gpus": controls.SelectionSlider(options=sorted({*_GPUS, asked.gpus}), value=asked.gpus,
                                             description="GPUs", **wide),
            "network": controls.SelectionSlider(options=[(f"{speed:g} GB/s", speed) for speed in networks],
                                                value=asked.network, description="network", **wide),
            "samples": controls.SelectionSlider(options=sorted({*_SAMPLES, asked.samples}), value=asked.samples,
                                                description="samples a step", **wide),
            "data_parallel": controls.Checkbox(value=asked.data_parallel, description="data parallelism only", **wide),
            "nic_fails": controls.Checkbox(value=asked.nic_fails, description="a NIC of each node fails", **wide),
            "one_slower": controls.Checkbox(value=asked.one_slower, description="one GPU is 30 % slower", **wide)}
        for name, control in self._controls.items():
            control.observe(lambda change, name=name: self._moved(name, change["new"]), names="value")
        self._drawing, self._words = controls.HTML(), controls.HTML()
        self._draw()
        left, right = list(self._controls)[:5], list(self._controls)[5:]
        sides = [controls.VBox([self._controls[name] for name in names]) for names in (left, right)]
        return controls.VBox([controls.HBox(sides), self._drawing, self._words])

    def _moved(self, name: str, value: Any) -> None:
        if not self._asking and getattr(self.question, name) != value:
            self._show(replace(self.question, **{name: value}))

    def _show(self, question: Question) -> None:
        self.question, self.picture = question, drawn(question)
        if self.box is not None:
            self._draw()

    def _draw(self) -> None:
        # the drawing says what its words begin with, so only the table stands below it
        _, _, table = self.picture.words.partition("\n\n")
        self._drawing.value = self.picture.svg
        text = (table or self.picture.words).replace("&", "&amp;").replace("<", "&lt;")
        self._words.value = f"<div style='{_TEXT}'>{text}</div>"

    def _repr_mimebundle_(self, **options: Any) -> Any:
        """The widget where somebody watches, with the words for whoever opens the notebook later; else a picture."""
        if self.box is None:
            return self.picture._repr_mimebundle_() if self.picture.svg else {"text/plain": self.picture.words}
        bundle = self.box._repr_mimebundle_(**options)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**data, "text/plain": self.picture.words}, metadata

    def __str__(self) -> str:
        return self.picture.words


def _set(control: Any, value: Any) -> None:
    """Moves a control; a slider gets a stop there, if it has none."""
    options = getattr(control, "options", None)
    if options is not None:
        stops = {stop[1]: stop for stop in options if isinstance(stop, tuple)} or {stop: stop for stop in options}
        if value not in stops:
            new = (f"{value:g} GB/s", value) if isinstance(options[0], tuple) else value
            control.options = [stop for _, stop in sorted({**stops, value: new}.items())]
    control.value = value


def explorer(**question: Any) -> Explorer:
    """Sliders that start at a question: `explorer(model="llama-7b", gpus=64)`."""
    return Explorer(**question)
