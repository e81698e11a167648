"""Byte-level BPE tokenizers, from GGUF metadata or an HF folder.

Content is not control: unless the caller says otherwise, the spelling of a control token inside a
text is encoded as plain text, by a backend whose vocabulary does not contain the control tokens.
"""

from __future__ import annotations

import codecs
import copy
import dataclasses
import functools
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers

# Values of tokenizer.ggml.token_type, from the GGUF format.
_CONTROL, _USER_DEFINED = 3, 4

_LLAMA3_SPLIT = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
  r"|\s*[\r\n]+|\s+(?!\S)|\s+")


def _byte_level(use_regex: bool) -> dict[str, Any]:
  """With the regex, ByteLevel first splits as GPT-2 does; without, it only spells out bytes."""
  return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True,
          "use_regex": use_regex}


_GPT2 = {"pre_tokenizer": _byte_level(True)}
# Every digit is cut out before GPT-2's pattern sees the rest, so "a  1" is "a", "  ", "1".
_DIGITS = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
  {"type": "Digits", "individual_digits": True}, _byte_level(True)]}}
_LLAMA3 = {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
  {"type": "Split", "pattern": {"Regex": _LLAMA3_SPLIT}, "behavior": "Isolated", "invert": False},
  _byte_level(False)]}, "ignore_merges": True, "add_bos": True}

# What the names in tokenizer.ggml.pre stand for.
_PRE_KINDS: dict[str, dict[str, Any]] = {
  "gpt-2": _GPT2,
  "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "command-r": _DIGITS,
  "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3,
}


@functools.cache
def _byte_alphabet() -> dict[str, int]:
  """GPT-2's spelling of bytes: printable Latin-1 stands for itself, the rest from U+0100 on."""
  printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
  others = [byte for byte in range(256) if byte not in set(printable)]
  spelled = {chr(byte): byte for byte in printable}
  return spelled | {chr(0x100 + place): byte for place, byte in enumerate(others)}


def _bytes_of(spelling: str) -> bytes:
  alphabet = _byte_alphabet()
  if all(char in alphabet for char in spelling):
    return bytes(alphabet[char] for char in spelling)
  return spelling.encode()


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
  """Text to ids and back. Build it with `from_gguf_metadata` or `from_hf`."""

  definition: Mapping[str, Any] = dataclasses.field(repr=False)  # the content of a tokenizer.json
  control: Mapping[str, int] = dataclasses.field(repr=False)  # spelling to id
  bos_id: int | None
  eos_id: int | None
  pad_id: int | None  # may equal an end token's id: masks come from lengths, never from this
  end_ids: tuple[int, ...]  # every end token the model's files declare
  add_bos: bool  # the files ask for the start token before a text
  chat_template: str | None = dataclasses.field(repr=False)  # jinja

  def __post_init__(self) -> None:
    ids = set(self.control.values())
    for name in ("bos_id", "eos_id", "pad_id"):
      value = getattr(self, name)
      if value is not None and not 0 <= value < self.vocab_size:
        raise ValueError(f"{name} {value} lies outside the vocabulary of {self.vocab_size}")
    if plain := [end for end in self.end_ids if end not in ids]:
      raise ValueError(f"end tokens {plain} are not control tokens of the tokenizer")
    if self.add_bos and self.bos_id is None:
      raise ValueError("the tokenizer asks for a start token but names none (bos_token_id)")

  @functools.cached_property
  def _with_control(self) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_str(json.dumps(self.definition))

  @functools.cached_property
  def _content_only(self) -> tokenizers.Tokenizer:
    # Built apart, without the control tokens, so that no text whatsoever can become one.
    model = self.definition["model"]
    vocab = {word: id for word, id in model["vocab"].items() if word not in self.control}
    added = [token for token in self.definition["added_tokens"] if not token["special"]]
    definition = {**self.definition, "added_tokens": added, "post_processor": None,
                  "model": {**model, "vocab": vocab, "unk_token": None}}
    return tokenizers.Tokenizer.from_str(json.dumps(definition))

  @functools.cached_property
  def token_bytes(self) -> tuple[bytes, ...]:
    """The bytes each id stands for. A control token stands for its spelling."""
    table = [b""] * self.vocab_size
    for spelling, id in self.definition["model"]["vocab"].items():
      table[id] = _bytes_of(spelling)
    for token in self.definition["added_tokens"]:
      table[token["id"]] = token["content"].encode()
    return tuple(table)

  @functools.cached_property
  def control_ids(self) -> frozenset[int]:
    return frozenset(self.control.values())

  @functools.cached_property
  def vocab_size(self) -> int:
    """One more than the largest id. The model's embedding may have more rows."""
    added = [token["id"] for token in self.definition["added_tokens"]]
    return 1 + max(*self.definition["model"]["vocab"].values(), *added)

  def encode(self, text: str, *, allow_control: bool = False, at_start: bool = False) -> list[int]:
    """Ids of a text.

    Args:
      allow_control: spellings of control tokens become control tokens. For template text only.
      at_start: the text begins a sequence, so the start token is put first where the model's files
        ask for one (and the text does not begin with it already).
    """
    backend = self._with_control if allow_control else self._content_only
    try:
      text.encode()
    except UnicodeEncodeError as error:
      raise ValueError(f"cannot encode text with a lone surrogate at character {error.start}: "
                       "decode it with errors='replace' first") from None
    ids = backend.encode(text, add_special_tokens=False).ids
    return self.with_start(ids) if at_start else ids

  def with_start(self, ids: list[int]) -> list[int]:
    """The ids of a whole sequence, with the start token first where the model's files ask for one."""
    if not self.add_bos or self.bos_id is None or ids[:1] == [self.bos_id]:
      return ids
    return [self.bos_id, *ids]

  def decode(self, ids: Iterable[int], *, skip_control: bool = False) -> str:
    """Text of ids; bytes that are not UTF-8 (an unfinished character) become U+FFFD."""
    return self.to_bytes(ids, skip_control=skip_control).decode("utf-8", errors="replace")

  def to_bytes(self, ids: Iterable[int], *, skip_control: bool = False) -> bytes:
    skipped = self.control_ids if skip_control else ()
    return b"".join(self._bytes(int(id)) for id in ids if int(id) not in skipped)

  def _bytes(self, id: int) -> bytes:
    if not 0 <= id < self.vocab_size:
      raise ValueError(f"id {id} lies outside the vocabulary of {self.vocab_size}")
    return self.token_bytes[id]

  def control_id(self, spelling: str) -> int:
    if spelling not in self.control:
      raise ValueError(f"{spelling!r} is not a control token (known: {sorted(self.control)})")
    return self.control[spelling]

  def spelling_of(self, control_id: int | None) -> str | None:
    """How a control token is written; None for None and for ids that are no control token."""
    return next((word for word, id in self.control.items() if id == control_id), None)

  def save(self, folder: str | os.PathLike[str]) -> None:
    """Writes tokenizer.json, tokenizer_config.json and generation_config.json for transformers."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    named = {"bos_token": self.bos_id, "eos_token": self.eos_id, "pad_token": self.pad_id}
    config = {
      "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False,
      "add_bos_token": self.add_bos, "chat_template": self.chat_template,
      **{name: self.spelling_of(id) for name, id in named.items()},
    }
    ids = {"bos_token_id": self.bos_id, "pad_token_id": self.pad_id,
           "eos_token_id": list(self.end_ids)}
    for name, data in (("tokenizer.json", self.definition), ("tokenizer_config.json", config),
                       ("generation_config.json", ids)):
      data = {key: value for key, value in data.items()
              if value is not None or name == "tokenizer.json"}
      (folder / name).write_text(json.dumps(data, ensure_ascii=False), encoding="utf-8")


class IncrementalDecoder:
  """Decodes one id at a time into complete characters, for streaming.

  Pieces joined equal the text of all ids at once. A character whose bytes are spread over tokens
  appears when its last byte does; U+FFFD appears only for bytes that cannot become a character.
  When the prompt ends inside a character, its bytes wait here for the rest of it, and no other part
  of the prompt is repeated.
  """

  def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = (), *,
               skip_control: bool = False) -> None:
    self._tokenizer, self._skip_control = tokenizer, skip_control
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    self._decoder.decode(tokenizer.to_bytes(prompt_ids, skip_control=skip_control))

  def push(self, token_id: int) -> str:
    """The characters that this id completes; often one word, sometimes nothing."""
    return self._decoder.decode(
      self._tokenizer.to_bytes([token_id], skip_control=self._skip_control))

  def finish(self) -> str:
    """What is left at the end: U+FFFD where a character stayed unfinished, else nothing."""
    return self._decoder.decode(b"", final=True)


def from_gguf_metadata(metadata: Mapping[str, Any]) -> Tokenizer:
  """The tokenizer described by a GGUF file's key-value pairs (wootz.models.gguf.read_metadata).

  Raises:
    ValueError: the tokenizer or its pre-tokenizer is of an unknown kind (named), or incomplete.
  """
  def fact(name, default=None):
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if value is None:
      raise ValueError(f"GGUF metadata lacks 'tokenizer.ggml.{name}'")
    return value

  def token(name):
    return metadata.get(f"tokenizer.ggml.{name}_token_id")

  if (kind := fact("model")) != "gpt2":
    raise ValueError(f"GGUF tokenizer kind {kind!r} is not supported (supported: 'gpt2', which is "
                     "byte-level BPE)")
  if (pre := fact("pre")) not in _PRE_KINDS:
    raise ValueError(f"GGUF pre-tokenizer kind {pre!r} is not known (known: "
                     f"{', '.join(sorted(_PRE_KINDS))}): guessing would change the ids")
  words, types = fact("tokens"), fact("token_type")
  if len(words) != len(types):
    raise ValueError(f"GGUF lists {len(words)} tokens but {len(types)} token types")
  if len(set(words)) != len(words):
    raise ValueError("GGUF lists the same token twice: ids would be ambiguous")
  control = {word: id for id, (word, type) in enumerate(zip(words, types, strict=True))
             if type == _CONTROL}
  ends = [token(name) for name in ("eos", "eot", "eom")]
  bos, add_bos = token("bos"), bool(fact("add_bos_token", _PRE_KINDS[pre].get("add_bos", False)))
  definition = _gguf_definition(words, types, fact("merges"), pre)
  if add_bos and bos in range(len(words)):
    definition["post_processor"] = _start_processor(words[bos], bos)
  return Tokenizer(
    definition=definition, control=control, bos_id=bos, eos_id=token("eos"),
    pad_id=token("padding"), end_ids=_distinct(ends), add_bos=add_bos,
    chat_template=metadata.get("tokenizer.chat_template"))


def _gguf_definition(words, types, merges, pre) -> dict[str, Any]:
  added = [_added_token(id, word, special=type == _CONTROL)
           for id, (word, type) in enumerate(zip(words, types, strict=True))
           if type in (_CONTROL, _USER_DEFINED)]
  return {
    "version": "1.0", "truncation": None, "padding": None, "added_tokens": added,
    "normalizer": None, "pre_tokenizer": _PRE_KINDS[pre]["pre_tokenizer"], "post_processor": None,
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True,
                "use_regex": True},
    "model": {
      "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
      "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
      "ignore_merges": _PRE_KINDS[pre].get("ignore_merges", False),
      "vocab": {word: id for id, word in enumerate(words)},
      "merges": [merge.split(" ", 1) for merge in merges],
    },
  }


def _added_token(id: int, word: str, *, special: bool) -> dict[str, Any]:
  return {"id": id, "content": word, "single_word": False, "lstrip": False, "rstrip": False,
          "normalized": False, "special": special}


def _start_processor(word: str, id: int) -> dict[str, Any]:
  """Other programs that read our tokenizer.json add the start token by this."""
  start = {"SpecialToken": {"id": word, "type_id": 0}}
  def text(name, type_id):
    return {"Sequence": {"id": name, "type_id": type_id}}
  return {"type": "TemplateProcessing", "single": [start, text("A", 0)],
          "pair": [start, text("A", 0), text("B", 1)],
          "special_tokens": {word: {"id": word, "ids": [id], "tokens": [word]}}}


def from_hf(folder: str | os.PathLike[str]) -> Tokenizer:
  """The tokenizer in a folder's tokenizer.json, tokenizer_config.json and generation_config.json.

  Raises:
    FileNotFoundError: no tokenizer.json.
    ValueError: not byte-level BPE, or an end token that the tokenizer does not have.
  """
  folder = Path(folder)
  definition = _read_json(folder / "tokenizer.json", required=True)
  config = _read_json(folder / "tokenizer_config.json")
  _require_byte_level(definition)
  backend = tokenizers.Tokenizer.from_str(json.dumps(definition))

  def named(name):
    word = config.get(name)
    word = word["content"] if isinstance(word, dict) else word
    if word is not None and (id := backend.token_to_id(word)) is None:
      raise ValueError(f"tokenizer_config.json says {name} {word!r}, which tokenizer.json lacks")
    return None if word is None else id

  eos = named("eos_token")
  ends = [eos]
  for name in ("generation_config.json", "config.json"):
    declared = _read_json(folder / name).get("eos_token_id")
    ends += declared if isinstance(declared, list) else [declared]
  bos = named("bos_token")
  started = bos is not None and backend.encode("a", add_special_tokens=True).ids[:1] == [bos]
  return Tokenizer(
    definition=_without_limits(definition),
    control={token["content"]: token["id"] for token in definition["added_tokens"]
             if token["special"]},
    bos_id=bos, eos_id=eos, pad_id=named("pad_token"), end_ids=_distinct(ends),
    add_bos=bool(config.get("add_bos_token", started)), chat_template=_hf_template(folder, config))


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
  if not path.exists() and not required:
    return {}
  try:
    return json.loads(path.read_text(encoding="utf-8"))
  except json.JSONDecodeError as error:
    raise ValueError(f"{path} is not valid JSON: {error}") from error


def _require_byte_level(definition: Mapping[str, Any]) -> None:
  kind = definition["model"].get("type")
  if kind != "BPE" or "ByteLevel" not in json.dumps(definition.get("decoder")):
    decoder = (definition.get("decoder") or {}).get("type")
    raise ValueError(f"tokenizer.json holds model {kind!r} with decoder {decoder!r}: only "
                     "byte-level BPE is supported")


def _without_limits(definition: dict[str, Any]) -> dict[str, Any]:
  """A stored truncation or padding would silently cut or lengthen every text."""
  definition = copy.copy(definition)
  definition["truncation"] = definition["padding"] = None
  return definition


def _hf_template(folder: Path, config: Mapping[str, Any]) -> str | None:
  if (path := folder / "chat_template.jinja").exists():
    return path.read_text(encoding="utf-8")
  template = config.get("chat_template")
  if isinstance(template, list):
    named = {entry["name"]: entry["template"] for entry in template}
    template = named.get("default")
  return template


def _distinct(ids: Iterable[int | None]) -> tuple[int, ...]:
  return tuple(dict.fromkeys(id for id in ids if id is not None))
