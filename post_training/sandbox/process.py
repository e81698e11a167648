"""Starts one bubblewrap, feeds and drains it, and sees to it that nothing of it stays alive.

The command waits behind a gate: a shell, the sandbox's first process, says that it is there, and
goes on when it is told to. What happens before is the sandbox's doing, what happens after is the
program's, and a host that dies in between leaves nothing behind.
"""

import contextlib
import dataclasses
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from wootz.post_training.sandbox.pipes import Pipe, Stream, open_pipe, readable
from wootz.post_training.sandbox.usage import child_pids

_START_SECONDS = 30.0
_END_SECONDS = 10.0
_TICK_SECONDS = 0.05
_CHUNK = 65536
# The sandbox's first process starts with no environment at all, since the program can read it.
_EMPTY = 'unset PWD OLDPWD SHLVL _; exec /bin/sh -c "$0" sh "$@"'
# It stays as pid 1, so that the kernel ends all others when the command ends, and bubblewrap reaps
# it (under bubblewrap's own pid 1 each run leaves a zombie to the host's init). Its own stderr is
# closed to keep the shell's "Killed" out of the program's.
_GATE = """echo
read -r _ || exit 125
exec 9>&2 2>/dev/null
(exec 2>&9 9>&-
while [ "$1" != -- ]; do export "$1"; shift; done
shift
exec "$@")
exit $?"""


class SandboxFailure(Exception):
  """The sandbox, not the program, failed."""


@dataclasses.dataclass(frozen=True)
class Ended:
  """A run that is over.

  `stopped` names the limit for which the host ended it, if any. `failure` is what
  was said when there is neither that nor an exit code; the caller may know better (memory).
  """

  exit_code: int | None
  stopped: str | None
  stdout: Stream
  stderr: Stream
  channel: Stream
  wall_seconds: float
  cpu_seconds: float
  max_rss_bytes: int
  failure: str | None


def check_command(cmd: str | Sequence[str]) -> list[str]:
  """The words of the command.

  Raises:
    ValueError: an empty command, one that starts with "-", or an argument that the kernel refuses.
  """
  words = ["/bin/sh", "-c", cmd] if isinstance(cmd, str) and cmd else list(cmd)
  if not words or not all(isinstance(word, str) for word in words) or not words[0]:
    raise ValueError(f"cmd must be a shell line or a list of strings, got {cmd!r}")
  if words[0].startswith("-"):
    raise ValueError(f"cmd would run a program called {words[0]!r}: put the program first")
  sizes = [len(os.fsencode(word)) for word in words]
  if any("\0" in word for word in words) or max(sizes) >= 131_072 or sum(sizes) > 1_000_000:
    raise ValueError(
      "cmd holds a NUL, an argument of 128 KiB or more than 1 MB in all: pass such data in "
      "`files` or `stdin`"
    )
  return words


def gated(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
  """What bubblewrap runs: the command, with its environment, behind the start signal."""
  pairs = [f"{name}={value}" for name, value in environment.items()]
  return ["/bin/sh", "-c", _EMPTY, _GATE, *pairs, "--", *words]


def run_process(
  bwrap: str,
  prefix: Sequence[str],
  options: Sequence[str],
  command: Sequence[str],
  environment: Mapping[str, str],
  *,
  stdin: bytes,
  channel: bool,
  timeout: float,
  output_limit: int,
  channel_limit: int,
  admit: Callable[[int], None] | None,
  over_limit: Callable[[int], str | None],
) -> Ended:
  """Runs `prefix bwrap options command` to its end.

  Args:
    bwrap: path of bubblewrap.
    prefix: words that end in running what follows them (entering a namespace, setting rlimits).
    options: bubblewrap's options.
    command: what runs inside, from `check_command`.
    environment: its environment variables.
    stdin: bytes for the command.
    channel: hand down one more pipe, whose number goes into WOOTZ_CHANNEL_FD.
    timeout: wall seconds from the start signal on.
    output_limit: bytes of stdout and of stderr.
    channel_limit: bytes of the channel.
    admit: called with the host pid of the sandbox's first process before the command starts.
    over_limit: asked regularly, with the host pid of the sandbox's first process; names the
      limit that the run has broken.

  Raises:
    SandboxFailure: bubblewrap did not start, or the end of its processes could not be confirmed.
    OSError: no descriptors or processes left on the host.
  """
  with contextlib.ExitStack() as stack:
    pipes = _Pipes.open(stack, channel)
    if pipes.channel is not None:
      environment = {**environment, "WOOTZ_CHANNEL_FD": str(pipes.channel.write)}
    watch = _Watch(
      _start(stack, pipes, [*prefix, bwrap], options, gated(command, environment)),
      pipes, output_limit, channel_limit,
    )
    try:
      pipes.close_child_ends()
      watch.await_start(admit)
      watch.serve(b"\n" + stdin, timeout, over_limit)
    finally:
      usage = watch.end()
    return watch.ended(usage)


@dataclasses.dataclass(frozen=True)
class _Pipes:
  """The pipes of one run."""

  stdin: Pipe
  stdout: Pipe
  stderr: Pipe
  channel: Pipe | None

  @classmethod
  def open(cls, stack: contextlib.ExitStack, channel: bool) -> "_Pipes":
    stdin = open_pipe(stack, feeds_child=True)
    outputs = [open_pipe(stack, feeds_child=False) for _ in range(3 if channel else 2)]
    return cls(stdin, *outputs, *([] if channel else [None]))

  def close_child_ends(self) -> None:
    self.stdin.close_read()
    for pipe in (self.stdout, self.stderr, self.channel):
      if pipe is not None:
        pipe.close_write()


def _start(stack: contextlib.ExitStack, pipes: _Pipes, bwrap: Sequence[str],
           options: Sequence[str], command: Sequence[str]) -> subprocess.Popen:
  """Starts bubblewrap with an empty environment, which the program could read otherwise."""
  arguments_fd = _arguments_file(stack, ["--as-pid-1", *options])
  channel = [] if pipes.channel is None else [pipes.channel.write]
  return subprocess.Popen(
    [*bwrap, "--args", str(arguments_fd), "--", *command],
    stdin=pipes.stdin.read, stdout=pipes.stdout.write, stderr=pipes.stderr.write,
    pass_fds=[arguments_fd, *channel], env={}, cwd="/", start_new_session=True,
  )


class _Watch:
  """One running bubblewrap, watched by the calling thread."""

  def __init__(self, process: subprocess.Popen, pipes: _Pipes, output: int, channel: int):
    self.process = process
    self.stdin = pipes.stdin
    self.stdout = Stream(pipes.stdout.read, output)
    self.stderr = Stream(pipes.stderr.read, output)
    self.channel = Stream(-1 if pipes.channel is None else pipes.channel.read, channel)
    self.stopped: str | None = None
    self.first_pid = 0
    self.first_fd: int | None = None
    self.began = time.monotonic()
    self.finished = self.began

  def await_start(self, admit: Callable[[int], None] | None) -> None:
    """Waits until the gate's shell is there, and admits it to its limits."""
    with selectors.PollSelector() as selector, _pidfd(self.process.pid) as monitor_fd:
      selector.register(self.stdout.fd, selectors.EVENT_READ)
      selector.register(monitor_fd, selectors.EVENT_READ)
      ready = [key.fd for key, _ in selector.select(_START_SECONDS)]
    if self.stdout.fd not in ready:
      raise SandboxFailure(f"bubblewrap did not start: {self._message()}")
    if os.read(self.stdout.fd, 1) != b"\n":
      raise SandboxFailure(f"bubblewrap could not start the command: {self._message()}")
    # We started nsenter, which started bubblewrap, which started the sandbox's first process.
    monitors = child_pids(self.process.pid)
    firsts = [pid for monitor in monitors for pid in child_pids(monitor)]
    if len(firsts) != 1:
      raise SandboxFailure(f"cannot find the sandbox's first process among {firsts}")
    self.first_pid = firsts[0]
    self.first_fd = os.pidfd_open(self.first_pid)
    if admit is not None:
      admit(self.first_pid)

  def serve(self, stdin: bytes, timeout: float, over_limit: Callable[[int], str | None]) -> None:
    """Feeds and drains until the command ends or breaks a limit."""
    self.began = time.monotonic()
    deadline = self.began + timeout
    pending = memoryview(stdin)
    with selectors.DefaultSelector() as selector, _pidfd(self.process.pid) as monitor_fd:
      selector.register(monitor_fd, selectors.EVENT_READ, "end")
      selector.register(self.stdin.write, selectors.EVENT_WRITE, "stdin")
      for stream in self._outputs():
        selector.register(stream.fd, selectors.EVENT_READ, stream)
      next_check = self.began + _TICK_SECONDS
      while self.stopped is None:
        now = time.monotonic()
        if now >= deadline:
          self.stopped = "wall"
        elif now >= next_check:
          self.stopped = over_limit(self.first_pid)
          next_check = now + _TICK_SECONDS
        for key, _ in selector.select(max(0.0, min(deadline, next_check) - now)):
          if key.data == "end":
            return
          if key.data == "stdin":
            pending = self._feed(selector, pending)
          elif not key.data.read():
            selector.unregister(key.fd)
          elif key.data.overflowed:
            self.stopped = "output"

  def end(self):
    """Kills what is left, waits until it is gone, and drains; returns the rusage of it all."""
    self.finished = time.monotonic()
    if self.first_fd is not None:
      # The first process of the pid namespace: the kernel ends all others with it.
      with contextlib.suppress(ProcessLookupError):
        signal.pidfd_send_signal(self.first_fd, signal.SIGKILL)
      os.close(self.first_fd)
    else:
      os.kill(self.process.pid, signal.SIGKILL)
    self.stdin.close_write()  # a gate that is still closed stays so
    # bubblewrap ends after its child has ended, and nsenter after bubblewrap.
    if not _ends_within(self.process.pid, _END_SECONDS):
      raise SandboxFailure(f"processes under {self.process.pid} do not end after SIGKILL")
    _, status, usage = os.wait4(self.process.pid, 0)
    self.process.returncode = os.waitstatus_to_exitcode(status)
    for stream in self._outputs():
      stream.drain()
    return usage

  def ended(self, usage) -> Ended:
    code = self.process.returncode
    stopped = self.stopped or self._overflow()
    lost = code < 0 and stopped is None  # bubblewrap itself was killed
    return Ended(
      exit_code=code if self.stopped is None and code >= 0 else None,
      stopped=stopped,
      stdout=self.stdout,
      stderr=self.stderr,
      channel=self.channel,
      wall_seconds=self.finished - self.began,
      cpu_seconds=usage.ru_utime + usage.ru_stime,
      max_rss_bytes=usage.ru_maxrss * 1024,
      failure=self._message() if lost else None,
    )

  def _outputs(self) -> list[Stream]:
    streams = [self.stdout, self.stderr]
    return [*streams, self.channel] if self.channel.fd >= 0 else streams

  def _overflow(self) -> str | None:
    return "output" if any(stream.overflowed for stream in self._outputs()) else None

  def _feed(self, selector: selectors.BaseSelector, pending: memoryview) -> memoryview:
    try:
      pending = pending[os.write(self.stdin.write, pending[:_CHUNK]):]
    except BlockingIOError:
      return pending
    except BrokenPipeError:
      pending = pending[:0]  # the program does not want (all of) its input; its right
    if not pending:
      selector.unregister(self.stdin.write)
      self.stdin.close_write()
    return pending

  def _message(self) -> str:
    if readable(self.stderr.fd, 1.0):
      self.stderr.read()
    return self.stderr.data.decode(errors="replace").strip() or "no message"


def _arguments_file(stack: contextlib.ExitStack, options: list[str]) -> int:
  """Options by descriptor: on the command line they would be shown in the sandbox's /proc."""
  fd = os.memfd_create("options", os.MFD_CLOEXEC)
  stack.callback(os.close, fd)
  data = b"".join(os.fsencode(option) + b"\0" for option in options)
  while data:
    data = data[os.write(fd, data):]
  os.lseek(fd, 0, os.SEEK_SET)
  return fd


@contextlib.contextmanager
def _pidfd(pid: int) -> Iterator[int]:
  fd = os.pidfd_open(pid)
  try:
    yield fd
  finally:
    os.close(fd)


def _ends_within(pid: int, seconds: float) -> bool:
  with _pidfd(pid) as fd:
    return readable(fd, seconds)
