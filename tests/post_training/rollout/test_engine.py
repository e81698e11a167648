import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wootz.data import packing
from wootz.models import attention, transformer
from wootz.post_training.learn.logprobs import target_logprobs
from wootz.post_training.rollout import decode as device
from wootz.post_training.rollout import engine
from wootz.post_training.rollout.engine import Request


def make_prompt(length, seed=0):
  return np.random.default_rng(seed).integers(0, 97, length).astype(np.int32)


def request(id="a", *, length=5, prompt=None, num_samples=1, seed=1, max_new_tokens=6, **settings):
  prompt = make_prompt(length) if prompt is None else np.asarray(prompt, np.int32)
  return Request(id, prompt, num_samples, seed, max_new_tokens, **settings)


def run(params, config, requests, num_slots=8, **kwargs):
  samples = list(engine.generate(params, config, requests, num_slots=num_slots, **kwargs))
  found = {(s.request_id, s.sample_index): s for s in samples}
  assert len(found) == len(samples)
  assert len(samples) == sum(r.num_samples for r in requests)
  return found


def assert_same(got, expected):
  assert got.tokens.tolist() == expected.tokens.tolist()
  np.testing.assert_allclose(got.logprobs, expected.logprobs, atol=1e-5)
  assert (got.finish_reason, got.stop_string) == (expected.finish_reason, expected.stop_string)


def word(id):
  """Text of a token: three to four characters, none the beginning of another's."""
  return f"[{id}]"


def to_text(ids):
  return "".join(word(id) for id in ids)


def test_greedy_equals_the_argmax_of_full_forward_passes(tiny_config, tiny_params, tiny_rollout_params):
  """Prompts of 1, 5 and 13 tokens; every step of the reference is a whole forward pass."""
  width = 32

  @jax.jit
  def next_token(tokens, length):
    positions = jnp.arange(width)[None]
    hidden, _ = transformer.forward(tiny_params, tiny_config, tokens, positions=positions,
                                    mask=attention.causal_mask(length[None], width))
    return jnp.argmax(transformer.unembed(tiny_params, hidden[0, length - 1]))

  requests = [request(str(n), length=n, temperature=0.0, max_new_tokens=12) for n in (1, 5, 13)]
  samples = run(tiny_rollout_params, tiny_config, requests)
  for r in requests:
    text = list(r.prompt)
    for _ in range(12):
      padded = np.array([text + [0] * (width - len(text))], np.int32)
      text.append(int(next_token(padded, jnp.asarray(len(text)))))
    assert samples[r.id, 0].tokens.tolist() == text[len(r.prompt):]
    assert samples[r.id, 0].finish_reason == "length"
    assert samples[r.id, 0].tokens.dtype == np.int32


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_equal_the_learners_score(tiny_config, tiny_params, tiny_rollout_params, tiny_trajectory,
                                           temperature):
  """KL-4: the log-probability of the token that was sampled, known by scoring the ids again."""
  requests = [request(str(n), length=n, num_samples=3, temperature=temperature, max_new_tokens=20)
              for n in (2, 11)]
  samples = run(tiny_rollout_params, tiny_config, requests)
  groups = [[(tiny_trajectory(r.prompt, samples[r.id, i].tokens, samples[r.id, i].logprobs,
                              task_id=r.id, sample_index=i), 1.0) for i in range(3)] for r in requests]
  rows = packing.pack_groups(groups, row_length=80)
  score = jax.jit(lambda params, rows: target_logprobs(params, tiny_config, rows, temperature=temperature)[0])
  behavior = np.take_along_axis(rows.behavior_logprobs, rows.target_index, axis=1)
  assert rows.target_mask.sum() == 2 * 3 * 20
  np.testing.assert_allclose(np.asarray(score(tiny_params, rows))[rows.target_mask],
                             behavior[rows.target_mask], atol=1e-4)


MIXED = [
  request("free", length=3, num_samples=3, seed=5, max_new_tokens=20),
  request("cold", length=9, num_samples=2, seed=5, max_new_tokens=9, temperature=0.0),
  request("limited", length=14, num_samples=4, seed=7, max_new_tokens=15, top_k=5, temperature=1.3),
  request("nucleus", length=1, num_samples=3, seed=8, max_new_tokens=20, top_p=0.6),
]


def test_a_sample_depends_on_its_request_alone(tiny_config, tiny_rollout_params, monkeypatch):
  """SV-5: with others in any order, alone, with fewer or more slots: the same ids and logprobs.

  12 samples in 8 slots are refilled; in 32 slots they all run at once and the batch shrinks.
  """
  sizes, real = [], device.gather
  monkeypatch.setattr(device, "gather", lambda slots, index: sizes.append(len(index)) or real(slots, index))
  monkeypatch.setattr(engine, "MIN_SLOTS", 8)
  together = run(tiny_rollout_params, tiny_config, MIXED)
  assert not sizes
  others = [run(tiny_rollout_params, tiny_config, MIXED[::-1]),
            run(tiny_rollout_params, tiny_config, MIXED, num_slots=32),
            run(tiny_rollout_params, tiny_config, MIXED, num_slots=3)]
  assert sizes == [8]
  for r in MIXED:
    others.append(run(tiny_rollout_params, tiny_config, [r]))
  for other in others:
    for key, sample in other.items():
      assert_same(sample, together[key])
  assert together["cold", 0].tokens.tolist() == together["cold", 1].tokens.tolist()
  for id in ("free", "limited", "nucleus"):
    drawn = [tuple(s.tokens) for (name, _), s in together.items() if name == id]
    assert len(set(drawn)) == len(drawn), "samples of a group must differ"


def test_sample_indexes_can_be_dealt_to_several_requests(tiny_config, tiny_rollout_params):
  """Three samples at once equal samples 0, 1 and 2 asked for apart; another seed gives others."""
  whole = run(tiny_rollout_params, tiny_config, [request(num_samples=3)])
  parts = run(tiny_rollout_params, tiny_config, [request(num_samples=1), request("b", num_samples=2,
                                                                                first_sample=1)])
  assert_same(parts["a", 0], whole["a", 0])
  assert_same(parts["b", 1], whole["a", 1])
  assert_same(parts["b", 2], whole["a", 2])
  other = run(tiny_rollout_params, tiny_config, [request(num_samples=3, seed=2)])
  assert other["a", 0].tokens.tolist() != whole["a", 0].tokens.tolist()


def test_many_more_samples_than_slots(tiny_config, tiny_rollout_params):
  """30 samples of 10 prompts with lengths of 1 to 24, through 8 slots: every one comes, once, whole."""
  requests = [request(str(n), length=n + 1, prompt=make_prompt(n + 1, seed=n), num_samples=3, seed=n,
                      max_new_tokens=1 + 5 * (n % 5) + n // 5) for n in range(10)]
  samples = run(tiny_rollout_params, tiny_config, requests)
  for r in requests:
    for index in range(3):
      sample = samples[r.id, index]
      assert len(sample.tokens) == len(sample.logprobs) == r.max_new_tokens
      assert sample.finish_reason == "length"
  alone = run(tiny_rollout_params, tiny_config, requests[7:8])
  for key, sample in alone.items():
    assert_same(samples[key], sample)


def test_a_stop_id_is_kept_and_ends_the_sample(tiny_config, tiny_rollout_params):
  """LM-2, LM-3: the recorded length is the sampler's; an id 0 (a pad elsewhere) can be content."""
  free = run(tiny_rollout_params, tiny_config, [request(max_new_tokens=20, num_samples=4)])
  for index in range(4):
    tokens = free["a", index].tokens.tolist()
    stop = tokens[10]
    stopped = run(tiny_rollout_params, tiny_config, [request(
      max_new_tokens=20, first_sample=index, stop_ids=(96, 95, stop) if stop < 95 else (stop,))])["a", index]
    length = min(tokens.index(id) for id in (stop, 95, 96) if id in tokens) + 1
    assert stopped.tokens.tolist() == tokens[:length]
    assert stopped.finish_reason == "stop"
    assert stopped.stop_string is None
    np.testing.assert_allclose(stopped.logprobs, free["a", index].logprobs[:length], atol=1e-5)


def test_a_stop_id_as_the_last_allowed_token_counts_as_stop(tiny_config, tiny_rollout_params):
  tokens = run(tiny_rollout_params, tiny_config, [request(max_new_tokens=6)])["a", 0].tokens.tolist()
  last = tokens[-1]
  length = tokens.index(last) + 1
  sample = run(tiny_rollout_params, tiny_config,
               [request(max_new_tokens=length, stop_ids=(last,))])["a", 0]
  assert (sample.tokens.tolist(), sample.finish_reason) == (tokens[:length], "stop")


@pytest.mark.parametrize("kind", ["within", "across", "at_the_end"])
def test_stop_strings(tiny_config, tiny_rollout_params, kind):
  """The sample ends with the token that completes the string, wherever the host looks."""
  tokens = run(tiny_rollout_params, tiny_config, [request(max_new_tokens=40)])["a", 0].tokens.tolist()
  stop = {"within": word(tokens[20])[1:-1] + "]", "across": to_text(tokens[17:20])[2:-1],
          "at_the_end": to_text(tokens[39:])}[kind]
  expected = next(n for n in range(1, 41) if stop in to_text(tokens[:n]))
  found = run(tiny_rollout_params, tiny_config, [request(max_new_tokens=40, stop_strings=("never", stop)),
                                                 request("b", max_new_tokens=40)], decode_text=to_text)
  assert found["a", 0].tokens.tolist() == tokens[:expected]
  assert len(found["a", 0].logprobs) == expected
  assert (found["a", 0].finish_reason, found["a", 0].stop_string) == ("stop", stop)
  assert (found["b", 0].tokens.tolist(), found["b", 0].finish_reason) == (tokens, "length")


def test_of_several_stop_strings_the_first_complete_one_counts():
  """Whatever the order they are listed in; two that one token completes included."""
  texts = ["x", "ab", "c"]
  decode_text = lambda ids: "".join(texts[i] for i in ids)  # noqa: E731
  for stops in (("b", "a"), ("a", "b")):
    assert engine._find_stop_string(np.array([0, 1, 2]), stops, decode_text) == ("a", 2)
  assert engine._find_stop_string(np.array([0, 1, 2]), ("bc", "c", "zz"), decode_text)[1] == 3
  assert engine._find_stop_string(np.array([0, 1, 2]), ("zz",), decode_text) == (None, 3)


def test_sv_6_the_window_cuts_and_a_full_prompt_is_refused(tiny_variant, monkeypatch):
  """SV-6: window 8; prompt 6, ask 10; prompt 8, ask 1; prompt 4, ask 1."""
  config, params = tiny_variant(max_positions=8)
  params = transformer.unstack_layers(params)
  states = []
  real = device.decode

  def spy(*args, **kwargs):
    slots = real(*args, **kwargs)
    states.append(jax.tree.map(jnp.copy, slots))  # a copy: the engine donates them to the next call
    return slots

  monkeypatch.setattr(device, "decode", spy)
  cut = run(params, config, [request(length=6, max_new_tokens=10)])["a", 0]
  assert (len(cut.tokens), cut.finish_reason) == (2, "length")
  huge = run(params, config, [request(length=6, max_new_tokens=2**30)])["a", 0]
  assert huge.tokens.tolist() == cut.tokens.tolist()
  one = run(params, config, [request(length=4, max_new_tokens=1)])["a", 0]
  assert (len(one.tokens), one.finish_reason) == (1, "length")
  last = states[-1]
  assert last.position[0] == 4
  assert last.output[0, 0] == one.tokens[0]
  assert not last.output[0, 1:].any()
  assert not last.logprobs[0, 1:].any()
  assert not last.cache[0][0][1:].any(), "a free slot was written to"
  with pytest.raises(ValueError, match="'a'.*8 tokens leaves no room.*window of 8"):
    run(params, config, [request(length=8, max_new_tokens=1)])


@pytest.mark.parametrize(("change", "message"), [
  ({"prompt": []}, "prompt is empty"),
  ({"length": 128}, "128 tokens leaves no room"),
  ({"prompt": [3, 97]}, "from 3 to 97 lie outside the vocabulary of 97"),
  ({"prompt": [-1, 3]}, "from -1 to 3 lie outside"),
  ({"max_new_tokens": 0}, "max_new_tokens 0"),
  ({"num_samples": 0}, "num_samples 0"),
  ({"temperature": -0.1}, "temperature -0.1"),
  ({"top_p": 0.0}, "top_p 0.0"),
  ({"top_p": 1.1}, "top_p 1.1"),
  ({"stop_ids": tuple(range(9))}, "9 stop ids, at most 8"),
  ({"stop_strings": ("x",)}, "need decode_text"),
])
def test_refused_requests_are_named(tiny_config, tiny_rollout_params, change, message):
  with pytest.raises(ValueError, match=f"request 'bad'.*{message}"):
    list(engine.generate(tiny_rollout_params, tiny_config, [request(), request("bad", **change)],
                         num_slots=8))


def test_an_empty_stop_string_and_no_slots_are_refused(tiny_config, tiny_rollout_params):
  with pytest.raises(ValueError, match="stop string is empty"):
    run(tiny_rollout_params, tiny_config, [request(stop_strings=("x", ""))], decode_text=to_text)
  with pytest.raises(ValueError, match="num_slots 0"):
    run(tiny_rollout_params, tiny_config, [request()], num_slots=0)


def test_no_requests_give_no_samples(tiny_config, tiny_rollout_params):
  assert run(tiny_rollout_params, tiny_config, []) == {}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_weights_raise(tiny_config, tiny_rollout_params, temperature):
  """A sample from NaN logits must not reach a grader as if the policy had said it."""
  broken = {**tiny_rollout_params, "final_norm": jnp.full(32, jnp.nan)}
  with pytest.raises(FloatingPointError, match="request 'a', sample 0.*non-finite"):
    run(broken, tiny_config, [request(temperature=temperature)])


def test_nothing_is_compiled_again_for_other_settings_and_prompts(tiny_config, tiny_rollout_params):
  """Settings, seeds, stop ids, prompts and limits are data."""
  jitted = (device.prefill, device.enter, device.decode, device.release, device.gather)
  run(tiny_rollout_params, tiny_config, MIXED, num_slots=32)
  before = [function._cache_size() for function in jitted]
  changed = [dataclasses.replace(
    r, prompt=make_prompt(len(r.prompt) + 2, seed=9), seed=r.seed + 1, temperature=r.temperature / 2 + 0.1,
    top_k=r.top_k + 3, top_p=0.9, stop_ids=(4, 5), max_new_tokens=r.max_new_tokens - 3) for r in MIXED]
  run(tiny_rollout_params, tiny_config, changed, num_slots=32)
  assert [function._cache_size() for function in jitted] == before


def test_a_prompt_is_prefilled_once(tiny_config, tiny_rollout_params, monkeypatch):
  """However many samples it has, however often slots are refilled, and whoever asks with it."""
  prefilled = []
  real = device.prefill

  def spy(params, tokens, positions, segment_ids, **kwargs):
    prefilled.extend(tuple(tokens[segment_ids == number]) for number in range(1, segment_ids.max() + 1))
    return real(params, tokens, positions, segment_ids, **kwargs)

  monkeypatch.setattr(device, "prefill", spy)
  requests = [request("a", length=7, num_samples=13), request("b", length=12, num_samples=5),
              request("c", length=7, num_samples=6, seed=9)]
  run(tiny_rollout_params, tiny_config, requests)
  assert sorted(prefilled) == sorted(tuple(make_prompt(n)[:-1]) for n in (7, 12))


def test_samples_do_not_depend_on_how_prompts_are_packed_for_prefill(tiny_config, tiny_rollout_params,
                                                                     monkeypatch):
  """Rows of 16 tokens: prompts that share a row, that need one alone, that are longer, of one token."""
  requests = [request(str(n), length=n, num_samples=2, temperature=0.0, max_new_tokens=10)
              for n in (1, 5, 30, 9, 17, 16, 2, 8)]
  plain = run(tiny_rollout_params, tiny_config, requests)
  lengths, real = [], device.prefill
  monkeypatch.setattr(device, "prefill", lambda params, tokens, *args, **kwargs: (
    lengths.append(len(tokens)), real(params, tokens, *args, **kwargs))[1])
  monkeypatch.setattr(engine, "PREFILL_TOKENS", 16)
  packed = run(tiny_rollout_params, tiny_config, requests)
  assert set(lengths) == {16, 32}
  for key, sample in packed.items():
    np.testing.assert_array_equal(sample.tokens, plain[key].tokens)
    np.testing.assert_allclose(sample.logprobs, plain[key].logprobs, atol=1e-5)
