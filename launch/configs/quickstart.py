"""SmolLM2-135M-Instruct learns small Python functions with GRPO on two CPU cores.

    python -m wootz.launch.train --config=launch/configs/quickstart.py

All parameters are trained in float32. Progress shows in the terminal; the run directory ends with
report.html, which compares held-out and unseen tasks before and after.
"""

from wootz.launch import config


def get_config() -> config.Config:
  return config.Config(
    model=config.ModelSection(path="smollm2-135m-instruct"),
    domain=config.DomainSection(name="python_functions"),
    rollout=config.RolloutSection(
      tasks_per_update=4, samples_per_task=8, max_new_tokens=64, slots=32),
    learner=config.LearnerSection(method="grpo", learning_rate=1e-5, row_length=768),
    evaluation=config.EvaluationSection(
      held_out_tasks=256, unseen_tasks=64, samples_per_task=4, pass_at=(1, 4), max_new_tokens=64),
    checkpoint=config.CheckpointSection(every_updates=2, keep=2),
    run=config.RunSection(directory="runs/quickstart", seed=0, updates=10),
  )
