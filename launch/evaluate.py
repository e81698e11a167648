"""Runs the evaluation suite on weights: pass@1 and pass@k with 95 % intervals, beside tokens and seconds.

  python -m wootz.launch.evaluate --config=quickstart --weights=runs/mine --output=mine.json
  python -m wootz.launch.evaluate --config=quickstart --weights=other --compare=mine.json

The suite, its limits and its seed come from the config. Exit status: 0 done; 1 wrong input, named;
3 done, but the gate does not find the weights at least as good as those of --compare.
"""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

from absl import flags

from wootz.launch import assemble, config_flags, program
from wootz.launch.config import Config
from wootz.post_training.domains.base import get_domain
from wootz.post_training.evaluate import results, suite
from wootz.post_training.evaluate.gate import Action, gate
from wootz.post_training.evaluate.results import EvaluationResult
from wootz.post_training.evaluate.statistics import Interval

EXIT_ROLLED_BACK = 3


def evaluate(config: Config, weights: program.Weights) -> EvaluationResult:
  """The config's suite on these weights. ValueError when the domain has fewer tasks than asked for."""
  domain = get_domain(config.domain.name)
  chosen = assemble.make_suite(config, domain)
  return suite.evaluate(
    program.generator(weights, slots=config.rollout.slots), chosen, domain=domain,
    tokenizer=weights.tokenizer, seed=config.run.seed, update=weights.updates,
    on_grade=program.Countdown("evaluated", chosen.num_completions))


def read_result(path: str) -> EvaluationResult:
  """An evaluation written with --output, or by a run. Raises ValueError or OSError naming the file."""
  try:
    return results.from_json(pathlib.Path(path).read_text(encoding="utf-8"))
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error


def check_comparable(before: EvaluationResult, config: Config) -> None:
  """Raises ValueError, before anything is sampled, when the suite is not the one of `before`."""
  limit = config.evaluation.max_new_tokens
  if before.max_new_tokens != limit:
    raise ValueError(f"--compare was evaluated with {before.max_new_tokens} new tokens, this is {limit}: "
                     f"set --config.evaluation.max_new_tokens={before.max_new_tokens}")
  before_ids, ids = ({task.task_id for task in before.tasks},
                     {task.id for task in assemble.make_suite(config, get_domain(config.domain.name)).tasks})
  if different := sorted(before_ids ^ ids):
    raise ValueError(f"--compare holds other tasks: {different[0]!r} is in only one of the two "
                     f"({len(different)} such tasks). Set --config.evaluation.held_out_tasks and "
                     ".unseen_tasks as they were")


def result_lines(result: EvaluationResult, pass_at: Sequence[int]) -> list[str]:
  """A table: one line per split, then one per family, pass rates in percent with their intervals."""
  title = f"{'':<20}{'tasks':>6}  {'greedy pass@1':<22}" + "".join(
    f"{f'pass@{k}':<22}" for k in pass_at) + f"{'tokens':>7}{'cut':>6}{'unscored':>9}"
  parts = [(name, result.select(split=split)) for split, name in results.SPLITS.items()]
  parts += list(results.by_family(result).items())
  rows = [_row(name, part, pass_at) for name, part in parts if part.tasks]
  return [title, *rows, f"{result.tokens} tokens sampled in {result.seconds:.1f} s"]


def _row(name: str, part: EvaluationResult, pass_at: Sequence[int]) -> str:
  summary = results.summarise(part, pass_at=pass_at)
  rates = "".join(f"{percent(summary.pass_at[k]):<22}" for k in pass_at)
  return (f"{name:<20}{summary.tasks:>6}  {percent(summary.greedy):<22}{rates}"
          f"{summary.mean_tokens or 0:>7.1f}{100 * (summary.truncated_share or 0):>4.0f} %"
          f"{summary.unscored:>9}")


def percent(interval: Interval | None) -> str:
  """"41.3 (35.0 to 48.1)", or a dash where nothing was scored."""
  if interval is None:
    return "-"
  return f"{100 * interval.estimate:.1f} ({100 * interval.low:.1f} to {100 * interval.high:.1f})"


def compare(before: EvaluationResult, after: EvaluationResult) -> int:
  """Prints the paired differences and the gate's verdict; returns the exit status."""
  for split, name in results.SPLITS.items():
    gain = results.greedy_gain(before.select(split=split), after.select(split=split))
    if gain is not None:
      print(f"{name}: greedy pass@1 {100 * gain.estimate:+.1f} points "
            f"({100 * gain.low:+.1f} to {100 * gain.high:+.1f})")
  decision = gate(before, after)
  print(f"gate: {decision.action.value}: {decision.reason}")
  return 0 if decision.action == Action.KEEP else EXIT_ROLLED_BACK


def evaluate_path(config: Config, path: str, *, output: str | None, other: str | None) -> int:
  """The program with its flags read; returns the exit status."""
  before = read_result(other) if other else None
  if before is not None:
    check_comparable(before, config)
  weights = program.load_weights(path, compute_dtype=config.model.compute_dtype)
  result = evaluate(config, weights)
  print(f"weights: {weights.source}")
  pass_at = config.evaluation.pass_at if config.evaluation.samples_per_task else ()
  print("\n".join(result_lines(result, pass_at)))
  if output:
    pathlib.Path(output).parent.mkdir(parents=True, exist_ok=True)
    pathlib.Path(output).write_text(results.to_json(result), encoding="utf-8")
  return 0 if before is None else compare(before, result)


def main() -> None:
  config = config_flags.ConfigFlag(default="quickstart")
  weights = flags.DEFINE_string(
    "weights", None, "A run's directory (its exported model, else its newest checkpoint), a Hugging Face "
    "folder, a GGUF file or a known model; the config's base model when left out.")
  output = flags.DEFINE_string("output", None, "File for the whole result, as JSON.")
  other = flags.DEFINE_string("compare", None, "An earlier --output to compare with, task by task.")
  program.run(lambda: evaluate_path(config.value, weights.value or config.value.model.path,
                                    output=output.value, other=other.value), config.parse)


if __name__ == "__main__":
  main()
