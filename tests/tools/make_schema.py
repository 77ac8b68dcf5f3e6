"""Make dsdoctor/dsconfig/deepspeed_schema.json from DeepSpeed source trees and the installed release.

    python tests/tools/make_schema.py [--check] [TREE ...]

Each TREE is a folder that holds the package `deepspeed` of another release: an unpacked source release
(`pip download --no-deps --no-binary deepspeed deepspeed==0.16.9`) or the site-packages of an environment. The table
holds the oldest release in full and each later one as an RFC 7386 merge patch of the one before, which also makes it a
record of what changed when. Releases that the table has and that are not given stay as they are; one that cannot be
read is left out, and the script says so. With --check nothing is written: the script says where the table differs from
what it reads, and ends with 1 if it does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from dsdoctor.dsconfig import patch, schema
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
        timeout=600,
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


def shipped() -> dict[str, dict[str, Any]]:
    """The tables that the package has now."""
    return {release: dict(table) for release, table in schema.shipped().items()}


def document(tables: dict[str, dict[str, Any]], torch_classes: dict[str, Any]) -> dict[str, Any]:
    order = sorted(tables, key=version_key)
    releases = {order[0]: tables[order[0]]}
    for before, release in itertools.pairwise(order):
        releases[release] = patch.diff(tables[before], tables[release])
    return {"order": order, "releases": releases, "torch": torch_classes}


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """The changes from one table to the other, one a line."""
    return [f"  {key}: {json.dumps(value)}" for key, value in _leaves(patch.diff(old, new))]


def _leaves(change: dict[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, value in change.items():
        path = f"{prefix}/{name}"
        found += _leaves(value, path) if isinstance(value, dict) and value else [(path, value)]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="TREE")
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    arguments = parser.parse_args()
    read, known = read_all(arguments.trees), shipped()
    torch_classes = read[max(read, key=version_key)]["torch"] if read else {}
    for table in read.values():
        table.pop("torch")
    if not arguments.check:
        TARGET.write_text(json.dumps(document(known | read, torch_classes), indent=1) + "\n", encoding="utf-8")
        return 0
    code = 0
    for release, table in read.items():
        found = differences(known.get(release, {}), table)
        print(f"{release}: {'as in the table' if not found else f'{len(found)} differences'}")
        print("\n".join(found[:20]), end="\n" if found else "")
        code = 1 if found else code
    return code


if __name__ == "__main__":
    sys.exit(main())
