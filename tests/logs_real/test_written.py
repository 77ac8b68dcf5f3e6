"""What is said of whole logs that were written after what programs print."""

import pytest

from dsdoctor.analysis import analyze_log
from tests.logs_real.written import (
    aborts,
    accelerators,
    attempts,
    breakages,
    brief_ends,
    brief_software,
    brief_waits,
    calm,
    collected,
    communication,
    figures,
    gpus,
    healthy,
    launchers,
    loading,
    networks,
    other_losses,
    partitioned,
    pasted,
    processes,
    scales,
    software,
    starts,
    variants,
    waiting,
)

LOGS = [
    *figures.CASES,
    *scales.CASES,
    *gpus.CASES,
    *breakages.CASES,
    *processes.CASES,
    *aborts.CASES,
    *attempts.CASES,
    *starts.CASES,
    *communication.CASES,
    *waiting.CASES,
    *networks.CASES,
    *brief_ends.CASES,
    *brief_waits.CASES,
    *brief_software.CASES,
    *software.CASES,
    *partitioned.CASES,
    *variants.CASES,
    *pasted.CASES,
    *accelerators.CASES,
    *launchers.CASES,
    *loading.CASES,
    *other_losses.CASES,
    *healthy.CASES,
    *calm.CASES,
    *collected.CASES,
]


@pytest.mark.parametrize("written", LOGS, ids=lambda written: written.name)
def test_written_log(written, tmp_path):
    path = tmp_path / "train.log"
    path.write_text(written.text, encoding="utf-8")
    analysis = analyze_log(path)
    assert not analysis.broken
    findings = analysis.findings
    alarming = [finding.id for finding in findings if finding.severity != "info"]
    said = {finding.id for finding in findings}
    if written.primary is None:
        assert alarming == []
    else:
        assert findings
        assert findings[0].id in (written.primary, *written.accept), alarming
        lines = " ".join(evidence.text for evidence in findings[0].evidence)
        assert written.line in lines, lines
        assert all(evidence.line is None or evidence.line <= analysis.logs.lines for evidence in findings[0].evidence)
    assert set(written.also) <= said
    assert not set(written.absent) & said
    scale = analysis.to_dict().get("loss_scale", {})
    assert written.skipped is None or scale.get("skipped") == written.skipped
    assert written.settled is None or scale.get("settled_at") == written.settled


def test_names_are_unique():
    names = [written.name for written in LOGS]
    assert len(names) == len(set(names))
