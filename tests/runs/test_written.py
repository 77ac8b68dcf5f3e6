"""Two listings of a working directory compared."""

from dsdoctor.runs.written import changed, listing


def test_new_and_changed_files_are_told_and_the_report_folder_is_not(tmp_path):
    report = tmp_path / "dsdoctor-report"
    report.mkdir()
    (tmp_path / "kept.txt").write_text("same")
    (tmp_path / "grown.txt").write_text("a")
    before = listing(tmp_path, leave_out=report)
    (tmp_path / "grown.txt").write_text("ab")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "new.bin").write_bytes(b"x")
    (report / "0001").mkdir()
    (report / "0001" / "report.json").write_text("{}")
    assert changed(before, listing(tmp_path, leave_out=report)) == ("grown.txt", "sub/new.bin")


def test_a_folder_that_does_not_exist_is_empty(tmp_path):
    assert listing(tmp_path / "none", leave_out=tmp_path) == {}
