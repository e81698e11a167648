"""Watches a process tree through /proc, for machines without a writable control group."""

import dataclasses
import os
import pathlib

_PAGE = os.sysconf("SC_PAGE_SIZE")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclasses.dataclass(frozen=True)
class TreeUsage:
  """cpu_seconds counts ended children that were waited for; memory_bytes is what is mapped
  now, shared pages in proportion; files in memory that nobody maps (memfd) are not seen."""

  cpu_seconds: float = 0.0
  memory_bytes: int = 0


def child_pids(pid: int) -> list[int]:
  """Children of all threads of a process."""
  tasks = pathlib.Path(f"/proc/{pid}/task").iterdir()
  return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def tree_usage(pid: int) -> TreeUsage:
  """Sums over `pid` and all its descendants; those that end meanwhile are left out."""
  cpu, memory, todo = 0.0, 0, [pid]
  while todo:
    current = pathlib.Path(f"/proc/{todo.pop()}")
    try:
      times = (current / "stat").read_text().rpartition(")")[2].split()[11:15]
      cpu += sum(map(int, times)) / _TICKS  # own and waited-for children's, user and system
      memory += _mapped_bytes(current)
      todo += child_pids(int(current.name))
    except (FileNotFoundError, ProcessLookupError):
      continue
  return TreeUsage(cpu, memory)


def _mapped_bytes(process: pathlib.Path) -> int:
  try:
    for line in (process / "smaps_rollup").read_text().splitlines():
      if line.startswith("Pss:"):
        return int(line.split()[1]) * 1024
  except PermissionError:
    # A program can hide its maps (PR_SET_DUMPABLE); it then pays for shared pages in full.
    return int((process / "statm").read_text().split()[1]) * _PAGE
  return 0
