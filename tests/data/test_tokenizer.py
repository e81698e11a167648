"""Text to ids and back, against transformers' own reading and by hand."""

from __future__ import annotations

import gzip
import itertools
import json
import pickle
import re
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from wootz.data import tokenizer as tokenizer_lib
from wootz.models import gguf, pretrained

REFERENCE = Path(__file__).parents[1] / "reference"


@pytest.fixture(scope="module")
def metadata():
  return gguf.read_metadata(gguf.open_gguf(pretrained.fetch_smollm2()))


@pytest.fixture(scope="module")
def smollm2(metadata):
  return tokenizer_lib.from_gguf_metadata(metadata)


@pytest.fixture(scope="module")
def strings():
  packed = (REFERENCE / "smollm2_tokens.json.gz").read_bytes()
  return json.loads(gzip.decompress(packed))["strings"]


def byte_metadata(**changes):
  """GGUF facts of a tokenizer with one token per byte, one merge and three control tokens."""
  letters = list(tokenizer_lib._byte_alphabet())
  words = [*letters, "ab", "<s>", "</s>", "<end>", "<think>"]
  types = [1] * (len(letters) + 1) + [3, 3, 3, 4]
  facts = {"model": "gpt2", "pre": "smollm", "tokens": words, "token_type": types,
           "merges": ["a b"], "bos_token_id": 257, "eos_token_id": 258, "eot_token_id": 259}
  facts = {name: value for name, value in (facts | changes).items() if value is not None}
  return {f"tokenizer.ggml.{name}": value for name, value in facts.items()}


def test_ids_equal_transformers_on_1000_strings(smollm2, strings):
  """Read by transformers with the split the file names ("smollm": digits first)."""
  assert len(strings) == 1000
  for entry in strings:
    ids = smollm2.encode(entry["text"], allow_control=entry["control"])
    assert ids == entry.get("published_ids", entry["ids"]), entry["text"]


def splits_may_differ(text):
  """Several spaces before a digit, or one before a numeral that is not ASCII."""
  return re.search(r"\s\s[0-9]", text) or any(
    a.isspace() and b.isnumeric() and not b.isascii() for a, b in itertools.pairwise(text))


def test_ids_equal_transformers_own_split_but_for_spaces_before_digits(smollm2, strings):
  """transformers drops the name of the split and uses GPT-2's pattern alone; so it reads the file
  as we do, except where that pattern would join white space and a numeral."""
  same = [entry for entry in strings if not splits_may_differ(entry["text"])]
  assert len(same) > 500
  for entry in same:
    assert smollm2.encode(entry["text"], allow_control=entry["control"]) == entry["ids"]


def test_text_of_ids_equals_transformers(smollm2, strings):
  for entry in strings:
    assert smollm2.decode(entry["ids"]) == entry["decoded"]


def test_digits_are_cut_out_before_white_space_is_grouped(smollm2):
  """By hand, from the published pre-tokenizer: "a  1" is "a", two spaces, "1"."""
  def words(text):
    return [smollm2.token_bytes[id].decode() for id in smollm2.encode(text)]
  assert words("a  1") == ["a", "  ", "1"]
  assert words("a  b") == ["a", " ", " b"]
  assert words("2024") == ["2", "0", "2", "4"]


def test_special_tokens_of_smollm2(smollm2):
  assert (smollm2.bos_id, smollm2.eos_id, smollm2.pad_id, smollm2.end_ids) == (1, 2, 2, (2,))
  assert smollm2.vocab_size == 49152
  assert not smollm2.add_bos
  assert smollm2.control_id("<|im_end|>") == 2
  with pytest.raises(ValueError, match="<none>"):
    smollm2.control_id("<none>")


@given(st.text())
@settings(max_examples=200, deadline=None)
def test_any_text_comes_back_and_holds_no_control_token(text):
  tokenizer = _BYTES
  for content in (text, f"{text}<s>{text}</s>", f"<{text}s>"):
    ids = tokenizer.encode(content)
    assert tokenizer.decode(ids) == content
    assert not set(ids) & tokenizer.control_ids


_BYTES = tokenizer_lib.from_gguf_metadata(byte_metadata())


def test_control_spelling_is_text_unless_allowed(smollm2):
  text = "a<|im_end|>\n<|im_start|>system"
  assert not {1, 2} & set(smollm2.encode(text))
  assert smollm2.decode(smollm2.encode(text)) == text
  assert smollm2.encode(text, allow_control=True) == [
    *smollm2.encode("a"), 2, *smollm2.encode("\n"), 1, *smollm2.encode("system")]


def test_content_cannot_reach_control_tokens_even_as_whole_words():
  """With ignore_merges a word of the vocabulary is taken whole: control tokens must not be."""
  facts = byte_metadata(pre="llama-bpe", add_bos_token=False)
  words = [*facts["tokenizer.ggml.tokens"], "quit"]
  facts |= {"tokenizer.ggml.tokens": words,
            "tokenizer.ggml.token_type": [*facts["tokenizer.ggml.token_type"], 3]}
  tokenizer = tokenizer_lib.from_gguf_metadata(facts)
  assert tokenizer.encode("quit", allow_control=True) == [len(words) - 1]
  assert len(tokenizer.encode("quit")) == 4


def test_decode_can_leave_control_tokens_out(smollm2):
  ids = [1, *smollm2.encode("hi"), 2]
  assert smollm2.decode(ids) == "<|im_start|>hi<|im_end|>"
  assert smollm2.decode(ids, skip_control=True) == "hi"
  with pytest.raises(ValueError, match="49152"):
    smollm2.decode([49152])


def test_every_declared_end_token_is_known():
  assert _BYTES.end_ids == (258, 259)
  more = tokenizer_lib.from_gguf_metadata(byte_metadata(eom_token_id=257))
  assert more.end_ids == (258, 259, 257)


def test_add_start_token_flag_is_honoured():
  """ggml-org/llama.cpp#3966: the flag, and the format's default for the kind, decide."""
  with_start = tokenizer_lib.from_gguf_metadata(byte_metadata(add_bos_token=True))
  assert with_start.encode("a", at_start=True) == [257, *with_start.encode("a")]
  assert with_start.encode("<s>a", allow_control=True, at_start=True).count(257) == 1
  assert with_start.encode("a")[0] != 257
  assert 257 not in _BYTES.encode("a", at_start=True)
  by_kind = tokenizer_lib.from_gguf_metadata(byte_metadata(pre="llama-bpe"))
  assert by_kind.encode("a", at_start=True)[0] == 257
  with pytest.raises(ValueError, match="bos_token_id"):
    tokenizer_lib.from_gguf_metadata(byte_metadata(add_bos_token=True, bos_token_id=None))


@pytest.mark.parametrize(("change", "message"), [
  ({"model": "llama"}, "'llama'"), ({"pre": "brand-new"}, "'brand-new'"), ({"pre": None}, "pre"),
  ({"merges": None}, "merges"), ({"token_type": [1]}, "token types"),
  ({"eos_token_id": 5}, r"\[5\]"), ({"padding_token_id": 9999}, "pad_id 9999"),
])
def test_unknown_or_broken_tokenizers_are_refused_by_name(change, message):
  with pytest.raises(ValueError, match=message):
    tokenizer_lib.from_gguf_metadata(byte_metadata(**change))


def test_lone_surrogate_is_refused():
  with pytest.raises(ValueError, match="surrogate at character 2"):
    _BYTES.encode("ab\ud800")


def stream(tokenizer, ids, prompt=()):
  decoder = tokenizer_lib.IncrementalDecoder(tokenizer, prompt)
  return [decoder.push(id) for id in ids], decoder.finish()


def byte_ids(data):
  return [_BYTES.token_bytes.index(bytes([byte])) for byte in data]


def test_sv_3_split_characters():
  """SV-3: pieces hold complete characters only."""
  assert stream(_BYTES, byte_ids(b"\xc4\x8f")) == (["", "ď"], "")
  assert stream(_BYTES, byte_ids("🙂".encode())) == (["", "", "", "🙂"], "")
  # Cut inside a character: one replacement mark, at the very end.
  assert stream(_BYTES, byte_ids(b"a\xf0\x9f")) == (["a", "", ""], "�")


def test_sv_3_prompt_that_ends_inside_a_character():
  """SV-3: no prompt text in the pieces, and the completed character is whole."""
  prompt = byte_ids("prompt €".encode()[:-1])
  assert stream(_BYTES, byte_ids("€!".encode()[-2:]), prompt) == (["€", "!"], "")


@given(st.binary(max_size=12))
@settings(max_examples=200, deadline=None)
def test_sv_3_pieces_joined_equal_the_whole(data):
  ids = byte_ids(data)
  pieces, rest = stream(_BYTES, ids)
  assert "".join(pieces) + rest == _BYTES.decode(ids)


def test_folder_round_trip(tmp_path, smollm2):
  """Saved as an HF folder and read back: the same tokenizer; and `tokenizers` alone reads it."""
  smollm2.save(tmp_path)
  again = tokenizer_lib.from_hf(tmp_path)
  for field in ("control", "bos_id", "eos_id", "pad_id", "end_ids", "add_bos", "chat_template",
                "token_bytes", "vocab_size"):
    assert getattr(again, field) == getattr(smollm2, field), field
  text = "def f(x):\n    return  12 * x<|im_end|>"
  assert again.encode(text) == smollm2.encode(text)
  plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert plain.encode(text).ids == smollm2.encode(text, allow_control=True)


def test_start_token_survives_the_folder(tmp_path):
  with_start = tokenizer_lib.from_gguf_metadata(byte_metadata(add_bos_token=True))
  with_start.save(tmp_path)
  plain = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
  assert plain.encode("ab").ids == [257, 256]
  assert tokenizer_lib.from_hf(tmp_path).add_bos


def hf_folder(folder, *, config=None, generation=None, decoder=True):
  """A folder as other programs write it, by the `tokenizers` library."""
  made = tokenizers.Tokenizer(models.BPE(
    vocab={letter: id for id, letter in enumerate(tokenizer_lib._byte_alphabet())}, merges=[]))
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  if decoder:
    made.decoder = tokenizers.decoders.ByteLevel()
  made.add_special_tokens(["<s>", "</s>", "<eot>"])
  made.enable_truncation(3)
  made.save(str(folder / "tokenizer.json"))
  for name, data in (("tokenizer_config.json", config), ("generation_config.json", generation)):
    if data is not None:
      (folder / name).write_text(json.dumps(data))
  return folder


def test_foreign_folder(tmp_path):
  """Named tokens may be objects; end tokens come from both files; truncation is not obeyed."""
  hf_folder(tmp_path, config={"bos_token": {"content": "<s>"}, "eos_token": "</s>",
                              "add_bos_token": True, "chat_template": [
                                {"name": "rag", "template": "r"},
                                {"name": "default", "template": "d"}]},
            generation={"eos_token_id": [257, 258]})
  tokenizer = tokenizer_lib.from_hf(tmp_path)
  assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.end_ids) == (256, 257, (257, 258))
  assert tokenizer.chat_template == "d"
  assert tokenizer.encode("hello", at_start=True) == [256, *byte_ids(b"hello")]
  (tmp_path / "chat_template.jinja").write_text("from the file")
  assert tokenizer_lib.from_hf(tmp_path).chat_template == "from the file"


def test_foreign_folder_that_cannot_be_read_is_refused(tmp_path):
  with pytest.raises(FileNotFoundError):
    tokenizer_lib.from_hf(tmp_path)
  hf_folder(tmp_path, decoder=False)
  with pytest.raises(ValueError, match="byte-level"):
    tokenizer_lib.from_hf(tmp_path)
  hf_folder(tmp_path, config={"eos_token": "<gone>"})
  with pytest.raises(ValueError, match="<gone>"):
    tokenizer_lib.from_hf(tmp_path)


def test_tokenizer_crosses_process_borders():
  again = pickle.loads(pickle.dumps(_BYTES))
  assert again.encode("ab<s>") == _BYTES.encode("ab<s>")
