"""Reads what the runner wrote to the channel. Everything in it is untrusted."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any

MAX_RECORD_BYTES = 256 * 1024

_LOAD_FAILURES = ("no_program", "no_function", "raised", "out_of_memory")
_TEST_KINDS = ("value", "raised", "foreign", "oversized", "hooked", "out_of_memory")
_FIELDS = {"value": {"nonce", "test", "kind", "value"}}
_TEST_FIELDS = {"nonce", "test", "kind"}


class Tampered(Exception):
  """The channel holds what the runner does not write; the message says what."""


@dataclasses.dataclass(frozen=True)
class Transcript:
  """One run as reported. `tests` maps a test's number to its record."""

  ready: bool  # the runner had started, so the sandbox worked
  load_failure: str  # one of "no_program", "no_function", "raised", "out_of_memory"; "" if loaded
  tests: Mapping[int, Mapping[str, Any]]
  done: bool


def read_transcript(channel: bytes, nonce: str, count: int, *, stopped: bool) -> Transcript:
  """Parses the channel of a run of `count` tests.

  Args:
    channel: what arrived.
    nonce: the run's own, which every record must carry.
    count: tests asked for, numbered from 0.
    stopped: the run was ended from outside, so that its last record may be cut.

  Raises:
    Tampered: foreign bytes, a wrong nonce, an unknown, repeated or misplaced record.
  """
  *lines, tail = channel.split(b"\n")
  if tail and not stopped:
    raise Tampered("the channel does not end with a whole record")
  ready, load_failure, done = False, "", False
  tests: dict[int, Mapping[str, Any]] = {}
  for line in lines:
    record = _parse(line, nonce)
    if done or (not ready and record["kind"] != "ready"):
      raise Tampered("a record before the first or after the last")
    if "test" in record:
      _add_test(tests, record, count)
    elif record["kind"] == "ready" and not ready:
      ready = True
    elif record["kind"] == "done":
      done = True
    elif record["kind"] in _LOAD_FAILURES and not load_failure and not tests:
      load_failure = record["kind"]
    else:
      raise Tampered(f"unexpected record {line[:80]!r}")
  if load_failure and tests:
    raise Tampered("outputs of a submission that did not load")
  return Transcript(ready, load_failure, tests, done)


def _add_test(tests: dict[int, Mapping[str, Any]], record: Mapping[str, Any], count: int) -> None:
  number, kind = record["test"], record["kind"]
  if type(number) is not int or not 0 <= number < count:
    raise Tampered(f"no test {number!r} was asked for")
  if number in tests:
    raise Tampered(f"test {number} is reported twice")
  if kind not in _TEST_KINDS or record.keys() != _FIELDS.get(kind, _TEST_FIELDS):
    raise Tampered(f"test {number} has a record of another shape")
  tests[number] = record


def _parse(line: bytes, nonce: str) -> Mapping[str, Any]:
  if len(line) > MAX_RECORD_BYTES:
    raise Tampered(f"a record of {len(line)} bytes")
  try:
    record = json.loads(line.decode("ascii"), object_pairs_hook=_unique, parse_constant=_refuse)
  except (ValueError, RecursionError) as error:
    raise Tampered(f"bytes that are no record: {line[:80]!r}") from error
  if type(record) is not dict or type(record.get("kind")) is not str:
    raise Tampered(f"bytes that are no record: {line[:80]!r}")
  if record.get("nonce") != nonce:
    raise Tampered("a record without this run's nonce")
  return record


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  if len(dict(pairs)) != len(pairs):
    raise ValueError("a repeated name")
  return dict(pairs)


def _refuse(constant: str) -> Any:
  raise ValueError(f"{constant} is not plain JSON")
