"""SmolLM2-135M-Instruct learns small Python functions with GRPO on two CPU cores.

    python -m wootz.launch.train --config=launch/configs/quickstart.py

All parameters are trained in float32. Progress shows in the terminal; the run directory ends with
report.html, which compares held-out and unseen tasks before and after.
"""

from wootz.launch import config

# A closed code block: what a model writes behind it is not graded, so it is not sampled. With one line
# break less it would also match where a block without a language opens.
CLOSED = ("\n```\n\n",)


def get_config() -> config.Config:
  return config.Config(
    model=config.ModelSection(path="smollm2-135m-instruct"),
    domain=config.DomainSection(name="python_functions"),
    rollout=config.RolloutSection(
      tasks_per_update=4, samples_per_task=8, max_new_tokens=48, temperature=0.6,
      stop_strings=CLOSED, slots=32),
    learner=config.LearnerSection(
      learning_rate=2.5e-5, row_length=544, remat="elementwise"),
    evaluation=config.EvaluationSection(
      held_out_tasks=204, unseen_tasks=40, samples_per_task=4, sampled_tasks=20, pass_at=(1, 4),
      max_new_tokens=48, stop_strings=CLOSED),
    checkpoint=config.CheckpointSection(every_updates=14, keep=2),
    run=config.RunSection(directory="runs/quickstart", seed=0, updates=28),
  )
