"""What the launch programs share: their way in, their way out with an error, and the weights they read."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags, logging

from wootz.data.store import StoreDamaged, StoreInUse
from wootz.data.tokenizer import Tokenizer
from wootz.launch import assemble
from wootz.launch import config as configs
from wootz.launch.assemble import BaseModel
from wootz.launch.config import Config
from wootz.models import transformer
from wootz.models.config import ModelConfig
from wootz.models.params import Tree
from wootz.post_training import loop
from wootz.post_training.checkpoint import CheckpointDamaged, Checkpointer
from wootz.post_training.evaluate import report
from wootz.post_training.learn import step
from wootz.post_training.rollout import engine
from wootz.post_training.rollout.collect import Generate
from wootz.post_training.sandbox import SandboxUnavailable

EXPORT_FOLDER = "model"  # of a run's directory: the weights that the gate kept
COMPILATION_CACHE = pathlib.Path(os.environ.get("WOOTZ_CACHE", "~/.cache/wootz")).expanduser() / "xla"
# What a user can cause and mend; anything else is a fault of the program and keeps its traceback.
_MENDABLE = (ValueError, LookupError, OSError, ImportError, StoreInUse, StoreDamaged, CheckpointDamaged,
             SandboxUnavailable)


def run(main: Callable[[], int], parse: Callable[[list[str]], list[str]] | None = None, *,
        exit_failed: int = 1, argv: list[str] | None = None) -> None:
  """Runs a program: flags, quiet logging, compiled code kept between runs; exits with `main`'s status.

  Flags are defined by the caller just before, not at import, so that programs can be imported together.
  `parse` is absl's `flags_parser`; `argv` is sys.argv when left out. A wrong input ends the program with
  one line and `exit_failed`; the traceback shows with --verbosity=1.
  """
  def guarded(arguments: list[str]) -> None:
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)
    if parse is None and arguments[1:]:
      raise app.UsageError(f"unexpected argument {arguments[1]!r}")
    jax.config.update("jax_compilation_cache_dir", str(COMPILATION_CACHE))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)
    try:
      status = main()
    except _MENDABLE as error:
      logging.debug("where it happened", exc_info=True)
      text = error.args[0] if isinstance(error, KeyError) and error.args else error
      print(f"wootz: {text}", file=sys.stderr)
      status = exit_failed
    sys.exit(status)

  app.run(guarded, argv=argv, **({"flags_parser": parse} if parse else {}))


@dataclasses.dataclass(frozen=True)
class Weights:
  """A model ready for sampling."""

  config: ModelConfig
  params: Tree  # in the rollout layout and the dtype of computation
  tokenizer: Tokenizer
  updates: int  # learner updates they have received; 0 for what is no run
  dtype: Any  # of computation
  source: str  # where they come from, for people


def load_weights(path: str, *, compute_dtype: str = "auto") -> Weights:
  """Weights of a run's directory, a Hugging Face folder, a GGUF file or a known model.

  Of a run's directory, the exported model if the gate has kept one, else the newest intact checkpoint.
  Raises ValueError naming what the path could be, and FileNotFoundError for a run without either.
  """
  place = pathlib.Path(path)
  model, updates, source = (
    _of_run(place) if (place / report.CONFIG_FILE).is_file() and _is_run(place)
    else (assemble.load_base_model(path), 0, path))
  dtype = assemble.compute_dtype(compute_dtype)
  params = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), model.params)
  return Weights(model.config, transformer.unstack_layers(params), model.tokenizer, updates, dtype, source)


def generator(weights: Weights, *, slots: int) -> Generate:
  """The engine with the weights bound to it; `slots` sequences are decoded at once."""
  return functools.partial(
    engine.generate, weights.params, weights.config, num_slots=slots, dtype=weights.dtype,
    decode_text=functools.partial(weights.tokenizer.decode, skip_control=True))


class Countdown:
  """Says on stderr, in ten steps, how much is done; called once for each thing that is."""

  def __init__(self, name: str, total: int) -> None:
    self._name, self._total, self._done = name, total, 0

  def __call__(self, _: object = None) -> None:
    self._done += 1
    if self._done * 10 // self._total > (self._done - 1) * 10 // self._total:
      print(f"{self._name}: {self._done} of {self._total}", file=sys.stderr, flush=True)


def _is_run(directory: pathlib.Path) -> bool:
  """A folder of a model has a config.json too; a run's has the sections of a `Config`."""
  values = json.loads((directory / report.CONFIG_FILE).read_text(encoding="utf-8"))
  return isinstance(values, dict) and {"model", "learner", "run"} <= values.keys()


def _of_run(directory: pathlib.Path) -> tuple[BaseModel, int, str]:
  config = configs.from_dict(json.loads((directory / report.CONFIG_FILE).read_text(encoding="utf-8")))
  if (directory / EXPORT_FOLDER).is_dir():  # a run is exported at its end only
    exported = directory / EXPORT_FOLDER
    return assemble.load_base_model(str(exported)), config.run.updates, str(exported)
  model, updates = _of_checkpoint(directory / loop.CHECKPOINT_FOLDER, config)
  return model, updates, f"{directory}, checkpoint of update {updates}"


def _of_checkpoint(folder: pathlib.Path, config: Config) -> tuple[BaseModel, int]:
  if not folder.is_dir():
    raise FileNotFoundError(f"the run in {folder.parent} has neither an exported model nor a checkpoint yet: "
                            "let it train on, or name its base model instead")
  model = assemble.load_base_model(config.model.path)
  recipe = assemble.make_recipe(lora_rank=config.model.lora_rank)
  learner, _ = assemble.make_learner(model, recipe, config)
  trained, frozen = assemble.initial_weights(model, config.model, seed=config.run.seed)
  abstract = jax.eval_shape(lambda params: step.init_state(params, learner.optimizer), trained)
  with Checkpointer(folder) as checkpointer:
    state = loop.restore(checkpointer, abstract)
  if state is None:
    raise FileNotFoundError(f"{folder} holds no finished checkpoint: let the run train on")
  params = recipe.plain_params(state.train.params, frozen)
  return BaseModel(model.config, params, model.tokenizer), state.update
