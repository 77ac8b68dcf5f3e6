"""A bundle brings the bad value back on a model that is built anew; what differs is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from dsdoctor.numerics.bundle import load
from dsdoctor.numerics.replay import NotReplayable
from dsdoctor.numerics.replaying import run_again
from tests.numerics.cases import CASES
from tests.numerics.test_fixes import examined


def fresh(name: str) -> nn.Module:
    torch.manual_seed(99)  # other weights than those of the run
    return CASES[name].build().to(torch.float16 if CASES[name].precision == "fp16" else torch.bfloat16)


@pytest.mark.parametrize("name", ["overflow", "domain", "masked-row"])
def test_the_same_value_comes_back(tmp_path: Path, name: str) -> None:
    found, known, _ = examined(name, tmp_path)
    again, report, told = run_again(fresh(name), load(Path(known.bundle)))
    assert (again.module, again.tensor, again.kind, again.op, again.cause) == (
        found.module, found.tensor, found.kind, found.op, found.cause,
    )  # fmt: skip
    assert found.module in report
    assert [(t.remedy, t.outcome) for t in told.trials] == [(t.remedy, t.outcome) for t in known.trials]


def test_what_does_not_come_back_is_not_reproducible(tmp_path: Path) -> None:
    _, known, _ = examined("not-reproducible", tmp_path)
    again, _, told = run_again(fresh("not-reproducible"), load(Path(known.bundle)))
    assert (again.cause, told.again) == ("not-reproducible", "finite")


def test_another_model_is_told(tmp_path: Path) -> None:
    _, known, _ = examined("domain", tmp_path)
    with pytest.raises(NotReplayable, match="another model"):
        run_again(nn.Linear(3, 3), load(Path(known.bundle)))


def test_nothing_in_it_is_unpickled(tmp_path: Path) -> None:
    _, known, _ = examined("domain", tmp_path)
    place = Path(known.bundle)
    assert sorted(path.name for path in place.iterdir()) == ["batch.pt", "bundle.json", "ds_config.json", "weights.pt"]
    torch.load(place / "weights.pt", weights_only=True)

    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return eval, ("1",)

    torch.save({"args": [Evil()]}, place / "batch.pt")
    with pytest.raises(Exception, match=r"(?i)weights.only"):
        load(place)


def test_what_was_found_stands_in_plain_json(tmp_path: Path) -> None:
    found, known, _ = examined("domain", tmp_path)
    about = json.loads((Path(known.bundle) / "bundle.json").read_text())
    assert about["first_bad"]["op"] == found.op == "aten.log"
    assert about["weights"] is True
