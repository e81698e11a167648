"""Finds the code in a completion."""

from __future__ import annotations

import re

_PYTHON_FENCE = re.compile(r"```[ \t]*(?:python3?|py)[ \t]*\r?\n", re.IGNORECASE)
_BARE_FENCE = re.compile(r"```[ \t]*\r?\n")


def extract_code(completion_text: str) -> str:
  """The first block fenced as Python, else the first bare fenced block, else the whole text.

  A block that is never closed runs to the end. Later blocks are not looked at, so that a policy gets
  one attempt.
  """
  fence = _PYTHON_FENCE.search(completion_text) or _BARE_FENCE.search(completion_text)
  if fence is None:
    return completion_text
  return completion_text[fence.end():].split("```", 1)[0]
