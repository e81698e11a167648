"""Builds every task of the domain, the same in each run, and splits them.

Within a family no two tasks have the same behaviour, and none behaves as a task of another family does,
so that a held-out task is never a training task in other words.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from wootz.data.records import Task
from wootz.post_training.domains.python_functions.families import SEEN, UNSEEN, Family
from wootz.post_training.domains.python_functions.hidden_tests import choose_tests, output_of
from wootz.post_training.domains.python_functions.specs import (
  Spec,
  choose_names,
  compile_function,
  describe,
  reference_source,
)
from wootz.post_training.domains.python_functions.values import draw_inputs

DOMAIN = "python_functions"
SYSTEM = "Reply with only the code."
PER_FAMILY = 120
HELD_OUT_EVERY = 6  # one task of six of each seen family is held out
PER_UNSEEN_FAMILY = 64
SEED = 20

# Kinds whose values share a Python type, from the narrowest domain to the widest.
_DOMAINS = (("small", "nat", "int"), ("ints1", "ints", "longs"), ("word", "text"),
            ("words",), ("dict",), ("pairs",), ("key",))
_TYPE = {kind: kinds[-1] for kinds in _DOMAINS for kind in kinds}


def _within(kind: str, value: Any) -> bool:
  """Whether a value of the kind's type lies in the kind's own domain."""
  if kind in ("small", "nat"):
    return 0 <= value <= (9 if kind == "small" else 1000)
  return kind != "ints1" or len(value) > 0


@functools.cache
def _probes(types: tuple[str, ...]) -> tuple[list[Any], ...]:
  """Inputs on which any two different tasks of the argument types should disagree."""
  rng = random.Random(f"probes {types}")
  if types == ("int",):
    return tuple([value] for value in range(-60, 121))
  if types == ("int", "int"):
    grid = itertools.product(range(0, 24), range(0, 24))
    return tuple(list(pair) for pair in grid) + tuple(
      [rng.randint(-60, 150), rng.randint(-60, 150)] for _ in range(60))
  focus = _all_focus()
  drawn = tuple(draw_inputs(types, rng.sample(focus, 12), rng) for _ in range(100))
  return drawn + _focus_probes(types, focus)


def _focus_probes(types: tuple[str, ...], focus: Sequence[str]) -> tuple[list[Any], ...]:
  """Every focus string at either end of a word, so that tests of single strings tell apart."""
  if types == ("text",):
    return tuple([s] for f in focus for s in (f, f + "qz", "qz" + f))
  if types == ("words",):
    return tuple([[f, f + "qz", "qz" + f]] for f in focus)
  if types == ("dict",):
    return tuple([{f: 1}] for f in focus)
  return ()


@functools.cache
def _all_focus() -> tuple[str, ...]:
  specs = itertools.chain.from_iterable(family() for family in (*SEEN.values(), *UNSEEN.values()))
  return tuple(sorted({f for spec in specs for f in spec.focus if isinstance(f, str)}))


def behaviours(spec: Spec, source: str, name: str) -> list[tuple[str, ...]]:
  """Kinds and outputs: on the function's own domain first, then on every narrower one.

  Two functions are the same to whoever solves them when the first key of one is any key of the other.
  """
  function = compile_function(source, name)
  types = tuple(_TYPE[kind] for kind in spec.kinds)
  probes = _probes(types)
  outputs = {i: repr(output_of(function, probes[i])) for i in _inside(types, spec.kinds)}
  return [(*kinds, " ".join(outputs[i] for i in _inside(types, kinds)))
          for kinds in itertools.product(*map(_narrower, spec.kinds))]


@dataclasses.dataclass
class _Behaviours:
  """The behaviours that tasks already have, and their references' bodies."""

  bodies: set[str] = dataclasses.field(default_factory=set)
  own: set[tuple[str, ...]] = dataclasses.field(default_factory=set)
  narrowed: set[tuple[str, ...]] = dataclasses.field(default_factory=set)

  def claim(self, body: str, keys: Sequence[tuple[str, ...]]) -> bool:
    """Adds a task, unless an earlier one behaves or is solved the same; says whether it did."""
    if body in self.bodies or keys[0] in self.narrowed or self.own & set(keys):
      return False
    self.bodies.add(body)
    self.own.add(keys[0])
    self.narrowed.update(keys)
    return True


@functools.cache
def _inside(types: tuple[str, ...], kinds: tuple[str, ...]) -> tuple[int, ...]:
  """The numbers of the probes that lie in the domains of `kinds`."""
  return tuple(i for i, inputs in enumerate(_probes(types)) if all(map(_within, kinds, inputs)))


def _narrower(kind: str) -> Iterable[str]:
  """The kinds of the same type whose domain lies within that of `kind`, beginning with `kind`."""
  family = next(kinds for kinds in _DOMAINS if kind in kinds)
  return ("text",) if _TYPE[kind] == "text" else family[family.index(kind)::-1]


def _build_family(name: str, family: Family, count: int, seen: _Behaviours
                  ) -> list[dict[str, Any]]:
  """`count` distinct tasks of a family as keyword arguments of `Task`, without id and split."""
  rng = random.Random(f"{SEED} {name}")
  specs = family()
  rng.shuffle(specs)
  built: list[dict[str, Any]] = []
  for spec in specs:
    if len(built) == count:
      break
    names = choose_names(spec, rng)
    source = reference_source(spec, names)
    tests = choose_tests(source, names["F"], spec.kinds, spec.focus, rng)
    if tests is None or not seen.claim(spec.body, behaviours(spec, source, names["F"])):
      continue
    messages = ({"role": "system", "content": SYSTEM},
                {"role": "user", "content": describe(spec, names, rng)})
    payload = {"function": names["F"], "tests": tests, "reference": source, "spec": spec.name}
    built.append({"domain": DOMAIN, "family": name, "messages": messages, "payload": payload})
  if len(built) < count:
    raise ValueError(f"family {name!r} yields {len(built)} distinct tasks of {count} wanted: "
                     "give its templates more constants")
  return built


@functools.cache
def build_tasks() -> Mapping[str, tuple[Task, ...]]:
  """Split -> its tasks, families in turn, so that every prefix is balanced."""
  seen = _Behaviours()
  columns: dict[str, list[list[Task]]] = {"train": [], "held_out": [], "unseen_family": []}
  for name, family in SEEN.items():
    rows = _build_family(name, family, PER_FAMILY, seen)
    tasks = [Task(id=f"{name}/{i:04d}", split="train" if i % HELD_OUT_EVERY else "held_out", **row)
             for i, row in enumerate(rows)]
    for split in ("train", "held_out"):
      columns[split].append([task for task in tasks if task.split == split])
  for name, family in UNSEEN.items():
    rows = _build_family(name, family, PER_UNSEEN_FAMILY, seen)
    columns["unseen_family"].append([Task(id=f"{name}/{i:04d}", split="unseen_family", **row)
                                     for i, row in enumerate(rows)])
  return {split: tuple(itertools.chain.from_iterable(zip(*lists, strict=True)))
          for split, lists in columns.items()}
