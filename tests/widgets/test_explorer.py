"""The planner behind sliders: what they redraw, what stands where nobody watches, what is refused."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dplab.errors import UsageError
from dplab.planner import search
from dplab.views.question import Question, label
from dplab.widgets import explorer as module
from dplab.widgets.explorer import Explorer, explorer


def test_without_a_watcher_it_is_a_picture_with_words():
    shown = explorer(model="gpt2-xl", gpus=8)
    assert shown.box is None
    bundle = shown._repr_mimebundle_()
    assert set(bundle) == {"image/svg+xml", "text/plain"}
    assert bundle["text/plain"].startswith("gpt2-xl on 8 x H100-SXM-80GB, 50 GB/s between nodes, 256 samples a step: ")
    best = search.plan("gpt2-xl", "8xH100", 256 * 1024).best
    assert f"{best!s:34}" in bundle["text/plain"]
    assert label(1, best) in bundle["image/svg+xml"]
    assert len(bundle["image/svg+xml"]) < 20_000


def test_a_slider_redraws_memory_step_and_plans(comms):
    shown = Explorer(live=True, model="gpt2-xl", gpus=8)
    before = shown._drawing.value, shown._words.value
    shown._controls["gpus"].value = 16
    assert shown.question.gpus == 16
    assert "gpt2-xl on 16 x" in shown._drawing.value
    assert "on 2 nodes" in shown._words.value
    assert (shown._drawing.value, shown._words.value) != before
    assert shown.picture.svg == shown._drawing.value


def test_code_moves_the_sliders_too_and_the_question_is_answered_once_a_change(comms, monkeypatch):
    asked = []
    real = module.drawn
    monkeypatch.setattr(module, "drawn", lambda question: asked.append(question) or real(question))
    shown = Explorer(live=True, model="gpt2")
    shown.ask(model="gpt2-medium", samples=128, data_parallel=True)
    assert [shown._controls[name].value for name in ("model", "samples", "data_parallel")] == ["gpt2-medium", 128, True]
    assert len(asked) == 2


def test_code_may_ask_for_what_no_slider_stops_at(comms, monkeypatch):
    asked = []
    real = module.drawn
    monkeypatch.setattr(module, "drawn", lambda question: asked.append(question) or real(question))
    shown = Explorer(live=True, model="gpt2", samples=256)
    shown.ask(samples=504, network=40)
    assert (shown.question.samples, shown.question.network, len(asked)) == (504, 40.0, 2)
    assert (shown._controls["samples"].value, shown._controls["network"].value) == (504, 40.0)
    assert "504 samples a step" in shown._drawing.value
    shown.ask(samples=256)
    shown._controls["samples"].value = 504
    assert shown.question.samples == 504


def test_a_cell_that_is_opened_later_has_words(comms):
    data, _ = Explorer(live=True, model="gpt2")._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["text/plain"].startswith("gpt2 on 8 x")


def test_what_breaks_slows_the_step():
    whole = Question(model="gpt2-xl", gpus=16, samples=64, network=3.125, data_parallel=True)
    step = whole.plans().best.step
    assert replace(whole, nic_fails=True).plans().best.step > step
    slower = replace(whole, one_slower=True).plans().best
    assert slower.step > step
    assert slower.shares is not None
    one_node = replace(whole, gpus=8)
    assert replace(one_node, nic_fails=True).plans().best.step == one_node.plans().best.step


def test_where_nothing_fits_the_reason_stands_in_the_pictures_place(comms):
    shown = Explorer(live=True, model="llama3-70b", gpu="rtx3090", gpus=2)
    assert shown._drawing.value == ""
    assert "fits nowhere on 2 x RTX-3090-24GB" in shown._words.value
    assert set(Explorer(live=False, model="llama3-70b", gpu="rtx3090", gpus=2)._repr_mimebundle_()) == {"text/plain"}


@pytest.mark.parametrize(("question", "message"), [
    ({"model": "gpt9"}, r"model 'gpt9' is not known; the nearest are"),
    ({"gpu": "H1000"}, r"GPU 'H1000' is not known; the nearest are"),
    ({"gpus": 0}, r"the explorer's gpus=0 is not allowed; it takes a number above 0"),
    ({"gpus": 2.5}, r"the explorer's gpus=2.5 is not allowed; it takes a int"),
    ({"gpus": True}, r"the explorer's gpus=True is not allowed; it takes a int"),
    ({"one_slower": 1}, r"the explorer's one_slower=1 is not allowed; it takes a bool"),
    ({"ranks": 8}, r"the explorer has no slider 'ranks'; it has model, gpu, gpus, network, samples"),
])
def test_bad_questions(question, message):
    with pytest.raises(UsageError, match=message):
        explorer(**question)
    shown = explorer(model="gpt2")
    with pytest.raises(UsageError, match=message):
        shown.ask(**question)
    assert shown.question.model == "gpt2"
