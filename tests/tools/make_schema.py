"""Make dsdoctor/dsconfig/deepspeed_schema.json from DeepSpeed source trees and the installed release.

    python tests/tools/make_schema.py [TREE ...]

Each TREE is an unpacked source release (`pip download --no-deps --no-binary deepspeed deepspeed==0.16.9`). The table
holds the oldest release in full and each later one as an RFC 7386 merge patch of the one before, which also makes it a
record of what changed when. A release that cannot be read is left out, and the script says so.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsdoctor.dsconfig import patch
from dsdoctor.dsconfig.release import version_key

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "dsdoctor" / "dsconfig" / "deepspeed_schema.json"


def read_release(tree: str | None) -> tuple[str, dict[str, Any]]:
    """The release and its table, read in a process that imports DeepSpeed from `tree` (None: the installed one)."""
    environment = dict(os.environ)
    if tree is not None:
        environment["PYTHONPATH"] = os.pathsep.join((tree, str(ROOT)))
    done = subprocess.run(
        [sys.executable, "-m", "dsdoctor.dsconfig.introspect"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    lines = {line.split(" ", 1)[0]: line.split(" ", 1)[1] for line in done.stdout.splitlines() if " " in line}
    if done.returncode or "TABLE" not in lines:
        raise RuntimeError(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else "no table printed")
    return lines["RELEASE"].strip(), json.loads(lines["TABLE"])


def read_all(trees: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for tree in [*trees, None]:
        try:
            release, table = read_release(tree)
        except RuntimeError as error:
            print(f"left out {tree or 'the installed release'}: {error}", file=sys.stderr)
            continue
        found[release] = table
        print(f"read {release}", file=sys.stderr)
    return found


def main() -> None:
    tables = read_all(sys.argv[1:])
    order = sorted(tables, key=version_key)
    torch_classes = tables[order[-1]]["torch"]
    for table in tables.values():
        table.pop("torch")
    releases = {order[0]: tables[order[0]]}
    for before, release in itertools.pairwise(order):
        releases[release] = patch.diff(tables[before], tables[release])
    document = {"order": order, "releases": releases, "torch": torch_classes}
    TARGET.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
