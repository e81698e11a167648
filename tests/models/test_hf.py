"""Hugging Face folders: read as transformers wrote them, written so that it reads them."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors import numpy as safetensors_numpy

from wootz.models import attention, hf, published, transformer
from wootz.models.config import ModelConfig
from wootz.models.families import llama
from wootz.models.params import map_specs

TINY = Path(__file__).parents[1] / "reference" / "tiny_llama"


def tied_config():
  return ModelConfig(family="llama", vocab_size=24, hidden_size=16, num_layers=2, num_heads=4,
                     num_kv_heads=2, head_dim=8, intermediate_size=20, rope_base=1e6, norm_eps=1e-5,
                     max_positions=64, tie_embeddings=True)


def random_params(config, dtype=np.float32):
  rng = np.random.default_rng(0)
  return map_specs(lambda spec: rng.normal(size=spec.shape).astype(dtype),
                   llama.param_specs(config))


def copy_with(folder, **changes):
  """A copy of the tiny model whose config.json is changed; None removes a key."""
  shutil.copytree(TINY, folder, dirs_exist_ok=True)
  config = json.loads((folder / "config.json").read_text()) | changes
  config = {key: value for key, value in config.items() if value is not None}
  (folder / "config.json").write_text(json.dumps(config))
  return folder


def assert_trees_equal(found, wanted):
  assert jax.tree.structure(found) == jax.tree.structure(wanted)
  jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_folder_written_by_transformers():
  """An untied bfloat16 llama in three shards with an index: configuration and logits."""
  model = hf.load_hf(TINY)
  assert (model.config.rope_base, model.config.head_dim, model.config.tie_embeddings,
          model.config.num_kv_heads, model.config.norm_eps) == (5000.0, 16, False, 2, 1e-6)
  reference = np.load(TINY / "logits.npz")
  tokens = jnp.asarray(reference["ids"])[None]
  width = tokens.shape[1]
  hidden, _ = transformer.forward(
    model.params, model.config, tokens, positions=jnp.arange(width)[None],
    mask=attention.causal_mask(jnp.array([width]), width))
  logits = transformer.unembed(model.params, hidden)[0]
  np.testing.assert_allclose(logits, reference["logits"], atol=1e-4, rtol=1e-4)


def test_dtypes_of_the_files_can_be_kept():
  params = hf.load_hf(TINY, dtype=None).params
  assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(ml_dtypes.bfloat16)}
  as_float = jax.tree.map(lambda leaf: leaf.astype(np.float32), params)
  assert_trees_equal(as_float, hf.load_hf(TINY).params)


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16],
                         ids=lambda dtype: np.dtype(dtype).name)
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("max_shard_bytes", [2**30, 3000])
def test_round_trip(tmp_path, dtype, tied, max_shard_bytes):
  config = ModelConfig(**{**vars(tied_config()), "tie_embeddings": tied})
  params = random_params(config, dtype)
  hf.save_hf(tmp_path, params, config, max_shard_bytes=max_shard_bytes)
  again = hf.load_hf(tmp_path, dtype=None)
  assert again.config == config
  assert_trees_equal(again.params, params)
  assert {leaf.dtype for leaf in jax.tree.leaves(again.params)} == {np.dtype(dtype)}
  names = [name for name in os.listdir(tmp_path) if name.endswith(".safetensors")]
  assert (len(names) > 1) == (max_shard_bytes == 3000)
  assert ("model.safetensors.index.json" in os.listdir(tmp_path)) == (len(names) > 1)


def test_export_can_convert(tmp_path):
  config = tied_config()
  params = random_params(config)
  hf.save_hf(tmp_path, params, config, dtype=ml_dtypes.bfloat16)
  written = safetensors_numpy.load_file(tmp_path / "model.safetensors")
  np.testing.assert_array_equal(written["model.embed_tokens.weight"],
                                np.asarray(params["embedding"]).astype(ml_dtypes.bfloat16))
  assert "lm_head.weight" not in written  # tied


def test_published_shapes(tmp_path):
  """Each matrix is two-dimensional, [out, in], heads and head size as one dimension."""
  config = tied_config()
  params = random_params(config)
  hf.save_hf(tmp_path, params, config)
  written = safetensors_numpy.load_file(tmp_path / "model.safetensors")
  attention_names = {name.split(".")[4]: matrix.shape for name, matrix in written.items()
                     if "layers.1.self" in name}
  assert attention_names == {"q_proj": (32, 16), "k_proj": (16, 16), "v_proj": (16, 16),
                             "o_proj": (16, 32)}
  # Row 8 of the key is the first row of the second head.
  np.testing.assert_array_equal(written["model.layers.1.self_attn.k_proj.weight"][8],
                                params["layers"]["key"][1, 1, 0])
  np.testing.assert_array_equal(written["model.layers.1.self_attn.o_proj.weight"][:, 8],
                                params["layers"]["output"][1, :, 1, 0])


def test_a_used_folder_is_not_overwritten(tmp_path):
  config = tied_config()
  hf.save_hf(tmp_path, random_params(config), config)
  with pytest.raises(FileExistsError, match=r"model\.safetensors"):
    hf.save_hf(tmp_path, random_params(config), config)


def test_parameters_that_do_not_fit_the_configuration_are_refused(tmp_path):
  config = tied_config()
  params = random_params(config)
  with pytest.raises(ValueError, match="head"):
    hf.save_hf(tmp_path / "a", params, ModelConfig(**{**vars(config), "tie_embeddings": False}))
  with pytest.raises(ValueError, match="final_norm"):
    hf.save_hf(tmp_path / "b", params | {"final_norm": np.ones(3)}, config)


def test_im_4_tensor_in_two_shards_is_refused_naming_both(tmp_path):
  """IM-4: neither of the two values wins in silence."""
  for name, value in (("one.safetensors", 1.0), ("two.safetensors", 2.0)):
    safetensors_numpy.save_file({"w": np.float32([value])}, tmp_path / name)
  with pytest.raises(ValueError, match=r"'w'.*one\.safetensors.*two\.safetensors"):
    hf.find_tensors(tmp_path)


def test_im_4_values_and_dtypes_are_kept(tmp_path):
  """IM-4: BF16 [1, -2.5] and F8_E4M3 [1, .5], written by hand as bytes."""
  header = json.dumps({"b": {"dtype": "BF16", "shape": [2], "data_offsets": [0, 4]},
                       "f": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [4, 6]}}).encode()
  data = bytes.fromhex("803f 20c0 38 30")
  path = tmp_path / "a.safetensors"
  path.write_bytes(len(header).to_bytes(8, "little") + header + data)
  shard = hf.open_shard(path)
  b, f = shard.read("b"), shard.read("f")
  assert (b.dtype, f.dtype) == (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn)
  assert b.astype(float).tolist() == [1, -2.5]
  assert f.astype(float).tolist() == [1, .5]


def test_tensor_doubled_inside_one_file_is_refused(tmp_path):
  entry = '{"dtype":"F32","shape":[1],"data_offsets":[%d,%d]}'
  header = f'{{"w":{entry % (0, 4)},"w":{entry % (4, 8)}}}'.encode()
  path = tmp_path / "a.safetensors"
  path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
  with pytest.raises(ValueError, match=r"a\.safetensors"):
    hf.open_shard(path)


def test_repeated_tied_head_must_be_equal(tmp_path):
  """Some writers store the tied head again: equal is accepted, another one is refused."""
  config = tied_config()
  hf.save_hf(tmp_path, random_params(config), config)
  path = tmp_path / "model.safetensors"
  tensors = safetensors_numpy.load_file(path)
  embedding = tensors["model.embed_tokens.weight"]
  safetensors_numpy.save_file(tensors | {"lm_head.weight": embedding.copy()}, path)
  assert "head" not in hf.load_hf(tmp_path).params
  safetensors_numpy.save_file(tensors | {"lm_head.weight": embedding + 1}, path)
  with pytest.raises(ValueError, match=r"lm_head\.weight"):
    hf.load_hf(tmp_path)


def test_missing_leftover_and_damaged_files_are_named(tmp_path):
  config = tied_config()
  hf.save_hf(tmp_path, random_params(config), config)
  path = tmp_path / "model.safetensors"
  tensors = safetensors_numpy.load_file(path)
  norm = "model.norm.weight"
  safetensors_numpy.save_file({k: v for k, v in tensors.items() if k != norm}, path)
  with pytest.raises(ValueError, match=r"lacks 1 tensors: model\.norm\.weight"):
    hf.load_hf(tmp_path)
  bias = "model.layers.0.self_attn.q_proj.bias"
  safetensors_numpy.save_file(tensors | {bias: tensors[norm]}, path)
  with pytest.raises(ValueError, match=bias):
    hf.load_hf(tmp_path)
  safetensors_numpy.save_file(tensors, path)
  path.write_bytes(path.read_bytes()[:-8])
  with pytest.raises(ValueError, match=r"model\.safetensors"):
    hf.load_hf(tmp_path)
  path.unlink()
  with pytest.raises(FileNotFoundError, match="safetensors"):
    hf.load_hf(tmp_path)


def test_missing_shard_is_named(tmp_path):
  folder = copy_with(tmp_path / "a")
  (folder / "model-00002-of-00003.safetensors").unlink()
  with pytest.raises(FileNotFoundError, match="model-00002-of-00003"):
    hf.load_hf(folder)


def test_index_that_places_tensors_wrongly_is_refused(tmp_path):
  folder = copy_with(tmp_path / "a")
  path = folder / "model.safetensors.index.json"
  index = json.loads(path.read_text())
  index["weight_map"]["lm_head.weight"] = "model-00001-of-00003.safetensors"
  path.write_text(json.dumps(index))
  with pytest.raises(ValueError, match=r"lm_head\.weight"):
    hf.load_hf(folder)


@pytest.mark.parametrize(("changes", "match"), [
  ({"architectures": ["MambaForCausalLM"]}, "MambaForCausalLM"),
  ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0}}, "'yarn'"),
  ({"rope_parameters": None, "rope_theta": 5000.0,
    "rope_scaling": {"type": "linear", "factor": 2.0}}, "'linear'"),
  ({"rope_parameters": {"rope_theta": 5000.0, "rope_type": "default", "beta": 1}}, "beta"),
  ({"rope_theta": 10000.0}, "several rotary bases"),
  ({"attention_bias": True}, "attention_bias"), ({"hidden_act": "gelu"}, "gelu"),
  ({"brand_new_switch": 1}, "brand_new_switch"), ({"num_hidden_layers": None}, "num_hidden_layers"),
])
def test_im_3_configurations_that_cannot_be_honoured_are_refused(tmp_path, changes, match):
  """IM-3 for rotary settings: unknown keys and kinds are refused, not ignored."""
  with pytest.raises(ValueError, match=match):
    hf.load_hf(copy_with(tmp_path / "a", **changes))


def test_im_3_rotary_base_under_either_name(tmp_path):
  """IM-3: older files write rope_theta, newer ones rope_parameters."""
  old = copy_with(tmp_path / "a", rope_parameters=None, rope_theta=1e6, rope_scaling=None)
  assert hf.read_config(old).rope_base == 1e6
  assert hf.read_config(TINY).rope_base == 5000.0
  assert hf.read_config(copy_with(tmp_path / "b", rope_parameters=None)).rope_base == 10000.0


def test_assemble_and_disassemble_are_inverse():
  config = tied_config()
  params = random_params(config)
  tensors = dict(published.disassemble(config, llama.HF_NAMES, params))
  again = published.assemble(config, llama.HF_NAMES, tensors, lambda name, _: tensors[name],
                             dtype=None, source="memory")
  assert_trees_equal(again, params)
