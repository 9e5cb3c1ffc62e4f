"""Making untrusted text, of the target or a visitor, safe and visible on the page."""

import html
import unicodedata

NAMED = {" ": "␣", "\n": "⏎", "\r": "␍", "\t": "⇥", "\0": "␀"}
# control, format (bidi overrides, joiners), surrogate, private use and unassigned characters; separators
HIDDEN_CATEGORIES = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp", "Zs"}


def visible(text: str) -> str:
    """Return `text` with a sign or an escape code for each character that is invisible or moves its neighbours."""
    shown = "".join(_visible_character(character) for character in text)
    # a combining mark at the start would attach to the text before it, so it gets a base of its own
    return f"◌{shown}" if shown and unicodedata.category(shown[0]).startswith("M") else shown


def _visible_character(character: str) -> str:
    if character in NAMED:
        return NAMED[character]
    if unicodedata.category(character) not in HIDDEN_CATEGORIES:
        return character
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def width(text: str) -> int:
    """Return the number of columns that `text` takes in a monospaced font."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else 0 if unicodedata.combining(c) else 1 for c in text)


def shorten(text: str, columns: int) -> str:
    """Return `text` if it fits into `columns` columns, otherwise its beginning and an ellipsis."""
    if width(text) <= columns:
        return text
    while width(text) > columns - 1:
        text = text[:-1]
    return f"{text}…"


def escape(text: str) -> str:
    """Return `text` escaped for an element or attribute of HTML and XML, and for the templates that Gradio fills in."""
    text = html.escape(text)
    for character in "${}`":  # Gradio's templates are JavaScript template strings
        text = text.replace(character, f"&#{ord(character)};")
    return text
