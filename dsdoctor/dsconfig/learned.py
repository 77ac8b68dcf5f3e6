"""Schemas of releases that the shipped table lacks: read once from the installed DeepSpeed, and kept in a cache.

The cache is `$XDG_CACHE_HOME/dsdoctor` (`~/.cache/dsdoctor`), one file a release. Without it, or where the release
cannot be read, the nearest older release of the table stands in.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_PROCESS = (sys.executable, "-m", "dsdoctor.dsconfig.introspect")
_PACKAGE_ROOT = Path(__file__).resolve().parents[2]
_FORMAT = 2
"""Raised when `introspect` writes another kind of table: older files are then read anew."""


def folder() -> Path:
    """Where the cache is."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base) / "dsdoctor"


def tables() -> dict[str, dict[str, Any]]:
    """The cached tables by release; files that are not such tables are passed over."""
    found = {}
    try:
        paths = list(folder().glob(f"deepspeed-schema-{_FORMAT}-*.json"))
    except OSError:  # the home of another user, as in a container that runs under any user id
        return {}
    for path in paths:
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            found[str(document["release"])] = dict(document["table"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return found


def learn(timeout: float = 120) -> str | None:
    """Read the installed DeepSpeed in a process of its own and keep its table; None, or in one line why not.

    Takes the time of importing DeepSpeed and trying some thousand configs (seconds), at most `timeout` seconds.
    """
    import subprocess  # needed this once only

    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(_PACKAGE_ROOT), *filter(None, sys.path)])}
    try:
        done = subprocess.run(
            _PROCESS, capture_output=True, text=True, timeout=timeout, env=environment, stdin=subprocess.DEVNULL
        )
        said = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in done.stdout.splitlines() if " " in line}
        _keep(said["RELEASE"].strip(), json.loads(said["TABLE"]))
    except subprocess.TimeoutExpired:
        return f"reading the installed DeepSpeed took more than {timeout:g} s"
    except KeyError:
        return (done.stderr.strip().splitlines() or ["it said nothing"])[-1][:200]
    except (OSError, ValueError) as error:
        return " ".join(str(error).split())[:200]
    return None


def _keep(release: str, table: Mapping[str, Any]) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    target = folder() / f"deepspeed-schema-{_FORMAT}-{release}.json"
    part = target.with_suffix(f".{os.getpid()}")
    part.write_text(json.dumps({"release": release, "table": table}), encoding="utf-8")
    part.replace(target)
