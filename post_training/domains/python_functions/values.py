"""Inputs for hidden tests, by kind of argument, drawn near the constants a task turns on."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

Focus = Sequence[int | str]

_VOWELS, _CONSONANTS = "aeiou", "bcdfglmnprst"
_KEYS = ("ann", "bob", "cat", "dan", "eve", "fox")


def _near(rng: random.Random, focus: Focus, low: int, high: int) -> int:
  """An integer in [low, high], often a focus number or its neighbour."""
  near = [f + d for f in focus if isinstance(f, int) for d in (-1, 0, 1) if low <= f + d <= high]
  return rng.choice(near) if near and rng.random() < 0.4 else rng.randint(low, high)


def _plain_word(rng: random.Random, focus: Focus, longest: int) -> str:
  letters = [f for f in focus if isinstance(f, str) and len(f) == 1 and f.isalnum()]
  out = []
  for place in range(rng.randint(1, longest)):
    pool = _VOWELS if place % 2 else _CONSONANTS
    out.append(rng.choice(letters) if letters and rng.random() < 0.35 else rng.choice(pool))
  return "".join(out)


def _word(rng: random.Random, focus: Focus) -> str:
  """A word; sometimes capitalised, sometimes one that holds a focus string at an end."""
  word = _plain_word(rng, focus, 8)
  strings = [f for f in focus if isinstance(f, str)]
  if strings and rng.random() < 0.4:
    part = rng.choice(strings)
    word = rng.choice((part, part + word, word + part))
  return rng.choice((word, word, word.capitalize()))


def _text(rng: random.Random, focus: Focus) -> str:
  return " ".join(_word(rng, focus) for _ in range(rng.randint(1, 5)))


def _ints(rng: random.Random, focus: Focus, shortest: int = 0, longest: int = 7) -> list[int]:
  values = [_near(rng, focus, -15, 40) for _ in range(rng.randint(shortest, longest))]
  if len(values) > 1 and rng.random() < 0.4:  # repeats tell sets from lists
    values[rng.randrange(len(values))] = values[0]
  return values


def _words(rng: random.Random, focus: Focus) -> list[str]:
  return [_word(rng, focus) for _ in range(rng.randint(0, 5))]


def _dict(rng: random.Random, focus: Focus) -> dict[str, int]:
  keys = list(_KEYS) + [f for f in focus if isinstance(f, str)]
  rng.shuffle(keys)
  return {key: _near(rng, focus, -5, 30) for key in keys[:rng.randint(0, 5)]}


def _pairs(rng: random.Random, focus: Focus) -> list[list[int]]:
  return [[_near(rng, focus, -9, 20), _near(rng, focus, -9, 20)] for _ in range(rng.randint(0, 4))]


DRAW: dict[str, Callable[[random.Random, Focus], Any]] = {
  "int": lambda rng, focus: _near(rng, focus, -60, 120),
  "nat": lambda rng, focus: _near(rng, focus, 0, 150),
  "small": lambda rng, focus: _near(rng, focus, 0, 9),
  "word": _word,
  "text": _text,
  "ints": _ints,
  "ints1": lambda rng, focus: _ints(rng, focus, 1),
  "longs": lambda rng, focus: _ints(rng, focus, 0, 13),
  "words": _words,
  "dict": _dict,
  "key": lambda rng, focus: rng.choice(_KEYS),
  "pairs": _pairs,
}

# The edge cases every task of the kind is tested on, where its outputs allow.
EDGES: dict[str, tuple[Any, ...]] = {
  "int": (0, -1), "nat": (0, 1), "small": (0, 1), "word": ("", "a"), "text": ("a", "to be"),
  "ints": ([], [7, 7]), "ints1": ([4, 4], [-3]), "longs": ([], list(range(20, 33))),
  "words": ([], ["a"]), "dict": ({}, {"ann": 0}), "key": ("ann",), "pairs": ([], [[0, 1]]),
}


def edge_inputs(kinds: Sequence[str]) -> list[list[Any]]:
  """The edges of all arguments side by side: the first of each, then the second of each."""
  count = max(len(EDGES[kind]) for kind in kinds)
  return [[EDGES[kind][min(i, len(EDGES[kind]) - 1)] for kind in kinds] for i in range(count)]


def draw_inputs(kinds: Sequence[str], focus: Focus, rng: random.Random) -> list[Any]:
  """One list of arguments."""
  return [DRAW[kind](rng, focus) for kind in kinds]


def border_inputs(kinds: Sequence[str], focus: Focus, rng: random.Random) -> list[list[Any]]:
  """Inputs at the first focus values, and next to the very first, one argument at a time.

  Another integer argument then is the last focus number: it decides nothing by itself.
  """
  numbers = [f for f in focus if isinstance(f, int)]
  strings = [f for f in focus if isinstance(f, str)]
  near = [f + d for f in numbers[:1] for d in (0, -1, 1)] + numbers[1:5]
  out = []
  for place, kind in enumerate(kinds):
    for number in near:
      inputs: list[Any] = [numbers[-1] if kind == "int" else DRAW[kind](rng, focus) for kind in kinds]
      if kind in ("int", "nat", "small"):
        inputs[place] = number if kind == "int" else max(number, 0)
      elif kind in ("ints", "ints1"):
        inputs[place] = [number + 5, *inputs[place][:3], number, number]  # unsorted, with a repeat
      out.append(inputs)
    if kind == "word":
      out += [[*draw_inputs(kinds[:place], focus, rng), text, *draw_inputs(kinds[place + 1:], focus, rng)]
              for text in strings]
  return out
