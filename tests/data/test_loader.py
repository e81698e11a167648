import dataclasses
import itertools
import json
from collections import Counter, defaultdict

import jax
import numpy as np
import pytest

from wootz.data.loader import LoaderStateMismatch, minibatches
from wootz.data.store import TrajectoryStore, TrajectoryWriter

ROW = 32


@pytest.fixture
def make_store(tmp_path, make_trajectory):
  """A store of `groups` groups of `samples` samples; the first completion token is unique."""
  def make(groups, samples=3, update=0, name="store", seed=0):
    rng = np.random.default_rng(seed)
    with TrajectoryWriter(tmp_path / name, resume=True) as writer:
      for g in range(groups):
        prompt = rng.integers(1, 99, rng.integers(2, 9))
        writer.write([make_trajectory(
          update, f"task{g}", s, prompt=prompt, score=s / samples,
          completion=[1000 * g + s + 100, *rng.integers(1, 99, rng.integers(0, 9))])
          for s in range(samples)])
    return TrajectoryStore(tmp_path / name)
  return make


def advantage(entry):
  return entry.score - 0.25


def load(store, update=0, **overrides):
  settings = {"advantages": advantage, "row_length": ROW, "rows_per_microbatch": 2, "seed": 3}
  return minibatches(store, update, **(settings | overrides))


def completions(minibatch):
  """(tokens, advantages, sequence id) of every completion with loss, as a multiset."""
  found = Counter()
  for rows in minibatch:
    for row in range(len(rows.tokens)):
      for sequence in set(rows.sequence_ids[row]) - {0}:
        mine = (rows.sequence_ids[row] == sequence) & rows.loss_mask[row]
        found[tuple(rows.tokens[row][mine]), tuple(rows.advantages[row][mine]), int(sequence)] += 1
  return found


def groups_of(minibatch):
  return sorted({(tokens[0] - 100) // 1000 for tokens, _, _ in completions(minibatch)})


def assert_equal(left, right):
  left, right = list(left), list(right)
  assert len(left) == len(right)
  for a, b in zip(left, right, strict=True):
    assert dataclasses.replace(a, microbatches=()) == dataclasses.replace(b, microbatches=())
    jax.tree.map(np.testing.assert_array_equal, a.microbatches, b.microbatches)


def test_every_group_is_used_whole_in_each_epoch(make_store):
  """DL-6: five groups in two minibatches: sizes 3 and 2, nothing dropped, shapes equal."""
  loader = load(make_store(5), num_minibatches=2, epochs=3)
  assert len(loader) == 6
  by_epoch, shapes, orders = defaultdict(list), set(), []
  for minibatch in loader:
    by_epoch[minibatch.epoch].append(minibatch)
    shapes |= {rows.tokens.shape + rows.target_index.shape for rows in minibatch}
  assert len(shapes) == 1
  for batches in by_epoch.values():
    assert [batch.num_groups for batch in batches] == [3, 2]
    groups = [groups_of(batch) for batch in batches]
    assert sorted(itertools.chain(*groups)) == [0, 1, 2, 3, 4]
    orders.append(tuple(map(tuple, groups)))
    for batch in batches:
      found = completions(batch)
      assert set(found.values()) == {1}
      assert len(found) == batch.num_sequences == 3 * batch.num_groups
      assert {sequence for _, _, sequence in found} == set(range(1, batch.num_sequences + 1))
      assert sum(rows.loss_mask.sum() for rows in batch) == batch.num_targets
  assert len(by_epoch) == 3 and len(set(orders)) > 1


def test_fewer_groups_than_minibatches(make_store):
  assert [batch.num_groups for batch in load(make_store(1, name="one"), epochs=2)] == [1, 1]
  assert [batch.num_groups for batch in load(make_store(2), num_minibatches=5)] == [1, 1]


def test_no_groups_no_minibatches(make_store):
  store = make_store(2)
  assert list(load(store, advantages={})) == []
  assert list(load(store, update=9)) == []


@pytest.mark.parametrize("rows_per_microbatch", [1, 3, 50])
def test_the_cut_does_not_change_the_content(make_store, rows_per_microbatch):
  """NM-3: what is learned from does not depend on the size of the micro-batches."""
  store = make_store(7)
  reference = list(load(store, num_minibatches=2))
  other = list(load(store, num_minibatches=2, rows_per_microbatch=rows_per_microbatch))
  for a, b in zip(reference, other, strict=True):
    assert completions(a) == completions(b)
    assert (a.num_groups, a.num_sequences, a.num_targets) == (
      b.num_groups, b.num_sequences, b.num_targets)


@pytest.mark.parametrize("process_count", [2, 3, 4])
def test_processes_share_all_rows_and_stay_in_step(make_store, process_count):
  """DL-1: the remainder is not lost; processes without a row left get empty ones."""
  store = make_store(11)
  whole = list(load(store, num_minibatches=2, rows_per_microbatch=1))
  parts = [list(load(store, num_minibatches=2, rows_per_microbatch=1, process_index=p,
                     process_count=process_count)) for p in range(process_count)]
  for minibatch, *shares in zip(whole, *parts, strict=True):
    assert {len(share) for share in shares} == {-(-len(minibatch) // process_count)}
    assert sum((completions(share) for share in shares), Counter()) == completions(minibatch)
    for share in shares:
      assert (share.num_sequences, share.num_targets) == (
        minibatch.num_sequences, minibatch.num_targets)


def test_eleven_rows_on_four_processes(make_store):
  """DL-1, as reported: shares of 3, 3, 3 and 2 rows, and their union is all eleven."""
  store = make_store(11, samples=1)
  shares = [list(load(store, rows_per_microbatch=3, share_prompt=False, process_index=p,
                      process_count=4)) for p in range(4)]
  used = [[int(rows.segment_ids.any(axis=1).sum()) for rows in share[0]] for share in shares]
  assert used == [[3], [3], [3], [2]]
  assert sorted(itertools.chain(*(groups_of(share[0]) for share in shares))) == list(range(11))


@pytest.mark.parametrize("num_threads", [0, 1, 2])
def test_state_restores_at_every_cut(make_store, num_threads):
  """DL-3 and CK-2: a fresh iterator continues exactly behind the last minibatch, twice over."""
  store = make_store(9)
  settings = {"num_minibatches": 4, "epochs": 2, "num_threads": num_threads}
  straight = list(load(store, **settings))
  loader = load(store, **settings)
  for cut in range(len(straight) + 1):
    state = json.loads(json.dumps(loader.get_state()))
    fresh = load(store, **settings | {"num_threads": 2 - num_threads})
    fresh.set_state(state)
    again = load(store, **settings)
    again.set_state(fresh.get_state())
    assert_equal(fresh, straight[cut:])
    assert_equal(again, straight[cut:])
    next(loader, None)


def test_state_set_on_a_started_iterator(make_store):
  """CK-2: restoring after the workers have begun is as good as before."""
  store = make_store(6)
  straight = list(load(store, num_minibatches=6))
  loader = load(store, num_minibatches=6)
  state = loader.get_state()
  for _ in range(3):
    next(loader)
  later = loader.get_state()
  loader.set_state(state)
  assert_equal([next(loader)], straight[:1])
  loader.set_state(later)
  assert_equal(loader, straight[3:])


@pytest.mark.parametrize("change", [
  {"seed": 4}, {"num_minibatches": 3}, {"epochs": 2}, {"advantages": lambda entry: entry.score}])
def test_state_of_another_order_is_refused(make_store, change):
  store = make_store(6)
  state = load(store).get_state()
  load(store, rows_per_microbatch=7, row_length=64).set_state(state)  # only the cut differs
  with pytest.raises(LoaderStateMismatch, match="have changed"):
    load(store, **change).set_state(state)


def test_state_of_other_data_is_refused(make_store):
  """CK-2: ten groups, then a store of three."""
  state = load(make_store(10)).get_state()
  for other in (make_store(3, name="small"), make_store(10, name="other", seed=1)):
    with pytest.raises(LoaderStateMismatch):
      load(other).set_state(state)


def test_order_depends_on_seed_update_and_epoch_only(make_store, tmp_path, make_trajectory):
  store = make_store(8)
  order = lambda loader: [groups_of(batch) for batch in loader]  # noqa: E731
  base = order(load(store, num_minibatches=8))
  assert order(load(store, num_minibatches=8)) == base
  assert order(load(store, num_minibatches=8, seed=4)) != base
  other_update = make_store(8, update=1, name="next")
  assert order(load(other_update, update=1, num_minibatches=8)) != base
  # The same trajectories, written by two processes in another sequence.
  trajectories = list(store)
  for process, part in enumerate((trajectories[12:], trajectories[:12])):
    with TrajectoryWriter(tmp_path / "two", process_index=process) as writer:
      writer.write(reversed(part))
  assert_equal(load(TrajectoryStore(tmp_path / "two"), num_minibatches=3),
               load(store, num_minibatches=3))


def test_only_the_update_asked_for_is_read(make_store):
  make_store(2, update=5)
  store = make_store(3, update=6)
  batches = list(load(store, update=6))
  assert [batch.update for batch in batches] == [6] and batches[0].num_groups == 3


def test_advantages_choose_what_is_trained(make_store):
  store = make_store(3)
  chosen = {("d", "task1", s): float(s) for s in range(2)}
  [batch] = load(store, advantages=chosen)
  assert (batch.num_groups, batch.num_sequences) == (1, 2)
  assert {tokens[0]: values[0] for tokens, values, _ in completions(batch)} == {
    1100: 0.0, 1101: 1.0}


def test_advantages_that_fit_nothing_are_refused(make_store):
  store = make_store(3)
  with pytest.raises(ValueError, match="belong to no trajectory.*task9"):
    load(store, advantages={("d", "task9", 0): 1.0})
  with pytest.raises(ValueError, match="advantage nan"):
    load(store, advantages=lambda entry: float("nan"))


def test_trajectories_without_a_score_cannot_be_trained(tmp_path, make_trajectory):
  """RW-7: what nobody scored is left out, and not taken for a zero."""
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(sample_index=i, score=score)
                  for i, score in enumerate([0.0, None, 1.0])])
  store = TrajectoryStore(tmp_path)
  with pytest.raises(ValueError, match="without a score .outcome infra_lost"):
    load(store, advantages=lambda entry: 0.0)
  [batch] = load(store, advantages=lambda entry: entry.score)  # None for the lost one
  assert batch.num_sequences == 2


def test_samples_with_different_prompts_are_refused_without_reading(tmp_path, make_trajectory):
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(sample_index=i, prompt=(1, 2, i)) for i in range(2)])
  store = TrajectoryStore(tmp_path)
  next(tmp_path.glob("*.array_record")).unlink()
  with pytest.raises(ValueError, match="2 different prompts"):
    load(store)


def test_a_completion_with_nothing_sampled_is_left_out(tmp_path, make_trajectory):
  with TrajectoryWriter(tmp_path) as writer:
    writer.write([make_trajectory(sample_index=0), make_trajectory(sample_index=1, completion=()),
                  make_trajectory(sample_index=2, fed={0, 1})])
  [batch] = load(TrajectoryStore(tmp_path))
  assert batch.num_sequences == 1 and batch.num_targets == 2
