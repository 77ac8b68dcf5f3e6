"""What a finished bisection says."""

from dsdoctor.blame.facts import Bisection, Rate, Trial
from dsdoctor.case import Case
from dsdoctor.diagnoses.bisected import GuiltyKey

KEY = ("zero_optimization.overlap_comm",)
FOUND = Bisection(
    keys=KEY,
    patch={"zero_optimization": {"overlap_comm": False}},
    verified=True,
    minimal=True,
    searched=True,
    trials=(
        Trial(changed=("gradient_clipping",), kind="fails", why="the loss is nan"),
        Trial(changed=KEY, kind="passes", why="8 steps"),
        Trial(changed=KEY, kind="passes", why="8 steps"),
        Trial(changed=KEY, kind="passes", why="8 steps"),
    ),
    given=Rate(failed=2, runs=3),
    changed=Rate(failed=0, runs=3),
    untried=("train_micro_batch_size_per_gpu (left as they are)",),
)
DOUBTED = Bisection(keys=KEY, patch={}, verified=False)

POSITIVE = {"config/guilty-key": Case(bisection=FOUND)}
NEGATIVE = {"config/guilty-key": Case(bisection=DOUBTED)}


def test_the_patch_the_runs_and_the_rates_are_told():
    (finding,) = GuiltyKey().examine(POSITIVE["config/guilty-key"])
    assert finding.keys == KEY
    assert finding.fixes[0].patch == {"zero_optimization": {"overlap_comm": False}}
    assert finding.evidence[0].text == "with zero_optimization.overlap_comm changed: passes, 8 steps"
    assert "2 of 3 times as given and 0 of 3 times changed" in (finding.caveat or "")
    assert "train_micro_batch_size_per_gpu" in (finding.caveat or "")


def test_what_failed_when_it_was_run_again_is_not_found():
    assert not list(GuiltyKey().examine(NEGATIVE["config/guilty-key"]))


def test_no_search_no_finding():
    assert not list(GuiltyKey().examine(Case()))
