"""Chat messages to ids. Only the template's own text may become control tokens."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence, Set
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from wootz.data.tokenizer import Tokenizer

# Unicode's private-use areas: no text in any language holds these characters.
_PRIVATE_USE = (range(0xE000, 0xF900), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))

ROLES = ("system", "user", "assistant", "tool")


def render_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *,
                add_generation_prompt: bool = True) -> list[int]:
  """Ids of a conversation in the model's chat template.

  A control token's spelling inside a message stays text, so no message can end its own turn or
  open another's. The ids are otherwise those of the rendered text encoded as a whole. Where the
  tokenizer asks for a start token the ids begin with exactly one, whether the template writes it or
  not.

  Args:
    messages: each with "role" (one of `ROLES`) and "content" (str), nothing else.
    add_generation_prompt: end with the assistant's header, ready for sampling.

  Raises:
    TypeError: content that is not str.
    ValueError: a malformed message; no chat template; a template that refuses the conversation, has
      no assistant header, or would alter the messages' text in a way that cannot be followed.
  """
  _check_messages(messages)
  guarded, restore = _guard(tokenizer, messages)
  render = functools.partial(_render, tokenizer)
  text = render(guarded, add_generation_prompt)
  if text.translate(restore) != render(messages, add_generation_prompt):
    raise ValueError("the chat template treats control spellings inside messages specially: "
                     "such content cannot be encoded as plain text")
  ids = _encode_guarded(tokenizer, text, restore)
  if add_generation_prompt:
    header = text.removeprefix(render(guarded, False))
    _check_prompt(tokenizer, ids, has_header=header not in ("", text))
  return _with_one_start(tokenizer, ids)


def render_text(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], *,
                add_generation_prompt: bool = True) -> str:
  """The conversation as the template writes it, for people. Encode with `render_chat` instead."""
  _check_messages(messages)
  return _render(tokenizer, messages, add_generation_prompt)


def _check_messages(messages: Sequence[Mapping[str, str]]) -> None:
  if not messages:
    raise ValueError("a conversation needs at least one message")
  for index, message in enumerate(messages):
    if extra := set(message) ^ {"role", "content"}:
      raise ValueError(f"message {index} must have exactly the keys role and content: "
                       f"{sorted(extra)} is missing or extra")
    if message["role"] not in ROLES:
      raise ValueError(f"message {index} has role {message['role']!r} (known: {', '.join(ROLES)})")
    if not isinstance(message["content"], str):
      raise TypeError(f"message {index} has content of type {type(message['content']).__name__}: "
                      "it must be str")


def _guard(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]]
           ) -> tuple[list[dict[str, str]], dict[int, str]]:
  """Replaces control spellings in contents by private-use characters; also returns the way back.

  The beginning of a spelling at a content's end is replaced too: the template's text might complete
  it.
  """
  used = set(_template_of(tokenizer)).union(*(message["content"] for message in messages))
  free = (char for char in map(chr, itertools.chain(*_PRIVATE_USE)) if char not in used)
  stands_for: dict[str, str] = {}

  def hide(spelling):
    if spelling not in stands_for:
      char = next(free, None)
      if char is None:
        raise ValueError("the conversation uses every private-use character of Unicode")
      stands_for[spelling] = char
    return stands_for[spelling]

  guarded = []
  for message in messages:
    pieces = _control_pattern(tokenizer).split(message["content"])
    pieces[1::2] = map(hide, pieces[1::2])
    tail = pieces[-1].rstrip()  # templates may strip
    if begun := _begun_spelling(tail, _spelling_starts(tokenizer)):
      pieces[-1] = tail.removesuffix(begun) + hide(begun) + pieces[-1][len(tail):]
    guarded.append({**message, "content": "".join(pieces)})
  return guarded, {ord(char): spelling for spelling, char in stands_for.items()}


@functools.lru_cache(maxsize=8)
def _spelling_starts(tokenizer: Tokenizer) -> frozenset[str]:
  return frozenset(word[:length] for word in tokenizer.control for length in range(1, len(word)))


def _begun_spelling(text: str, starts: Set[str]) -> str:
  """The longest end of `text` with which a control spelling begins, or an empty string."""
  longest = max(map(len, starts), default=0)
  return next((text[-length:] for length in range(min(longest, len(text)), 0, -1)
               if text[-length:] in starts), "")


@functools.lru_cache(maxsize=8)
def _control_pattern(tokenizer: Tokenizer) -> re.Pattern[str]:
  """Matches any control spelling, in a group, the longest where several begin."""
  longest_first = sorted(tokenizer.control, key=len, reverse=True)
  return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _encode_guarded(tokenizer: Tokenizer, text: str, restore: Mapping[int, str]) -> list[int]:
  """Spellings still visible are the template's control tokens; all between them is content."""
  ids: list[int] = []
  for index, piece in enumerate(_control_pattern(tokenizer).split(text)):
    if index % 2:  # re.split puts what the group matched at the odd places
      ids.append(tokenizer.control[piece])
    elif piece:
      ids += tokenizer.encode(piece.translate(restore))
  return ids


def _check_prompt(tokenizer: Tokenizer, ids: list[int], *, has_header: bool) -> None:
  if not has_header:
    raise ValueError("the chat template writes no assistant header for add_generation_prompt: the "
                     "model would have to guess whose turn it is")
  if ids and ids[-1] in tokenizer.end_ids:
    raise ValueError("the chat template ends the prompt with an end token: the model would "
                     "continue after an end")


def _with_one_start(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
  ids = tokenizer.with_start(ids)
  if tokenizer.add_bos and ids[1:2] == ids[:1]:
    raise ValueError("the chat template writes the start token twice in a row")
  return ids


def _template_of(tokenizer: Tokenizer) -> str:
  if tokenizer.chat_template is None:
    raise ValueError("the model's files hold no chat template")
  return tokenizer.chat_template


def _render(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]],
            add_generation_prompt: bool) -> str:
  try:
    return _compiled(_template_of(tokenizer)).render(
      messages=[dict(message) for message in messages],
      add_generation_prompt=add_generation_prompt,
      bos_token=tokenizer.spelling_of(tokenizer.bos_id) or "",
      eos_token=tokenizer.spelling_of(tokenizer.eos_id) or "")
  except jinja2.TemplateError as error:
    raise ValueError(f"the chat template refuses this conversation: {error}") from error


@functools.lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
  """Templates come with model files, so they run in jinja's sandbox. Settings are transformers'."""
  environment = ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols])
  environment.filters["tojson"] = _to_json
  environment.globals["raise_exception"] = _refuse
  try:
    return environment.from_string(template)
  except jinja2.TemplateError as error:
    raise ValueError(f"the chat template is not valid jinja: {error}") from error


def _refuse(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
  """Plain JSON: jinja's own filter escapes for HTML."""
  return json.dumps(value, ensure_ascii=False, indent=indent)
