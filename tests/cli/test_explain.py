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


def test_a_family_lists_its_own(capsys):
    assert main(["explain", "hang"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len({d.id for d in ALL if d.id.startswith("hang/")}) > 1
    assert all(line.startswith("hang/") for line in lines)
