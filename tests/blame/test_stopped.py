"""What the words of an ending prove about numbers and types, and what they do not."""

import pytest

from dsdoctor.blame.health import judge
from dsdoctor.runs.facts import EngineFacts, Failure, Frame, RankRun, Run, Step

FINE = tuple(Step(index=i, losses=(1.0,)) for i in range(4))


def ended(*, failure=None, printed="", code=1, outcome=None):
    facts = EngineFacts(framework="deepspeed", config={}, precision="bf16", zero_stage=1, optimizer="AdamW")
    ranks = (
        RankRun(rank=0, exit_code=code, steps=FINE, last_step=4, failure=failure, printed=printed),
        RankRun(rank=1, exit_code=1, steps=FINE, last_step=4, failure=LOST),
    )
    return Run(
        leg="with-deepspeed",
        engine="deepspeed",
        precision="as-configured",
        outcome=outcome or ("raised" if failure else "exited"),
        ranks=ranks,
        seconds=1.0,
        folder="",
        world_size=2,
        facts=facts,
    )


LOST = Failure(rank=1, type="RuntimeError", message="[gloo/tcp/pair.cc:553] Connection closed by peer", time=9.0)


def raised(kind, message, text=""):
    frames = (Frame(file="train.py", line=7, function="main", text=text),) if text else ()
    return ended(failure=Failure(rank=0, type=kind, message=message, frames=frames, step=4, time=1.0))


# The lines of DETR and MAE (`engine.py`), of timm, and of scripts that end on their own words.
@pytest.mark.parametrize(
    "printed",
    [
        "Loss is nan, stopping training",
        "Loss is inf, stopping training\n{'loss_ce': tensor(nan), 'loss_bbox': tensor(0.3)}",
        "ERROR: non-finite gradient norm detected at step 4",
        "loss became NaN, exiting",
    ],
)
def test_a_script_that_says_that_its_loss_is_bad_failed_by_its_numbers(printed):
    health = judge(ended(printed=printed))
    assert (health.trouble, health.step, health.rank, health.numeric) == ("non-finite", 4, 0, True)
    assert printed.splitlines()[0] in health.why


@pytest.mark.parametrize("printed", ["epoch 3 loss 0.31 best inf", "no more data", "", "reading info, stopping"])
def test_other_last_words_are_no_bad_number(printed):
    assert judge(ended(printed=printed)).trouble == "exited"


def test_what_argparse_says_of_an_argument_is_no_bad_number():
    assert judge(ended(printed="error: argument --clip: inf found", code=2)).trouble == "exited"


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        ("FloatingPointError", "loss exploded", ""),
        ("ValueError", "Expected parameter loc (Tensor of shape (8,)) of distribution Normal(...) to satisfy the "
         "constraint Real(), but found invalid values:\ntensor([nan, nan])", ""),
        ("ValueError", "cannot convert float NaN to integer", ""),
        ("OverflowError", "cannot convert float infinity to integer", ""),
        ("RuntimeError", "Function 'ExpBackward0' returned nan values in its 0th output.", ""),
        ("torch._C._LinAlgError", "linalg.svd: (Batch element 0): The algorithm failed to converge because the input "
         "matrix contained non-finite values.", ""),
        ("AssertionError", "", "assert torch.isfinite(loss)"),
    ],
)  # fmt: skip
def test_an_exception_that_says_so_is_a_bad_number(kind, message, text):
    health = judge(raised(kind, message, text))
    assert (health.trouble, health.step, health.rank) == ("non-finite", 4, 0)


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        ("KeyError", "'nan'", ""),
        ("RuntimeError", "shape '[4, inf_dim]' is invalid for input of size 12", ""),
        ("ValueError", "unknown mode 'inf'", ""),
        ("AssertionError", "", "assert len(batch) == 4"),
        ("RuntimeError", "finite differences need eps", ""),
    ],
)
def test_other_exceptions_are_not(kind, message, text):
    assert judge(raised(kind, message, text)).trouble == "raised"


@pytest.mark.parametrize(
    "message",
    [
        "mat1 and mat2 must have the same dtype, but got Float and BFloat16",
        "expected m1 and m2 to have the same dtype, but got: float != c10::Half",
        "Input type (float) and bias type (c10::BFloat16) should be the same",
        "Got unsupported ScalarType BFloat16",
        "\"cdist\" not implemented for 'Half'",
        "Index put requires the source and destination dtypes match, got BFloat16 for the destination and Float for"
        " the source.",
    ],
)
def test_a_type_that_is_refused_can_be_a_matter_of_the_precision(message):
    health = judge(raised("RuntimeError", message))
    assert (health.trouble, health.numeric, health.of_the_precision) == ("raised", False, True)


def test_a_shape_that_is_refused_is_none():
    health = judge(raised("RuntimeError", "mat1 and mat2 shapes cannot be multiplied (8x12 and 13x40)"))
    assert not health.of_the_precision
