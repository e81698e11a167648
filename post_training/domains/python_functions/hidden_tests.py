"""Chooses the hidden tests of a task so that only functions that do the work pass all of them.

Edge cases come first, then inputs drawn near the task's constants. No single output, and no argument
handed back as it came, may account for more than `MAX_SHARE` of the tests; and every small change of the
reference (`mutants`) that behaves differently on any drawn input fails at least one chosen test.
"""

from __future__ import annotations

import collections
import random
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wootz.post_training.domains.python_functions.specs import compile_function
from wootz.post_training.domains.python_functions.values import (
  border_inputs,
  draw_inputs,
  edge_inputs,
)

TESTS = 8  # before those that mutants add
MOST_TESTS = 12
CANDIDATES = (24, 96)  # inputs drawn to choose from; more where the first give no fair set
MAX_SHARE = 0.6  # of the tests that one constant or one handed-back argument may pass

_SWAPS = ((">=", ">"), (">", ">="), ("<=", "<"), ("<", "<="), ("+", "-"), ("-", "+"), ("*", "+"),
          ("==", "!="), (" and ", " or "), (" or ", " and "), ("min(", "max("), ("max(", "min("),
          (", reverse=True", ""), ("set(", "list("), (" & ", " | "), (" | ", " & "))


class Raised:
  """Stands for the output of a call that raised; equals nothing that a reference returns."""


def same_value(left: Any, right: Any) -> bool:
  """Equality of plain values in which True is not 1 and 1.0 is not 1, at any depth."""
  if type(left) is not type(right):
    return False
  if type(left) is list:
    return len(left) == len(right) and all(map(same_value, left, right))
  if type(left) is dict:
    return left.keys() == right.keys() and all(same_value(left[k], right[k]) for k in left)
  return left == right


def output_of(function: Callable[..., Any], inputs: Sequence[Any]) -> Any:
  """What `function` returns on `inputs`, which references never change, or `Raised`."""
  try:
    return function(*inputs)
  except Exception:
    return Raised


def mutants(source: str, name: str) -> Iterator[Callable[..., Any]]:
  """Functions that differ from the reference by one number, operator or helper."""
  head, body = source.split("\n", 1)
  spans = [(m.start(), m.end(), str(n)) for m in re.finditer(r"(?<![\w'])\d+(?![\w'])", body)
           for n in _other_numbers(int(m.group()))]
  for old, new in _SWAPS:
    spans += [(m.start(), m.end(), new) for m in re.finditer(re.escape(old), body)]
  for start, end, new in spans:
    try:
      yield compile_function(f"{head}\n{body[:start]}{new}{body[end:]}", name)
    except SyntaxError:
      continue


def _other_numbers(n: int) -> list[int]:
  """Numbers easily taken for `n`: its neighbours, and parts of it."""
  return [n - 1, n + 1, *(n // d for d in (2, 3, 5) if n % d == 0 and n > d)]


def _degenerate_passes(tests: Sequence[dict]) -> int:
  """The most `tests` that one constant, or one argument handed back as it came, would pass."""
  constants = collections.Counter(repr(test["expected"]) for test in tests)
  returned = collections.Counter(i for test in tests for i, value in enumerate(test["inputs"])
                                 if same_value(value, test["expected"]))
  return max((*constants.values(), *returned.values()), default=0)


def _candidates(function: Callable[..., Any], kinds: Sequence[str], focus: Sequence[int | str],
                rng: random.Random, count: int) -> list[dict]:
  """Edges, borders, then drawn inputs, without repeats, each with the reference's output."""
  tests: dict[str, dict] = {}
  drawn = [draw_inputs(kinds, focus, rng) for _ in range(count)]
  for inputs in edge_inputs(kinds) + border_inputs(kinds, focus, rng) + drawn:
    expected = output_of(function, inputs)
    if expected is Raised:
      raise ValueError(f"the reference raises on {inputs!r}")
    tests.setdefault(repr(inputs), {"inputs": inputs, "expected": expected})
  return list(tests.values())


def _killers(candidates: Sequence[dict], source: str, name: str) -> list[dict]:
  """For each mutant that any candidate tells from the reference, one candidate that does."""
  chosen: list[dict] = []
  for mutant in mutants(source, name):
    if not any(_kills(test, mutant) for test in chosen):
      chosen += next(([test] for test in candidates if _kills(test, mutant)), [])
  return chosen


def _kills(test: dict, mutant: Callable[..., Any]) -> bool:
  return not same_value(output_of(mutant, test["inputs"]), test["expected"])


def choose_tests(source: str, name: str, kinds: Sequence[str], focus: Sequence[int | str],
                 rng: random.Random) -> list[dict] | None:
  """Hidden tests, each {"inputs": [...], "expected": value}; None when no fair set was found."""
  for count in CANDIDATES:
    candidates = _candidates(compile_function(source, name), kinds, focus, rng, count)
    if chosen := _choose(candidates, _killers(candidates, source, name)):
      return chosen
  return None


def _choose(candidates: Sequence[dict], killers: Sequence[dict]) -> list[dict] | None:
  """`killers`, and candidates until no degenerate function passes more than its share."""
  chosen = list(killers)
  passes = _degenerate_passes(chosen)
  for test in candidates:
    if len(chosen) >= TESTS and passes <= MAX_SHARE * len(chosen):
      return chosen
    if test in chosen or len(chosen) == MOST_TESTS:
      continue
    longer = [*chosen, test]
    more = _degenerate_passes(longer)
    if more == passes or more <= MAX_SHARE * (TESTS + 1):
      chosen, passes = longer, more
  return None
