"""Checks of the planner; run by test_plan.py in a process of its own, where it makes its devices."""

import json
import re

import pytest
from absl import app, flags

from wootz.launch import plan
from wootz.sharding.plan import Plan

TINY = {"model_type": "llama", "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 32,
        "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": True}
# embedding 64*16; a layer: two norms, query and output 16*16, key and value 8*16, three of 32*16
LAYER = 2 * 16 + 2 * 16 * 16 + 2 * 8 * 16 + 3 * 32 * 16
NORMS = 5 * 16
PARAMETERS = 64 * 16 + 2 * LAYER + 16


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
  path = tmp_path_factory.mktemp("model") / "config.json"
  path.write_text(json.dumps(TINY))
  return f"--model={path}"


def run(*arguments):
  flags.FLAGS.unparse_flags()
  flags.FLAGS(["plan", "--devices=8", "--batch=8", "--sequence=32", *arguments])
  plan.main(["plan"])


def test_figures_by_hand(tiny, capsys):
  run(tiny, "--mesh=fsdp=4,tensor=2")
  printed = capsys.readouterr().out
  figures = {name: float(value) * {"B": 1, "kB": 1e3}[unit] for name, value, unit in
             re.findall(r"^  (.*?) +([\d.]+) (B|kB)\b", printed, re.MULTILINE)}
  share = 4 * ((PARAMETERS - NORMS) // 8 + NORMS)  # norms are whole on each of the eight devices
  assert figures["parameters"] == figures["accumulated gradients"] == share
  assert figures["optimizer state"] == 2 * share + 4 + 4  # two moments, AdamW's and schedule's count
  assert figures["batch"] == 2 * 32 * (9 * 4 + 2 * 1)  # 2 rows: nine arrays of 4 bytes, two masks
  assert figures["peak"] >= 4 * share + figures["micro-batch temporaries"]
  assert figures["micro-batch temporaries"] > 0 and "all-gather" in printed


@pytest.mark.parametrize("arguments, message", [
    (["--mesh=fsdp=8", "--batch=6"], r"--batch=6 .*dimension 0 \(batch\) of 6"),
    (["--mesh=fsdp=2,tensor=4"], r"parameter layers/key: .*\(kv_heads\) of 2 .*tensor 4"),
    (["--mesh=fsdp=3"], "fsdp=3 needs 3 devices, there are 8"),
    (["--mesh=fsdp=-1", "--model=smolm2-135m"], "'smollm2-135m'.*config.json")])
def test_what_cannot_be_is_named(tiny, arguments, message):
  with pytest.raises(app.UsageError, match=message):
    run(tiny, *arguments)


def test_peak_and_whether_it_fits():
  microbatch = Plan(arguments=300, outputs=110, aliased=100, temporaries=40, flops=1.0,
                    collectives={})
  update = Plan(arguments=400, outputs=300, aliased=300, temporaries=5, flops=1.0, collectives={})
  facts = {"num_parameters": 1, "parameters": 100, "optimizer": 200, "gradients": 100, "batch": 100,
           "microbatch": microbatch, "update": update}
  exact = plan.Report(**facts, capacity=550)  # 200 waiting, 300 + 10 + 40 in the micro-batch
  assert exact.peak == 550 and exact.fits and "550 B of 550 B: fits" in "\n".join(exact.lines())
  assert not plan.Report(**facts, capacity=549).fits
  assert plan.Report(**facts, capacity=None).fits is None


@pytest.mark.parametrize("name, parameters", [  # as published
    ("smollm2-135m", 134_515_008), ("smollm2-1.7b", 1_711_376_384), ("llama-3-8b", 8_030_261_248),
    ("llama-3-70b", 70_553_706_496)])
def test_known_sizes(name, parameters):
  assert plan.params.count(plan.llama.param_specs(plan.KNOWN[name])) == parameters
