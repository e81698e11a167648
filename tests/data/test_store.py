import dataclasses
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
import time

import hypothesis
import msgpack
import numpy as np
import pytest
from hypothesis import strategies as st

from wootz.data.records import Grade, Outcome, Trajectory
from wootz.data.store import StoreDamaged, StoreInUse, TrajectoryStore, TrajectoryWriter
from wootz.data.trajectory_codec import decode_trajectory, encode_trajectory


def assert_same(left, right):
  for field in dataclasses.fields(Trajectory):
    a, b = getattr(left, field.name), getattr(right, field.name)
    if isinstance(a, np.ndarray):
      assert a.dtype == b.dtype and a.shape == b.shape
      np.testing.assert_array_equal(a, b)
    else:
      assert a == b and type(a) is type(b), field.name


@st.composite
def trajectories(draw):
  prompt = draw(st.integers(1, 5))
  mask = np.array([False] * prompt + draw(st.lists(st.booleans(), max_size=8)))
  number = st.floats(-50, 0, width=32)
  logprobs = np.array([draw(number) if m else 0.0 for m in mask], np.float32)
  scored = draw(st.booleans())
  grade = Grade(draw(st.sampled_from([o for o in Outcome if o.has_score == scored])),
                draw(st.floats(0, 1)) if scored else None, draw(st.text()), draw(st.floats(0, 1e6)))
  ids = draw(st.lists(st.integers(0, 2**31 - 1), min_size=len(mask), max_size=len(mask)))
  return Trajectory(
    task_id=draw(st.text()), domain=draw(st.text()), family=draw(st.text()),
    update=draw(st.integers(0, 2**40)), weight_version=draw(st.integers(0, 2**40)),
    sample_index=draw(st.integers(0, 999)), prompt_length=prompt,
    tokens=np.array(ids, np.int32), loss_mask=mask, behavior_logprobs=logprobs,
    temperature=draw(st.floats(0, 2)), finish_reason=draw(st.sampled_from(["stop", "length"])),
    text=draw(st.text(st.characters(codec=None))), grade=grade)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(trajectories())
def test_round_trip_is_exact(trajectory):
  assert_same(decode_trajectory(encode_trajectory(trajectory)), trajectory)


def test_another_schema_version_is_refused_by_name(make_trajectory):
  record = msgpack.unpackb(encode_trajectory(make_trajectory()))
  record["schema"] = 99
  with pytest.raises(ValueError, match="version 99"):
    decode_trajectory(msgpack.packb(record))


@pytest.mark.parametrize("change, message", [
  ({"tokens": np.arange(5, dtype=np.int64)}, "tokens must be a numpy array int32"),
  ({"loss_mask": np.array([True] * 5)}, "prompt as sampled"),
  ({"behavior_logprobs": np.array([0, 0, 0, np.nan, 0], np.float32)}, "not finite"),
  ({"behavior_logprobs": np.array([0, -1, 0, -1, -1], np.float32)}, "must be 0 where"),
  ({"prompt_length": 6}, "prompt_length 6"),
  ({"prompt_length": 0}, "prompt_length 0"),
])
def test_broken_records_are_refused_before_anything_is_written(tmp_path, make_trajectory, change,
                                                               message):
  with TrajectoryWriter(tmp_path) as writer:
    with pytest.raises(ValueError, match=message):
      writer.write([make_trajectory(sample_index=0),
                    dataclasses.replace(make_trajectory(sample_index=1), **change)])
    assert writer.commit() == 0


def test_only_committed_records_are_visible(tmp_path, make_trajectory):
  writer = TrajectoryWriter(tmp_path)
  written = [make_trajectory(7, task, i) for task in "ab" for i in range(3)]
  writer.write(written[:4])
  assert len(TrajectoryStore(tmp_path)) == 0
  assert writer.commit() == 4
  store = TrajectoryStore(tmp_path)
  writer.write(written[4:])
  assert len(store) == 4 and store.refresh() == 4
  assert writer.commit() == 6 and store.refresh() == 6
  for found, expected in zip(store, written, strict=True):
    assert_same(found, expected)
  groups = store.groups(7)
  assert list(groups) == ["7/d/a", "7/d/b"]
  assert [entry.sample_index for entry in groups["7/d/b"]] == [0, 1, 2]
  assert (groups["7/d/a"][0].prompt_length, groups["7/d/a"][0].length) == (3, 5)
  assert store.updates() == (7,) and store.of_update(8) == () and store.verify() == 6
  writer.close()


def test_samples_of_two_domains_with_one_id_are_two_groups(tmp_path, make_trajectory):
  """LA-3."""
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(0, "0", i, domain=d, score=s)
                  for d, s in (("A", 1.0), ("B", 0.0)) for i in range(2)])
  groups = TrajectoryStore(tmp_path).groups(0)
  assert {name: [e.score for e in group] for name, group in groups.items()} == {
    "0/A/0": [1.0, 1.0], "0/B/0": [0.0, 0.0]}


def test_a_fresh_run_in_a_used_directory_is_refused(tmp_path, make_trajectory):
  """LA-3."""
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(5)])
  with pytest.raises(StoreInUse, match="resume"):
    TrajectoryWriter(tmp_path)
  assert len(TrajectoryWriter(tmp_path, resume=True)) == 1


def test_two_live_writers_of_one_process_index_are_refused(tmp_path):
  with TrajectoryWriter(tmp_path):
    with pytest.raises(StoreInUse, match="live writer"):
      TrajectoryWriter(tmp_path, resume=True)
    TrajectoryWriter(tmp_path, process_index=1).close()
  TrajectoryWriter(tmp_path, resume=True).close()


def test_processes_write_beside_each_other(tmp_path, make_trajectory):
  writers = [TrajectoryWriter(tmp_path, process_index=i) for i in range(2)]
  for i, writer in enumerate(writers):
    writer.write([make_trajectory(0, f"task{i}", s) for s in range(2)])
    writer.commit()
  assert list(TrajectoryStore(tmp_path).groups(0)) == ["0/d/task0", "0/d/task1"]
  writers[1].write([make_trajectory(0, "task0", 0)])
  writers[1].commit()
  with pytest.raises(StoreDamaged, match="two processes"):
    TrajectoryStore(tmp_path)


def test_a_trajectory_is_stored_once(tmp_path, make_trajectory):
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(0, "a", 0)])
    with pytest.raises(ValueError, match="sample 0 was written already"):
      writer.write([make_trajectory(0, "a", 0)])
    with pytest.raises(ValueError, match="sample 1 was written already"):
      writer.write([make_trajectory(0, "a", 1), make_trajectory(0, "a", 1)])
    writer.write([make_trajectory(1, "a", 0)])
    assert writer.commit() == 2


@pytest.mark.parametrize("by", ["length", "update"])
def test_rewind_sets_later_records_aside(tmp_path, make_trajectory, by):
  """A resume from update 2 sees updates 0 and 1, and its own second attempt at 2."""
  with TrajectoryWriter(tmp_path) as writer:
    for update in range(4):
      writer.write([make_trajectory(update, "old", i) for i in range(2)])
      writer.commit()
  watching = TrajectoryStore(tmp_path)
  with TrajectoryWriter(tmp_path, resume=True) as writer:
    assert writer.rewind(**({"length": 4} if by == "length" else {"update": 2})) == 4
    assert writer.rewind(update=2) == 0
    writer.write([make_trajectory(2, "new", 0)])
  for store in (watching, TrajectoryStore(tmp_path)):
    store.refresh()
    assert [entry.task_id for entry in store.entries] == ["old"] * 4 + ["new"]
    assert store.verify() == 5
  with TrajectoryWriter(tmp_path, resume=True) as writer:
    assert len(writer) == 5
    with pytest.raises(StoreDamaged, match="keep 9 records and has 5"):
      writer.rewind(length=9)


def test_a_torn_last_manifest_line_is_as_if_never_written(tmp_path, make_trajectory):
  """Whatever byte the kill cut the line at; its record file is set aside."""
  source = tmp_path / "source"
  with TrajectoryWriter(source) as writer:
    writer.write([make_trajectory(0)])
    writer.commit()
    first = (source / "manifest-00000.jsonl").stat().st_size
    writer.write([make_trajectory(1)])
  whole = (source / "manifest-00000.jsonl").read_bytes()
  for cut in (first, first + 1, (first + len(whole)) // 2, len(whole) - 1):
    copy = tmp_path / f"cut{cut}"
    shutil.copytree(source, copy)
    (copy / "manifest-00000.jsonl").write_bytes(whole[:cut])
    assert len(TrajectoryStore(copy)) == 1
    with TrajectoryWriter(copy, resume=True) as writer:
      assert writer.lost_files == ("trajectories-00000-000001.array_record",)
      writer.write([make_trajectory(1)])
    store = TrajectoryStore(copy)
    assert [entry.update for entry in store.entries] == [0, 1] and store.verify() == 2


def test_damage_is_named_not_skipped(tmp_path, make_trajectory):
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(0, completion=range(100))])
    writer.commit()
    writer.write([make_trajectory(1)])
  manifest = tmp_path / "manifest-00000.jsonl"
  record = tmp_path / "trajectories-00000-000000.array_record"
  lines, data = manifest.read_bytes(), record.read_bytes()
  manifest.write_bytes(lines.replace(b'"length": 103', b'"length": 104', 1))
  with pytest.raises(StoreDamaged, match="manifest-00000.jsonl: the line at byte 0"):
    TrajectoryStore(tmp_path)
  manifest.write_bytes(lines)
  record.write_bytes(data[:-1])
  with pytest.raises(StoreDamaged, match="trajectories-00000-000000.*bytes"):
    TrajectoryStore(tmp_path)[0]
  used = [i for i in range(len(data)) if data[i]]
  place = used[len(used) // 2]
  record.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1:])
  with pytest.raises(StoreDamaged, match="trajectories-00000-000000"):
    TrajectoryStore(tmp_path).verify()
  record.unlink()
  with pytest.raises(StoreDamaged, match="trajectories-00000-000000"):
    TrajectoryStore(tmp_path)[0]


@pytest.mark.parametrize("commits_before", [0, 1])
@pytest.mark.parametrize("failing", range(4))
def test_a_full_disk_is_an_error_and_loses_no_commit(tmp_path, make_trajectory, monkeypatch,
                                                     commits_before, failing):
  """Whichever of a commit's syncs fails, the store is as before and the commit can be repeated."""
  writer = TrajectoryWriter(tmp_path)
  for update in range(commits_before):
    writer.write([make_trajectory(update)])
    writer.commit()
  writer.write([make_trajectory(7)])
  calls, fsync = iter(range(10)), os.fsync
  with monkeypatch.context() as patch:
    def fsync_on_a_full_disk(descriptor):
      if next(calls) == failing:
        raise OSError(28, "No space left on device")
      fsync(descriptor)
    patch.setattr(os, "fsync", fsync_on_a_full_disk)
    if failing == 3 and commits_before:  # a manifest that exists needs no sync of its directory
      assert writer.commit() == 2
    else:
      with pytest.raises(OSError, match="No space left.*1 records are not in the store"):
        writer.commit()
      assert len(TrajectoryStore(tmp_path)) == len(writer) == commits_before
      writer.write([make_trajectory(7)])
  assert writer.commit() == commits_before + 1
  writer.close()
  store = TrajectoryStore(tmp_path)
  assert [entry.update for entry in store.entries] == [*range(commits_before), 7]
  assert store.verify() == commits_before + 1
  assert len(TrajectoryWriter(tmp_path, resume=True)) == commits_before + 1


_WRITE_FOREVER = textwrap.dedent("""
  import sys
  import numpy as np
  from wootz.data.records import Grade, Outcome, Trajectory
  from wootz.data.store import TrajectoryWriter
  writer = TrajectoryWriter(sys.argv[1], resume=True)
  update = 0 if not len(writer) else len(writer) // 4
  print("ready", flush=True)
  while True:
    rng = np.random.default_rng(update)
    for sample in range(4):
      tokens = rng.integers(0, 50000, 400).astype(np.int32)
      mask = np.arange(400) >= 100
      writer.write([Trajectory(
        task_id="t", domain="d", family="f", update=update, weight_version=update,
        sample_index=sample, prompt_length=100, tokens=tokens, loss_mask=mask,
        behavior_logprobs=np.where(mask, -1, 0).astype(np.float32), temperature=1.0,
        finish_reason="stop", text="", grade=Grade(Outcome.FAILED, 0.0))])
    writer.commit()
    print(update, flush=True)
    update += 1
""")


def test_kill_9_at_any_moment_loses_at_most_the_open_file(tmp_path):
  """Every commit that returned is whole, and at most one that had not returned is there besides."""
  rng = random.Random(0)
  script = tmp_path / "writer.py"
  script.write_text(_WRITE_FOREVER)
  store_path = tmp_path / "store"
  reported = -1
  for _ in range(5):
    process = subprocess.Popen([sys.executable, str(script), str(store_path)], text=True,
                               stdout=subprocess.PIPE)
    assert process.stdout.readline() == "ready\n"
    seen = [process.stdout.readline() for _ in range(rng.randrange(4))]
    time.sleep(rng.uniform(0.0, 0.05))
    process.send_signal(signal.SIGKILL)
    lines = seen + process.stdout.read().splitlines()
    process.wait()
    reported = max([reported, *(int(line) for line in lines if line.strip().isdigit())])
    store = TrajectoryStore(store_path)
    committed = len(store) // 4
    assert len(store) == 4 * committed and committed - 1 in (reported, reported + 1)
    reported = committed - 1
    assert store.verify() == len(store)
    assert [e.update for e in store.entries] == [u for u in range(committed) for _ in range(4)]
    for update in range(committed):
      expected = np.random.default_rng(update).integers(0, 50000, 400)
      np.testing.assert_array_equal(store[4 * update].tokens, expected)
  assert reported >= 0
  with TrajectoryWriter(store_path, resume=True) as writer:
    assert len(writer) == 4 * (reported + 1)
  listed = {entry.file for entry in TrajectoryStore(store_path).entries}
  unlisted = [p.name for p in store_path.glob("trajectories-*") if p.name not in listed]
  assert all(name.endswith(".lost") for name in unlisted)
