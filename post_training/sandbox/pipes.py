"""Pipes whose ends are closed exactly once, and bounded reading from them."""

import contextlib
import dataclasses
import fcntl
import os
import selectors

_CHUNK = 65536


@dataclasses.dataclass
class Pipe:
  """Both ends of a pipe; a closed end is -1."""

  read: int
  write: int

  def close_read(self) -> None:
    fd, self.read = self.read, -1
    if fd >= 0:
      os.close(fd)

  def close_write(self) -> None:
    fd, self.write = self.write, -1
    if fd >= 0:
      os.close(fd)

  def close(self) -> None:
    self.close_read()
    self.close_write()


def open_pipe(stack: contextlib.ExitStack, *, feeds_child: bool) -> Pipe:
  """A pipe to or from a child, closed with the stack.

  Only our own end is non-blocking: that flag belongs to the end, and programs expect none. Both
  have two-digit numbers: shells keep the lower ones for themselves.
  """
  pipe = Pipe(*os.pipe2(os.O_CLOEXEC))
  stack.callback(pipe.close)
  if pipe.write < 10:
    low, pipe.write = pipe.write, fcntl.fcntl(pipe.write, fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(low)
  os.set_blocking(pipe.write if feeds_child else pipe.read, False)
  return pipe


@dataclasses.dataclass
class Stream:
  """Bytes read so far from one descriptor; one more than `limit` is kept to know of an overflow."""

  fd: int
  limit: int
  data: bytearray = dataclasses.field(default_factory=bytearray)

  @property
  def overflowed(self) -> bool:
    return len(self.data) > self.limit

  def read(self) -> bool:
    """Takes what is there; False at the end of the stream."""
    try:
      chunk = os.read(self.fd, _CHUNK)
    except BlockingIOError:
      return True
    self.data += chunk[: self.limit + 1 - len(self.data)]
    return bool(chunk)

  def drain(self) -> None:
    """Takes all that is there without waiting, up to the limit."""
    while not self.overflowed and readable(self.fd, 0.0) and self.read():
      pass


def readable(fd: int, seconds: float) -> bool:
  """Waits at most so long for data, the end of a stream, or (pidfd) the end of a process."""
  with selectors.PollSelector() as selector:
    selector.register(fd, selectors.EVENT_READ)
    return bool(selector.select(seconds))
