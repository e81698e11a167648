"""Means that do not depend on the cut, and files that survive kills and odd values."""

import json
import math

import numpy as np
import pytest

from wootz.post_training import alerts
from wootz.post_training.metrics import (
  MetricsWriter,
  WeightedMean,
  combine_means,
  mean_of,
  read_metrics,
)


@pytest.mark.parametrize("cut", [[[1.0, 3.0]], [[1.0], [3.0]], [[], [1.0, 3.0]]])
def test_nm_3_mean_does_not_depend_on_microbatches(cut):
  """NM-3 (a): per-sample losses 1 and 3 have mean 2, in one micro-batch or two."""
  combined = combine_means({"loss": mean_of(part)} for part in cut)
  assert combined["loss"].value == 2.0


def test_nm_3_ranks_with_different_token_counts():
  """NM-3 (b): one token of entropy 4 and nine of entropy 0 have mean 0.4, not 2."""
  combined = combine_means([{"entropy": WeightedMean(4.0, 1)}, {"entropy": WeightedMean(0.0, 9)}])
  assert combined["entropy"].value == pytest.approx(0.4)


def test_nm_3_missing_reward_is_not_counted():
  """NM-3: one missing reward neither makes the mean NaN nor counts as zero."""
  assert mean_of([1.0, None, 0.0]).value == 0.5
  assert mean_of([None]).value is None


def test_rows_come_back_and_odd_values_are_recorded(tmp_path):
  with MetricsWriter(tmp_path, process_index=0) as writer:
    writer.write(1, {"reward": np.float32(0.5), "loss": float("nan"), "ratio": -math.inf,
                     "kl": None, "count": 3}, {"note": "ünï\nline \x1b"})
  (row,) = read_metrics(tmp_path)
  assert row["update"] == 1
  assert row["scalars"]["reward"] == 0.5
  assert math.isnan(row["scalars"]["loss"])
  assert row["scalars"]["ratio"] == -math.inf
  assert row["scalars"]["kl"] is None
  assert row["texts"] == {"note": "ünï\nline \x1b"}
  strict = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=pytest.fail)
  assert strict["scalars"]["loss"] == "nan"


def test_what_is_no_number_is_named(tmp_path):
  with (MetricsWriter(tmp_path, process_index=0) as writer,
        pytest.raises(TypeError, match="'per_token' is no number")):
    writer.write(1, {"per_token": np.zeros(3)})
  assert read_metrics(tmp_path) == []


def test_tensorboard_files_hold_the_scalars(tmp_path):
  from tensorboardX.proto import event_pb2
  with MetricsWriter(tmp_path, process_index=0) as writer:
    writer.write(3, {"reward": 0.25, "loss": math.nan})
  (path,) = (tmp_path / "tensorboard").iterdir()
  found = {}
  for record in _records(path.read_bytes()):
    event = event_pb2.Event.FromString(record)
    for value in event.summary.value:
      found[value.tag] = (event.step, value.simple_value)
  assert found == {"reward": (3, 0.25)}


def _records(data):
  """TFRecord framing: length (8 bytes), its check (4), data, its check (4)."""
  while data:
    length = int.from_bytes(data[:8], "little")
    yield data[12:12 + length]
    data = data[16 + length:]


def test_resume_drops_lost_updates_and_a_torn_line(tmp_path):
  with MetricsWriter(tmp_path, process_index=0) as writer:
    for update in (1, 2, 3):
      writer.write(update, {"reward": update / 10, "loss": math.nan})
  with (tmp_path / "metrics.jsonl").open("a") as file:
    file.write('{"update": 4, "scal')  # killed while writing
  assert [row["update"] for row in read_metrics(tmp_path)] == [1, 2, 3]
  with MetricsWriter(tmp_path, next_update=3, process_index=0) as writer:
    writer.write(3, {"reward": 0.9})
  rows = read_metrics(tmp_path)
  rewards = {row["update"]: row["scalars"]["reward"] for row in rows}
  assert (len(rows), rewards) == (3, {1: 0.1, 2: 0.2, 3: 0.9})
  assert math.isnan(rows[0]["scalars"]["loss"])


def test_la_3_fresh_run_in_a_used_directory_is_refused(tmp_path):
  """LA-3: a fresh run must not append to what another run left."""
  with MetricsWriter(tmp_path, process_index=0) as writer:
    writer.write(1, {"reward": 0.0})
  with pytest.raises(FileExistsError, match="metrics of another run"):
    MetricsWriter(tmp_path, process_index=0)
  assert len(read_metrics(tmp_path)) == 1


def test_broken_line_inside_is_named(tmp_path):
  (tmp_path / "metrics.jsonl").write_text('{"update": 1, "scalars": {}, "texts": {}}\nxx\n')
  with pytest.raises(ValueError, match="line 2"):
    read_metrics(tmp_path)


def test_only_process_0_writes(tmp_path):
  with MetricsWriter(tmp_path, process_index=1) as writer:
    writer.write(1, {"reward": 1.0})
  assert list(tmp_path.iterdir()) == []


def test_alerts_name_what_is_wrong():
  quiet = {"loss": 0.1, "logprob_gap": 1e-4, "tampered": 0.0, "infra_lost_share": 0.0, "kl": None}
  assert alerts.check(quiet) == ()
  assert alerts.as_texts(()) == {}
  bad = alerts.check({"loss": math.nan, "logprob_gap": -0.5, "tampered": 2.0,
                      "infra_lost_share": 0.3})
  assert [alert.name for alert in bad] == [
    "non_finite", "tampered", "logprob_gap", "infra_lost_share"]
  assert [alert.level.value for alert in bad] == ["critical", "critical", "critical", "warning"]
  assert "loss is nan" in bad[0].message
  assert alerts.as_texts(bad)["alerts"].count("\n") == 3


def test_alert_bounds_are_arguments():
  assert alerts.check({"logprob_gap": 0.5}, max_logprob_gap=1.0) == ()
