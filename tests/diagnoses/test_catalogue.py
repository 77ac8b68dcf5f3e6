"""Every diagnosis there is has a page, a positive and a negative example, and an id of its own."""

import importlib
import pkgutil
import re

import pytest

import tests.diagnoses as examples
from dsdoctor.diagnoses import ALL

MODULES = [
    importlib.import_module(f"tests.diagnoses.{module.name}")
    for module in pkgutil.iter_modules(examples.__path__)
    if module.name.startswith("test_") and module.name != "test_catalogue"
]
POSITIVE = {identifier for module in MODULES for identifier in getattr(module, "POSITIVE", {})}
NEGATIVE = {identifier for module in MODULES for identifier in getattr(module, "NEGATIVE", {})}


def test_ids_are_unique():
    ids = [diagnosis.id for diagnosis in ALL]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("diagnosis", ALL, ids=lambda d: d.id)
def test_id_page_and_examples(diagnosis):
    assert re.fullmatch(r"[a-z0-9-]+/[a-z0-9-]+", diagnosis.id)
    assert diagnosis.title
    page = diagnosis.page()
    assert len(page.split()) > 30, f"{diagnosis.id} has no page"
    assert re.search(r"wrong", page), f"the page of {diagnosis.id} does not say when it could be wrong"
    assert diagnosis.id in POSITIVE, f"{diagnosis.id} has no positive example"
    assert diagnosis.id in NEGATIVE, f"{diagnosis.id} has no negative example"


def test_no_example_is_for_a_diagnosis_that_does_not_exist():
    known = {diagnosis.id for diagnosis in ALL}
    assert not (POSITIVE | NEGATIVE) - known
