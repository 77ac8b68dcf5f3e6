"""Apply a merge patch to the text of a config file: comments, order and layout stay, only what changes is touched.

A key that goes while another comes in the same object gives it its place: with the same value only the name is
changed. What is added otherwise comes after the last key of its object, indented as that one is.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dsdoctor.dsconfig import patch as merge
from dsdoctor.dsconfig import reader

_COMMA = re.compile(r"[ \t]*,")


class NotEditable(Exception):
    """The text cannot be changed in place so that it holds what it should; `str()` is one line for the user."""


def patched(text: str, patch: Mapping[str, Any]) -> str:
    """The text with the patch applied. Raises NotEditable."""
    try:
        before = reader.read(text)
        wanted = merge.apply(before.value, patch)
        after = _Editor(text, before).patched(patch)
        if before.duplicates or not _same(reader.read(after).value, wanted):
            raise NotEditable("the file is laid out in a way that cannot be changed in place")
    except reader.HjsonError as error:
        raise NotEditable(f"the file cannot be read: {error.message}") from None
    return after


@dataclass(frozen=True, kw_only=True)
class _Edit:
    """Replace the characters from `start` to `end` by `text`."""

    start: int
    end: int
    text: str


class _Editor:
    """Turns one patch into edits of one text."""

    def __init__(self, text: str, reading: reader.Reading) -> None:
        self.text = text
        self.reading = reading
        self.newline = "\r\n" if "\r\n" in text else "\n"
        self.edits: list[_Edit] = []

    def patched(self, patch: Mapping[str, Any]) -> str:
        self.change("", self.reading.value, patch)
        text = self.text
        for _place, edit in sorted(((e.start, e.end, n), e) for n, e in enumerate(_united(self.edits)))[::-1]:
            text = text[: edit.start] + edit.text + text[edit.end :]
        return text

    def change(self, section: str, node: Mapping[str, Any], patch: Mapping[str, Any]) -> None:
        """Collect the edits inside one object."""
        gone = [name for name, value in patch.items() if value is None and name in node]
        new = {name: _set_by(value) for name, value in patch.items() if value is not None and name not in node}
        for old in list(gone):
            heir = next((name for name, value in new.items() if _same(value, node[old])), None)
            if heir is not None:
                self.rename(_join(section, old), heir)
                gone.remove(old)
                new.pop(heir)
        while gone and new:
            self.succeed(_join(section, gone.pop(0)), *new.popitem())
        for name, value in patch.items():
            path = _join(section, name)
            if name in node and isinstance(value, Mapping) and isinstance(node[name], Mapping):
                self.change(path, node[name], value)
            elif name in node and value is not None and not _same(value, node[name]):
                self.replace(path, _set_by(value))
        self.delete(section, node, gone)
        if new:
            self.add(section, node, new)

    def rename(self, path: str, name: str) -> None:
        start = self.reading.offsets[path]
        end = self.text.index(":", start) if self.text[start] not in "\"'" else self.quoted_end(start)
        self.edits.append(_Edit(start=start, end=start + len(self.text[start:end].rstrip()), text=json.dumps(name)))

    def quoted_end(self, start: int) -> int:
        match = re.compile(r"""(["'])(?:\\.|(?!\1).)*\1""", re.DOTALL).match(self.text, start)
        assert match is not None, "the reader has read a quoted key here"
        return match.end()

    def succeed(self, path: str, name: str, value: Any) -> None:
        """Another key with another value in the place of this one."""
        edit = self.for_value(path, f"{json.dumps(name)}: {_dumped(value)}")
        self.edits.append(_Edit(start=self.reading.offsets[path], end=edit.end, text=edit.text))

    def replace(self, path: str, value: Any) -> None:
        self.edits.append(self.for_value(path, _dumped(value)))

    def for_value(self, path: str, text: str) -> _Edit:
        """The edit that puts a text in place of a value; a comma that a value without quotes swallowed stays."""
        start, end = self.reading.values[path]
        swallowed = path in self.reading.quoteless and self.text[end - 1] == ","
        return _Edit(start=start, end=end, text=text + ("," if swallowed else ""))

    def delete(self, section: str, node: Mapping[str, Any], gone: list[str]) -> None:
        """Take keys out, with the comma that parts them from the next, or from the one before if they are the last."""
        names = list(node)
        stays = [name for name in names if name not in gone]
        for name in gone:
            path = _join(section, name)
            start, end = self.reading.offsets[path], self.reading.values[path][1]
            comma = _COMMA.match(self.text, end)
            end = comma.end() if comma else end
            if stays and names.index(name) > names.index(stays[-1]):
                before = self.reading.values[_join(section, stays[-1])][1]
                if not self.text[before:start].strip(" \t,"):
                    start = before
                elif name == gone[-1]:
                    self.drop_comma_after(section, stays[-1])
            self.edits.append(self.whole_line(start, end))

    def drop_comma_after(self, section: str, name: str) -> None:
        end = self.reading.values[_join(section, name)][1]
        comma = _COMMA.match(self.text, end)
        if comma is not None and not self.keeps_trailing_comma(section):
            self.edits.append(_Edit(start=end, end=comma.end(), text=""))

    def keeps_trailing_comma(self, section: str) -> bool:
        """The object's last key has a comma after it already; then the new last key may have one too."""
        start, end = self.reading.values[section]
        return re.search(r",\s*\}?\s*\Z", self.text[start:end]) is not None

    def whole_line(self, start: int, end: int) -> _Edit:
        """The edit that deletes a stretch, with its line if nothing else stands there."""
        line_start = self.text.rfind("\n", 0, start) + 1
        line_end = self.text.find("\n", end)
        blank_before = not self.text[line_start:start].strip()
        if blank_before and line_end >= 0 and not self.text[end:line_end].strip():
            return _Edit(start=line_start, end=line_end + 1, text="")
        blanks = re.compile(r"[ \t]*").match(self.text, end)
        return _Edit(start=start, end=blanks.end() if blanks else end, text="")

    def add(self, section: str, node: Mapping[str, Any], new: Mapping[str, Any]) -> None:
        if not node:
            self.replace(section, dict(new))
            return
        last = _join(section, list(node)[-1])
        end = self.reading.values[last][1]
        members = [f"{json.dumps(name)}: {_dumped(value)}" for name, value in new.items()]
        if not self.on_own_line(section, last):
            self.edits.append(_Edit(start=end, end=end, text="".join(f", {member}" for member in members)))
            return
        indent = self.indent_at(self.reading.offsets[last])
        bare = last in self.reading.quoteless  # then the end of the line parts it from what follows
        comma = _COMMA.match(self.text, end)
        if comma is None and not bare:
            self.edits.append(_Edit(start=end, end=end, text=","))
        at = self.text.find("\n", end)
        at = len(self.text) if at < 0 else at - (self.text[at - 1] == "\r")
        lines = f",{self.newline}{indent}".join(members) + ("," if comma is not None and not bare else "")
        self.edits.append(_Edit(start=at, end=at, text=f"{self.newline}{indent}{lines}"))

    def on_own_line(self, section: str, last: str) -> bool:
        """The object is written over several lines: its last key begins one, and the bracket stands on another."""
        start = self.reading.offsets[last]
        begins = not self.text[self.text.rfind("\n", 0, start) + 1 : start].strip()
        close = self.reading.values[section][1] - 1
        without_braces = section == "" and self.text[self.reading.values[""][0]] != "{"
        return begins and (without_braces or "\n" in self.text[self.reading.values[last][1] : close])

    def indent_at(self, offset: int) -> str:
        line = self.text[self.text.rfind("\n", 0, offset) + 1 :]
        return line[: len(line) - len(line.lstrip(" \t"))]


def _united(edits: list[_Edit]) -> list[_Edit]:
    """The edits with deletions that overlap made one: two keys in one line share the comma between them."""
    united = [edit for edit in edits if edit.text]
    last: _Edit | None = None
    for edit in sorted((edit for edit in edits if not edit.text), key=lambda edit: edit.start):
        if last is not None and edit.start <= last.end:
            last = _Edit(start=last.start, end=max(last.end, edit.end), text="")
            united[-1] = last
        else:
            last = edit
            united.append(edit)
    return united


def _set_by(value: Any) -> Any:
    """What a patch's value makes of a key that had no object before."""
    return merge.apply({}, value) if isinstance(value, Mapping) else value


def _dumped(value: Any) -> str:
    """A value as JSON; objects in one line, which reads well for the small ones that fixes write."""
    return json.dumps(value, ensure_ascii=False)


def _join(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON, with true apart from 1."""
    return json.dumps(left, sort_keys=True) == json.dumps(right, sort_keys=True)
