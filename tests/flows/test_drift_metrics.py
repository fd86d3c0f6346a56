"""Counters of real and documented metrics pages: differenced, summed over ranks and replicas, restarts survived."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flows.drifting.metrics import Window, increase, read_page, window_of
from stages.contracts.errors import DataError

PAGES = Path(__file__).parent / "metrics"


def page(name: str) -> str:
    return (PAGES / f"{name}.txt").read_text()


def test_sglangs_own_page_gives_the_accept_length_that_its_answers_told() -> None:
    """Captured from SGLang 0.5.23 with a draft of this line. Between the pages five answers of 40 tokens were served, whose
    meta_info told 22, 22, 17, 19 and 19 verifications."""
    before, after = read_page(page("sglang_0.5.23_0"), "0"), read_page(page("sglang_0.5.23_1"), "1")
    window = window_of(after, increase(before.counters, after.counters))
    assert (window.tokens, window.verifications, window.requests, window.prompt_tokens) == (200, 99, 5, 90)
    assert window.accept_length == pytest.approx(200 / 99)
    assert window.lengths[100.0] == 5 and sum(window.lengths.values()) == 5
    assert after.engine == "sglang" and after.gauges["draft_steps"] == 3


def test_vllms_drafts_and_accepted_tokens_are_told_as_tokens_a_verification_over_whole_answers() -> None:
    reading = read_page(page("vllm_0"), "page")
    window = window_of(reading, reading.counters)
    assert (window.verifications, window.requests, window.prompt_tokens) == (600, 15, 1500)
    assert window.tokens == 600 + 420 + 15, "a bonus token a draft, those accepted, and each answer's first"
    assert window.lengths == {50.0: 2, 100.0: 4, math.inf: 4}


def test_a_restarted_server_counts_from_nothing_and_the_first_page_counts_as_nothing_new() -> None:
    assert increase(None, {"a": 7.0}) == {"a": 0.0}
    assert increase({"a": 100.0, "b": 5.0}, {"a": 30.0, "b": 8.0, "c": 2.0}) == {"a": 30.0, "b": 3.0, "c": 2.0}
    before, after = read_page(page("sglang_0.5.23_1"), "1"), read_page(page("sglang_0.5.23_0"), "0")
    window = window_of(after, increase(before.counters, after.counters))
    assert (window.tokens, window.verifications) == (128, 59), "what the new process has served since it started"


def test_every_series_of_every_rank_and_replica_is_summed_and_windows_add_up() -> None:
    text = page("sglang_0.5.23_1")
    counted = [
        line for line in text.splitlines() if line.startswith(("sglang:spec_verify", "sglang:generation_tokens"))
    ]
    twice = text + "\n".join(
        line.replace('engine_type="unified"', 'dp_rank="1",engine_type="unified"') for line in counted
    )
    one, two = (window_of(r, r.counters) for r in (read_page(text, "x"), read_page(twice + "\n", "x")))
    assert (two.tokens, two.verifications) == (2 * one.tokens, 2 * one.verifications)
    total = Window()
    total.add(one)
    total.add(two)
    assert total.verifications == 3 * one.verifications and total.accept_length == pytest.approx(one.accept_length)


def test_sglangs_gauges_of_averages_are_weighed_by_what_was_verified_and_ranks_of_one_replica_counted_once() -> None:
    lines = ["# TYPE sglang:spec_accept_length gauge", "# TYPE sglang:gen_throughput gauge"]
    for replica, accept, rate in ((0, 3.0, 300.0), (1, 1.5, 300.0)):
        for rank in (0, 1):
            labels = f'{{dp_rank="{replica}",tp_rank="{rank}"}}'
            lines += [f"sglang:spec_accept_length{labels} {accept}", f"sglang:gen_throughput{labels} {rate}"]
    found = read_page("\n".join(lines) + "\n", "x").gauges["accept_length_now"]
    assert found == pytest.approx(600 / (100 + 200)), "not 2.25, the mean of the two"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<html>no</html>", "no metrics page of SGLang or vLLM[\\s\\S]*--enable-metrics"),
        ("# TYPE up gauge\nup 1\n", "1 metrics, none of them theirs"),
        (
            '# TYPE sglang:generation_tokens counter\nsglang:generation_tokens_total{is_streaming="false"} 5\n',
            "no counters of speculation[\\s\\S]*sglang:spec_verify_calls_total",
        ),
    ],
)
def test_a_page_that_tells_nothing_of_speculation_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_page(text, "http://there/metrics")
