"""Read HJSON, the superset of JSON that DeepSpeed takes, and remember where each key stands.

DeepSpeed parses a config file with the hjson library, so comments, trailing or missing commas, keys and strings
without quotes and a root without braces are legal there. This reader accepts the same texts and gives the same values
(the tests compare the two), but it keeps the position of every key, finds keys that stand twice, and remembers which
strings were written without quotes: `True,` is the text "True," to DeepSpeed, which is seldom meant.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from dsdoctor.dsconfig.letters import unusual

_BLANK = " \t\n\r"
_PUNCTUATION = "{}[],:"
_NUMBER = re.compile(r"[\t ]*(-?(?:0|[1-9]\d*))(\.\d+)?([eE][-+]?\d+)?[\t ]*")
_PLAIN = re.compile(r'[^"\'\\\x00-\x1f]+')
"""What stands in a string as it is."""
_SPACE = re.compile(r"[ \t\n\r]+")
_LINE_END = re.compile(r"[\r\n]|\Z")
_SIMPLE = re.compile(r"(?:(null|true|false)|-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?)(?=[ \t]*[,}\]\r\n])")
"""A literal or number with a stop after it; nearly every value without quotes is one."""
_STOPS = re.compile(r"[\r\n,}\]#]|//|/\*|\Z")
_HEX4 = re.compile(r"[0-9a-fA-F]{4}")
_ESCAPES = {
    '"': '"',
    "'": "'",
    "\\": "\\",
    "/": "/",
    "b": "\b",
    "f": "\f",
    "n": "\n",
    "r": "\r",
    "t": "\t",
}
_LITERALS = {"null": None, "true": True, "false": False}


class HjsonError(ValueError):
    """The text is not HJSON. `offset` is the character that it went wrong at, from 0."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.message = message
        self.offset = offset


@dataclass(kw_only=True)
class Reading:
    """What a text holds. Offsets are characters from 0; paths are dotted, list items by their index."""

    value: Any = None
    offsets: dict[str, int] = field(default_factory=dict)
    values: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Start and end of each key's value, and of the whole under ""."""
    duplicates: dict[str, list[int]] = field(default_factory=dict)
    quoteless: dict[str, int] = field(default_factory=dict)
    """Strings without quotes, by the offset of the value."""


def read(text: str) -> Reading:
    """Read a whole text.

    Raises HjsonError where the hjson library fails too; a value without quotes that swallowed a comma or a bracket is
    named in the message, since that is where such a text really went wrong.
    """
    reader = _Reader(text)
    try:
        reader.result.value = reader.root()
    except RecursionError:
        raise HjsonError("nested too deeply to be read", reader.at) from None
    except HjsonError as error:
        raise reader.explained(error) from None
    return reader.result


class _Reader:
    """A recursive descent over one text; `at` is the next character."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.at = 1 if text.startswith("\ufeff") else 0
        self.path: list[str] = []
        self.result = Reading()

    # what stands where

    def peek(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def next_character(self) -> str:
        """Skip blanks and comments, then look at the next character; "" at the end."""
        text = self.text
        while True:
            character = text[self.at : self.at + 1]
            if character and character in _BLANK:
                blanks = _SPACE.match(text, self.at)
                self.at = blanks.end() if blanks else self.at
            elif character == "#" or (character == "/" and self.peek(2) == "//"):
                end = _LINE_END.search(text, self.at)
                self.at = end.start() if end else len(text)
            elif character == "/" and self.peek(2) == "/*":
                end_at = text.find("*/", self.at + 2)
                if end_at < 0:
                    raise HjsonError("comment is never closed", self.at)
                self.at = end_at + 2
            else:
                return character

    def explained(self, error: HjsonError) -> HjsonError:
        """The error itself, or the earlier string without quotes that swallowed the punctuation missed here."""
        for path, offset in reversed(self.result.quoteless.items()):
            line_end = self.text.find("\n", offset)
            value = self.text[offset : line_end if line_end >= 0 else len(self.text)].strip()
            if any(sign in value for sign in ",}]"):
                hidden = unusual(path)
                name = f"{path!r}{f' ({hidden})' if hidden else ''}"
                return HjsonError(f"the value of {name} has no quotes, so all of `{value}` is read as text", offset)
        return error

    # grammar

    def root(self) -> Any:
        first = self.next_character()
        start = self.at
        value = self.value() if first in ("{", "[") else self.root_without_braces()
        self.result.values[""] = (start, self.at)
        if self.next_character():
            raise HjsonError("text goes on after the end of the object", self.at)
        return value

    def root_without_braces(self) -> Any:
        start = self.at
        try:
            return self.members(closing="")
        except HjsonError as error:
            self.at = start
            try:
                return self.value()
            except HjsonError:
                raise error from None

    def value(self) -> Any:
        first = self.next_character()
        if self.peek(3) == "'''":
            return self.multiline()
        if first in ("'", '"'):
            return self.quoted()
        if first == "{":
            self.at += 1
            if self.next_character() == "}":
                self.at += 1
                return {}
            return self.members(closing="}")
        if first == "[":
            self.at += 1
            return self.items()
        return self.bare()

    def members(self, closing: str) -> dict[str, Any]:
        found: dict[str, Any] = {}
        seen: dict[str, list[int]] = {}
        while True:
            self.next_character()
            start = self.at
            name = self.key()
            seen.setdefault(name, []).append(start)
            if self.next_character() != ":":
                raise HjsonError("':' expected after the key", self.at)
            self.at += 1
            self.path.append(name)
            path = ".".join(self.path)
            self.result.offsets[path] = start
            if len(seen[name]) > 1:
                self.result.duplicates[path] = seen[name]
            self.next_character()
            begin = self.at
            found[name] = self.value()
            self.result.values[path] = (begin, begin + len(self.text[begin : self.at].rstrip()))
            self.path.pop()
            if self.after_comma() == closing:
                self.at += len(closing)
                return found

    def items(self) -> list[Any]:
        found: list[Any] = []
        if self.next_character() == "]":
            self.at += 1
            return found
        while True:
            self.path.append(str(len(found)))
            found.append(self.value())
            self.path.pop()
            if self.after_comma() == "]":
                self.at += 1
                return found

    def after_comma(self) -> str:
        """The next character after an optional comma."""
        if self.next_character() == ",":
            self.at += 1
        return self.next_character()

    def key(self) -> str:
        if self.peek() in ('"', "'") and self.peek():
            return self.quoted()
        start = self.at
        while True:
            character = self.peek()
            if character == "":
                raise HjsonError("the text ends where a key or a closing bracket is expected", self.at)
            if character == ":":
                name = self.text[start : self.at]
                if not name:
                    raise HjsonError("':' without a key before it", start)
                if any(blank in name.rstrip(_BLANK) for blank in _BLANK):
                    raise HjsonError("a key with blanks in it needs quotes", start)
                return name.rstrip()
            if character in "{}[],":
                raise HjsonError(f"'{character}' where a key is expected", self.at)
            self.at += 1

    # scalars

    def quoted(self) -> str:
        start = self.at
        quote = self.peek()
        self.at += 1
        parts: list[str] = []
        while True:
            plain = _PLAIN.match(self.text, self.at)
            if plain is not None:
                parts.append(plain.group())
                self.at = plain.end()
            character = self.peek()
            if character == "":
                raise HjsonError("string is never closed", start)
            if character < " ":
                what = "the line ends inside a string" if character in "\r\n" else "control character in a string"
                raise HjsonError(what, start if character in "\r\n" else self.at)
            self.at += 1
            if character == quote:
                return "".join(parts)
            parts.append(self.escape() if character == "\\" else character)

    def escape(self) -> str:
        letter = self.peek()
        if letter != "u":
            if letter not in _ESCAPES or not letter:
                raise HjsonError(f"unknown escape \\{letter}", self.at - 1)
            self.at += 1
            return _ESCAPES[letter]
        code = self.code_unit(self.at + 1)
        self.at += 5
        if 0xD800 <= code <= 0xDBFF and self.peek(2) == "\\u":
            low = self.code_unit(self.at + 2)
            if 0xDC00 <= low <= 0xDFFF:
                self.at += 6
                return chr(0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00))
        return chr(code)

    def code_unit(self, start: int) -> int:
        digits = _HEX4.match(self.text, start)
        if digits is None:
            raise HjsonError("\\u needs four hexadecimal digits", start - 2)
        return int(digits.group(), 16)

    def multiline(self) -> str:
        start = self.at
        indent = start - (self.text.rfind("\n", 0, start) + 1)
        end = self.text.find("'''", start + 3)
        if end < 0:
            raise HjsonError("''' string is never closed", start)
        body = self.text[start + 3 : end].lstrip(" \t\r")
        if body.startswith("\n"):
            body = body[1:]
            body = re.sub(rf"\A[ \t\r]{{0,{indent}}}", "", body)
        body = re.sub(rf"\n[ \t\r]{{0,{indent}}}", "\n", body).replace("\r", "")
        self.at = end + 3
        return body[:-1] if body.endswith("\n") else body

    def bare(self) -> Any:
        """A number, a literal, or a string without quotes, which runs to the end of the line."""
        start = self.at
        if self.peek() == "" or self.peek() in _PUNCTUATION:
            what = f"'{self.peek()}'" if self.peek() else "the end of the text"
            raise HjsonError(f"{what} where a value is expected", start)
        simple = _SIMPLE.match(self.text, start)
        if simple is not None:
            self.at = simple.end()
            if simple.group(1):
                return _LITERALS[simple.group(1)]
            number = _NUMBER.match(self.text, start)
            assert number is not None, "a simple value is a literal or a number"
            return self.number(number)
        for stop in _STOPS.finditer(self.text, start):
            self.at = stop.start()
            word = self.text[start : self.at].strip()
            if word in _LITERALS:
                return _LITERALS[word]
            number = _NUMBER.match(self.text, start)
            if number is not None and number.end() == self.at:
                return self.number(number)
            if stop.group() in ("\r", "\n", ""):
                self.result.quoteless[".".join(self.path)] = start
                return word
        raise AssertionError("the end of the text always matches")

    def number(self, match: re.Match[str]) -> int | float:
        whole, fraction, exponent = match.groups()
        if not fraction and not exponent:
            try:
                return int(whole)
            except ValueError:  # Python reads whole numbers of up to 4300 digits
                raise HjsonError("number too large", match.start()) from None
        value = float(whole + (fraction or "") + (exponent or ""))
        if value in (float("inf"), float("-inf")):
            raise HjsonError("number too large", match.start())
        # hjson turns whole numbers below 1e10 into int, which DeepSpeed's batch arithmetic then sees
        return int(value) if value == int(value) and abs(value) < 1e10 else value
