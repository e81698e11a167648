"""The families by name. The last two are never trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wootz.post_training.domains.python_functions import families_collections as collections
from wootz.post_training.domains.python_functions import families_numbers as numbers
from wootz.post_training.domains.python_functions import families_text as text
from wootz.post_training.domains.python_functions.specs import Spec

Family = Callable[[], list[Spec]]

SEEN: Mapping[str, Family] = {
  "arithmetic": numbers.arithmetic,
  "strings": text.strings,
  "list_filter": collections.list_filter,
  "conditions": numbers.conditions,
  "dicts": collections.dicts,
  "recursion": numbers.recursion,
  "slicing": text.slicing,
  "list_map": collections.list_map,
  "booleans": numbers.booleans,
  "formatting": text.formatting,
  "list_reduce": collections.list_reduce,
  "number_theory": numbers.number_theory,
  "string_tests": text.string_tests,
  "sorting": collections.sorting,
  "ranges": numbers.ranges,
  "sets": collections.sets,
  "list_edit": collections.list_edit,
  "pairs": collections.pairs,
}

UNSEEN: Mapping[str, Family] = {
  "words": text.words,
  "positions": collections.positions,
}
