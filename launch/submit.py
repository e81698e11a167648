"""Writes a Slurm batch script or a Kubernetes JobSet that trains, and submits it when told to.

  python -m wootz.launch.submit --cluster=slurm --nodes=4 --gpus_per_node=8 --time_limit=24:00:00 \\
    -- --config=quickstart --config.run.directory=/shared/runs/mine
  python -m wootz.launch.submit --cluster=kubernetes --image=registry/wootz:1 --claim=runs --submit \\
    -- --config=quickstart --config.run.directory=mine

What follows `--` are the flags of wootz.launch.train; they are checked here, before the job waits in a
queue. The job runs one process per node, with --resume, so that a job stopped with status 75 goes on where
it was. The working directory must be shared by all nodes. Exit status: 0 done; 1 wrong input, named.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jinja2
from absl import flags

from wootz.launch import config_flags, program
from wootz.post_training.preemption import EXIT_PREEMPTED

TEMPLATES = {"slurm": "slurm.sh.jinja", "kubernetes": "jobset.yaml.jinja"}
SUBMITTERS = {"slurm": ("sbatch",), "kubernetes": ("kubectl", "create", "-f", "-")}
_NAME = r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?"  # a DNS label; JobSet appends to it for its pods
_RULES = {  # field -> (pattern, what it must be)
  "name": (_NAME, "up to 40 small letters, digits and inner dashes, beginning with a letter"),
  "time_limit": (r"(\d+-)?\d{1,2}:\d{2}:\d{2}|\d+", "[days-]hours:minutes:seconds, or minutes"),
  "partition": (r"([\w.-]+(,[\w.-]+)*)?", "names of partitions, with commas between them"),
  "account": (r"([\w.-]+)?", "the name of an account"),
  "namespace": (rf"({_NAME})?", "the name of a namespace"),
  "image": (r"[^\s]*", "a container image, without spaces"),
  "claim": (r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?", "the name of a persistent volume claim"),
  "memory": (r"\d+(Ki|Mi|Gi|Ti)", "an amount such as 64Gi"),
  "directory": (r"/[^\n\0]*", "an absolute path"),
}


def _setting(default: Any, help: str) -> Any:
  return dataclasses.field(default=default, metadata={"help": help})


@dataclasses.dataclass(frozen=True)
class Job:
  """Where and how a training command is run. Empty texts and zeros leave a setting to the cluster."""

  cluster: str  # a key of TEMPLATES
  name: str
  arguments: tuple[str, ...]  # the whole command
  directory: str  # where it is run, on every node
  nodes: int = _setting(1, "Nodes, with one process each.")
  gpus_per_node: int = _setting(0, "GPUs of each node; 0 asks for none.")
  cpus_per_node: int = _setting(0, "CPUs of each node; 0 leaves it to the cluster.")
  time_limit: str = _setting("24:00:00", "Slurm: [days-]hours:minutes:seconds.")
  partition: str = _setting("", "Slurm: partition.")
  account: str = _setting("", "Slurm: account.")
  namespace: str = _setting("", "Kubernetes: namespace.")
  image: str = _setting("", "Kubernetes: container image with wootz in it.")
  claim: str = _setting("", "Kubernetes: persistent volume claim, mounted at --directory.")
  memory: str = _setting("64Gi", "Kubernetes: memory of each node.")
  max_restarts: int = _setting(10, "Kubernetes: how often a lost node may restart the whole job.")

  def __post_init__(self) -> None:
    for field, (pattern, rule) in _RULES.items():
      if not re.fullmatch(pattern, getattr(self, field)):
        raise ValueError(f"--{field}={getattr(self, field)!r}: must be {rule}")
    for field, least in {"nodes": 1, "gpus_per_node": 0, "cpus_per_node": 0, "max_restarts": 0}.items():
      if getattr(self, field) < least:
        raise ValueError(f"--{field}={getattr(self, field)}: must be at least {least}")
    if self.cluster == "kubernetes" and not (self.image and self.claim):
      raise ValueError("--cluster=kubernetes needs --image, the container with wootz in it, and --claim, the "
                       "volume that outlives the pods")


def render(job: Job) -> str:
  """The batch script or the manifest."""
  environment = jinja2.Environment(
    loader=jinja2.FileSystemLoader(pathlib.Path(__file__).parent / "clusters"), trim_blocks=True,
    lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined, autoescape=False)
  environment.filters |= {"quote": shlex.quote, "json": functools.partial(json.dumps, ensure_ascii=False)}
  return environment.get_template(TEMPLATES[job.cluster]).render(
    dataclasses.asdict(job), command=shlex.join(job.arguments), exit_preempted=EXIT_PREEMPTED)


def train_command(python: str, train_flags: Sequence[str]) -> tuple[str, ...]:
  """The command of one process. Raises ConfigError for flags that training would refuse."""
  overrides, others = config_flags.split_overrides(train_flags)
  given = flags.FlagValues()
  flags.DEFINE_string("config", "quickstart", "", flag_values=given)
  flags.DEFINE_bool("resume", True, "", flag_values=given)
  try:
    if rest := given(["train", *others])[1:]:
      raise ValueError(f"{rest[0]!r} is no flag of wootz.launch.train")
  except flags.Error as error:
    raise ValueError(f"flags of wootz.launch.train: {error}") from error
  config_flags.parse_overrides(config_flags.load_config(str(given["config"].value)), overrides)
  again = [] if "--resume" in others else ["--resume"]
  return (python, "-m", "wootz.launch.train", *train_flags, *again)


def submit(job: Job) -> str:
  """Hands the job to the cluster; returns what its program says. ValueError when that is not here."""
  command = SUBMITTERS[job.cluster]
  if shutil.which(command[0]) is None:
    raise ValueError(f"{command[0]} is not on this machine: run this where jobs are submitted, or leave "
                     "--submit out and take the printed text there")
  done = subprocess.run(command, input=render(job), capture_output=True, text=True, check=False)
  if done.returncode:
    raise ValueError(f"{' '.join(command)} refused the job: {done.stderr.strip()}")
  return done.stdout.strip()


def main() -> None:
  cluster = flags.DEFINE_enum("cluster", None, sorted(TEMPLATES), "Which kind.", required=True)
  python = flags.DEFINE_string("python", None, "Interpreter of the job; this one, or the image's python.")
  do_submit = flags.DEFINE_bool("submit", False, "Submit it instead of printing it.")
  settings: dict[str, Any] = {
    "name": flags.DEFINE_string("name", "wootz", "Of the job."),
    "directory": flags.DEFINE_string("directory", str(pathlib.Path.cwd()), "Shared working directory.")}
  for field in dataclasses.fields(Job):
    if field.default is not dataclasses.MISSING:
      define = flags.DEFINE_integer if isinstance(field.default, int) else flags.DEFINE_string
      settings[field.name] = define(field.name, field.default, field.metadata["help"])

  def run() -> int:
    interpreter = python.value or ("python" if cluster.value == "kubernetes" else sys.executable)
    job = Job(cluster=cluster.value, arguments=train_command(interpreter, train_flags),
              **{name: flag.value for name, flag in settings.items()})
    print(submit(job) if do_submit.value else render(job), end="" if not do_submit.value else "\n")
    return 0

  place = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
  train_flags = sys.argv[place + 1:]
  program.run(run, argv=sys.argv[:place])


if __name__ == "__main__":
  main()
