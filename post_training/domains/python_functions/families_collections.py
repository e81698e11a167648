"""Families about lists, dicts, sets and pairs, and positions (held out whole)."""

from __future__ import annotations

from wootz.post_training.domains.python_functions.families_numbers import turning_points
from wootz.post_training.domains.python_functions.specs import Spec, spec

CONSTANTS = range(2, 28)
LETTERS = "abcdefghijklmnopqrstuvwxyz"
_KEYS = ("ann", "bob", "cat", "dan", "eve", "fox", "gus", "hal", "ida", "jon", "kim", "leo", "may",
         "ned", "oli", "pam", "quin", "ray", "sue", "tom", "uma", "vic", "wes", "xia", "yan", "zoe")


def list_filter() -> list[Spec]:
  out = []
  for k, c in zip(CONSTANTS, LETTERS, strict=True):
    out += [
      spec("keep_above", "ints", f"a list of the numbers in X that are greater than {k}",
           f"[n for n in X if n > {k}]", k),
      spec("keep_below", "ints", f"a list of the numbers in X that are less than {k}",
           f"[n for n in X if n < {k}]", k),
      spec("keep_multiples", "ints", f"a list of the numbers in X that are divisible by {k}",
           f"[n for n in X if n % {k} == 0]", *turning_points(k)),
      spec("drop_value", "ints", f"a list of the numbers in X that are not {k}",
           f"[n for n in X if n != {k}]", k),
      spec("words_with", "words", f"a list of the strings in X that contain '{c}'",
           f"[w for w in X if '{c}' in w]", c),
    ]
  return out


def list_map() -> list[Spec]:
  out = []
  for k, c in zip(CONSTANTS, LETTERS, strict=True):
    out += [
      spec("add_each", "ints", f"a list of n + {k} for each n in X|X with {k} added to each number",
           f"[n + {k} for n in X]"),
      spec("times_each", "ints", f"a list of n * {k} for each n in X|X with each number times {k}",
           f"[n * {k} for n in X]"),
      spec("minus_each", "ints", f"a list of n - {k} for each n in X", f"[n - {k} for n in X]"),
      spec("mod_each", "ints", f"a list of n % {k} for each n in X", f"[n % {k} for n in X]"),
      spec("suffix_each", "words", f"a list of w + '{c}' for each string w in X",
           f"[w + '{c}' for w in X]"),
    ]
  return out


def list_reduce() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("sum_plus", "ints", f"the sum of X plus {k}", f"sum(X) + {k}"),
      spec("sum_times", "ints", f"the sum of X times {k}|=", f"sum(X) * {k}"),
      spec("max_plus", "ints1", f"the largest number in X plus {k}|the maximum of X plus {k}",
           f"max(X) + {k}"),
      spec("min_minus", "ints1", f"the smallest number in X minus {k}|the minimum of X minus {k}",
           f"min(X) - {k}"),
      spec("count_value", "ints", f"how many times {k} occurs in X|=",
           f"X.count({k})", k),
      spec("length_times", "ints", f"the length of X times {k}", f"len(X) * {k}"),
    ]
  return out


def sorting() -> list[Spec]:
  out = []
  for k in range(2, 6):
    for kind, units, tag in (("ints", "numbers", "num"), ("words", "strings", "str")):
      out += [
        spec(f"smallest_{tag}", kind, f"the first {k} {units} of X sorted|=",
             f"sorted(X)[:{k}]"),
        spec(f"largest_{tag}", kind, f"the last {k} {units} of X sorted|=",
             f"sorted(X)[-{k}:]"),
      ]
  for k in CONSTANTS:
    out += [
      spec("sort_with", "ints", f"X plus [{k}], sorted|=",
           f"sorted(X + [{k}])", k),
      spec("sort_down_with", "ints", f"X plus [{k}], sorted in reverse|=",
           f"sorted(X + [{k}], reverse=True)", k),
      spec("sort_each", "ints", f"a list of n + {k} for each n in sorted(X)",
           f"[n + {k} for n in sorted(X)]"),
      spec("sort_above", "ints", f"a list of the n in sorted(X) that are greater than {k}",
           f"[n for n in sorted(X) if n > {k}]", k),
      spec("sort_append", "ints", f"sorted(X) followed by {k}|=", f"sorted(X) + [{k}]"),
    ]
  return out


def dicts() -> list[Spec]:
  out = []
  for k, key in zip(CONSTANTS, _KEYS, strict=True):
    out += [
      spec("lookup", "dict key", f"the value of key Y in X, or {k} if it is missing|=",
           f"X.get(Y, {k})"),
      spec("get_key", "dict", f"the value of '{key}' in X, or {k} if it is missing|=",
           f"X.get('{key}', {k})", key),
      spec("has_key", "dict", f"True if '{key}' is a key of X|whether '{key}' in X",
           f"'{key}' in X", key),
      spec("sum_values_plus", "dict", f"the sum of the values of X plus {k}|=",
           f"sum(X.values()) + {k}"),
      spec("count_keys_minus", "dict", f"the number of keys in X minus {k}", f"len(X) - {k}"),
    ]
  return out


def sets() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("count_distinct_plus", "ints", f"the number of distinct numbers in X plus {k}|=",
           f"len(set(X)) + {k}"),
      spec("count_distinct_times", "ints", f"the length of set(X) times {k}", f"len(set(X)) * {k}"),
      spec("sum_distinct", "ints", f"the sum of set(X) plus {k}|=", f"sum(set(X)) + {k}"),
      spec("union_count", "ints ints", f"the number of distinct numbers in X + Y, plus {k}",
           f"len(set(X + Y)) + {k}", 1, 4),
      spec("distinct_above", "ints", f"a sorted list of the numbers in set(X) greater than {k}",
           f"sorted(n for n in set(X) if n > {k})", k),
    ]
  return out


def list_edit() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("append", "ints", f"X with {k} added at the end|=", f"X + [{k}]"),
      spec("prepend", "ints", f"X with {k} added at the start|=", f"[{k}] + X"),
      spec("join_with", "ints ints", f"X plus [{k}] plus Y, as one list|=", f"X + [{k}] + Y"),
      spec("list_of_two", "int int", f"a list of X and Y times {k}|the list [X, Y * {k}]",
           f"[X, Y * {k}]"),
      spec("neighbours", "int", f"a list of X - {k}, X and X + {k}", f"[X - {k}, X, X + {k}]"),
    ]
  return out


def pairs() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("first_plus", "pairs", f"a list of a + {k} for a, b in X|=",
           f"[a + {k} for a, b in X]"),
      spec("second_times", "pairs", f"a list of b * {k} for a, b in X|=",
           f"[b * {k} for a, b in X]"),
      spec("pair_sums", "pairs", f"a list of a + b + {k} for a, b in X|=",
           f"[a + b + {k} for a, b in X]"),
      spec("sum_firsts", "pairs", f"the sum of a for a, b in X, plus {k}|=",
           f"sum(a for a, b in X) + {k}"),
      spec("zip_sums", "ints ints", f"a list of a + b * {k} for a, b in zip(X, Y)|=",
           f"[a + b * {k} for a, b in zip(X, Y)]"),
    ]
  return out


def positions() -> list[Spec]:
  """Held out whole: indexes of elements."""
  out = []
  for k, c in zip(CONSTANTS, LETTERS, strict=True):
    out += [
      spec("index_of", "word", f"the first index of '{c}' in X, or -1|=",
           f"X.find('{c}')", c),
      spec("add_index", "ints", f"a list of n + i * {k} for i, n in enumerate(X)",
           f"[n + i * {k} for i, n in enumerate(X)]"),
      spec("indexes_above", "ints", f"a list of i for i, n in enumerate(X) if n > {k}",
           f"[i for i, n in enumerate(X) if n > {k}]", k),
      spec("first_plus", "ints1", f"the number at index 0 of X plus {k}", f"X[0] + {k}"),
      spec("last_times", "ints1", f"the last number of X times {k}", f"X[-1] * {k}"),
    ]
  return out
