"""Rendered jobs are parsed and run by the programs that read them, or by stand-ins for a cluster's."""

import os
import shlex
import subprocess
import sys

import pytest
import yaml

from wootz.launch import submit
from wootz.launch.config import ConfigError

DIRECTORY = "/shared/it's a place"
TRAIN = ["--config=quickstart", "--config.run.directory=runs/a b$(touch hacked)"]


def job(cluster="slurm", **facts):
  facts = {"name": "mine", "directory": DIRECTORY, "nodes": 4, "gpus_per_node": 8, **facts}
  return submit.Job(cluster=cluster, arguments=submit.train_command("python", TRAIN), **facts)


def run_script(job, tmp_path, srun_status):
  """Runs a batch script for real, with an `srun` and an `scontrol` that note how they were called."""
  tools = tmp_path / "tools"
  tools.mkdir()
  for name, status in (("srun", srun_status), ("scontrol", 0)):
    (tools / name).write_text(f'#!/bin/bash\nprintf "%s\\0" {name} "$@" >> "{tmp_path}/calls"\n'
                              f"printf '\\n' >> '{tmp_path}/calls'\nexit {status}\n")
    (tools / name).chmod(0o755)
  script = tmp_path / "job.sh"
  script.write_text(submit.render(job))
  subprocess.run(["bash", "-n", script], check=True)
  done = subprocess.run(["bash", script], check=False, env={
    **os.environ, "PATH": f"{tools}:{os.environ['PATH']}", "SLURM_JOB_ID": "77"})
  calls = [line.strip("\0").split("\0") for line in (tmp_path / "calls").read_text().splitlines()]
  return done.returncode, calls


@pytest.mark.parametrize("status, requeued", [(0, False), (75, True), (1, False), (3, False)])
def test_slurm_runs_one_process_per_node_and_requeues_what_was_stopped(tmp_path, status, requeued):
  place = tmp_path / "it's a place"
  place.mkdir()
  code, calls = run_script(job(directory=str(place)), tmp_path, status)
  assert code == status
  srun = calls[0]
  assert srun[:4] == ["srun", "--nodes=4", "--ntasks=4", "--ntasks-per-node=1"]
  assert srun[srun.index("python"):] == ["python", "-m", "wootz.launch.train", *TRAIN, "--resume"]
  assert (["scontrol", "requeue", "77"] in calls) == requeued
  assert not (place / "hacked").exists()


def test_slurm_header():
  lines = submit.render(job(partition="gpu,big", account="lab.1")).splitlines()
  header = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")]
  assert {"--job-name=mine", "--nodes=4", "--ntasks-per-node=1", "--gpus-per-node=8", "--requeue",
          "--signal=TERM@120", "--time=24:00:00", "--partition=gpu,big", "--account=lab.1"} <= set(header)
  assert lines[0] == "#!/bin/bash"
  first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
  assert not any(line.startswith("#SBATCH") for line in lines[first_command:])  # Slurm would ignore it
  assert not any("partition" in line for line in submit.render(job()).splitlines())


def test_jobset_manifest():
  """Names such as "on" stay texts, and a stopped process is started again but a failed one is not."""
  manifest = yaml.safe_load(submit.render(job("kubernetes", name="on", image="registry/wootz:1", claim="on",
                                              namespace="on")))
  assert manifest["metadata"] == {"name": "on", "namespace": "on"} and manifest["kind"] == "JobSet"
  spec = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
  assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (4, 4, "Indexed")
  rules = {code: rule["action"] for rule in spec["podFailurePolicy"]["rules"]
           for code in rule["onExitCodes"]["values"]}
  assert rules == {75: "Ignore", 1: "FailJob", 3: "FailJob"}
  pod = spec["template"]["spec"]
  container = pod["containers"][0]
  assert container["command"] == ["python", "-m", "wootz.launch.train", *TRAIN, "--resume"]
  assert container["workingDir"] == container["volumeMounts"][0]["mountPath"] == DIRECTORY
  assert container["resources"]["limits"] == {"nvidia.com/gpu": 8, "memory": "64Gi"}
  assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "on"
  environment = {entry["name"]: entry.get("value") for entry in container["env"]}
  assert environment["JAX_COORDINATOR_ADDRESS"] == "on-train-0-0.on:8476"


@pytest.mark.parametrize("facts, message", [
  ({"nodes": 0}, "--nodes=0: must be at least 1"),
  ({"name": "Mine"}, "--name='Mine'"),
  ({"name": "a\n#SBATCH --x"}, "--name="),
  ({"time_limit": "a day"}, "--time_limit='a day'.*hours"),
  ({"partition": "gpu; rm"}, "--partition="),
  ({"directory": "here"}, "--directory='here': must be an absolute path"),
  ({"memory": "64"}, "--memory='64'.*64Gi"),
  ({"cluster": "kubernetes"}, "needs --image.*--claim"),
])
def test_wrong_settings_are_named(facts, message):
  with pytest.raises(ValueError, match=message):
    job(**facts)


@pytest.mark.parametrize("train_flags, message", [
  (["--config.learner.lerning_rate=1"], "did you mean --config.learner.learning_rate"),
  (["--config=nothing"], "no config file 'nothing'"),
  (["--resum"], "flags of wootz.launch.train"),
  (["stray"], "'stray' is no flag"),
])
def test_wrong_train_flags_fail_before_the_queue(train_flags, message):
  with pytest.raises((ValueError, ConfigError), match=message):
    submit.train_command("python", train_flags)


def test_resume_is_given_once():
  assert submit.train_command("python", ["--resume"]).count("--resume") == 1


def test_submitting_hands_over_the_script(tmp_path, monkeypatch):
  monkeypatch.setenv("PATH", str(tmp_path))
  with pytest.raises(ValueError, match="sbatch is not on this machine"):
    submit.submit(job())
  (tmp_path / "sbatch").write_text(f"#!/bin/bash\nwhile IFS= read -r line; do echo \"$line\"; done > "
                                   f"{shlex.quote(str(tmp_path / 'given'))}\necho Submitted batch job 7\n")
  (tmp_path / "sbatch").chmod(0o755)
  monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
  assert submit.submit(job()) == "Submitted batch job 7"
  assert (tmp_path / "given").read_text() == submit.render(job())


def test_program_prints_a_script():
  done = subprocess.run(
    [sys.executable, "-m", "wootz.launch.submit", "--cluster=slurm", "--nodes=2", "--directory=/tmp", "--",
     "--config=quickstart"], capture_output=True, text=True, check=False)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("#!/bin/bash\n") and "--config=quickstart --resume" in done.stdout
