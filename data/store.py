"""Append-only trajectory store: array_record files that a manifest lists once they are complete.

Each writing process has its own files and its own manifest, so processes never wait for each other:

    trajectories-00000-000007.array_record        listed, complete, never changed again
    trajectories-00000-000008.array_record.open   being written; lost when the writer is killed
    trajectories-00000-000008.array_record.lost   what a killed writer left; never read
    manifest-00000.jsonl                          the truth about process 0's files

A file is closed, counted, synced to disk and renamed before its manifest line is written, so a
reader sees whole files only. Durability is that of fsync on the file system in use.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import logging
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Self

from array_record.python import array_record_module as array_record

from wootz.data import manifest
from wootz.data.manifest import Entry, StoreDamaged
from wootz.data.records import Trajectory
from wootz.data.trajectory_codec import decode_trajectory, encode_trajectory

__all__ = ["Entry", "StoreDamaged", "StoreInUse", "TrajectoryStore", "TrajectoryWriter"]

# One record per chunk: the loader reads at random, and a group's records would not compress better
# together than their text does alone.
_WRITER_OPTIONS = "group_size:1,zstd:3"
_READER_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
_OPEN, _LOST = ".open", ".lost"
_log = logging.getLogger(__name__)


class StoreInUse(RuntimeError):
  """The directory already holds, or is being written by, another run."""


class TrajectoryWriter:
  """Appends trajectories of one process. Call `commit` to make what was written visible.

  Args:
    directory: the store; created when missing.
    process_index: names this process's files; no two live writers may share it.
    resume: continue the store that is there. Without it a directory that already holds files of
      this process index is refused, so that a fresh run never trains on an old run's rollouts.

  Attributes:
    lost_files: files that a killed writer had left and that were set aside at the start.
  """

  def __init__(self, directory: str | os.PathLike, *, process_index: int = 0,
               resume: bool = False) -> None:
    self.directory = Path(directory)
    self.process_index = process_index
    self.directory.mkdir(parents=True, exist_ok=True)
    self._lock = _lock(self.directory / f"writer-{process_index:05d}.lock")
    try:
      if not resume:
        _refuse_used(self.directory, process_index)
      self._manifest = self.directory / f"manifest-{process_index:05d}.jsonl"
      self._entries, self.lost_files = self._recover()
    except BaseException:
      self._lock.close()
      raise
    self._keys = {(entry.update, *entry.key) for entry in self._entries}
    self._pending: list[Entry] = []
    self._file: array_record.ArrayRecordWriter | None = None
    self._next_number = _next_number(self.directory, process_index)

  def __len__(self) -> int:
    """Committed records of this process."""
    return len(self._entries)

  def __enter__(self) -> Self:
    return self

  def __exit__(self, kind: object, *_: object) -> None:
    if kind is None:
      self.commit()
    self.close()

  def write(self, trajectories: Iterable[Trajectory]) -> int:
    """Appends to the open file and returns how many were appended; nothing is visible yet.

    All are checked and encoded before the first is written, so a bad one leaves the file unchanged.
    """
    self._check_alive()
    batch = [(trajectory, encode_trajectory(trajectory)) for trajectory in trajectories]
    keys = [(int(t.update), t.domain, t.task_id, int(t.sample_index)) for t, _ in batch]
    self._refuse_repeated(keys)
    if not batch:
      return 0
    file = self._file or self._open_file()
    for trajectory, data in batch:
      try:
        file.write(data)
      except RuntimeError as error:
        raise self._abandon(f"could not be written: {error}") from error
      self._pending.append(manifest.entry_of(
        trajectory, file=self._final.name, position=len(self._pending), crc32=zlib.crc32(data)))
    self._keys.update(keys)
    return len(batch)

  def commit(self) -> int:
    """Finishes the open file and lists it. Returns how many records this process has committed.

    Raises OSError, naming the file, when the disk did not take it. The store is then as it was
    after the commit before, and the records since may be written again.
    """
    self._check_alive()
    if self._file is None:
      return len(self)
    try:
      size = _finish(self._file, self._final, len(self._pending))
      manifest.append_event(self._manifest, manifest.file_event(
        self._final.name, size, self._pending))
    except (RuntimeError, OSError) as error:
      raise self._abandon(f"could not be finished: {error}") from error
    self._entries.extend(self._pending)
    self._file, self._pending = None, []
    return len(self)

  def rewind(self, *, length: int | None = None, update: int | None = None) -> int:
    """Sets aside what a resumed run will make again; returns how many records that were.

    Args:
      length: keep the first `length` records of this process (what `commit` returned then).
      update: keep the records of updates before `update`: the next one that the run will do.
    """
    self._check_alive()
    if (length is None) == (update is None):
      raise ValueError("rewind takes either length= or update=")
    if self._file is not None:
      raise ValueError(f"rewind with {len(self._pending)} uncommitted records: commit first")
    if update is not None:
      length = _first_of_update(self._entries, update)
    assert length is not None
    if length > len(self):
      raise StoreDamaged(f"{self.directory}: process {self.process_index} is to keep {length} "
                         f"records and has {len(self)}; the checkpoint belongs to another store")
    superseded = self._entries[length:]
    if superseded:
      manifest.append_event(self._manifest, manifest.rewind_event(length))
      del self._entries[length:]
      self._keys -= {(entry.update, *entry.key) for entry in superseded}
    return len(superseded)

  def close(self) -> None:
    """Ends the writer. Records that were not committed are set aside as a killed writer's are."""
    if self._lock.closed:
      return
    if self._file is not None:
      self._abandon("was closed without a commit")
    self._lock.close()

  def _recover(self) -> tuple[list[Entry], tuple[str, ...]]:
    """Reads the manifest and sets aside every file of this process that it does not list."""
    if manifest.cut_torn_line(self._manifest):
      _log.warning("%s: the last line was cut by a kill and is dropped", self._manifest)
    entries: list[Entry] = []
    listed = set()
    for event in manifest.read_events(self._manifest)[0]:
      manifest.apply_event(entries, event)
      listed.add(event.get("name"))
    lost = [path.name for path in sorted(self.directory.glob(_pattern(self.process_index)))
            if path.name not in listed and not path.name.endswith(_LOST)]
    for name in lost:
      _log.warning("%s: %s was never finished and is set aside", self.directory, name)
      _set_aside(self.directory / name)
    return entries, tuple(lost)

  def _open_file(self) -> array_record.ArrayRecordWriter:
    name = f"trajectories-{self.process_index:05d}-{self._next_number:06d}.array_record"
    self._next_number += 1
    self._final = self.directory / name
    file = array_record.ArrayRecordWriter(str(self._final) + _OPEN, _WRITER_OPTIONS)
    if not file.ok():
      raise OSError(f"cannot create {self._final}{_OPEN}")
    self._file = file
    return file

  def _abandon(self, reason: str) -> OSError:
    """Sets the open file aside and forgets its records; returns the error to raise."""
    assert self._file is not None
    with contextlib.suppress(RuntimeError):  # closing flushes, which a full disk refuses again
      self._file.close()
    for path in (self._final, self._final.with_name(self._final.name + _OPEN)):
      if path.exists():
        _set_aside(path)
    self._keys -= {(entry.update, *entry.key) for entry in self._pending}
    count, self._file, self._pending = len(self._pending), None, []
    return OSError(f"{self._final} {reason}; its {count} records are not in the store")

  def _refuse_repeated(self, keys: Sequence[tuple]) -> None:
    twice = {key for key, count in Counter(keys).items() if count > 1}
    repeated = sorted(self._keys.intersection(keys) | twice)
    if repeated:
      update, domain, task_id, sample = repeated[0]
      raise ValueError(f"trajectory of update {update}, task {domain}/{task_id}, sample {sample} "
                       "was written already; each is trained on once (on resume, rewind first)")

  def _check_alive(self) -> None:
    if self._lock.closed:
      raise ValueError(f"the writer of {self.directory} is closed")


class TrajectoryStore(Sequence[Trajectory]):
  """Read-only view of everything committed, by all processes, when it was opened or refreshed.

  Records are ordered by process, then by commit. Indices hold until the next `refresh`.
  """

  def __init__(self, directory: str | os.PathLike) -> None:
    self.directory = Path(directory)
    if not self.directory.is_dir():
      raise FileNotFoundError(f"no trajectory store at {self.directory}")
    self._offsets: dict[Path, int] = {}
    self._by_process: dict[Path, list[Entry]] = {}
    self._sizes: dict[str, int] = {}
    self._by_update: dict[int, dict[tuple, Entry]] = defaultdict(dict)
    self.entries: tuple[Entry, ...] = ()
    self.refresh()

  def __len__(self) -> int:
    return len(self.entries)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.read(self.entries[index])
    return self.read([self.entries[index]])[0]

  def refresh(self) -> int:
    """Takes in what was committed since; returns the number of records now visible."""
    added: list[Entry] = []
    rewound = False
    for path in sorted(self.directory.glob("manifest-*.jsonl")):
      events, self._offsets[path] = manifest.read_events(path, self._offsets.get(path, 0))
      entries = self._by_process.setdefault(path, [])
      for event in events:
        before = len(entries)
        manifest.apply_event(entries, event)
        added += entries[before:]
        rewound |= event["kind"] == "rewind"
        if event["kind"] == "file":
          self._sizes[event["name"]] = event["bytes"]
    self.entries = tuple(itertools.chain.from_iterable(
      self._by_process[path] for path in sorted(self._by_process)))
    if rewound:
      self._by_update.clear()
    self._index(self.entries if rewound else added)
    return len(self)

  def updates(self) -> tuple[int, ...]:
    """The updates that have records, in order."""
    return tuple(sorted(self._by_update))

  def of_update(self, update: int) -> tuple[Entry, ...]:
    """Facts of the trajectories drawn for one learner update, by group and sample index."""
    entries = self._by_update.get(update, {}).values()
    return tuple(sorted(entries, key=lambda entry: (entry.group, entry.sample_index)))

  def groups(self, update: int) -> dict[str, tuple[Entry, ...]]:
    """Facts by `Trajectory.group`, groups in order of name, samples in order of index."""
    groups = defaultdict(list)
    for entry in self.of_update(update):
      groups[entry.group].append(entry)
    return {name: tuple(entries) for name, entries in groups.items()}

  def read(self, entries: Sequence[Entry]) -> list[Trajectory]:
    """The trajectories themselves, in the order given.

    Raises StoreDamaged, naming file and record, where the bytes are not those that were committed.
    """
    by_file = defaultdict(list)
    for place, entry in enumerate(entries):
      by_file[entry.file].append((place, entry))
    result: list[Trajectory | None] = [None] * len(entries)
    for name, wanted in by_file.items():
      data = self._read_file(name, [entry.position for _, entry in wanted])
      for (place, entry), record in zip(wanted, data, strict=True):
        if zlib.crc32(record) != entry.crc32:
          raise StoreDamaged(f"{self.directory / name}: record {entry.position} does not match its "
                             "checksum in the manifest")
        result[place] = decode_trajectory(record)
    return result  # type: ignore[return-value]

  def verify(self) -> int:
    """Reads every record once; returns how many. Raises StoreDamaged at the first bad one."""
    by_file = defaultdict(list)
    for entry in self.entries:
      by_file[entry.file].append(entry)
    return sum(len(self.read(entries)) for entries in by_file.values())

  def _read_file(self, name: str, positions: list[int]) -> list[bytes]:
    path = self.directory / name
    try:
      if (size := path.stat().st_size) != self._sizes[name]:
        raise StoreDamaged(f"{path}: {size} bytes, the manifest says {self._sizes[name]}")
      # A reader is opened per call: files are small, and loader threads must not share one.
      reader = array_record.ArrayRecordReader(str(path), _READER_OPTIONS)
      try:
        return reader.read(positions)
      finally:
        reader.close()
    except (RuntimeError, OSError, IndexError) as error:
      if isinstance(error, StoreDamaged):
        raise
      raise StoreDamaged(f"{path}: {error}") from error

  def _index(self, entries: Iterable[Entry]) -> None:
    for entry in entries:
      if self._by_update[entry.update].setdefault(entry.key, entry) is not entry:
        raise StoreDamaged(f"{self.directory}: update {entry.update}, task {entry.domain}/"
                           f"{entry.task_id}, sample {entry.sample_index} was committed by two "
                           "processes; give each process its own tasks")


def _pattern(process_index: int) -> str:
  return f"trajectories-{process_index:05d}-*"


def _lock(path: Path) -> IO[bytes]:
  """Holds the writer's lock until closed; the kernel lets go of it when the process dies."""
  file = path.open("ab")
  try:
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except OSError as error:
    file.close()
    raise StoreInUse(f"{path} is held by another live writer: stop that run, or choose another "
                     "directory") from error
  return file


def _refuse_used(directory: Path, process_index: int) -> None:
  """A fresh run may meet other processes of the same run, but nothing of its own name."""
  used = sorted([*directory.glob(f"manifest-{process_index:05d}.jsonl"),
                 *directory.glob(_pattern(process_index))])
  if used:
    raise StoreInUse(f"{directory} already holds trajectories of a run ({used[0].name}): resume "
                     "that run, or choose another directory")


def _finish(file: array_record.ArrayRecordWriter, path: Path, count: int) -> int:
  """Closes a record file, makes sure that the disk holds `count` records, and gives it its name.

  Returns its size in bytes.
  """
  temporary = path.with_name(path.name + _OPEN)
  file.close()
  with temporary.open("rb") as written:
    os.fsync(written.fileno())
  reader = array_record.ArrayRecordReader(str(temporary), _READER_OPTIONS)
  found = reader.num_records()
  reader.close()
  if found != count:
    raise OSError(f"it holds {found} records after closing, {count} were written")
  os.rename(temporary, path)
  manifest.sync_directory(path.parent)
  return path.stat().st_size


def _set_aside(path: Path) -> None:
  os.rename(path, path.with_name(path.name + _LOST))


def _next_number(directory: Path, process_index: int) -> int:
  numbers = [int(match[1]) for path in directory.glob(_pattern(process_index))
             if (match := re.match(r"trajectories-\d+-(\d+)\.", path.name))]
  return max(numbers, default=-1) + 1


def _first_of_update(entries: Sequence[Entry], update: int) -> int:
  """Length of the part before `update`; later records of earlier updates would be lost with it."""
  length = next((i for i, entry in enumerate(entries) if entry.update >= update), len(entries))
  if stray := [entry for entry in entries[length:] if entry.update < update]:
    raise ValueError(f"records of update {stray[0].update} follow records of update {update}: "
                     "rewind by length instead")
  return length
