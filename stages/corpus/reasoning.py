"""Reasoning blocks in answers: between `<think>` and `</think>`, or apart in `reasoning_content`.

A target whose generation prompt opens the block says only the closing tag, so that a stored completion holds a `</think>`
without its opening one. Rendered as content, such an answer gets an empty block in front of it and an orphaned tag in
its middle; the target never says either.
"""

from __future__ import annotations

import re

from stages.corpus.items import Message, RowFault

_NAMES = ("reasoning_content", "reasoning", "thinking")
OPEN, CLOSE = "<think>", "</think>"
_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_ANALYSIS = re.compile(r"<\|channel\|>analysis<\|message\|>.*?(?:<\|end\|>|\Z)", re.DOTALL)  # harmony's reasoning
_EMPTY = re.compile(r"\s*<think>\s*</think>")


def with_one_name(message: Message) -> Message:
    """The message with its reasoning under `reasoning_content`; older names for it are `reasoning` and `thinking`."""
    if message.keys().isdisjoint(_NAMES):
        return message
    told = next((message[n] for n in _NAMES if isinstance(message.get(n), str)), None)
    kept = {n: v for n, v in message.items() if n not in _NAMES}
    return kept if not told else {**kept, "reasoning_content": told}


def split_thought(message: Message) -> Message:
    """An answer whose content holds a reasoning block, with the block moved to `reasoning_content`, as servers' reasoning
    parsers do; other messages are as they were."""
    content = message["content"]
    if message["role"] != "assistant" or CLOSE not in content or thought_of(message):
        return message
    thought, _, said = content.partition(CLOSE)
    thought = thought.strip("\n").removeprefix(OPEN).strip("\n")
    return {**message, "reasoning_content": thought, "content": said.lstrip("\n")}


def thought_of(message: Message) -> str:
    """The reasoning that a message carries apart from its content."""
    return str(message.get("reasoning_content") or "")


def without_thought(message: Message) -> Message:
    """The message without the reasoning that it carries apart from its content."""
    return {name: value for name, value in message.items() if name != "reasoning_content"}


def opens_thought(prompt: str) -> bool:
    """Whether a rendered prompt ends within a reasoning block."""
    return prompt.rstrip().endswith(OPEN)


def demand_whole_thoughts(prompt: str, answer: str) -> None:
    """Raises RowFault when the rendered answer closes a reasoning block that nobody opened."""
    said = _said(prompt, answer)
    if said.count(CLOSE) > said.count(OPEN):
        raise RowFault("orphaned think tag", f"{said.count(CLOSE)} closing, {said.count(OPEN)} opening")


def says_nothing_first(prompt: str, answer: str) -> bool:
    """Whether the rendered answer would have to open with an empty reasoning block: the template writes one where an answer
    brings no reasoning, and a target that reasons never says it."""
    return _EMPTY.match(_said(prompt, answer)) is not None


def beyond_thought(prompt: str, answer: str) -> str:
    """What an answer says beside its reasoning; with special tokens, as it was generated behind `prompt`."""
    whole = _said(prompt, answer)
    if CLOSE in whole and OPEN not in whole.partition(CLOSE)[0]:
        whole = OPEN + whole
    return _ANALYSIS.sub("", _THOUGHT.sub("", whole))


def _said(prompt: str, answer: str) -> str:
    return (OPEN if opens_thought(prompt) else "") + answer
