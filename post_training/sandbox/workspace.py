"""A sandbox's own mount and pid namespaces, with one size-bounded tmpfs.

An idle shell, the anchor, is the first process of the pid namespace in which all runs are started.
It waits for the end of a pipe that this process holds. When this process ends in any way, kill -9
included, the anchor ends, with it (by the kernel) every process of every run at whatever stage, and
then the tmpfs. Nothing ever appears in the host's mount table or file system.

bubblewrap's --die-with-parent is not used: it follows the thread, not the process, and when its
parent dies while bubblewrap starts, a half-made child stays for good.
"""

import contextlib
import dataclasses
import errno
import itertools
import os
import pathlib
import signal
import stat
import subprocess
from collections.abc import Iterable, Iterator, Mapping

from wootz.post_training.sandbox.result import SandboxUnavailable
from wootz.post_training.sandbox.tools import NAMESPACE_REMEDY, PATH, find_tool
from wootz.post_training.sandbox.usage import child_pids

_DIRECTORY = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FIRST_UID = 1_900_000_000  # above what systemd, containers and directory services hand out
_NOBODY = 65534  # for containers with few user ids
_CAP_SYS_ADMIN = 21
_counter = itertools.count()

# Shows the new pid namespace's processes (bubblewrap looks up its child), mounts the tmpfs ($3),
# binds what the host user may reach but the sandbox's user may not (pairs of source and name), and
# waits for the end of its stdin.
_SCRIPT = """set -e
mount -t proc proc /proc
mount -t tmpfs -o "size=$1,nr_inodes=$2,mode=755,nosuid,nodev" wootz-sandbox "$3"
base=$3; shift 3
while [ $# -gt 0 ]; do mkdir "$base/$2"; mount --rbind "$1" "$base/$2"; shift 2; done
echo ready; exec >/dev/null 2>&1; read -r _ || :
"""


@dataclasses.dataclass(frozen=True)
class Workspace:
  """Private namespaces and what is in them.

  Attributes:
    anchor: parent of the idle first process of the pid namespace; ends when its stdin is closed.
    base: where the tmpfs is mounted, seen from inside the namespace.
    uid: host user that runs are given, or None to keep the host process's own.
    mount_fd: the mount namespace.
    pid_fd: the pid namespace.
    user_fd: the user namespace that owns it, or None when the host process may mount.
    root_fd: the tmpfs's root directory.
    work_fd: the work directory.
  """

  anchor: subprocess.Popen
  base: str
  uid: int | None
  mount_fd: int
  pid_fd: int
  user_fd: int | None
  root_fd: int
  work_fd: int

  def enter_command(self) -> list[str]:
    """Command prefix that enters the namespaces and becomes the sandbox's host user.

    The namespaces go by path, since descriptors handed over would stay open in the program.
    """
    own = f"/proc/{os.getpid()}/fd"
    command = [find_tool("nsenter"), f"--mount={own}/{self.mount_fd}"]
    command.append(f"--pid={own}/{self.pid_fd}")
    if self.user_fd is not None:
      command += [f"--user={own}/{self.user_fd}", "--preserve-credentials"]
    if self.uid is not None:
      command += [f"--setuid={self.uid}", f"--setgid={self.uid}"]
    return command

  def kill_strays(self) -> None:
    """Ends what a failed start may have left in the pid namespace; no run is under way."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
      for first in child_pids(self.anchor.pid):
        for pid in child_pids(first):
          os.kill(pid, signal.SIGKILL)

  def close(self) -> None:
    """Ends whatever still runs in the namespaces and frees the tmpfs."""
    for fd in (self.mount_fd, self.pid_fd, self.user_fd, self.root_fd, self.work_fd):
      if fd is not None:
        os.close(fd)
    _end_anchor(self.anchor)


def open_workspace(size: int, entries: int, binds: Mapping[str, str]) -> Workspace:
  """Makes the namespace.

  Args:
    size: bytes of the tmpfs.
    entries: files and directories in it.
    binds: name under the tmpfs's root to host directory, for what must stay in reach.

  Raises:
    SandboxUnavailable: namespaces or mounts are forbidden here.
  """
  base = _mount_point(binds.values())
  may_mount = _may_mount()
  # Unprivileged: a user namespace of our own, in which we may mount.
  namespaces = [] if may_mount else ["--user", "--map-root-user"]
  pairs = [word for name, source in binds.items() for word in (source, name)]
  command = [find_tool("unshare"), *namespaces, "--mount", "--propagation", "private"]
  command += ["--pid", "--fork"]
  command += ["/bin/sh", "-c", _SCRIPT, "sh", str(size), str(entries), base, *pairs]
  uid = _free_uid() if may_mount and os.geteuid() == 0 else None
  with contextlib.ExitStack() as undo:
    anchor = _start_anchor(command)
    undo.callback(_end_anchor, anchor)
    namespace = f"/proc/{anchor.pid}/ns"
    mount_fd = _open(undo, f"{namespace}/mnt", os.O_RDONLY | os.O_CLOEXEC)
    pid_fd = _open(undo, f"{namespace}/pid_for_children", os.O_RDONLY | os.O_CLOEXEC)
    user_fd = None
    if not may_mount:
      user_fd = _open(undo, f"{namespace}/user", os.O_RDONLY | os.O_CLOEXEC)
    root_fd = _open(undo, f"/proc/{anchor.pid}/root{base}", _DIRECTORY)
    for name in ("work", "tmp", "shm"):
      _make_directory(name, root_fd, uid)
    work_fd = _open(undo, "work", _DIRECTORY, root_fd)
    undo.pop_all()
  return Workspace(anchor, base, uid, mount_fd, pid_fd, user_fd, root_fd, work_fd)


def check_names(files: Mapping[str, str | bytes]) -> None:
  """Refuses names that are not plain relative paths.

  Raises:
    ValueError: naming the file and the reason.
    TypeError: a content that is neither str nor bytes.
  """
  for name, content in files.items():
    if not isinstance(name, str) or not name:
      raise ValueError(f"file name {name!r} must be a relative path such as 'tests/case.py'")
    if name.startswith("/"):
      raise ValueError(f"file name {name!r} is absolute: give it relative to the work directory")
    if {"", ".", ".."} & set(name.split("/")) or "\0" in name:
      raise ValueError(f"file name {name!r} has an empty part, '.', '..' or NUL: give a plain path")
    if any(len(os.fsencode(part)) > 255 for part in name.split("/")) or len(name) > 1024:
      raise ValueError(f"file name {name[:80]!r}... is too long")
    if not isinstance(content, str | bytes):
      raise TypeError(f"file {name!r} must be str or bytes, got {type(content).__name__}")


def write_files(workspace: Workspace, files: Mapping[str, str | bytes]) -> None:
  """Writes into the work directory, never through a link that a program may have left there.

  Raises:
    ValueError: a part of the path is a symbolic link, or not a directory where one is needed.
    OSError: ENOSPC or EDQUOT when the work directory is full.
  """
  check_names(files)
  for name, content in files.items():
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    with _parent_directory(workspace, name, create=True) as parent_fd:
      _replace_file(pathlib.PurePosixPath(name), parent_fd, data, workspace.uid)


def read_file(workspace: Workspace, name: str, max_bytes: int) -> bytes:
  """Reads a regular file that a program left; never follows links, never blocks.

  Raises:
    FileNotFoundError: there is none.
    ValueError: it is a link, FIFO, device or directory, has a second (hard) link, or is larger
      than `max_bytes`.
  """
  check_names({name: b""})
  with _parent_directory(workspace, name, create=False) as parent_fd:
    try:
      flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
      fd = os.open(pathlib.PurePosixPath(name).name, flags, dir_fd=parent_fd)
    except OSError as error:
      if error.errno in (errno.ELOOP, errno.ENXIO):
        raise ValueError(f"{name!r} in the work directory is a link or a socket") from None
      raise
  try:
    info = os.fstat(fd)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
      raise ValueError(f"{name!r} in the work directory is not a plain file with one name")
    with open(fd, "rb", closefd=False) as file:
      data = file.read(max_bytes + 1)
  finally:
    os.close(fd)
  if len(data) > max_bytes:
    raise ValueError(f"{name!r} in the work directory is larger than {max_bytes} bytes")
  return data


def write_static(workspace: Workspace, directory: str, files: Mapping[str, str],
                 links: Mapping[str, str]) -> None:
  """Writes read-only material beside the work directory; done before any program runs."""
  os.mkdir(directory, 0o755, dir_fd=workspace.root_fd)
  fd = os.open(directory, _DIRECTORY, dir_fd=workspace.root_fd)
  try:
    os.chmod(f"/proc/self/fd/{fd}", 0o755)
    for name, text in files.items():
      _replace_file(pathlib.PurePosixPath(name), fd, text.encode(), None)
    for name, target in links.items():
      os.symlink(target, name, dir_fd=fd)
  finally:
    os.close(fd)


def _start_anchor(command: list[str]) -> subprocess.Popen:
  """Runs the mounting script up to its wait."""
  process = subprocess.Popen(
    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    env={"PATH": PATH}, cwd="/", start_new_session=True,
  )
  assert process.stdout is not None and process.stderr is not None
  with process.stdout, process.stderr:
    if process.stdout.readline() != b"ready\n":
      _end_anchor(process)
      raise SandboxUnavailable(_explain(process.stderr.read().decode(errors="replace").strip()))
  return process


def _end_anchor(process: subprocess.Popen) -> None:
  assert process.stdin is not None
  process.stdin.close()
  process.wait()


def _explain(message: str) -> str:
  return f"cannot make a private mount namespace ({message}). {NAMESPACE_REMEDY}"


def _open(undo: contextlib.ExitStack, path: str, flags: int, dir_fd: int | None = None) -> int:
  try:
    fd = os.open(path, flags, dir_fd=dir_fd)
  except PermissionError as error:
    raise SandboxUnavailable(_explain(str(error))) from error
  undo.callback(os.close, fd)
  return fd


def _mount_point(keep: Iterable[str]) -> str:
  """A directory found on every system that hides nothing we need when covered."""
  needed = [os.path.realpath(path) for path in keep]
  for candidate in ("/mnt", "/media", "/srv", "/var/tmp", "/tmp"):
    hides = any(f"{path}/".startswith(f"{candidate}/") for path in needed)
    if not hides and os.path.isdir(candidate) and not os.path.islink(candidate):
      return candidate
  raise SandboxUnavailable(f"no free mount point: make an empty /mnt (needed: {needed})")


def _may_mount() -> bool:
  for line in pathlib.Path("/proc/self/status").read_text().splitlines():
    if line.startswith("CapEff:"):
      return bool(int(line.split()[1], 16) >> _CAP_SYS_ADMIN & 1)
  return False


def _free_uid() -> int | None:
  """A host user of the sandbox's own, so that sandboxes share no per-user limit with anyone.

  Two processes may rarely pick the same one; they would then share the process limit, no more.
  """
  own = _FIRST_UID + (os.getpid() * 4099 + next(_counter)) % 2**24
  rows = pathlib.Path("/proc/self/uid_map").read_text().splitlines()
  ranges = [tuple(map(int, row.split())) for row in rows]
  for uid in (own, _NOBODY):
    if any(first <= uid < first + count for first, _, count in ranges):
      return uid
  return None  # a user namespace with no user but us: we are not the host's root


def _make_directory(name: str, dir_fd: int, uid: int | None) -> None:
  os.mkdir(name, 0o700, dir_fd=dir_fd)
  if uid is not None:
    os.chown(name, uid, uid, dir_fd=dir_fd, follow_symlinks=False)


@contextlib.contextmanager
def _parent_directory(workspace: Workspace, name: str, *, create: bool) -> Iterator[int]:
  """Opens the directory that holds `name`, one part at a time and through no link."""
  fd = os.dup(workspace.work_fd)
  try:
    for part in pathlib.PurePosixPath(name).parts[:-1]:
      if create:
        with contextlib.suppress(FileExistsError):
          _make_directory(part, fd, workspace.uid)
      try:
        inner = os.open(part, _DIRECTORY, dir_fd=fd)
      except NotADirectoryError:
        raise ValueError(
          f"file name {name!r}: {part!r} is a symbolic link or no directory in the work directory"
        ) from None
      os.close(fd)
      fd = inner
    yield fd
  finally:
    os.close(fd)


def _replace_file(name: pathlib.PurePosixPath, dir_fd: int, data: bytes, uid: int | None) -> None:
  """Makes a new file in place of an old one, so that no other name of the old one sees it."""
  with contextlib.suppress(FileNotFoundError):
    mode = os.stat(name.name, dir_fd=dir_fd, follow_symlinks=False).st_mode
    if stat.S_ISLNK(mode) or stat.S_ISDIR(mode):
      kind = "a directory" if stat.S_ISDIR(mode) else "a symbolic link"
      raise ValueError(f"file name {str(name)!r} is {kind} in the work directory")
    os.unlink(name.name, dir_fd=dir_fd)
  flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
  with open(os.open(name.name, flags, 0o644, dir_fd=dir_fd), "wb") as file:
    os.fchmod(file.fileno(), 0o644)
    if uid is not None:
      os.fchown(file.fileno(), uid, uid)
    file.write(data)
