"""Text of a model, which nobody vouches for, made fit to be shown."""

import html
import unicodedata

NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\0": "␀"}
# control, format (bidi overrides, joiners), surrogate, private and unassigned characters; separators
HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def visible(text: str) -> str:
    """`text` with every character that would show as nothing, or move its neighbours, replaced by one that can be seen."""
    shown = "".join(_visible_character(character) for character in text)
    # a mark alone would sit on what stands before the text
    return f"◌{shown}" if shown and unicodedata.category(shown[0]).startswith("M") else shown


def _visible_character(character: str) -> str:
    if character in NAMED:
        return NAMED[character]
    if unicodedata.category(character) not in HIDDEN:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width(text: str) -> int:
    """How many columns `text` takes in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def shorten(text: str, columns: int) -> str:
    """`text`, or its beginning and an ellipsis where it is wider than `columns`."""
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[:-1]
    return f"{text}…"


def escape(text: str) -> str:
    """`text` for HTML and XML, in an element or an attribute; also safe in the templates Gradio fills in the browser."""
    text = html.escape(text)
    for character in "${}`":
        text = text.replace(character, f"&#{ord(character)};")
    return text
