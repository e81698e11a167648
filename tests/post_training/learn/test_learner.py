import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from wootz.data import loader, packing
from wootz.data.store import TrajectoryStore, TrajectoryWriter
from wootz.models import attention, lora, transformer
from wootz.models.families import llama
from wootz.models.params import init_params
from wootz.post_training.learn import learner as learning
from wootz.post_training.learn import step as steps
from wootz.post_training.learn.grpo import PolicyBatch, grpo_objective
from wootz.post_training.learn.learner import Packing

TEMPERATURE = 0.8
SIZES = {"a": (4, (3, 7, 1, 5)), "b": (2, (6, 6, 2, 3)), "c": (9, (1, 4, 8, 2))}  # prompt, completions
SCORES = {"a": (1.0, 0.0, 0.0, 0.0), "b": (0.5, 1.0, 0.0, 0.5), "c": (0.0, 0.0, 1.0, 1.0)}


@pytest.fixture(scope="module")
def trajectories(tiny_trajectory):
  rng, made = np.random.default_rng(0), {}
  for task, (prompt_length, lengths) in SIZES.items():
    prompt = rng.integers(0, 97, prompt_length)
    made[task] = [tiny_trajectory(prompt, rng.integers(0, 97, n), -rng.uniform(3, 6, n), task_id=task,
                                  sample_index=i, score=SCORES[task][i], temperature=TEMPERATURE)
                  for i, n in enumerate(lengths)]
  return made


@pytest.fixture
def make_store(tmp_path):
  def make(trajectories, name="store"):
    with TrajectoryWriter(tmp_path / name) as writer:
      writer.write(trajectories)
    return TrajectoryStore(tmp_path / name)
  return make


@pytest.fixture
def store(make_store, trajectories):
  return make_store([t for group in trajectories.values() for t in group])


def build(config, *, assemble=lambda trained, frozen: trained, rate=1.0, **objective):
  """Plain descent with rate 1: parameters move by the gradient, which then can be compared."""
  return learning.make_learner(
    config, assemble=assemble, optimizer=optax.sgd(rate), num_sequences=12, temperature=TEMPERATURE,
    compute_dtype=jnp.float32, remat="none", advantage={}, objective=objective)


@pytest.fixture(scope="module")
def learner(tiny_config):
  return build(tiny_config)


def fresh(params, learner):
  return steps.init_state(jax.tree.map(jnp.copy, params), learner.optimizer)


def run(learner, params, store, *, frozen=None, reference=None, seed=3, **packing_facts):
  facts = {"row_length": 48, "rows_per_microbatch": 1, **packing_facts}
  return learning.learn(learner, fresh(params, learner), frozen or {}, reference, store, update=0,
                        group_size=4, packing=Packing(**facts), seed=seed)


def assert_close(left, right, atol=1e-5):
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), left, right)


def assert_equal(left, right):
  jax.tree.map(np.testing.assert_array_equal, left, right)


# ---- the objective, written out on plain unpacked rows ----------------------------------------------

def advantages_by_hand(scores):
  scores = np.array(scores)
  return (scores - scores.mean()) / (scores.std(ddof=1) + 1e-6)


def unpacked(trajectories):
  """tokens [12, 20], mask, advantages: one trajectory per row."""
  flat = [(t, a) for task, group in trajectories.items()
          for t, a in zip(group, advantages_by_hand(SCORES[task]), strict=True)]
  tokens, mask, advantages = np.zeros((12, 20), np.int32), np.zeros((12, 20), bool), np.zeros((12, 1))
  for row, (t, advantage) in enumerate(flat):
    tokens[row, :len(t.tokens)], mask[row, :len(t.tokens)] = t.tokens, t.loss_mask
    advantages[row] = advantage
  return tokens, mask, advantages


def plain_logprobs(params, config, tokens):
  """[12, 20]: of each token but the first, given those before it."""
  positions = jnp.broadcast_to(jnp.arange(20), tokens.shape)
  hidden, _ = transformer.forward(params, config, tokens, positions=positions,
                                  mask=attention.causal_mask(jnp.full(len(tokens), 20), 20))
  logprobs = jax.nn.log_softmax(transformer.unembed(params, hidden) / TEMPERATURE)
  shifted = jnp.take_along_axis(logprobs[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
  return jnp.pad(shifted, ((0, 0), (1, 0)))


def plain_loss(params, config, data, old=None, reference=None, clip=(0.2, 0.2), kl=0.0):
  tokens, mask, advantages = data
  logprobs = plain_logprobs(params, config, tokens)
  old = jax.lax.stop_gradient(logprobs) if old is None else old
  ratio = jnp.exp(logprobs - old)
  per_token = -jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - clip[0], 1 + clip[1]) * advantages)
  if reference is not None:
    per_token += kl * (logprobs - reference) ** 2 / 2
  return jnp.sum(per_token * mask) / mask.sum()


def test_one_update_follows_the_written_out_gradient(tiny_config, tiny_params, learner, store, trajectories):
  """Packed, shared prompts, several micro-batches; at ratio 1 the loss is minus the mean advantage."""
  state, metrics = run(learner, tiny_params, store)
  data = unpacked(trajectories)
  loss, gradient = jax.jit(jax.value_and_grad(lambda p: plain_loss(p, tiny_config, data)))(tiny_params)
  moved = jax.tree.map(jnp.subtract, tiny_params, state.params)
  assert_close(moved, gradient, atol=2e-6)
  assert int(state.step) == 1
  assert metrics["loss"] == pytest.approx(float(loss), abs=1e-5)
  assert metrics["gradient_norm"] == pytest.approx(float(optax.global_norm(gradient)), rel=1e-4)
  assert metrics["learned_tokens"] == sum(sum(lengths) for _, lengths in SIZES.values())
  assert metrics["ratio"] == pytest.approx(1.0, abs=1e-6)
  assert metrics["optimizer_updates"] == 1


def test_clipping_and_kl_follow_the_written_out_gradient(tiny_config, tiny_params, tiny_variant,
                                                         trajectories):
  """Old policy and reference are other models, so that ratios leave the clip range on both sides."""
  _, other = tiny_variant(seed=1)
  old_params = jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, tiny_params, other)
  built = build(tiny_config, clip_low=0.1, clip_high=0.3, kl_coefficient=0.5, kl_estimator="k2")
  groups = [[(t, float(a)) for t, a in zip(group, advantages_by_hand(SCORES[task]), strict=True)]
            for task, group in trajectories.items()]
  rows = packing.pack_groups(groups, row_length=48)
  old, reference = (steps.score(params, {}, rows, score_fn=built.score_fn) for params in (old_params, other))
  batch = PolicyBatch(rows, old, reference)
  nothing = steps.nothing_yet(tiny_params, {}, batch, loss_fn=built.loss_fn)
  got = steps.add_microbatch(nothing, tiny_params, {}, batch, loss_fn=built.loss_fn)
  data = unpacked(trajectories)
  score = jax.jit(lambda p: plain_logprobs(p, tiny_config, data[0]))
  plain_old, plain_reference = score(old_params), score(other)
  ratios = np.exp(score(tiny_params) - plain_old)[data[1]]
  assert (ratios < 0.9).any()
  assert (ratios > 1.3).any()
  loss, gradient = jax.jit(jax.value_and_grad(lambda p: plain_loss(
    p, tiny_config, data, plain_old, plain_reference, (0.1, 0.3), 0.5)))(tiny_params)
  count = float(got.sums["denominator"])
  assert count == data[1].sum()
  assert float(got.sums["loss"]) / count == pytest.approx(float(loss), rel=1e-5)
  assert_close(jax.tree.map(lambda leaf: leaf / count, got.gradient), gradient)


def test_the_cut_into_microbatches_changes_nothing(tiny_params, learner, store):
  """NM-2, NM-3: other rows, other micro-batches, unshared prompts: the same weights and metrics."""
  state, metrics = run(learner, tiny_params, store)
  advantages = learning.entry_advantages(store.of_update(0), 4, learner.advantage_fn)
  for facts in ({"row_length": 100, "rows_per_microbatch": 2},
                {"row_length": 24, "rows_per_microbatch": 3, "share_prompt": False}):
    minibatch, = loader.minibatches(store, 0, advantages=advantages, seed=3, num_threads=0, **facts)
    other, other_metrics = steps.learn_minibatch(
      fresh(tiny_params, learner), {}, [PolicyBatch(rows) for rows in minibatch], loss_fn=learner.loss_fn,
      optimizer=learner.optimizer)
    assert_close(other.params, state.params)
    for name, value in other_metrics.items():
      assert value == pytest.approx(metrics[name], rel=1e-4, abs=1e-5), name


def test_ad_2_flat_groups_contribute_nothing(tiny_params, learner, make_store, trajectories):
  """AD-2: beside a group with spread a flat one counts neither in the loss nor in its denominator."""
  flat = [dataclasses.replace(t, grade=dataclasses.replace(t.grade, score=0.7)) for t in trajectories["b"]]
  mixed, metrics = run(learner, tiny_params, make_store(trajectories["a"] + flat, "mixed"))
  alone, _ = run(learner, tiny_params, make_store(trajectories["a"], "alone"))
  assert_close(mixed.params, alone.params, atol=1e-7)
  assert metrics["flat_groups"] == 0.5
  assert metrics["learned_tokens"] == sum(SIZES["a"][1])
  only, metrics = run(learner, tiny_params, make_store(flat, "flat"))
  assert_equal(only.params, tiny_params)
  assert int(only.step) == 0
  assert metrics == {"flat_groups": 1.0, "optimizer_updates": 0.0, "learned_tokens": 0.0}


def test_lost_samples_leave_baseline_and_loss(learner, make_store, trajectories, tiny_trajectory):
  """AD-4: the group [1, 0, lost, 0] has the advantages of [1, 0, 0]; a group of one survivor has none."""
  def lose(t):
    return tiny_trajectory(t.tokens[:t.prompt_length], t.tokens[t.prompt_length:], task_id=t.task_id,
                           sample_index=t.sample_index, score=None)

  group, other = trajectories["a"], trajectories["b"]
  store = make_store([*group[:2], lose(group[2]), group[3], other[1], *map(lose, other[2:])])
  advantages = learning.entry_advantages(store.of_update(0), 4, learner.advantage_fn)
  expected = dict(zip((0, 1, 3), advantages_by_hand([1, 0, 0]), strict=True))
  assert {key[2]: value for key, value in advantages.items()} == pytest.approx(expected, abs=1e-5)
  assert {key[1] for key in advantages} == {"a"}


def test_old_logprobs_are_those_before_the_first_of_several_updates(tiny_config, tiny_params, learner, store,
                                                                    monkeypatch):
  """Two minibatches, two epochs: four updates that all measure their ratio from the same policy."""
  seen, real = [], steps.learn_minibatch

  def spy(state, frozen, batches, **kwargs):
    seen.extend((batch, int(state.step)) for batch in batches)
    return real(state, frozen, batches, **kwargs)

  monkeypatch.setattr(steps, "learn_minibatch", spy)
  state, metrics = run(learner, tiny_params, store, row_length=64, num_minibatches=2, epochs=2)
  assert int(state.step) == metrics["optimizer_updates"] == 4
  assert {step for _, step in seen} == {0, 1, 2, 3}
  for batch, _ in seen:
    first = steps.score(tiny_params, {}, batch.rows, score_fn=learner.score_fn)
    np.testing.assert_array_equal(batch.old_logprobs, first)
  assert metrics["learned_tokens"] == 2 * sum(sum(lengths) for _, lengths in SIZES.values())
  assert metrics["ratio"] != pytest.approx(1.0, abs=1e-3)


def test_kl_draws_towards_the_reference(tiny_config, tiny_params, tiny_variant, store):
  """With a KL alone (advantages drowned) the measured KL falls; at the reference it is exactly 0."""
  _, other = tiny_variant(seed=1)
  reference = jax.tree.map(lambda a, b: 0.8 * a + 0.2 * b, tiny_params, other)
  built = build(tiny_config, rate=1e-4, kl_coefficient=1e3)
  state, before = run(built, tiny_params, store, reference=reference, row_length=64)
  _, after = run(built, state.params, store, reference=reference, row_length=64)
  assert 0 < after["kl"] < before["kl"]
  _, same = run(built, reference, store, reference=reference, row_length=64)
  assert same["kl"] == 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_sampler_correction_weighs_by_the_recorded_logprobs(trajectories, level):
  """Two tokens in one sequence with gaps log 2 and log 3 (cap 2.5) and one in another with log 1/2."""
  rows = packing.pack_groups([[(t, 1.0) for t in trajectories["a"][:1]]], row_length=8)
  rows = rows.replace(sequence_ids=np.where(rows.loss_mask, np.where(np.arange(8) < 6, 1, 2), 0))
  weights = np.array([2.0, 3.0, 0.5])
  logprobs = jnp.zeros(rows.target_mask.shape)
  behavior = np.zeros((1, 8), np.float32)
  behavior[0, 4:7] = -np.log(weights)
  numerator, _ = grpo_objective(logprobs, logprobs, PolicyBatch(rows.replace(behavior_logprobs=behavior)),
                                num_sequences=2, correction="truncate", correction_level=level,
                                correction_high=2.5)
  expected = {"token": 2 + 2.5 + 0.5, "sequence": 2 * 2.5 + 0.5, "geometric": 2 * np.sqrt(6) + 0.5}[level]
  assert float(numerator) == pytest.approx(-expected, rel=1e-5)


def test_a_gradient_that_is_not_finite_raises_and_changes_nothing(tiny_params, learner, store):
  broken = {**tiny_params, "final_norm": tiny_params["final_norm"].at[0].set(jnp.nan)}
  advantages = learning.entry_advantages(store.of_update(0), 4, learner.advantage_fn)
  minibatch, = loader.minibatches(store, 0, advantages=advantages, seed=3, num_threads=0, row_length=48,
                                  rows_per_microbatch=1)
  state = fresh(broken, learner)
  with pytest.raises(FloatingPointError, match="gradient norm nan at optimizer update 1"):
    steps.learn_minibatch(state, {}, [PolicyBatch(rows) for rows in minibatch], loss_fn=learner.loss_fn,
                          optimizer=learner.optimizer)
  assert_equal(state.params, broken)
  assert int(state.step) == 0


def test_apply_update_keeps_the_state_where_the_gradient_is_not_finite():
  optimizer = optax.adam(0.1)
  sums = {name: jnp.asarray(2.0) for name in ("denominator", "tokens", "loss")}
  for value, moves in ((1.0, True), (np.inf, False), (np.nan, False)):
    state = steps.init_state({"w": jnp.ones(2)}, optimizer)
    after, metrics = steps.apply_update(
      state, steps.Accumulated({"w": jnp.array([1.0, value])}, dict(sums)), optimizer=optimizer)
    assert bool(metrics["finite"]) == moves
    assert int(after.step) == moves
    assert np.all(np.asarray(after.params["w"]) == 1.0) != moves
    assert np.isfinite(after.params["w"]).all()
    assert int(after.opt_state[0].count) == moves


def test_a_lora_learner_trains_adapters_only(tiny_config, tiny_params, store):
  """Its first step is that of the full weights seen through the adapters: only "up" moves from zero."""
  built = build(tiny_config, assemble=lambda trained, frozen: lora.attach(frozen, trained, alpha=4.0))
  specs = lora.lora_specs(llama.param_specs(tiny_config), rank=2)
  adapters = jax.jit(lambda key: init_params(specs, key))(jax.random.key(0))
  state, _ = run(built, adapters, store, frozen=tiny_params, row_length=64)
  assert jax.tree.structure(state.params) == jax.tree.structure(adapters)
  for name, weights in state.params.items():
    assert np.any(weights["up"] != 0), name
    np.testing.assert_array_equal(weights["down"], adapters[name]["down"])  # its gradient passes "up" = 0
  state, _ = run(built, state.params, store, frozen=tiny_params, row_length=64)
  assert np.any(state.params["query"]["down"] != adapters["query"]["down"])
