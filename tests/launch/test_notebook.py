"""The notebook runs from top to bottom, and its update changes the weights."""

import json
import os
import pathlib
import re
import subprocess
import sys

from wootz import launch

NOTEBOOK = pathlib.Path(launch.__file__).parent / "notebooks" / "quickstart.ipynb"
CHECK = """
import jax
assert int(state.step) == 1 and metrics["optimizer_updates"] == 1
# Every learned token was sampled by this model: ln of 3/4, of 1/4, or of 1.
learned = sum(t.loss_mask.sum() for t in trajectories if t.grade.score is not None)
assert 0 < metrics["learned_tokens"] <= learned
base = jax.tree.leaves(assemble.load_base_model(MODEL).params)
moved = [float(abs(a - b).max()) for a, b in zip(base, jax.tree.leaves(state.params))]
assert max(moved) > 1e-6
print("checked")
"""


def cells():
  return json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]


def test_notebook_is_stored_without_outputs():
  document = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
  assert (document["nbformat"], document["nbformat_minor"]) == (4, 5)
  assert len({cell["id"] for cell in document["cells"]}) == len(document["cells"])
  for cell in document["cells"]:
    assert cell["cell_type"] in ("code", "markdown") and re.fullmatch(r"[\w-]{1,64}", cell["id"])
    assert isinstance(cell["metadata"], dict) and isinstance(cell["source"], list)
    if cell["cell_type"] == "code":
      assert cell["outputs"] == [] and cell["execution_count"] is None


def test_notebook_runs(tiny_model):
  source = "\n".join("".join(cell["source"]) for cell in cells() if cell["cell_type"] == "code")
  done = subprocess.run([sys.executable, "-c", source + CHECK], capture_output=True, text=True, check=False,
                        env={**os.environ, "WOOTZ_MODEL": tiny_model, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
  assert done.returncode == 0, done.stderr
  assert done.stdout.endswith("checked\n") and "flat_groups" in done.stdout
