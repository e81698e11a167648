"""Families about integers: arithmetic, conditions, booleans, number theory, recursion, ranges."""

from __future__ import annotations

from wootz.post_training.domains.python_functions.specs import Spec, spec

CONSTANTS = range(2, 28)


def turning_points(k: int) -> list[int]:
  """Numbers that tell divisibility by `k` from that by its divisors, then its multiples."""
  return [k, *(d for d in range(k - 1, 1, -1) if k % d == 0), *range(2 * k, 150, k)]


def arithmetic() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    c = k % 9 + 1
    out += [
      spec("times", "int", f"X times {k}|X multiplied by {k}", f"X * {k}"),
      spec("add", "int", f"X plus {k}|the sum of X and {k}", f"X + {k}"),
      spec("subtract", "int", f"X minus {k}|{k} less than X", f"X - {k}"),
      spec("sum_plus", "int int", f"X plus Y plus {k}|the sum of X, Y and {k}", f"X + Y + {k}"),
      spec("product_plus", "int int", f"X times Y plus {k}", f"X * Y + {k}"),
      spec("scale_add", "int", f"X times {k} plus {c}|{k} times X plus {c}", f"X * {k} + {c}"),
    ]
  return out


def conditions() -> list[Spec]:
  out = []
  labels = (("high", "low"), ("yes", "no"), ("pass", "fail"), ("big", "small"), ("hot", "cold"))
  for k in range(2, 54, 2):
    a, b = labels[k // 2 % 5]
    out += [
      spec("label", "int", f"'{a}' if X is greater than {k}, else '{b}'",
           f"'{a}' if X > {k} else '{b}'", k),
      spec("check_limit", "int", f"'{b}' if X is less than {k}, else '{a}'",
           f"'{b}' if X < {k} else '{a}'", k),
      spec("at_most", "int", f"the smaller of X and {k}|the minimum of X and {k}",
           f"min(X, {k})", k),
      spec("at_least", "int", f"the larger of X and {k}|the maximum of X and {k}",
           f"max(X, {k})", k),
      spec("or_zero", "int", f"X if X is greater than {k}, else 0", f"X if X > {k} else 0", k),
    ]
  return out


def booleans() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("is_above", "int", f"True if X is greater than {k}|whether X is greater than {k}",
           f"X > {k}", k),
      spec("is_below", "int", f"True if X is less than {k}|whether X is less than {k}",
           f"X < {k}", k),
      spec("both_above", "int int", f"True if X and Y are both greater than {k}",
           f"X > {k} and Y > {k}", k, k, k + 20),
      spec("either_above", "int int", f"True if X is greater than {k} or Y is greater than {k}|=",
           f"X > {k} or Y > {k}", k, k - 50),
      spec("sum_above", "int int", f"True if X plus Y is greater than {k}", f"X + Y > {k}", k + 30, -30),
    ]
  return out


def number_theory() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("divisible", "nat", f"True if X is divisible by {k}|whether X is a multiple of {k}",
           f"X % {k} == 0", *turning_points(k)),
      spec("not_divisible", "nat", f"True if X is not divisible by {k}|True if X % {k} is not 0",
           f"X % {k} != 0", *turning_points(k)),
      spec("remainder", "nat", f"the remainder of X divided by {k}|X modulo {k}", f"X % {k}", k),
      spec("quotient", "nat", f"X divided by {k}, rounded down|=", f"X // {k}", k),
      spec("sum_mod", "nat nat", f"the sum of X and Y, modulo {k}|=", f"(X + Y) % {k}", k),
    ]
  return out


def recursion() -> list[Spec]:
  out = []
  for k in range(2, 12):
    for c in range(1, 5):
      out += [
        spec("rec_scale", "small", f"{c} if X is 0, else {k} * F(X - 1)",
             f"{c} if X == 0 else {k} * F(X - 1)"),
        spec("rec_step", "small", f"{c} if X is 0, else F(X - 1) + {k}",
             f"{c} if X == 0 else F(X - 1) + {k}"),
        spec("rec_affine", "small", f"{c} if X is 0, else 2 * F(X - 1) + {k}",
             f"{c} if X == 0 else 2 * F(X - 1) + {k}"),
        spec("rec_add_n", "small", f"{k} if X is 0, else F(X - 1) + {c} * X",
             f"{k} if X == 0 else F(X - 1) + {c} * X"),
      ]
  return out


def ranges() -> list[Spec]:
  out = []
  for k in CONSTANTS:
    out += [
      spec("multiples", "small", f"a list of i * {k} for i in range(X)",
           f"[i * {k} for i in range(X)]"),
      spec("shifted", "small", f"a list of i + {k} for i in range(X)",
           f"[i + {k} for i in range(X)]"),
      spec("squares_plus", "small", f"a list of i * i + {k} for i in range(X)",
           f"[i * i + {k} for i in range(X)]"),
      spec("constants", "small", f"a list with {k} repeated X times|=", f"[{k}] * X"),
      spec("count_up", "nat", f"the numbers from {k} up to but not including X, as a list|=",
           f"list(range({k}, X))", k, k + 4),
    ]
  return out
