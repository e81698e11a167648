"""Llama-type decoders (Llama 3, SmolLM2): parameters, published names and configurations.

Weights are [out, in], as published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from wootz.models.config import ModelConfig
from wootz.models.params import ParamSpec, Tree


def param_specs(config: ModelConfig) -> Tree:
  """The parameter tree. Leaves under "layers" are stacked over the layer dimension first."""
  c = config
  heads, kv = c.num_heads, c.num_kv_heads

  def layer(shape, axes, **kwargs):
    return ParamSpec((c.num_layers, *shape), ("layer", *axes), **kwargs)

  specs = {
    "embedding": ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed"), fan_in=c.hidden_size),
    "layers": {
      "attention_norm": layer((c.hidden_size,), ("embed_norm",), init="ones"),
      "query": layer((heads, c.head_dim, c.hidden_size), ("heads", "head_dim", "embed"),
                     fan_in=c.hidden_size),
      "key": layer((kv, c.head_dim, c.hidden_size), ("kv_heads", "head_dim", "embed"),
                   fan_in=c.hidden_size),
      "value": layer((kv, c.head_dim, c.hidden_size), ("kv_heads", "head_dim", "embed"),
                     fan_in=c.hidden_size),
      "output": layer((c.hidden_size, heads, c.head_dim), ("embed", "heads", "head_dim"),
                      fan_in=heads * c.head_dim),
      "mlp_norm": layer((c.hidden_size,), ("embed_norm",), init="ones"),
      "gate": layer((c.intermediate_size, c.hidden_size), ("mlp", "embed"), fan_in=c.hidden_size),
      "up": layer((c.intermediate_size, c.hidden_size), ("mlp", "embed"), fan_in=c.hidden_size),
      "down": layer((c.hidden_size, c.intermediate_size), ("embed", "mlp"),
                    fan_in=c.intermediate_size),
    },
    "final_norm": ParamSpec((c.hidden_size,), ("embed_norm",), init="ones"),
  }
  if not c.tie_embeddings:
    specs["head"] = ParamSpec((c.vocab_size, c.hidden_size), ("vocab", "embed"),
                              fan_in=c.hidden_size)
  return specs


# Where each leaf of `param_specs` is found in published files. "{}" stands for the layer number.
GGUF_NAMES = {
  "embedding": "token_embd.weight",
  "layers.attention_norm": "blk.{}.attn_norm.weight",
  "layers.query": "blk.{}.attn_q.weight",
  "layers.key": "blk.{}.attn_k.weight",
  "layers.value": "blk.{}.attn_v.weight",
  "layers.output": "blk.{}.attn_output.weight",
  "layers.mlp_norm": "blk.{}.ffn_norm.weight",
  "layers.gate": "blk.{}.ffn_gate.weight",
  "layers.up": "blk.{}.ffn_up.weight",
  "layers.down": "blk.{}.ffn_down.weight",
  "final_norm": "output_norm.weight",
  "head": "output.weight",
}

HF_NAMES = {
  "embedding": "model.embed_tokens.weight",
  "layers.attention_norm": "model.layers.{}.input_layernorm.weight",
  "layers.query": "model.layers.{}.self_attn.q_proj.weight",
  "layers.key": "model.layers.{}.self_attn.k_proj.weight",
  "layers.value": "model.layers.{}.self_attn.v_proj.weight",
  "layers.output": "model.layers.{}.self_attn.o_proj.weight",
  "layers.mlp_norm": "model.layers.{}.post_attention_layernorm.weight",
  "layers.gate": "model.layers.{}.mlp.gate_proj.weight",
  "layers.up": "model.layers.{}.mlp.up_proj.weight",
  "layers.down": "model.layers.{}.mlp.down_proj.weight",
  "final_norm": "model.norm.weight",
  "head": "lm_head.weight",
}

# Leaves whose rows llama.cpp stores in interleaved rotary order.
GGUF_ROTARY_LEAVES = ("layers.query", "layers.key")

# GGUF facts of a llama that change nothing in the forward function.
_GGUF_INERT = {"tensor_data_layout", "expert_count", "expert_used_count"}


def config_from_gguf(metadata: Mapping[str, Any], *, tied: bool) -> ModelConfig:
  """The configuration in a GGUF file's "llama.*" facts. `tied`: the file has no output matrix.

  A fact this family cannot honour (rotary scaling, experts, a sliding window, ...) or does not know
  is refused by name with ValueError: ignoring it would load a model that is quietly another one.
  """
  facts = {key.removeprefix("llama."): value for key, value in metadata.items()
           if key.startswith("llama.")}

  def take(name, default=None):
    value = facts.pop(name, default)
    if value is None:
      raise ValueError(f"GGUF metadata lacks 'llama.{name}': the file is incomplete")
    if isinstance(value, list):  # one number per layer
      if len(set(value)) != 1:
        raise ValueError(f"GGUF 'llama.{name}' differs between layers ({value}): only models with "
                         "equal layers are supported")
      value = value[0]
    return value

  hidden, heads = take("embedding_length"), take("attention.head_count")
  head_dim = take("attention.key_length", hidden // heads)
  config = ModelConfig(
    family="llama",
    vocab_size=take("vocab_size", len(metadata.get("tokenizer.ggml.tokens", ())) or None),
    hidden_size=hidden, num_layers=take("block_count"), num_heads=heads,
    num_kv_heads=take("attention.head_count_kv", heads), head_dim=head_dim,
    intermediate_size=take("feed_forward_length"),
    rope_base=float(take("rope.freq_base", 10000.0)),  # the format's stated default
    norm_eps=float(take("attention.layer_norm_rms_epsilon")),
    max_positions=take("context_length"), tie_embeddings=tied)
  for name in ("attention.value_length", "rope.dimension_count"):
    if (size := take(name, head_dim)) != head_dim:
      raise ValueError(f"GGUF 'llama.{name}' is {size} but the head size is {head_dim}: unequal "
                       "head sizes and partial rotary positions are not supported")
  _refuse_gguf_leftovers(facts)
  return config


def _refuse_gguf_leftovers(facts: dict[str, Any]) -> None:
  if (kind := facts.pop("rope.scaling.type", "none")) != "none":
    raise ValueError(f"GGUF 'llama.rope.scaling.type' is {kind!r}: this rotary scaling is not "
                     "supported (supported: 'none')")
  if experts := facts.get("expert_count", 0):
    raise ValueError(f"GGUF 'llama.expert_count' is {experts}: mixtures of experts are not "
                     "llama-type models")
  if unknown := sorted(set(facts) - _GGUF_INERT):
    raise ValueError(f"GGUF metadata holds facts the llama family does not know: "
                     f"{['llama.' + name for name in unknown]}")


# What each key of an HF config.json must say, where the llama family can honour one value only.
_HF_REQUIRED = {
  "attention_bias": False, "mlp_bias": False, "hidden_act": "silu", "rope_interleaved": False,
  "partial_rotary_factor": 1.0, "attention_dropout": 0.0, "sliding_window": None,
}
_HF_INERT = {
  "_name_or_path", "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id",
  "initializer_range", "is_llama_config", "model_type", "pad_token_id", "pretraining_tp",
  "tokenizer_class", "torch_dtype", "transformers.js_config", "transformers_version", "use_cache",
}


def config_from_hf(data: Mapping[str, Any]) -> ModelConfig:
  """The configuration in an HF config.json. Unknown keys and rotary kinds are refused by name."""
  data = dict(data)

  def take(name, default=None):
    value = data.pop(name, None)
    value = default if value is None else value
    if value is None:
      raise ValueError(f"config.json lacks {name!r}")
    return value

  hidden, heads = take("hidden_size"), take("num_attention_heads")
  config = ModelConfig(
    family="llama", vocab_size=take("vocab_size"), hidden_size=hidden,
    num_layers=take("num_hidden_layers"), num_heads=heads,
    num_kv_heads=take("num_key_value_heads", heads), head_dim=take("head_dim", hidden // heads),
    intermediate_size=take("intermediate_size"), rope_base=_take_rope_base(data),
    norm_eps=float(take("rms_norm_eps")), max_positions=take("max_position_embeddings"),
    tie_embeddings=take("tie_word_embeddings", False))
  for name, wanted in _HF_REQUIRED.items():
    if (value := data.pop(name, wanted)) != wanted:
      raise ValueError(f"config.json says {name!r}: {value!r}; the llama family supports "
                       f"{wanted!r} only")
  if unknown := sorted(set(data) - _HF_INERT):
    raise ValueError(f"config.json holds keys the llama family does not know: {unknown}")
  return config


def _take_rope_base(data: dict[str, Any]) -> float:
  """Older files write rope_theta and rope_scaling, newer ones rope_parameters with both inside."""
  bases = [base] if (base := data.pop("rope_theta", None)) is not None else []
  for name in ("rope_scaling", "rope_parameters"):
    settings = dict(data.pop(name, None) or {})
    kind = settings.pop("rope_type", settings.pop("type", "default"))
    settings.pop("type", None)
    if kind != "default":
      raise ValueError(f"config.json {name!r} is of kind {kind!r}: this rotary scaling is not "
                       "supported (supported: 'default')")
    if "rope_theta" in settings:
      bases.append(settings.pop("rope_theta"))
    if settings:
      raise ValueError(f"config.json {name!r} holds unknown keys {sorted(settings)}")
  if len(set(bases)) > 1:
    raise ValueError(f"config.json states several rotary bases: {bases}")
  return float(bases[0]) if bases else 10000.0  # the format's stated default


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """The config.json of a llama, as transformers reads it (4.x and 5.x)."""
  return {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
    "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "vocab_size": config.vocab_size, "hidden_size": config.hidden_size,
    "num_hidden_layers": config.num_layers, "num_attention_heads": config.num_heads,
    "num_key_value_heads": config.num_kv_heads, "head_dim": config.head_dim,
    "intermediate_size": config.intermediate_size, "rope_theta": config.rope_base,
    "rope_scaling": None, "rms_norm_eps": config.norm_eps,
    "max_position_embeddings": config.max_positions, "tie_word_embeddings": config.tie_embeddings,
  }
