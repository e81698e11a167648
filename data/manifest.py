"""The manifest of a trajectory store: what is in it, in JSON lines, one file per writing process.

A line is `{"crc": <crc32 of the event's JSON>, "event": {...}}` and is complete when it ends in a
newline. Events are `file` (a finished record file with the facts of each record) and `rewind`
(everything after the first `keep` records is set aside). A last line without its newline was cut by
a kill and counts as never written; any other line that does not match its crc is damage and an
error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wootz.data.records import Trajectory


class StoreDamaged(RuntimeError):
  """Something that the store had finished writing is not what it was; the message names it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
  """What is known of one stored trajectory without reading it."""

  file: str  # file name inside the store
  position: int  # place in that file, 0-based
  crc32: int  # of the record's bytes
  domain: str
  family: str
  task_id: str
  update: int
  weight_version: int
  sample_index: int
  prompt_length: int  # tokens
  prompt_crc32: int  # of the prompt's ids; equal within a group
  length: int  # tokens, prompt and completion
  sampled_tokens: int  # tokens with loss
  outcome: str
  score: float | None

  @property
  def group(self) -> str:
    """As `Trajectory.group`."""
    return f"{self.update}/{self.domain}/{self.task_id}"

  @property
  def key(self) -> tuple[str, str, int]:
    """Names the trajectory within its update: domain, task id, sample index."""
    return self.domain, self.task_id, self.sample_index


def entry_of(trajectory: Trajectory, *, file: str, position: int, crc32: int) -> Entry:
  grade = trajectory.grade
  return Entry(
    file=file, position=position, crc32=crc32, domain=trajectory.domain, family=trajectory.family,
    task_id=trajectory.task_id, update=int(trajectory.update),
    weight_version=int(trajectory.weight_version), sample_index=int(trajectory.sample_index),
    prompt_length=int(trajectory.prompt_length),
    prompt_crc32=zlib.crc32(trajectory.tokens[:trajectory.prompt_length].tobytes()),
    length=len(trajectory.tokens), sampled_tokens=int(trajectory.loss_mask.sum()),
    outcome=grade.outcome.value, score=None if grade.score is None else float(grade.score))


def file_event(name: str, size: int, entries: Iterable[Entry]) -> dict[str, Any]:
  """The event that lists a finished file of `size` bytes."""
  records = [dataclasses.asdict(entry) for entry in entries]
  for record in records:
    del record["file"], record["position"]
  updates = sorted({record["update"] for record in records})
  return {"kind": "file", "name": name, "bytes": size, "count": len(records), "updates": updates,
          "records": records}


def rewind_event(keep: int) -> dict[str, Any]:
  return {"kind": "rewind", "keep": keep}


def apply_event(entries: list[Entry], event: Mapping[str, Any]) -> None:
  """Plays one event on the visible entries, in place."""
  if event["kind"] == "rewind":
    del entries[event["keep"]:]
  elif event["kind"] == "file":
    entries.extend(Entry(file=event["name"], position=position, **_shared(record))
                   for position, record in enumerate(event["records"]))
  else:
    raise StoreDamaged(f"manifest holds an event of unknown kind {event['kind']!r}: it was written "
                       "by a newer version of wootz")


def _shared(record: Mapping[str, Any]) -> dict[str, Any]:
  """Equal names stored once in memory: a long run has a million entries and few names."""
  return {name: sys.intern(value) if isinstance(value, str) else value
          for name, value in record.items()}


def read_events(path: Path, offset: int = 0) -> tuple[list[dict[str, Any]], int]:
  """Complete events from byte `offset` on, and the offset behind the last complete line."""
  if not path.exists():
    return [], offset
  with path.open("rb") as file:
    file.seek(offset)
    data = file.read()
  complete = data[:data.rfind(b"\n") + 1]
  events = []
  for line in complete.splitlines(keepends=True):
    events.append(_parse_line(line, path, offset))
    offset += len(line)
  return events, offset


def _parse_line(line: bytes, path: Path, offset: int) -> dict[str, Any]:
  try:
    record = json.loads(line)
    if record["crc"] == zlib.crc32(_dump(record["event"])):
      return record["event"]
  except (ValueError, KeyError, TypeError):
    pass
  raise StoreDamaged(f"{path}: the line at byte {offset} is damaged (its checksum does not match); "
                     "restore the file from a copy, or start a new store")


def append_event(path: Path, event: Mapping[str, Any]) -> None:
  """Adds one event and returns once it is on disk. On an error the file is as it was before."""
  line = json.dumps({"crc": zlib.crc32(_dump(event)), "event": event}) + "\n"
  before = path.stat().st_size if path.exists() else 0
  try:
    with path.open("ab") as file:
      file.write(line.encode())
      file.flush()
      os.fsync(file.fileno())
    if not before:
      sync_directory(path.parent)
  except OSError:
    if path.exists():  # half a line must not stand before the next one
      os.truncate(path, before)
    raise


def cut_torn_line(path: Path) -> bool:
  """Removes a last line that a kill cut short. True when there was one."""
  if not path.exists():
    return False
  _, end = read_events(path)
  if torn := path.stat().st_size > end:
    with path.open("r+b") as file:
      file.truncate(end)
      os.fsync(file.fileno())
  return torn


def sync_directory(path: Path) -> None:
  """Makes renames and new names in the directory durable."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def _dump(event: Mapping[str, Any]) -> bytes:
  return json.dumps(event, sort_keys=True).encode()
