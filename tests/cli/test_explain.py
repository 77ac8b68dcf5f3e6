"""`dsdoctor explain`."""

import json

import pytest

from dsdoctor.cli.main import main
from dsdoctor.diagnoses import ALL


def test_the_catalogue_has_a_line_for_each_diagnosis(capsys):
    assert main(["explain"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == sorted(diagnosis.id for diagnosis in ALL)


@pytest.mark.parametrize("diagnosis", ALL, ids=lambda d: d.id)
def test_each_page_is_printed(diagnosis, capsys):
    assert main(["explain", diagnosis.id]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{diagnosis.id}: {diagnosis.title}")
    assert diagnosis.page() in out


def test_json(capsys):
    assert main(["explain", "hang/uneven-batches", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["diagnoses"][0]["id"] == "hang/uneven-batches"
    assert "verdict" not in document
