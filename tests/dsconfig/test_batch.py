"""The batch triangle; that the arithmetic is DeepSpeed's own is checked in test_real_deepspeed."""

from hypothesis import given
from hypothesis import strategies as st

from dsdoctor.dsconfig.batch import BatchTriple, complete, nearest_triples

sizes = st.none() | st.integers(1, 200)


@given(sizes, sizes, sizes, st.integers(1, 16))
def test_every_offer_is_valid(train, micro, steps, ranks):
    for triple in nearest_triples(train, micro, steps, ranks):
        assert complete(triple.train, triple.micro, triple.steps, ranks).problem is None


@given(st.integers(1, 200), st.integers(1, 50), st.integers(1, 50), st.integers(1, 16))
def test_offers_keep_to_the_given_micro_batch(train, micro, steps, ranks):
    offers = nearest_triples(train, micro, steps, ranks)
    assert offers
    assert offers[0] == BatchTriple(train=micro * steps * ranks, micro=micro, steps=steps)
    assert all(o.micro <= micro for o in offers if o.steps != steps)


def test_the_well_known_example():
    assert nearest_triples(64, 8, 2, 2) == (
        BatchTriple(train=32, micro=8, steps=2),
        BatchTriple(train=64, micro=8, steps=4),
        BatchTriple(train=64, micro=16, steps=2),
    )


def test_a_total_that_the_ranks_cannot_share():
    offers = nearest_triples(50, 4, 3, 4)
    assert {offer.train for offer in offers} == {48, 52}


def test_a_huge_total_is_quick():
    assert nearest_triples(10**15 + 1, 7, None, 3)
