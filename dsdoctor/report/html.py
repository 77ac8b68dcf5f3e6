"""One file to look at in a browser: findings with their evidence, curves over the steps. It loads nothing.

Everything that came from logs or configs is escaped; there is no script in the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path

from dsdoctor.finding import Evidence, Finding
from dsdoctor.logs.facts import LogFacts
from dsdoctor.report.charts import chart
from dsdoctor.report.curves import Curve, curves

MARK = "<!-- written by dsdoctor -->"
"""By this a report is known as one of ours, which may be written over."""
_NO_TEXT = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_STYLE = """
:root{color-scheme:light dark;--line:#2563eb;--skip:#d97706;--bad:#dc2626;--soft:#8884}
body{font:15px/1.5 system-ui,sans-serif;max-width:56rem;margin:2rem auto;padding:0 1rem}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
article{border-left:4px solid var(--soft);padding:.2rem 1rem;margin:1rem 0}
article.error{border-color:var(--bad)}article.warning{border-color:var(--skip)}article.info{border-color:var(--line)}
code,pre{font:13px/1.4 ui-monospace,monospace}pre{overflow-x:auto;background:var(--soft);padding:.5rem}
.note{opacity:.7}li{overflow-wrap:anywhere}
svg{width:100%;height:auto}svg text{font:11px system-ui,sans-serif;fill:currentColor}
.axis{fill:none;stroke:currentColor;opacity:.4}.line{fill:none;stroke:var(--line);stroke-width:1.5}
.skipped{stroke:var(--skip);opacity:.6}.bad{stroke:var(--bad)}
"""


class NotOurs(Exception):
    """The file is there and no report of dsdoctor, so it is left alone."""


def write(path: Path, text: str) -> None:
    """Write a report. Raises NotOurs for a file that is something else, OSError where it cannot be written."""
    if path.exists():
        head = path.open("rb").read(len(MARK) + 200)
        if MARK.encode() not in head:
            raise NotOurs(f"{path} is there and is no report of dsdoctor")
    path.write_text(text, encoding="utf-8")


def page(title: str, findings: Sequence[Finding], logs: LogFacts | None = None, sections: Sequence[str] = ()) -> str:
    """The whole page. Findings come in the order they have, the primary one first; `sections` are HTML already."""
    drawn = curves(logs) if logs is not None else ()
    parts = [
        f"<h1>{_text(title)}</h1>",
        _summary(findings),
        *map(_finding, findings),
        *(map(_figure, drawn)),
        *sections,
        _read(logs) if logs is not None else "",
    ]
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{_text(title)}</title>'
    return (
        f'<!doctype html>\n{MARK}\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n'
        f"<body>\n{''.join(part + chr(10) for part in parts if part)}</body></html>\n"
    )


def _summary(findings: Sequence[Finding]) -> str:
    counts = {name: sum(finding.severity == name for finding in findings) for name in ("error", "warning", "info")}
    told = ", ".join(f"{count} of severity {name}" for name, count in counts.items() if count)
    return f"<p>{_text(told or 'nothing wrong was found')}</p>"


def _finding(finding: Finding) -> str:
    role = ", a consequence" if finding.role == "consequence" else ""
    note = f"{finding.severity}{role}, {finding.confidence:.0%} sure"
    proof = _list(f"<code>{_text(_where(evidence))}</code> {_text(evidence.text)}" for evidence in finding.evidence)
    caveat = f"<p>But: {_text(finding.caveat)}</p>" if finding.caveat else ""
    return (
        f'<article class="{finding.severity}"><h2>{_text(finding.title)}</h2>'
        f'<p class="note"><code>{_text(finding.id)}</code> {_text(note)}</p>'
        f"<p>{_text(finding.cause)}</p>{proof}{caveat}{_fixes(finding)}</article>"
    )


def _fixes(finding: Finding) -> str:
    if not finding.fixes:
        return ""
    shown = (
        _text(fix.text) + (f"<pre>{_text(json.dumps(fix.patch, indent=2))}</pre>" if fix.patch else "")
        for fix in finding.fixes
    )
    return f"<p>What to do:</p>{_list(shown)}"


def _figure(curve: Curve) -> str:
    marks = [f"{len(curve.skipped)} skipped (upright lines)"] if curve.skipped else []
    return f"<h2>{_text(', '.join([curve.title, *marks]))}</h2>{chart(curve)}"


def _read(logs: LogFacts) -> str:
    ranks = f"{len(logs.ranks)} ranks" if logs.ranks else "no rank marks"
    told = f"{logs.lines} lines of {len(logs.sources)} file(s), {ranks}, {logs.steps_seen} steps seen"
    missed = _list(map(_text, logs.unreadable)) if logs.unreadable else ""
    return f'<p class="note">{_text(told)}</p>{missed}'


def _where(evidence: Evidence) -> str:
    line = f":{evidence.line}" if evidence.line is not None else ""
    parts = [f"{evidence.source}{line}"]
    parts += [f"rank {evidence.rank}"] if evidence.rank is not None else []
    parts += [f"step {evidence.step}"] if evidence.step is not None else []
    return ", ".join(parts)


def _list(items: Iterable[str]) -> str:
    """A list of items that are HTML already."""
    shown = "".join(f"<li>{item}</li>" for item in items)
    return f"<ul>{shown}</ul>" if shown else ""


def _text(text: str) -> str:
    """Text as HTML: escaped, without control characters and half characters."""
    return escape(_NO_TEXT.sub("", text).encode("utf-8", "replace").decode("utf-8"))
