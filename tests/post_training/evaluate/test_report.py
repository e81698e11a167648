"""The page: complete, self-contained, and safe against what the model wrote."""

import html.parser
import json
import math
import re
import xml.etree.ElementTree

import matplotlib.image
import pytest

from wootz.launch import config as launch_config
from wootz.post_training import alerts
from wootz.post_training.evaluate import environment, figures, report, results
from wootz.post_training.evaluate.results import EvaluationResult, SampleResult, TaskResult
from wootz.post_training.metrics import MetricsWriter

HOSTILE = ("</pre></article><script>steal()</script><img src=http://evil.test/x onerror=go()>"
           "{{ 7 * 7 }} \x1b[2J\x00\u202egnp &amp; ']]> <!-- ")


def _sample(flag):
  if flag:
    return SampleResult(1.0, "solved", 12, "def f(): return 1")
  return SampleResult(0.25, "partial", 64, HOSTILE, truncated=True, reason=HOSTILE)


def _evaluation(flags, update):
  tasks = []
  for family, split in (("clamp", "held_out"), ("sorts", "held_out"), ("cipher", "unseen_family")):
    tasks += [TaskResult(f"{family}/{i}", family, split, f"Write {HOSTILE}", _sample(flag),
                         (_sample(flag), _sample(not flag))) for i, flag in enumerate(flags)]
  return EvaluationResult(tuple(tasks), update, 0.8, 64, seconds=30.0)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory):
  directory = tmp_path_factory.mktemp("invented_run")
  with MetricsWriter(directory, process_index=0) as writer:
    for update in range(1, 5):
      values = {"reward": 0.1 * update, "pass_rate": 0.2 * update, "kl": 0.001 * update,
                "loss": math.nan if update == 2 else -0.01, "seconds": 20.0,
                "sampling_seconds": 5.0, "grading_seconds": 2.0, "learning_seconds": 10.0,
                "sampled_tokens": 1000, "learned_tokens": 900}
      writer.write(update, values, alerts.as_texts(alerts.check(values)))
  before = _evaluation([True, False, False, False, False, False], 0)
  after = _evaluation([False, True, True, True, True, True], 4)
  (directory / report.BEFORE_FILE).write_text(results.to_json(before))
  (directory / report.AFTER_FILE).write_text(results.to_json(after))
  (directory / report.CONFIG_FILE).write_text(launch_config.to_json(launch_config.Config(
    evaluation=launch_config.EvaluationSection(samples_per_task=2, pass_at=(1, 2)))))
  (directory / report.VERSIONS_FILE).write_text(json.dumps(environment.versions()))
  return directory


@pytest.fixture(scope="module")
def page(run_directory):
  return report.write_report(run_directory).read_text(encoding="utf-8")


class _Reader(html.parser.HTMLParser):
  """Collects tags, attributes and text, and checks that elements are closed in order."""

  VOID = frozenset({"meta", "br", "img", "link", "input", "hr", "use"})

  def __init__(self, page):
    super().__init__()
    self.open, self.tags, self.attributes, self.texts = [], [], [], []
    self.feed(page)
    self.close()

  def handle_starttag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(name, value or "") for name, value in attrs]
    if tag not in self.VOID:
      self.open.append(tag)

  def handle_startendtag(self, tag, attrs):
    self.tags.append(tag)
    self.attributes += [(name, value or "") for name, value in attrs]

  def handle_endtag(self, tag):
    assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
    self.open.pop()

  def handle_data(self, data):
    self.texts.append(data)


def test_page_is_well_formed_and_has_every_part(page):
  reader = _Reader(page)
  assert reader.open == []
  text = " ".join(" ".join(reader.texts).split())
  for wanted in ("Result", "Before and after", "Learning curves", "By family", "Cost",
                 "Where an update's time went", "Sample trajectories", "Configuration and versions",
                 "learning_rate", "jax", "sampled pass@2", "update 2: CRITICAL non_finite"):
    assert wanted in text
  assert reader.tags.count("svg") == 1 + 4  # comparison; reward, pass rate, KL, loss


def test_headline_figures_by_hand(page):
  text = " ".join(" ".join(_Reader(page).texts).split())
  # Held out, 12 tasks: 2 solved before, 10 after.
  assert re.search(r"Held-out tasks 12 tasks, greedy pass@1 16.7 % → 83.3 % \+66.7 points", text)
  assert re.search(r"Unseen families 6 tasks, greedy pass@1 16.7 % → 83.3 %", text)
  # Training: 4 updates of 20 s and 1,000 tokens, of which 5 s were sampling.
  assert re.search(r"Training 4,000 3,600 1 min 20 s", text)
  assert re.search(r"sampling 25.0 % 20.0 s grading 10.0 % 8.0 s learning 50.0 % 40.0 s "
                   r"other 15.0 % 12.0 s", text)
  assert "not finite: 1 of the values" in text


def test_page_needs_no_network_and_runs_no_script(page):
  reader = _Reader(page)
  assert not {"script", "img", "link", "iframe", "object", "a"} & set(reader.tags)
  for name, value in reader.attributes:
    assert not name.startswith("on")
    if name in ("src", "href", "xlink:href"):
      assert value.startswith("#")
    if "://" in value:
      assert name.startswith("xmlns")
  assert "default-src 'none'" in page
  assert "@import" not in page
  assert not re.search(r"url\((?!#)", page)


def test_model_text_is_shown_but_inert(page):
  text = "".join(_Reader(page).texts)
  assert "<script>steal()</script>" in text
  assert "{{ 7 * 7 }}" in text
  assert "<U+001B>[2J<U+0000><U+202E>gnp &amp; ']]>" in text
  for character in "\x1b\x00\u202e":
    assert character not in page


def test_same_tasks_before_and_after_of_each_kind(page):
  text = " ".join(_Reader(page).texts)
  assert text.count("newly solved") == 2
  assert text.count("no longer solved") == 2
  assert "solved both times" not in text


def test_report_of_an_unfinished_run(tmp_path):
  text = report.write_report(tmp_path).read_text()
  assert "No evaluation has been recorded yet" in text
  assert "No update has been recorded yet" in text
  (tmp_path / report.BEFORE_FILE).write_text(results.to_json(_evaluation([True, False], 0)))
  reader = _Reader(report.write_report(tmp_path).read_text())
  assert reader.open == []
  text = " ".join(reader.texts)
  assert "not compared" in text
  assert "evaluated once" in text
  assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".new")] == []


def test_evaluations_of_other_tasks_are_shown_but_not_compared(tmp_path):
  (tmp_path / report.BEFORE_FILE).write_text(results.to_json(_evaluation([True, False], 0)))
  (tmp_path / report.AFTER_FILE).write_text(results.to_json(_evaluation([True] * 3, 4)))
  text = " ".join(" ".join(_Reader(report.write_report(tmp_path).read_text()).texts).split())
  assert "50.0 % → 100.0 % not compared" in text
  assert "points" not in text.partition("By family")[0].partition("Result")[2]


def test_broken_files_and_missing_directories_are_named(tmp_path):
  with pytest.raises(FileNotFoundError, match="no run directory"):
    report.write_report(tmp_path / "absent")
  (tmp_path / report.AFTER_FILE).write_text("{")
  with pytest.raises(ValueError, match=report.AFTER_FILE):
    report.write_report(tmp_path)


def test_figures_are_plain_svg_in_the_colours_of_the_page():
  svg = figures.curve_svg(([1, 2, 3], [0.1, 0.5, 0.4]), share=True)
  root = xml.etree.ElementTree.fromstring(svg)
  assert root.tag == "{http://www.w3.org/2000/svg}svg"
  assert "var(--accent)" in svg
  assert not any(color in svg for color in figures._THEME.values())
  assert svg == figures.curve_svg(([1, 2, 3], [0.1, 0.5, 0.4]), share=True)
  assert figures.curve_svg(([1], [0.0]), share=True)  # one point, all zero


def test_curves_leave_out_what_is_not_finite():
  rows = [{"update": 1, "scalars": {"loss": 1.0}}, {"update": 2, "scalars": {"loss": math.nan}},
          {"update": 3, "scalars": {"loss": None, "kl": math.inf}},
          {"update": 4, "scalars": {"loss": 2.0}}]
  assert figures.curves(rows) == {"loss": ([1, 4], [1.0, 2.0])}


def test_learning_curve_picture(run_directory, tmp_path):
  path = tmp_path / "curve.png"
  report.write_learning_curve(run_directory, path)
  pixels = matplotlib.image.imread(path)
  assert pixels.shape[1] > 2 * pixels.shape[0]
  assert pixels[..., :3].std() > 0.01
  with pytest.raises(ValueError, match="no metrics to draw"):
    report.write_learning_curve(tmp_path, path)
