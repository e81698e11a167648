import concurrent.futures
import gc
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from wootz.post_training.sandbox import (
  Outcome,
  Sandbox,
  SandboxLimits,
  SandboxUnavailable,
  usage,
  view,
)
from wootz.post_training.sandbox.cgroups import cgroup_parents

_MIB = 2**20


def own_parents(path):
  """The folders of pytest's own above a temporary one, however deep it puts them."""
  return [parent for parent in path.parents if "pytest-of-" in str(parent)]



@pytest.fixture(scope="module")
def sandbox():
  with Sandbox(timeout=20) as opened:
    yield opened


def test_result_of_an_honest_program(sandbox):
  source = "import sys\nprint(sys.stdin.read()[::-1])\nprint('note', file=sys.stderr)\nsys.exit(4)"
  result = sandbox.run(files={"a/b.py": source}, cmd=["python", "a/b.py"], stdin="abc")
  assert (result.outcome, result.exit_code, result.signal) == (Outcome.NONZERO_EXIT, 4, None)
  assert (result.stdout, result.stderr) == ("cba\n", "note\n")
  assert not result.stdout_truncated and not result.ok
  assert 0 < result.cpu_seconds < 10 and result.peak_memory_bytes > _MIB
  assert set(result.limits_enforced_by) == {
    "wall", "output", "workdir", "file_size", "open_files", "cpu", "memory", "processes",
  }


def test_work_directory_lasts_over_runs_and_differs_between_sandboxes(sandbox):
  sandbox.run(cmd="echo kept > kept; mkdir -p deep")
  assert sandbox.run(files={"deep/x": b"\xff"}, cmd="cat kept; ls deep").stdout == "kept\nx\n"
  assert sandbox.read_file("deep/x", 10) == b"\xff"
  with Sandbox() as other:
    assert other.run(cmd="ls").stdout == ""
    with pytest.raises(FileNotFoundError):
      other.read_file("kept", 10)


def test_sb3_output_that_is_not_utf8_keeps_text_and_status(sandbox):
  """SB-3."""
  result = sandbox.run(cmd=r"printf '\377\376A'; exit 3")
  assert (result.exit_code, result.stdout) == (3, "\ufffd\ufffdA")


@pytest.mark.skipif(cgroup_parents() is None, reason="needs control groups to tell the outcome")
def test_sb4_user_and_memory_limit_hold_together():
  """SB-4: neither preparation of the child replaces the other."""
  with Sandbox(timeout=20, limits=SandboxLimits(memory_bytes=64 * _MIB)) as sandbox:
    assert sandbox.run(cmd="id -u").stdout == "1000\n"
    source = "import os\nprint(os.getuid(), flush=True)\nx = bytearray(128 * 2**20)\nprint('no')"
    result = sandbox.run(cmd=["python", "-c", source])
  assert (result.outcome, result.stdout) == (Outcome.MEMORY_LIMIT, "1000\n")
  assert result.peak_memory_bytes <= 64 * _MIB


def test_program_that_ends_before_reading_its_input_shows_its_own_error(sandbox):
  """verl#4074: no BrokenPipeError takes the place of the program's status and message."""
  result = sandbox.run(cmd="echo real error >&2; exit 7", stdin=b"x" * 5_000_000)
  assert (result.exit_code, result.stderr) == (7, "real error\n")
  assert sandbox.run(cmd="exec 0<&-; sleep 0.1", stdin=b"x" * 5_000_000).ok


def test_large_input_and_output_at_once_do_not_deadlock():
  text = "0123456789abcdef\n" * 200_000
  with Sandbox(timeout=30, limits=SandboxLimits(output_bytes=4 * _MIB)) as sandbox:
    assert sandbox.run(cmd="tee /dev/stderr", stdin=text).stdout == text


def test_channel_carries_bytes_apart_from_the_output(sandbox):
  source = "import os\nfd = int(os.environ['WOOTZ_CHANNEL_FD'])\nfor _ in range(50):"
  source += "\n  print('noise')\n  os.write(fd, bytes(range(256)) * 16)"
  result = sandbox.run(cmd=["python", "-c", source], channel=True)
  assert (result.outcome, result.channel) == (Outcome.OK, bytes(range(256)) * 16 * 50)
  assert result.stdout == "noise\n" * 50
  silent = sandbox.run(cmd='echo "${WOOTZ_CHANNEL_FD-none}"')
  assert (silent.stdout, silent.channel) == ("none\n", b"")


def test_channel_is_bounded():
  with Sandbox(timeout=20, limits=SandboxLimits(channel_bytes=1000)) as sandbox:
    source = "import os\nwhile True: os.write(int(os.environ['WOOTZ_CHANNEL_FD']), b'x' * 999)"
    result = sandbox.run(cmd=["python", "-c", source], channel=True)
  assert (result.outcome, result.channel) == (Outcome.OUTPUT_LIMIT, b"x" * 1000)


@pytest.mark.parametrize("extra", [0, 1])
def test_output_limit_is_exact(extra):
  with Sandbox(timeout=20, limits=SandboxLimits(output_bytes=1000)) as sandbox:
    result = sandbox.run(cmd=f"head -c {1000 + extra} /dev/zero")
  assert result.outcome is (Outcome.OUTPUT_LIMIT if extra else Outcome.OK)
  assert result.stdout_truncated == bool(extra) and result.stdout.startswith("\0" * 1000)


def test_signals_are_named(sandbox):
  result = sandbox.run(cmd=["python", "-c", "import os; os.abort()"])
  assert (result.outcome, result.signal, result.exit_code) == (Outcome.KILLED, signal.SIGABRT, 134)
  assert result.stderr == ""  # no "Aborted" from a shell of ours
  assert sandbox.run(cmd="kill -XFSZ $$").outcome is Outcome.DISK_LIMIT


@pytest.mark.parametrize("count", [3, 12])
def test_process_limit_is_exact(count):
  source = """
    import os, time
    alive = 1
    try:
      while True:
        if os.fork() == 0:
          time.sleep(60)
        alive += 1
    except OSError:
      print(alive)
  """
  with Sandbox(timeout=20, limits=SandboxLimits(processes=count)) as sandbox:
    result = sandbox.run(files={"a.py": textwrap.dedent(source)}, cmd=["python", "a.py"])
  assert result.stdout == f"{count}\n"


def test_open_files_and_file_size_limits():
  limits = SandboxLimits(open_files=32, file_bytes=5000)
  with Sandbox(timeout=20, limits=limits) as sandbox:
    assert sandbox.run(cmd="ulimit -n; ulimit -Hn; ulimit -c").stdout == "32\n32\n0\n"
    result = sandbox.run(cmd="head -c 6000 /dev/zero > big")
    assert result.exit_code != 0
    assert sandbox.run(cmd="wc -c < big").stdout.strip() == "5000"


def test_commands(sandbox):
  assert sandbox.run(cmd="echo a | tr a b").stdout == "b\n"
  assert sandbox.run(cmd=["echo", "-n", "$HOME; *"]).stdout == "$HOME; *"
  missing = sandbox.run(cmd=["no-such-program"])
  assert missing.exit_code == 127 and "no-such-program" in missing.stderr
  assert sandbox.run(cmd='echo "$A"', env={"A": "two  words=x"}).stdout == "two  words=x\n"


@pytest.mark.parametrize("cmd", ["", [], ["-c", "x"], ["a\0b"], ["x" * 200_000], [1]])
def test_bad_commands_are_refused(sandbox, cmd):
  with pytest.raises(ValueError, match="cmd"):
    sandbox.run(cmd=cmd)


@pytest.mark.parametrize(
  "name", ["/etc/passwd", "../x", "a/../../x", "a/./b", "", "a//b", "a/", "a\0b", "x" * 300]
)
def test_bad_file_names_are_refused(sandbox, name):
  with pytest.raises(ValueError, match="file name"):
    sandbox.run(files={name: "x"}, cmd="true")


@pytest.mark.parametrize(
  "make",
  [
    lambda: SandboxLimits(memory_bytes=0),
    lambda: SandboxLimits(processes=True),
    lambda: SandboxLimits(open_files=2.5),
    lambda: SandboxLimits(memory_bytes=1000),
    lambda: SandboxLimits(cpu_seconds=float("nan")),
    lambda: Sandbox(timeout=-1),
    lambda: Sandbox(image="/"),
    lambda: Sandbox(image="/nonexistent-image"),
  ],
)
def test_bad_settings_are_refused(make):
  with pytest.raises(ValueError):
    make()


def test_a_closed_sandbox_says_so():
  sandbox = Sandbox()
  with pytest.raises(RuntimeError, match="not open"):
    sandbox.run(cmd="true")
  with sandbox:
    assert sandbox.run(cmd="true").ok
  sandbox.close()
  with pytest.raises(RuntimeError, match="not open"):
    sandbox.run(cmd="true")


def test_many_at_once_keep_their_files_apart():
  """llm-sandbox#17: parallel runs with the same file name."""

  def job(number):
    with Sandbox(timeout=60) as sandbox:
      result = sandbox.run(files={"data": str(number)}, cmd="sleep 0.05; cat data")
    assert result.outcome is Outcome.OK, result.detail
    return result.stdout

  with concurrent.futures.ThreadPoolExecutor(16) as pool:
    assert list(pool.map(job, range(48))) == [str(n) for n in range(48)]


def test_runs_outlive_the_thread_that_opened_the_sandbox():
  """Lives are tied to the process: bubblewrap's --die-with-parent would follow the thread."""
  box = []
  opener = threading.Thread(target=lambda: box.append(Sandbox(timeout=20).__enter__()))
  opener.start()
  opener.join()
  results = []
  runner = threading.Thread(target=lambda: results.append(box[0].run(cmd="sleep 0.3; echo done")))
  runner.start()
  for _ in range(5):  # short-lived threads that run and end meanwhile
    with Sandbox() as other:
      thread = threading.Thread(target=other.run, kwargs={"cmd": "true"})
      thread.start()
      thread.join()
  runner.join()
  box[0].close()
  assert results[0].stdout == "done\n"


def test_nothing_leaks_over_many_runs():
  def footprint():
    gc.collect()
    groups = cgroup_parents().directories().values() if cgroup_parents() else []
    own = [p for parent in groups for p in parent.glob(f"wootz-sandbox-{os.getpid()}-*")]
    mounts = pathlib.Path("/proc/self/mountinfo").read_text().count("wootz-sandbox")
    fds = len(os.listdir("/proc/self/fd"))
    children = usage.child_pids(os.getpid())  # zombies too
    return fds, own, mounts, threading.active_count(), children

  with Sandbox() as sandbox:
    before = footprint()
    for _ in range(10):
      sandbox.run(cmd="true", channel=True)
      sandbox.run(cmd="sleep 9", timeout=0.01)
      with Sandbox() as other:
        other.run(files={"x": "y"}, cmd="true")
      Sandbox().open()  # never closed: goes with the object
    assert footprint() == before


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.5])
def test_runs_die_with_a_killed_host(marker, processes_with, eventually, delay):
  """kill -9 of the host process at any moment: no process of the run stays."""
  source = f"""
    import threading
    from wootz.post_training.sandbox import Sandbox
    with Sandbox() as sandbox:
      run = lambda: sandbox.run(cmd=["python", "-c", "import time; time.sleep(999)", "{marker}"])
      thread = threading.Thread(target=run)
      print("open", flush=True)
      thread.start()
      thread.join()
  """
  host = subprocess.Popen([sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE)
  assert host.stdout.readline() == b"open\n"
  time.sleep(delay)
  host.kill()
  host.communicate()
  eventually(lambda: not processes_with(marker))


def test_failing_bubblewrap_is_not_the_programs_failure(tmp_path, monkeypatch):
  fake = tmp_path / "bwrap"
  with Sandbox() as sandbox:
    assert sandbox.run(cmd="true").ok
    fake.write_text("#!/bin/sh\necho broken >&2\nexit 1\n")
    fake.chmod(0o755)
    for parent in (tmp_path, *own_parents(tmp_path)):
      parent.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    result = sandbox.run(cmd="true")
  assert result.outcome is Outcome.INFRA_ERROR and result.exit_code is None
  assert "broken" in result.detail


def test_lack_of_descriptors_is_not_the_programs_failure():
  limits = resource.getrlimit(resource.RLIMIT_NOFILE)
  with Sandbox() as sandbox:
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + 3, limits[1]))
    try:
      result = sandbox.run(cmd="true")
    finally:
      resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert result.outcome is Outcome.INFRA_ERROR and "Too many open files" in result.detail
    assert sandbox.run(cmd="true").ok


def test_missing_bubblewrap_names_the_remedy(monkeypatch, tmp_path):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(SandboxUnavailable, match="apt-get install bubblewrap"), Sandbox():
    pass


def test_forbidden_namespaces_name_the_remedy():
  source = "from wootz.post_training.sandbox import Sandbox\nSandbox().open()"
  host = ["bwrap", "--dev-bind", "/", "/", "--unshare-user", "--disable-userns"]
  command = [*host, sys.executable, "-c", source]
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 1
  assert "SandboxUnavailable" in done.stderr and "unprivileged_userns_clone" in done.stderr


def _image(root: pathlib.Path) -> pathlib.Path:
  """A root file system with a shell and `cat`, and what they are linked with."""
  for program in ("/bin/sh", "/bin/cat"):
    listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
    libraries = [word for word in listed.split() if word.startswith("/")]
    for path in [program, *libraries]:
      target = root / path.lstrip("/")
      target.parent.mkdir(parents=True, exist_ok=True)
      shutil.copy(os.path.realpath(path), target)
  (root / "etc").mkdir()
  (root / "etc" / "motd").write_text("from the image\n")
  return root


def test_image_directory_is_the_root(tmp_path):
  root = _image(tmp_path / "image")
  with Sandbox(image=root, timeout=20) as sandbox:
    result = sandbox.run(files={"x": "and work\n"}, cmd="cat /etc/motd x; cat /etc/passwd")
    assert result.stdout == "from the image\nand work\n"
    assert "No such file" in result.stderr
    assert sandbox.run(cmd="echo > /etc/motd").exit_code != 0
  assert (root / "etc" / "motd").read_text() == "from the image\n"


def test_image_without_a_shell_is_refused(tmp_path):
  with pytest.raises(ValueError, match="/bin/sh"):
    Sandbox(image=tmp_path)


def test_python_is_there_even_if_usr_has_none(monkeypatch):
  """As on hosts whose only Python came from pyenv or conda: its prefix is shown instead."""
  monkeypatch.setattr(view, "_find_python", lambda root: None)
  with Sandbox(timeout=20) as sandbox:
    shown = "import json, sys; print(sys.prefix, sys.version_info[:2])"
    for name in ("python", "python3"):
      # The image's own, were it there, would come first on PATH.
      found = sandbox.run(cmd=[f"/sandbox/bin/{name}", "-c", shown])
      assert found.stdout == f"/opt/python {sys.version_info[:2]}\n", found.stderr


_UNPRIVILEGED = """
import sys
sys.path.insert(0, {path!r})
from wootz.post_training.sandbox import Sandbox, SandboxLimits
with Sandbox(timeout=20, limits=SandboxLimits(memory_bytes=200 * 2**20, processes=9)) as sandbox:
  run = sandbox.run
  print(run(files={{"a/x": "file"}}, cmd="id -u; cat a/x; ls /root; ls /").stdout)
  print(run(cmd=["python", "-c", "bytearray(10**9)"]).outcome in ("nonzero_exit", "memory_limit"))
  print(run(cmd="for i in 1 2 3 4 5 6 7 8 9 10; do sleep 9 & done").exit_code)
  print(run(cmd="head -c 99000000 /dev/zero > /tmp/x").ok, run(cmd="sleep 9", timeout=0.2).outcome)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests already run as an ordinary user")
def test_ordinary_users_get_the_same_isolation(tmp_path):
  """Without root: user namespaces make the mounts, rlimits and sampling hold the limits."""
  source = pathlib.Path(view.__file__).parent
  package = tmp_path / "wootz" / "post_training" / "sandbox"
  shutil.copytree(source, package, ignore=shutil.ignore_patterns("__pycache__"))
  for path in (tmp_path / "wootz", tmp_path / "wootz" / "post_training"):
    (path / "__init__.py").touch()
  for path in (tmp_path, *own_parents(tmp_path), *tmp_path.rglob("*")):
    path.chmod(0o755)
  python = shutil.which("python3", path="/usr/bin")
  version = subprocess.run([python or "false", "-V"], capture_output=True, text=True, check=False)
  if not version.stdout or tuple(map(int, version.stdout[7:].split(".")[:2])) < (3, 11):
    pytest.skip("needs a Python that every user may run, at least 3.11, in /usr/bin")
  done = subprocess.run(
    [python, "-c", _UNPRIVILEGED.format(path=str(tmp_path))],
    user=54321, group=54321, extra_groups=[], capture_output=True, text=True, cwd="/", check=False,
  )
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0] == "1000" and lines[1].startswith("file") and "root" not in lines, done.stderr
  assert lines[-3:] == ["True", "2", "False timed_out"], done.stdout + done.stderr
