"""Makes text that a model wrote safe to show to a person."""

from __future__ import annotations

import unicodedata

# Cc: terminal control sequences. Cf: invisible and direction-changing characters, which make text
# read otherwise than it is. Cs: lone surrogates, which cannot be encoded. Zl, Zp: hidden line ends.
_HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})


def printable(text: str, *, limit: int | None = None) -> str:
  """`text` with every control or invisible character but newline and tab spelt out, as <U+001B>.

  With `limit`, text of more characters is cut there and says how many were left out.
  """
  shown = text if limit is None else text[:limit]
  escaped = "".join(
    f"<U+{ord(character):04X}>"
    if character not in "\n\t" and unicodedata.category(character) in _HIDDEN else character
    for character in shown.replace("\r\n", "\n"))
  left_out = len(text) - len(shown)
  return f"{escaped} [... {left_out} more characters]" if left_out else escaped


def snippet(text: str, width: int) -> str:
  """The start of `text` on one line of at most `width` characters, for a status line."""
  line = printable(text[: 8 * width]).replace("\n", " ").expandtabs(4).rstrip()
  return line if len(line) <= width else line[: width - 1] + "…"
