import os
import pathlib
import subprocess

import pytest

from wootz.post_training.sandbox import SandboxLimits
from wootz.post_training.sandbox import cgroups as cg

_V1_MOUNT = "30 25 0:26 {root} {point} rw,relatime - cgroup cgroup rw,{name}\n"
_V2_MOUNT = "30 25 0:26 {root} {point} rw,relatime - cgroup2 cgroup2 rw\n"


def test_own_directory_in_a_container_with_version_1():
  mounts = _V1_MOUNT.format(root="/docker/abc", point="/sys/fs/cgroup/memory", name="memory")
  own = cg._own_paths(mounts, "4:memory:/docker/abc/inner\n")
  assert own == {"memory": pathlib.Path("/sys/fs/cgroup/memory/inner")}


def test_own_directory_with_joined_controllers_and_a_named_hierarchy():
  mounts = _V1_MOUNT.format(root="/", point="/sys/fs/cgroup/cpu,cpuacct", name="cpu,cpuacct")
  own = cg._own_paths(mounts, "4:cpu,cpuacct:/a\n9:name=systemd:/\n")
  assert own["cpuacct"] == pathlib.Path("/sys/fs/cgroup/cpu,cpuacct/a")


def test_own_directory_in_version_2():
  mounts = _V2_MOUNT.format(root="/", point="/sys/fs/cgroup")
  own = cg._own_paths(mounts, "0::/user.slice/a.scope\n")
  assert own == {"": pathlib.Path("/sys/fs/cgroup/user.slice/a.scope")}


def test_nowhere_to_make_groups(tmp_path):
  mounts = _V2_MOUNT.format(root="/", point=tmp_path)
  assert cg.find_parents(mounts, "0::/\n") is None  # a plain directory has no controllers
  assert list(tmp_path.iterdir()) == []
  assert cg.find_parents("", "0::/\n") is None


def test_version_2_files(tmp_path):
  """The kernel's file names and formats, from its cgroup-v2 documentation."""
  parents = cg.CgroupParents(version=2, memory=tmp_path, pids=tmp_path, cpuacct=tmp_path)
  group = cg.create_cgroup(parents, SandboxLimits(memory_bytes=64 * 2**20, processes=7))
  directory = group.directories["memory"]
  assert (directory / "memory.max").read_text() == str(64 * 2**20)
  assert (directory / "pids.max").read_text() == "8"  # and one of the sandbox's own
  (directory / "cpu.stat").write_text("usage_usec 1500000\nuser_usec 1000000\nsystem_usec 500000\n")
  (directory / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 0\n")
  assert group.cpu_seconds() == 1.5 and not group.out_of_memory()
  assert group.peak_memory_bytes() is None  # before Linux 5.19
  (directory / "memory.peak").write_text("123456\n")
  (directory / "memory.events").write_text("low 0\nhigh 0\nmax 12\noom 1\noom_kill 1\n")
  assert group.peak_memory_bytes() == 123456 and group.out_of_memory()


def _real_parent() -> pathlib.Path:
  parents = cg.cgroup_parents()
  if parents is None:
    pytest.skip("no writable control groups here")
  return next(iter(parents.directories().values()))


def test_groups_of_dead_makers_are_swept_and_living_ones_kept():
  parent = _real_parent()
  dead = subprocess.Popen(["true"])
  dead.wait()
  stale = parent / f"wootz-sandbox-{dead.pid}-1-0"
  reused = parent / f"wootz-sandbox-{os.getpid()}-1-0"  # our pid, another start time
  alive = parent / f"wootz-sandbox-{os.getpid()}-{cg._start_time(os.getpid())}-sweeptest"
  for path in (stale, reused, alive):
    path.mkdir()
  try:
    assert cg.sweep(parent) >= 2
    assert not stale.exists() and not reused.exists() and alive.exists()
  finally:
    alive.rmdir()


def test_a_busy_group_is_reported_then_removed():
  parents = cg.cgroup_parents() or pytest.skip("no writable control groups here")
  group = cg.create_cgroup(parents, SandboxLimits())
  sleeper = subprocess.Popen(["sleep", "60"])
  try:
    group.admit(sleeper.pid)
    with pytest.raises(OSError, match="still has processes"):
      group.destroy(patience=0.05)
  finally:
    sleeper.kill()
    sleeper.wait()
  group.destroy()
  assert not any(path.exists() for path in group.directories.values())
