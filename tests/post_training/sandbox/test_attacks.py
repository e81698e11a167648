"""What hostile programs try at the level of the sandbox. After each, nothing of it is left and an
honest job runs at once."""

import os
import pathlib
import socket
import threading

import pytest

from wootz.post_training.sandbox import Outcome, Sandbox, SandboxLimits
from wootz.post_training.sandbox.cgroups import cgroup_parents

_MIB = 2**20
_SLACK = 20.0  # seconds: generous, for a busy machine


@pytest.fixture(params=[True, False], ids=["cgroups", "rlimits"])
def use_cgroups(request):
  if request.param and cgroup_parents() is None:
    pytest.skip("no writable control groups here")
  return request.param


@pytest.fixture
def attack(marker, processes_with, use_cgroups):
  """Function: runs Python source as an attack, then checks that all is well again."""

  def run(source: str, *, timeout: float = _SLACK, **limits):
    limits = SandboxLimits(**{"memory_bytes": 256 * _MIB, "processes": 20, **limits})
    with Sandbox(timeout=timeout, limits=limits, use_cgroups=use_cgroups) as sandbox:
      result = sandbox.run(files={"attack.py": source}, cmd=["python", "attack.py", marker])
      assert processes_with(marker) == []
      assert result.outcome is not Outcome.INFRA_ERROR, result.detail
    with Sandbox(use_cgroups=use_cgroups) as sandbox:
      assert sandbox.run(cmd=["python", "-c", "print(6 * 7)"]).stdout == "42\n"
    return result

  return run


def test_fork_bomb_is_bounded_and_ends_with_the_wall_time(attack):
  result = attack(
    "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass\n", timeout=1.0
  )
  assert result.outcome in (Outcome.TIMED_OUT, Outcome.CPU_LIMIT)


def test_one_gigabyte_at_once(attack, use_cgroups):
  result = attack("x = bytearray(10**9)\nprint(len(x))")
  assert result.stdout == ""
  if use_cgroups:
    assert result.outcome is Outcome.MEMORY_LIMIT
  else:  # the address space rlimit refuses, and the program says so
    assert result.exit_code == 1 and "MemoryError" in result.stderr


def test_one_gigabyte_split_over_children(attack):
  source = """
import os, time
for _ in range(10):
  if os.fork() == 0:
    x = bytearray(100 * 2**20)
    time.sleep(60)
    os._exit(0)
for _ in range(10):
  os.wait()
"""
  assert attack(source).outcome is Outcome.MEMORY_LIMIT


def test_parent_that_survives_its_killed_child_is_still_over_memory(attack, use_cgroups):
  if not use_cgroups:
    pytest.skip("the rlimit gives the child an error instead of killing it")
  source = """
import os
if os.fork() == 0:
  x = bytearray(10**9)
os.wait()
print("survived")
"""
  assert attack(source).outcome is Outcome.MEMORY_LIMIT


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_infinite_output_is_stopped_in_bounded_memory(attack, stream):
  result = attack(
    f"import sys\nwhile True: sys.{stream}.write('x' * 4096)", output_bytes=100_000
  )
  assert result.outcome is Outcome.OUTPUT_LIMIT
  text = getattr(result, stream)
  assert text == "x" * 100_000 + "\n[cut: more than 100000 bytes]"
  assert getattr(result, f"{stream}_truncated") and result.exit_code is None


def test_sparse_file_is_refused(attack):
  result = attack("open('big', 'wb').truncate(10**12)")
  assert result.outcome is Outcome.NONZERO_EXIT and "File too large" in result.stderr


@pytest.mark.parametrize("directory", ["/work", "/tmp", "/dev/shm"])
def test_huge_files_fill_only_the_work_directory(attack, directory):
  source = f"for i in range(9): open(f'{directory}/{{i}}', 'wb').write(bytes(4 * 2**20))"
  result = attack(source, workdir_bytes=16 * _MIB)
  assert result.outcome is Outcome.NONZERO_EXIT and "No space left" in result.stderr


def test_inode_flood(attack):
  result = attack("for i in range(10**6): open(str(i), 'w').close()", workdir_entries=1000)
  assert result.outcome is Outcome.NONZERO_EXIT and "No space left" in result.stderr


def test_nothing_else_can_be_written(attack):
  source = """
import os
for top, directories, _ in os.walk("/"):
  if top in ("/work", "/tmp", "/dev/shm", "/proc"):
    directories.clear()
    continue
  try:
    open(top + "/x", "w").close()
    print(top)
  except OSError:
    pass
  if top.count("/") > 2:
    directories.clear()
"""
  result = attack(source)
  assert (result.outcome, result.stdout) == (Outcome.OK, "")


@pytest.mark.parametrize(
  "source",
  [
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(600)",
    "import os, signal\nos.kill(os.getpid(), signal.SIGSTOP)",
  ],
  ids=["ignores-SIGTERM", "stops-itself"],
)
def test_sleepers_end_with_the_wall_time(attack, source):
  result = attack(source, timeout=0.5)
  assert result.outcome is Outcome.TIMED_OUT and 0.5 <= result.wall_seconds < _SLACK
  assert result.exit_code is None and "0.5 s" in result.detail


def test_processor_time_of_all_children_counts(attack):
  result = attack("import os\nos.fork(); os.fork()\nwhile True: pass", cpu_seconds=0.3)
  assert result.outcome is Outcome.CPU_LIMIT
  assert 0.3 <= result.cpu_seconds < _SLACK


def test_kill_everything_reaches_only_the_own_sandbox(attack):
  result = attack("import os, signal\nos.kill(os.getpid(), 0)\nos.kill(-1, signal.SIGKILL)")
  assert "ProcessLookupError" in result.stderr  # -1 spares the caller and pid 1


def test_pid_1_cannot_be_killed_from_inside(attack):
  source = "import os, time\nfor s in (15, 9, 19): os.kill(1, s)\ntime.sleep(0.1)\nprint('alive')"
  result = attack(source)
  assert (result.outcome, result.stdout) == (Outcome.OK, "alive\n")


def test_host_processes_are_not_in_view(attack):
  source = f"""
import os
print(sorted(int(p) for p in os.listdir("/proc") if p.isdigit())[-1] < 100)
try:
  os.kill({os.getpid()}, 0)
except ProcessLookupError:
  print("no such process")
"""
  assert attack(source).stdout == "True\nno such process\n"


def test_daemon_is_gone_when_the_run_ends(attack):
  source = """
import os, time
if os.fork() == 0:
  os.setsid()
  if os.fork() == 0:
    time.sleep(600)
  os._exit(0)
print("bye")
"""
  result = attack(source)
  assert (result.outcome, result.stdout) == (Outcome.OK, "bye\n")
  assert result.wall_seconds < _SLACK


def test_daemon_does_not_hold_back_the_result_by_an_open_channel(processes_with, marker):
  source = "import os, time\nif os.fork() == 0: time.sleep(600)\nos.write(CHANNEL, b'result')"
  source = f"CHANNEL = int(__import__('os').environ['WOOTZ_CHANNEL_FD'])\n{source}"
  with Sandbox(timeout=_SLACK) as sandbox:
    result = sandbox.run({"a.py": source}, ["python", "a.py", marker], channel=True)
  assert (result.outcome, result.channel) == (Outcome.OK, b"result")
  assert processes_with(marker) == []


def test_host_files_are_absent(attack):
  paths = ["/root", "/home", "/etc/shadow", "/var", "/run", "/sys", "/mnt", "/boot", "/opt"]
  paths += [str(pathlib.Path(__file__).resolve()), str(pathlib.Path.home())]
  source = f"import os\nprint([p for p in {paths!r} if os.path.lexists(p)])"
  assert attack(source).stdout == "[]\n"


def test_environment_of_the_host_is_nowhere(attack, monkeypatch):
  monkeypatch.setenv("SECRET_TOKEN", "do-not-leak")
  source = """
import glob, os
print(repr(open("/proc/1/environ").read()), sorted(os.environ))
for path in glob.glob("/proc/[0-9]*/environ") + glob.glob("/proc/[0-9]*/cmdline"):
  assert "do-not-leak" not in open(path).read()
"""
  result = attack(source)
  assert result.stdout == f"'' {['HOME', 'LANG', 'PATH', 'PWD', 'TMPDIR']}\n", result.stderr


def test_inherited_descriptors_are_closed(attack, tmp_path):
  secret = os.open(tmp_path / "secret", os.O_RDWR | os.O_CREAT)
  os.set_inheritable(secret, True)
  source = """
import os
for pid in [p for p in os.listdir("/proc") if p.isdigit()]:
  for fd in os.listdir(f"/proc/{pid}/fd"):
    try:
      target = os.readlink(f"/proc/{pid}/fd/{fd}")
    except FileNotFoundError:
      continue
    if not target.startswith(("pipe:", "/dev/null")) and f"/{pid}/fd" not in target:
      print(pid, fd, target)
print(sorted(map(int, os.listdir("/proc/self/fd"))))
"""
  try:
    result = attack(source)
  finally:
    os.close(secret)
  assert result.stdout == "[0, 1, 2, 3]\n"  # 3 is the listing's own


def test_network_is_unreachable(attack):
  listener = socket.create_server(("127.0.0.1", 0))
  hidden = socket.socket(socket.AF_UNIX)
  hidden.bind("\0wootz-test-abstract")
  hidden.listen()
  source = f"""
import socket
def attempt(family, address):
  with socket.socket(family) as s:
    s.settimeout(5)
    try:
      s.connect(address)
      print("connected", address)
    except OSError as error:
      print(type(error).__name__)
attempt(socket.AF_INET, ("127.0.0.1", {listener.getsockname()[1]}))
attempt(socket.AF_INET, ("1.1.1.1", 53))
attempt(socket.AF_INET, ("169.254.169.254", 80))
attempt(socket.AF_UNIX, "\\0wootz-test-abstract")
try:
  print(socket.gethostbyname("example.com"))
except OSError as error:
  print(type(error).__name__)
"""
  with listener, hidden:
    result = attack(source)
  refused = "ConnectionRefusedError\n"
  assert result.stdout == f"{refused}OSError\nOSError\n{refused}gaierror\n"


def test_no_new_privileges_and_no_nested_namespaces(attack):
  source = """
import ctypes, os
print(os.getuid(), os.geteuid(), os.getgid(), os.getgroups())
status = dict(line.split(":\\t") for line in open("/proc/self/status").read().splitlines())
print(status["CapEff"], status["CapBnd"], status["NoNewPrivs"])
print(ctypes.CDLL(None).unshare(0x10000000))
"""
  result = attack(source)
  assert result.stdout == f"1000 1000 1000 []\n{'0' * 16} {'0' * 16} 1\n-1\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give runs a host user of their own")
def test_the_host_sees_an_unprivileged_user(marker, processes_with, eventually):
  seen = {}

  def look():
    def pids():
      return [p for p in processes_with(marker) if "python" in os.readlink(f"/proc/{p}/exe")]

    eventually(pids)
    seen["uid"] = os.stat(f"/proc/{pids()[0]}").st_uid

  with Sandbox(timeout=_SLACK) as sandbox:
    thread = threading.Thread(target=look)
    thread.start()
    sandbox.run(cmd=["python", "-c", "import time; time.sleep(2)", marker])
    thread.join()
  assert seen["uid"] >= 1000


@pytest.mark.parametrize("left", ["link", "hard", "fifo", "directory", "large"])
def test_odd_files_left_behind_are_refused_without_a_hang(left):
  commands = {
    "link": "ln -s /etc/passwd out", "hard": "echo x > y; ln y out", "fifo": "mkfifo out",
    "directory": "mkdir out", "large": "head -c 101 /dev/zero > out",
  }
  with Sandbox(timeout=_SLACK) as sandbox:
    assert sandbox.run(cmd=commands[left]).ok
    with pytest.raises(ValueError, match="out"):
      sandbox.read_file("out", max_bytes=100)


def test_files_are_never_written_through_links_left_behind(tmp_path):
  with Sandbox(timeout=_SLACK) as sandbox:
    assert sandbox.run(cmd=f"ln -s {tmp_path} d; ln -s /proc/1/oom_score_adj f").ok
    with pytest.raises(ValueError, match="'d' is a symbolic link"):
      sandbox.run(files={"d/x": "1"}, cmd="true")
    with pytest.raises(ValueError, match="symbolic link"):
      sandbox.run(files={"f": "1"}, cmd="true")
  assert list(tmp_path.iterdir()) == []


def test_replaced_file_is_not_seen_through_an_old_hard_link():
  with Sandbox(timeout=_SLACK) as sandbox:
    assert sandbox.run(files={"tests.py": "old"}, cmd="ln tests.py spy; chmod 0 tests.py").ok
    result = sandbox.run(files={"tests.py": "new"}, cmd="cat tests.py; chmod +r spy; cat spy")
  assert result.stdout == "newold"


def test_a_full_work_directory_is_the_programs_doing():
  limits = SandboxLimits(workdir_bytes=_MIB, memory_bytes=64 * _MIB)
  with Sandbox(timeout=_SLACK, limits=limits) as sandbox:
    sandbox.run(cmd="cat /dev/zero > fill")
    result = sandbox.run(files={"next.py": "x" * 10_000}, cmd="true")
  assert result.outcome is Outcome.DISK_LIMIT
