"""Characters of a name that a reader cannot tell from the ones that DeepSpeed expects."""

from __future__ import annotations

import unicodedata


def unusual(name: str) -> str | None:
    """A blank at one of its ends, or its first character beyond ASCII, in words; None for a plain name."""
    blank = next((ends for ends in (name[:1], name[-1:]) if ends.isspace()), None)
    found = blank or next((letter for letter in name if not letter.isascii()), None)
    if found is None:
        return None
    shown = "a blank" if found.isspace() else f'"{found}"'
    return f"{shown} in it is U+{ord(found):04X}, {unicodedata.name(found, 'a control character').lower()}"
