"""The benchmark's own parts: turns, protocol, checks, table. Neither peer nor model is needed."""

import io
import json
import sys
import textwrap

import pytest

from wootz.launch import bench
from wootz.launch.benchmarks import figures, grpo, peer, sides, trl_grpo
from wootz.launch.benchmarks.figures import Quantity
from wootz.launch.benchmarks.sides import Side, SideFailed

SECONDS = Quantity("step_seconds", "s", "less")


def fake_side(folder, name, body):
  """A process of the standard library alone that answers as `body` says."""
  script = folder / f"{name}.py"
  script.write_text("import json, sys\nwork = json.loads(sys.stdin.readline())\n" + textwrap.dedent(body))
  return Side(name, [sys.executable, str(script)], {"SIDE_NAME": name})


WORKING = """
  import os
  def tell(**answer):
    print(json.dumps(answer), flush=True)
  tokens = len(work["tasks"]) * work["samples"] * work["new_tokens"]
  tell(prompt_ids=[[1, 2, 3]], about={"versions": {"fake": "1"}, "name": os.environ["SIDE_NAME"]})
  seconds = 0
  while json.loads(sys.stdin.readline())["do"] == "step":
    seconds += 1
    with open(work["model"], "a") as turns:
      turns.write(os.environ["SIDE_NAME"] + "\\n")
    tell(step_seconds=4.0 * seconds, sampling_seconds=1.0 * seconds, learning_seconds=3.0 * seconds,
         sampled_tokens=tokens, learned_tokens=tokens, cpu_seconds=1.0, idle_cpu_seconds=0.0,
         peak_memory_bytes=2**30)
"""


def make_work(tmp_path, **changes):
  values = {"model": str(tmp_path / "turns"), "tasks": ({"id": "t", "messages": []},), "samples": 2,
            "new_tokens": 3, "warmup_steps": 1, "steps": 3, "threads": 1, "seed": 0}
  return grpo.Work(**{**values, **changes})


def test_spread_is_median_and_range():
  assert figures.spread([5.0, 1.0, 2.0]) == figures.Spread(2.0, 1.0, 5.0)
  assert figures.spread([4.0, 1.0, 2.0, 3.0]).median == 2.5
  with pytest.raises(ValueError, match="no steps"):
    figures.spread([])


def test_table_shows_medians_ranges_and_the_ratio_of_the_first_to_the_second():
  measured = {"wootz": [{"step_seconds": s} for s in (18.0, 20.0, 19.0)],
              "trl": [{"step_seconds": s} for s in (40.0, 38.0, 123.4)]}
  header, rule, row = figures.table(measured, [SECONDS]).splitlines()
  assert "wootz / trl" in header and set(rule) == {"|", "-"}
  assert [cell.strip() for cell in row.strip("|").split("|")] == [
    "step seconds, s", "19 (18..20)", "40 (38..123)", "0.47", "less"]
  assert len(header) == len(rule) == len(row)
  assert figures.as_values(measured, [SECONDS])["step_seconds"]["ratio"] == 19 / 40


def test_sides_take_turns_and_only_warm_steps_count(tmp_path):
  work = make_work(tmp_path)
  with fake_side(tmp_path, "one", WORKING) as one, fake_side(tmp_path, "two", WORKING) as two:
    about, steps = grpo.measure(work, (one, two), say=lambda text: None)
  assert (tmp_path / "turns").read_text().split() == ["one", "two"] * 4
  assert [step["step_seconds"] for step in steps["one"]] == [8.0, 12.0, 16.0]
  assert steps["two"][0]["sampled_tokens_per_second"] == 2 * 3 / 2.0
  assert steps["two"][0]["learned_tokens_per_second"] == 2 * 3 / 6.0
  assert steps["two"][0]["peak_memory"] == 1.0
  assert about["two"]["about"]["name"] == "two"


def test_a_side_is_gone_after_its_block(tmp_path):
  with fake_side(tmp_path, "one", WORKING) as side:
    side.begin(make_work(tmp_path).message())
  assert side._process.returncode == 0


@pytest.mark.parametrize("sampled, learned", [(5, 6), (6, 4)])
def test_a_step_with_other_tokens_is_refused(sampled, learned):
  with pytest.raises(grpo.WorkDiffers, match="trl had"):
    grpo.check_tokens("trl", {"sampled_tokens": sampled, "learned_tokens": learned}, 6)
  grpo.check_tokens("trl", {"sampled_tokens": 6, "learned_tokens": 6}, 6)


def test_prompts_must_be_equal_id_by_id():
  grpo.check_prompts({"wootz": [[1, 2], [3]], "trl": [[1, 2], [3]]})
  with pytest.raises(grpo.WorkDiffers, match="prompt 1 has 1 ids"):
    grpo.check_prompts({"wootz": [[1, 2], [3]], "trl": [[1, 2], [3, 4]]})
  with pytest.raises(grpo.WorkDiffers, match="2 prompts"):
    grpo.check_prompts({"wootz": [[1], [2]], "trl": [[1]]})


def test_a_failed_side_shows_its_last_words(tmp_path):
  body = "print('noise', file=sys.stderr)\nraise ValueError('no such model')"
  with fake_side(tmp_path, "trl", body) as side, pytest.raises(SideFailed, match="no such model"):
    side.begin(make_work(tmp_path).message())


def test_an_answer_that_is_not_json_is_refused(tmp_path):
  with fake_side(tmp_path, "trl", "print('Loading...', flush=True)\nsys.stdin.read()") as side:
    with pytest.raises(SideFailed, match="Loading"):
      side.begin(make_work(tmp_path).message())


def test_what_libraries_print_does_not_mix_with_the_answers(tmp_path):
  body = """
    from wootz.launch.benchmarks import sides
    def answers():
      print("a library's words")
      yield {"about": 1}
      yield {"step": 2}
    channel = sides.take_over_output()
    sides.serve(answers(), channel)
  """
  with fake_side(tmp_path, "noisy", body) as side:
    assert (side.begin({}), side.step()) == ({"about": 1}, {"step": 2})


def test_serve_answers_until_told_to_quit():
  channel = io.StringIO()
  commands = io.StringIO('{"do": "step"}\n{"do": "quit"}\n{"do": "step"}\n')
  sides.serve(({"n": n} for n in range(9)), channel, commands)
  assert [json.loads(line)["n"] for line in channel.getvalue().splitlines()] == [0, 1]


def test_both_sides_have_the_same_reward():
  from wootz.launch.benchmarks import wootz_grpo
  for text in ("", "aeiou", "def f(x):\n  return x", "běžný text"):
    assert wootz_grpo.character_reward(text, "aeiou") == trl_grpo.character_reward(text, "aeiou")
  assert trl_grpo.character_reward("abcd e", "aeiou") == 2 / 6
  completions = [[{"content": "ab"}], [{"content": ""}]]
  assert trl_grpo.character_rewards("aeiou")(completions=completions, prompts=[]) == [0.5, 0.0]


def test_the_peers_script_needs_neither_wootz_nor_torch_to_be_read():
  assert "wootz" not in {name.split(".")[0] for name in vars(trl_grpo)}
  source = open(trl_grpo.__file__, encoding="utf-8").read()
  assert "import wootz" not in source and "from wootz" not in source


def test_prompts_are_the_first_training_tasks():
  tasks = grpo.first_tasks(3)
  assert len({task["id"] for task in tasks}) == 3 and all(task["messages"] for task in tasks)
  with pytest.raises(ValueError, match="0 tasks"):
    grpo.first_tasks(0)


def test_an_environment_from_elsewhere_is_used_as_it_is(tmp_path):
  (tmp_path / "bin").mkdir()
  (tmp_path / "bin" / "python").touch()
  requirements = tmp_path / "requirements.txt"
  requirements.write_text("nothing==1\n")
  assert peer.peer_python(tmp_path, requirements) == tmp_path / "bin" / "python"


def test_an_environment_is_made_once_and_again_when_requirements_change(tmp_path, monkeypatch):
  calls = []

  def fake_run(command, **_):
    calls.append(command)
    return type("Result", (), {"returncode": 0 if len(calls) != 2 else 7})

  def fake_create(place, **_):
    (place / "bin").mkdir(exist_ok=True)
    (place / "bin" / "python").touch()

  monkeypatch.setattr(peer.subprocess, "run", fake_run)
  monkeypatch.setattr(peer.venv, "create", fake_create)
  requirements, place = tmp_path / "requirements.txt", tmp_path / "venv"
  requirements.write_text("trl==1\n")
  peer.peer_python(place, requirements)
  peer.peer_python(place, requirements)
  assert len(calls) == 1
  requirements.write_text("trl==2\n")
  with pytest.raises(RuntimeError, match="exit status 7"):
    peer.peer_python(place, requirements)
  peer.peer_python(place, requirements)  # the broken installation is not taken for a whole one
  assert len(calls) == 3


def test_requirements_are_pinned():
  lines = [line for line in grpo.REQUIREMENTS.read_text().splitlines() if line and line[0] not in "#-"]
  assert lines and all("==" in line for line in lines)


@pytest.mark.parametrize("arguments, message", [
  (["grpo", "--samples=1"], "--samples=1"), (["grpo", "--peer_batch=5"], "--peer_batch=5 must divide")])
def test_wrong_sizes_are_refused_before_anything_starts(arguments, message, capsys):
  assert bench.main(arguments) == 1
  assert message in capsys.readouterr().err


def test_an_unknown_benchmark_is_refused(capsys):
  with pytest.raises(SystemExit) as exit:
    bench.main(["gpro"])
  assert exit.value.code == 2 and "grpo" in capsys.readouterr().err
