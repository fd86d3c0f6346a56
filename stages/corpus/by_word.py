"""Text to token ids a word at a time, each word tokenised once: the ids that the tokenizer gives of the whole.

Byte-level tokenizers (GPT-2's and all that follow it) cut text into words before they merge anything, and a single space
between two characters that are no space begins a word. Text cut there, and at its added tokens, gives the same ids part
by part; and parts recur, so that most of a text's are looked up. The tokenizer itself makes the ids of every part, and all
that is no such cut (line breaks, runs of spaces) stays within one.

Whether a tokenizer is of this kind is not read off its name. `by_word` declines one that has a token across such a cut
(SuperBPE), and has the others tokenise words that stand for the classes of characters their rules can tell apart, and words
of their own, each behind each. Besides, the first texts of a run are all tokenised as a whole too, and of every call
after that one; a difference stops the run.
"""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.contracts.errors import DataError

Ids = npt.NDArray[np.int32]

_KEPT = 1 << 18  # parts, about 50 MB
_LONGEST = 48  # characters of a part that is kept: longer ones hardly recur
# What stands between added tokens: a part without a space, one before its first space, those behind a space.
_ALONE, _FIRST, _REST = range(3)
_BEFORE = ("", "", " ")
_SPACE = "\u0120"  # how byte-level tokens spell a space
_SPACES = "\u0120\u010a\u0109\u010d\u010b\u010c"  # and the other white space of ASCII
_TOGETHER = 512  # words that are one text for the tokenizer
_CUT = re.compile(r"(?<=\S) (?=\S)")
_Unknown = tuple[int, tuple[int, str]]  # where it stands among the parts; which of the three it is, and its text

_PIECES = [*"aBé中あア한اก7٣²Ⅷ。😀\u00ad\ufeff\x07ªǅ\ue000\n\t\u00a0\u3000", *string.punctuation]
_PIECES += ["क\u093f", "e\u0301", "'s", "’t", "👩\u200d💻", "\r\n"]
_LONGER = 'of in the word Words LONGER don\'t x2 12 123 1234 000 12.5 1,000 e.g. etc). (see "so" a=b == -> // https://a.b/c a@b.c'
_OWN_WORDS = 32  # words of the tokenizer's own vocabulary
_ROUNDS = 3  # of the words of two pieces that are tried, each in an order of its own
_ALL_COMPARED = 256  # texts


class ByWord:
    """Tokenises by parts kept from text to text. Not for several threads at once."""

    def __init__(self, backend: Any, added: Mapping[str, int], pattern: re.Pattern[str]) -> None:
        """`backend`: a tokenizer for which this holds (`by_word`). `added`: its added tokens, which `pattern` finds."""
        self._backend, self._compared = backend, 0
        self._added = {token: np.int32(number).tobytes() for token, number in added.items()}
        self._split = re.compile(f"({pattern.pattern})").split
        vocabulary = backend.get_vocab(with_added_tokens=True)
        self._spaced = np.zeros(max(vocabulary.values(), default=0) + 1, bool)
        self._spaced[[i for token, i in vocabulary.items() if _SPACE in token and token not in added]] = True
        self._kept: tuple[dict[str, bytes], ...] = ({}, {}, {})  # by _ALONE, _FIRST, _REST: part to ids, i32

    def encode(self, texts: Sequence[str]) -> list[Ids]:
        """Ids of each text, i32 [tokens]; no special tokens are added.

        Raises:
            DataError: the tokenizer gives other ids of a whole text.
        """
        if sum(map(len, self._kept)) > _KEPT:
            for kept in self._kept:
                kept.clear()
        cut = [self._parts(text) for text in texts]
        made = self._made(dict.fromkeys(part for _, unknown in cut for _, part in unknown))
        for found, unknown in cut:
            for at, part in unknown:
                found[at] = made[part]
        for kind, part in made:
            if len(part) <= _LONGEST and (kind == _ALONE or (_ends(part) and (kind == _FIRST or _opens(part)))):
                self._kept[kind][part] = made[kind, part]
        joined = [np.frombuffer(b"".join(found), np.int32) for found, _ in cut]
        self._compare(texts, joined)
        return joined

    def _made(self, new: Collection[tuple[int, str]]) -> dict[tuple[int, str], bytes]:
        """Ids of parts. Words behind a space go to the tokenizer together: each has one space, and it opens its first token."""
        words = [key for key in new if key[0] == _REST and " " not in key[1] and _ends(key[1])]
        groups = [words[i : i + _TOGETHER] for i in range(0, len(words), _TOGETHER)]
        made: dict[tuple[int, str], bytes] = {}
        for group, ids in zip(groups, encode_whole(self._backend, [_together(g) for g in groups]), strict=True):
            starts = np.flatnonzero(self._spaced[ids]).tolist()
            if len(starts) == len(group):  # else some token holds a space elsewhere, and they go one by one
                cuts = itertools.pairwise([*starts, len(ids)])
                made |= {key: ids[a:b].tobytes() for key, (a, b) in zip(group, cuts, strict=True)}
        others = [key for key in new if key not in made]
        found = encode_whole(self._backend, [_BEFORE[kind] + part for kind, part in others])
        return made | {key: ids.tobytes() for key, ids in zip(others, found, strict=True)}

    def _parts(self, text: str) -> tuple[list[bytes], list[_Unknown]]:
        """Ids of a text's parts, and the parts whose ids are not kept."""
        found: list[bytes] = []
        unknown: list[_Unknown] = []
        for i, piece in enumerate(self._split(text)):
            if i % 2:
                found.append(self._added[piece])
            elif piece:
                parts = piece.split(" ")
                ids = self._look_up(parts)
                last = len(parts) - 1
                new = [(k, parts[k]) for k, known in enumerate(ids) if known is None]
                if not all((not k or _opens(part)) and (k == last or _ends(part)) for k, part in new):
                    parts = _CUT.split(piece)
                    ids = self._look_up(parts)
                if None in ids:
                    kinds = itertools.chain([_FIRST if len(parts) > 1 else _ALONE], itertools.repeat(_REST))
                    told = enumerate(zip(kinds, parts, ids, strict=False), len(found))
                    unknown += [(at, (kind, part)) for at, (kind, part, known) in told if known is None]
                found += ids  # type: ignore[arg-type]
        return found, unknown

    def _look_up(self, parts: Sequence[str]) -> list[bytes | None]:
        alone, first, rest = self._kept
        if len(parts) == 1:
            return [alone.get(parts[0])]
        return [first.get(parts[0]), *map(rest.get, itertools.islice(parts, 1, None))]

    def _compare(self, texts: Sequence[str], found: Sequence[Ids]) -> None:
        if not texts:
            return
        some = range(len(texts)) if self._compared < _ALL_COMPARED else [self._compared % len(texts)]
        self._compared += len(some)
        for i, whole in zip(some, encode_whole(self._backend, [texts[i] for i in some]), strict=True):
            if not np.array_equal(whole, found[i]):
                raise DataError(
                    "A text tokenised word by word has other ids than as a whole",
                    where=f"a conversation that opens with {texts[i][:80]!r}",
                    expected=f"{len(whole)} ids, the tokenizer's own",
                    got=f"{len(found[i])} ids",
                    do="set prepare.rendering.tokenise to whole, which is slower",
                )


def by_word(backend: Any, added: Mapping[str, int], pattern: re.Pattern[str]) -> ByWord | None:
    """A tokenizer by words, where a byte-level one with these added tokens gives the same ids of a text and of its words."""
    if type(backend.model).__name__ != "BPE" or any(c.isspace() for token in added for c in token):
        return None
    vocabulary = [t for t in backend.get_vocab(with_added_tokens=True) if t not in added]
    if any(map(_crosses, vocabulary)):
        return None
    tried = ByWord(backend, added, pattern)
    try:
        for text in _tries(vocabulary):
            tried.encode([text])
    except DataError:
        return None
    return ByWord(backend, added, pattern)


def _crosses(token: str) -> bool:
    """Whether a byte-level token has a space directly behind what is none."""
    at = token.find(_SPACE, 1)
    while at > 0:
        if token[at - 1] not in _SPACES:
            return True
        at = token.find(_SPACE, at + 1)
    return False


def _tries(vocabulary: Sequence[str]) -> Iterator[str]:
    """Texts in which each of many words stands behind each: pieces, longer words, words of the vocabulary; and, in some
    orders, words of two pieces."""
    draw = np.random.default_rng(0)
    own = sorted(t[1:] for t in vocabulary if t.startswith(_SPACE) and t[1:].isascii() and t[1:].isalnum())
    chosen = [own[i] for i in sorted(draw.choice(len(own), min(_OWN_WORDS, len(own)), replace=False))]
    longer = _LONGER.split()
    words = [w for w in dict.fromkeys([*_PIECES, *longer, *chosen]) if w == w.strip()]
    for word in words:
        yield " ".join(itertools.chain.from_iterable((word, other) for other in words))
        yield "\n".join(f"{word} {other}" for other in [*longer, *chosen[:8]])  # nothing but a line's end before it
    pairs = [a + b for a, b in itertools.product(_PIECES, repeat=2) if a + b == (a + b).strip()]
    for _ in range(_ROUNDS):
        yield " ".join(pairs[i] for i in draw.permutation(len(pairs)))


def _together(words: Sequence[tuple[int, str]]) -> str:
    return "".join(f" {part}" for _, part in words)


def _opens(part: str) -> bool:
    """Whether a part behind a space opens with something else."""
    return bool(part) and not part[0].isspace()


def _ends(part: str) -> bool:
    """Whether a part before a space ends with something else."""
    return bool(part) and not part[-1].isspace()


def encode_whole(backend: Any, texts: Sequence[str]) -> list[Ids]:
    """Ids of each text, i32 [tokens], as the tokenizer gives them; no special tokens are added."""
    encoded = backend.encode_batch_fast(list(texts), add_special_tokens=False)
    return [np.fromiter(e.ids, np.int32, len(e.ids)) for e in encoded]
