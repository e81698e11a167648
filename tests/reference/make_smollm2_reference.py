"""Records how transformers reads the SmolLM2 GGUF file, for tests that must not need torch.

Run it in a virtual environment of its own; the files beside this script were made with Python 3.11
and

    pip install "torch==2.13.0" "transformers==5.24.0" "gguf==0.19.0" "numpy==2.4.6"
    python make_smollm2_reference.py /path/to/SmolLM2-135M-Instruct.Q4_1.gguf

It writes smollm2_tokens.json.gz, smollm2_logits.npz, smollm2_greedy.json and tiny_llama/. With
`--check-export FOLDER` it writes nothing and compares a folder written by wootz.models.hf.save_hf
with the GGUF file: logits and ids must agree.
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
from pathlib import Path

import numpy as np
import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

HERE = Path(__file__).parent


def words(text: str) -> list[str]:
  return text.split()


WORDS = words("""the and of value list return def class print if else for while in range import self
 x y total count data name string number True False None hello world it's don't we'll I'm they've
 naïve café Straße Ελλάδα Москва שלום مرحبا 你好 世界 こんにちは 한국어 ไทย हिन्दी Ærø ŋ ǆ ﬁ İstanbul
 🙂 👩‍👩‍👧 🇨🇿 e\u0301 ö \u200b \ufeff ½ ² Ⅻ ٣ ৫ ① ㊿ € → ≤ ∑
 ‚quote‘ “double” … — \u00a0 \u2028""")
CODE = ["def f(a, b):\n    return a + b\n", "for i in range(10):\n\tprint(i)\n",
        "x = {'a': 1, \"b\": [2,3]}", "if x >= 10 and y != 0: pass  # why",
        "SELECT * FROM t WHERE id = 42;", "#include <stdio.h>\r\n", "<div class=\"a\">&amp;</div>",
        "lambda s: s[::-1].strip()\n\n\n", "0x1F + 1e-9 * 3.14159",
        "    if n <= 1:\n        return 1\n    return n * f(n - 1)\n", "a,b=b,a;c+=1"]
SPACES = [" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", " \n ", "\t\t ", "    ",
          "\u00a0", "\u3000", " " * 17]
NUMBERS = ["0", "7", "42", "1999", "123456789", "3.14", "-1", "1,000,000", "2/3", "10^9", "v1.2.3"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<file_sep>",
           "<jupyter_code>", "<empty_output>", "<|im_start|>user\n", "<|im_end|>\n",
           "<|im_", "end|>", "<|im_end|"]


def make_strings(count: int, seed: int = 7) -> list[tuple[str, bool]]:
  """`count` varied strings, each with whether control spellings become control tokens."""
  rng = random.Random(seed)
  fixed = [("", False), (" ", False), ("a  1", False), ("12345", False), ("<|im_end|>", False),
           ("<|im_end|>", True), ("x<|im_start|>y", False), ("x<|im_start|>y", True),
           ("\n\n\n", False)]
  kinds = [WORDS, WORDS, CODE, SPACES, SPACES, NUMBERS]
  made = list(fixed)
  while len(made) < count:
    parts = []
    for _ in range(rng.randint(1, 14)):
      pool = SPECIAL if rng.random() < 0.08 else rng.choice(kinds)
      parts.append(rng.choice(pool))
      if rng.random() < 0.05:
        parts.append(chr(rng.choice([rng.randrange(32, 0x250), rng.randrange(0x250, 0xD800),
                                     rng.randrange(0xE000, 0x2FA20)])))
      parts.append(rng.choice(["", " ", " ", "\n", ", "]))
    made.append(("".join(parts), rng.random() < 0.5))
  return made


TEXT = """A recipe for learning to program begins with small functions. Each one takes some values,
does one thing, and returns a result that can be tested. For example, this function clamps a number
between a lower and an upper bound:

def clamp(value, low, high):
    if value < low:
        return low
    if value > high:
        return high
    return value

print(clamp(15, 0, 10))  # 10
print(clamp(-3, 0, 10))  # 0

The second habit is to read the error message. When Python says that a name is not defined, it is
usually right, and the name is usually misspelt. In 1949 Maurice Wilkes realised that a good part of
the remainder of his life was going to be spent in finding errors in his own programs. Štěpán, 世界
and Ελλάδα are text as well, and so is 3.14159 or 1,000,000. Some people like to write tests first,
others like to write them last, but those who never write them learn about their mistakes from other
people. A list of numbers can be sorted in place or copied, and each choice has a price:

numbers = [5, 3, 8, 1]
ordered = sorted(numbers)
numbers.sort(reverse=True)
assert ordered == numbers[::-1]

When the list is long, the price matters. When it is short, only clarity does. The best programs are
those that other people can change without fear. """

CHATS = [
  "What is the capital of France?",
  "Write a Python function that reverses a string.",
  "Name three primary colors.",
  "What is 12 + 30?",
  "Write a Python function `clamp(value, low, high)`. Answer with code only.",
  "Translate 'good morning' to Spanish.",
  "Explain in one sentence what a list is.",
  "Write a haiku about rain.",
]


def read_gguf(path: Path):
  tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
  model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name,
                                               dtype=torch.float32)
  return tokenizer, model.eval()


def published_split(tokenizer) -> None:
  """Gives the tokenizer the split that its file names ("smollm"): digits first, then GPT-2's.

  transformers leaves that name out and uses GPT-2's pattern alone, which reads a run of white space
  before a digit differently ("a  1"). The model's own tokenizer.json and llama.cpp split digits
  first.
  """
  tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True),
     pre_tokenizers.ByteLevel(add_prefix_space=False)])


def encode(tokenizer, text: str, control: bool) -> list[int]:
  return tokenizer(text, add_special_tokens=False, split_special_tokens=not control).input_ids


def record_tokens(tokenizer, tokenizer_published) -> None:
  entries = []
  for text, control in make_strings(1000):
    ids, published = (encode(reader, text, control) for reader in (tokenizer, tokenizer_published))
    entry = {"text": text, "control": control, "ids": ids, "decoded": tokenizer.decode(ids)}
    if ids != published:
      entry["published_ids"] = published
    entries.append(entry)
  data = {"transformers": transformers.__version__, "strings": entries}
  # mtime 0: the same content gives the same bytes.
  packed = gzip.compress(json.dumps(data).encode(), mtime=0)
  (HERE / "smollm2_tokens.json.gz").write_bytes(packed)


def record_logits(tokenizer, model) -> None:
  ids = tokenizer(TEXT).input_ids
  ids = (ids * 3)[:512]
  with torch.no_grad():
    logits = model(torch.tensor([ids])).logits[0]
  columns = np.sort(np.random.default_rng(0).choice(logits.shape[1], 64, replace=False))
  top = torch.topk(logits, 8)
  np.savez_compressed(
    HERE / "smollm2_logits.npz", ids=np.int32(ids), logsumexp=torch.logsumexp(logits, -1).numpy(),
    argmax=top.indices[:, 0].int().numpy(), top_ids=top.indices.int().numpy(),
    top_values=top.values.numpy(), columns=np.int32(columns), values=logits[:, columns].numpy())


def record_greedy(tokenizer, model) -> None:
  chats = []
  for question in CHATS:
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    with torch.no_grad():
      output = model.generate(torch.tensor([prompt]), max_new_tokens=48, do_sample=False,
                              attention_mask=torch.ones(1, len(prompt)).long())
    completion = output[0, len(prompt):].tolist()
    chats.append({"messages": messages, "text": text, "prompt": prompt, "completion": completion,
                  "decoded": tokenizer.decode(completion)})
  path = HERE / "smollm2_greedy.json"
  path.write_text(json.dumps({"transformers": transformers.__version__, "chats": chats}, indent=1))


def record_tiny_llama() -> None:
  """An untied bfloat16 llama in shards as transformers writes it, and its float32 logits."""
  torch.manual_seed(0)
  config = LlamaConfig(
    vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, rope_theta=5000.0,
    rms_norm_eps=1e-6, tie_word_embeddings=False, initializer_range=0.3, bos_token_id=1,
    eos_token_id=2)
  model = LlamaForCausalLM(config).to(torch.bfloat16)
  folder = HERE / "tiny_llama"
  model.save_pretrained(folder, max_shard_size="20KB")
  ids = torch.arange(48)[None] * 7 % 96
  # Read anew: model.float() would keep the rotary frequencies that were rounded to bfloat16.
  model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
  with torch.no_grad():
    logits = model(ids).logits[0]
  np.savez_compressed(folder / "logits.npz", ids=ids[0].int().numpy(), logits=logits.numpy())


def check_export(path: Path, folder: Path) -> None:
  tokenizer, model = read_gguf(path)
  published_split(tokenizer)
  exported_tokenizer = AutoTokenizer.from_pretrained(folder)
  exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
  different = sum(
    encode(tokenizer, text, control) != encode(exported_tokenizer, text, control)
    for text, control in make_strings(1000))
  ids = torch.tensor([tokenizer(TEXT).input_ids[:256]])
  with torch.no_grad():
    gap = (model(ids).logits - exported(ids).logits).abs().max().item()
  chat = [{"role": "user", "content": CHATS[0]}]
  same_chat = len({reader.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
                   for reader in (tokenizer, exported_tokenizer)}) == 1
  print(f"strings with other ids: {different} of 1000; largest logit difference: {gap:.2e}; "
        f"chat equal: {same_chat}; end ids: {exported.generation_config.eos_token_id}")


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("gguf", type=Path)
  parser.add_argument("--check-export", type=Path)
  args = parser.parse_args()
  if args.check_export:
    check_export(args.gguf, args.check_export)
    return
  tokenizer, model = read_gguf(args.gguf)
  other = AutoTokenizer.from_pretrained(args.gguf.parent, gguf_file=args.gguf.name)
  published_split(other)
  record_tokens(tokenizer, other)
  record_logits(tokenizer, model)
  record_greedy(tokenizer, model)
  record_tiny_llama()


if __name__ == "__main__":
  main()
