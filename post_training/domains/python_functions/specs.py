"""What one generated function is to do, and the text that asks for it.

A `Spec` is written with placeholders: `X`, `Y`, `Z` stand for the arguments and `F` for the function's
own name. The same words serve the description and the reference, so that names can be varied freely.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Callable, Mapping
from typing import Any

PLACEHOLDERS = ("X", "Y", "Z")

FRAMES = (
  "Write a Python function `{signature}` that returns {what}.",
  "Define a Python function `{signature}` returning {what}.",
  "Write `{signature}` in Python. It returns {what}.",
  "Python function `{signature}`: return {what}.",
)

ARGUMENT_NAMES: Mapping[str, tuple[str, ...]] = {
  "int": ("x", "a", "n", "num", "value"),
  "nat": ("n", "x", "num", "count"),
  "small": ("n", "k", "num"),
  "word": ("s", "word", "text", "name"),
  "text": ("text", "sentence", "line"),
  "ints": ("nums", "values", "numbers", "xs", "items"),
  "ints1": ("nums", "values", "numbers", "xs", "items"),
  "longs": ("nums", "values", "numbers", "xs", "items"),
  "words": ("words", "names", "strings"),
  "dict": ("d", "scores", "prices", "counts", "table"),
  "pairs": ("pairs", "points", "rows"),
}
SECOND_NAMES: Mapping[str, tuple[str, ...]] = {
  "int": ("y", "b", "m", "other"), "nat": ("m", "b", "y"), "small": ("m", "times"),
  "word": ("t", "other", "second"), "ints": ("ys", "others", "more"), "dict": ("e", "extra"),
  "key": ("key", "k", "name"),
}
THIRD_NAMES: Mapping[str, tuple[str, ...]] = {"int": ("z", "c", "third")}


@dataclasses.dataclass(frozen=True)
class Spec:
  """One function: `what` it returns in words, and `body`, its reference as one or more lines.

  `kinds` names the kind of each argument (see values.py). `focus` holds the constants on which the
  behaviour turns: inputs are drawn near them, so that tests see both sides of every border.
  """

  name: str
  kinds: tuple[str, ...]
  what: tuple[str, ...]  # phrasings, all of one meaning
  body: str
  focus: tuple[int | str, ...] = ()


def spec(name: str, kinds: str, what: str, body: str, *focus: int | str) -> Spec:
  """A Spec in shorthand: kinds parted by blanks, phrasings by `|`, a body without its `return`.

  The phrasing `=` is the body itself, spelled out.
  """
  phrasings = tuple(body if phrasing == "=" else phrasing for phrasing in map(str.strip, what.split("|")))
  body = body if "\n" in body or body.startswith("return") else f"return {body}"
  return Spec(name, tuple(kinds.split()), phrasings, body, focus)


def choose_names(spec: Spec, rng: random.Random) -> dict[str, str]:
  """Placeholder -> name: the arguments' names, distinct, and the function's."""
  names: dict[str, str] = {}
  pools = (ARGUMENT_NAMES, SECOND_NAMES, THIRD_NAMES)
  for place, kind, pool in zip(PLACEHOLDERS, spec.kinds, pools, strict=False):
    free = [name for name in pool[kind] if name not in names.values()]
    names[place] = rng.choice(free)
  generic = ("f", "solve", "compute", "func")
  names["F"] = rng.choice(generic) if rng.random() < 0.1 else spec.name
  return names


def fill(template: str, names: Mapping[str, str]) -> str:
  """`template` with every placeholder that stands alone replaced by its name."""
  return re.sub(r"\b[FXYZ]\b", lambda match: names[match.group()], template)


def signature(spec: Spec, names: Mapping[str, str]) -> str:
  arguments = ", ".join(names[place] for place in PLACEHOLDERS[:len(spec.kinds)])
  return f"{names['F']}({arguments})"


def describe(spec: Spec, names: Mapping[str, str], rng: random.Random) -> str:
  """The request as the policy reads it."""
  what = fill(rng.choice(spec.what), names)
  return rng.choice(FRAMES).format(signature=signature(spec, names), what=what)


def reference_source(spec: Spec, names: Mapping[str, str]) -> str:
  """A correct solution, as source text."""
  lines = fill(spec.body, names).splitlines()
  return f"def {signature(spec, names)}:\n" + "".join(f"  {line}\n" for line in lines)


def compile_function(source: str, name: str) -> Callable[..., Any]:
  """The function `name` of trusted source text: references and their mutants, never a submission."""
  namespace: dict[str, Any] = {}
  exec(compile(source, f"<reference {name}>", "exec"), namespace)
  return namespace[name]
