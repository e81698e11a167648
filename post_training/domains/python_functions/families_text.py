"""Families about strings: changing, testing, slicing, formatting, and words (held out whole)."""

from __future__ import annotations

from wootz.post_training.domains.python_functions.specs import Spec, spec

LETTERS = "abcdefghijklmnopqrstuvwxyz"
_PARTS = ("ab", "ing", "re", "ed", "er", "un", "go", "st", "no", "ly", "in", "ex", "up", "al", "de",
          "am", "on", "to", "is", "my", "ful", "pre", "ion", "out", "sub", "es")
_NAMES = ("id", "age", "size", "price", "score", "level", "total", "room", "page", "step", "item",
          "name", "city", "day", "year", "code", "count", "line", "key", "team", "row", "user",
          "rank", "time", "cost", "mode")
_MARKS = ("-", ":", "/", "=", "+", "_", "#", "<", "~", "*", "@", ".", ",", ";", "!", "?", "%", "&",
          "->", "::", " - ", ", ", "--", "..", " + ", " = ")


def strings() -> list[Spec]:
  out = []
  for i, (c, part) in enumerate(zip(LETTERS, _PARTS, strict=True)):
    other = LETTERS[(i + 3) % 26]
    out += [
      spec("add_suffix", "word", f"X followed by '{part}'|X with '{part}' added at the end",
           f"X + '{part}'"),
      spec("add_prefix", "word", f"'{part}' followed by X|X with '{part}' added at the start",
           f"'{part}' + X"),
      spec("upper_suffix", "word", f"X in upper case followed by '{c}'", f"X.upper() + '{c}'", c),
      spec("replace", "word", f"X with every '{c}' replaced by '{other}'|=",
           f"X.replace('{c}', '{other}')", c),
      spec("repeat_plus", "word", f"X repeated {i % 8 + 2} times, followed by '{c}'",
           f"X * {i % 8 + 2} + '{c}'"),
    ]
  return out


def string_tests() -> list[Spec]:
  out = []
  for k, (c, part) in enumerate(zip(LETTERS, _PARTS, strict=True), start=1):
    out += [
      spec("count_letter", "text", f"the number of times '{c}' occurs in X|=",
           f"X.count('{c}')", c),
      spec("has_letter", "word", f"True if '{c}' is in X|whether '{c}' in X", f"'{c}' in X",
           c),
      spec("starts", "word", f"True if X starts with '{part}'|=",
           f"X.startswith('{part}')",
           part, part + "im", part[:-1], "a" + part),
      spec("ends", "word", f"True if X ends with '{part}'|=", f"X.endswith('{part}')",
           part, "mi" + part, part[1:], part + "a"),
      spec("length_plus", "word", f"the length of X plus {k}", f"len(X) + {k}"),
    ]
  return out


def slicing() -> list[Spec]:
  """The same slice never serves both lists and strings: one would be the other's answer."""
  out = []
  for k in range(2, 10):
    out += [
      _slice("first", k, f"the first {k} UNITS of X|=", f"X[:{k}]"),
      _slice("last", k, f"the last {k} UNITS of X|=", f"X[-{k}:]"),
      _slice("skip", k, f"X without its first {k} UNITS|=", f"X[{k}:]"),
      _slice("drop", k, f"X without its last {k} UNITS|=", f"X[:-{k}]"),
      _slice("reversed", k, f"the first {k} UNITS of X[::-1]|=", f"X[::-1][:{k}]"),
    ]
  for i in range(1, 9):
    out += [_slice("part", i + j, f"the slice of X from index {i} to {j}|=", f"X[{i}:{j}]")
            for j in range(i + 2, min(i + 10, 13))]
  for i in range(2, 8):
    out += [_slice("ends", i + j, f"the first {i} UNITS of X plus the last {j}|=",
                   f"X[:{i}] + X[-{j}:]") for j in range(2, 8)]
  return out


def _slice(name: str, number: int, what: str, body: str) -> Spec:
  """A Spec on lists for even numbers and on strings for odd ones."""
  if number % 2:
    return spec(f"{name}_str", "word", what.replace("UNITS", "characters"), body,
                "abcdefghijklmnop", "mnopqrstuvw")
  return spec(f"{name}_num", "longs", what.replace("UNITS", "elements"), body)


def formatting() -> list[Spec]:
  out = []
  for mark, name in zip(_MARKS, _NAMES, strict=True):
    out += [
      spec("tag", "word", f"the string '{name}=' followed by X|'{name}=' plus X", f"'{name}=' + X"),
      spec("label_number", "int", f"the string '{name}: ' followed by the number X",
           f"f'{name}: {{X}}'"),
      spec("join_list", "words", f"the strings in X joined with '{mark}'|=",
           f"'{mark}'.join(X)"),
      spec("wrap", "word", f"X with '{mark}' before and after it|=",
           f"'{mark}' + X + '{mark}'"),
      spec("join_two", "word word", f"X, then '{mark}', then Y, as one string|=",
           f"X + '{mark}' + Y"),
    ]
  return out


def words() -> list[Spec]:
  """Held out whole: sentences as lists of words."""
  out = []
  for k, (c, mark) in enumerate(zip(LETTERS, _MARKS, strict=True), start=1):
    out += [
      spec("rejoin", "text", f"the words of X joined with '{mark}'", f"'{mark}'.join(X.split())"),
      spec("suffix_words", "text", f"a list of w + '{c}' for each word w in X.split()",
           f"[w + '{c}' for w in X.split()]"),
      spec("words_plus", "text", f"the number of words in X plus {k}", f"len(X.split()) + {k}"),
      spec("words_with", "text", f"a list of the words in X.split() that contain '{c}'",
           f"[w for w in X.split() if '{c}' in w]", c),
    ]
  return out
