"""What a publication leaves open is filled by the search, and what it says is kept."""

from __future__ import annotations

import pytest

from dplab.planner import filling, memory, published
from dplab.planner.published import Unusable

OPEN = [case for case in published.cases() if case.id.startswith(("mcore-h100", "mlm-jan21"))]


@pytest.mark.parametrize("case", OPEN, ids=[case.id for case in OPEN])
def test_what_was_published_is_kept(case):
    made = filling.setup(case)
    split, config = made.split, case.config
    assert split.ranks == case.cluster["count"]
    assert split.samples == config["global_batch"]
    assert split.dp == config["dp"]
    assert split.tp * split.pp == config.get("model_parallel", config.get("tp", 1) * config.get("pp", 1))
    assert float(memory.predict(made.profile, split, made.recipe).total) <= made.cluster.gpu.memory
    assert split.recompute == 2 or config.get("recompute") != "full"


def test_a_whole_publication_is_left_alone():
    case = published.case("vtrain-m026")
    assert filling.setup(case) == published.setup(case)


def test_too_little_is_not_guessed():
    with pytest.raises(Unusable, match="the model's shape was not published"):
        filling.setup(published.case("mlm-v1-4.2B"))
    with pytest.raises(Unusable, match="the micro-batch was not published"):
        filling.setup(published.case("titan-405B-512-1f1b-tps"))
