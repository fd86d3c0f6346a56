"""The page: whole without network or script, for a finished line and for any part of one."""

from __future__ import annotations

import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from stages.contracts.evidence import BENCHMARK_EVIDENCE, SERVE_EVIDENCE
from stages.contracts.manifest import PREPARED_MANIFEST
from stages.contracts.params import load_params
from stages.contracts.report import Check, report_path
from stages.reporting.facts import read_line
from stages.reporting.page import render, write_page
from tests.reporting import evidence

PARAMS = load_params(Path(__file__).parents[2] / "params.yaml")
VOID = {"meta", "link", "br", "hr", "img"}


def page(root: Path) -> str:
    return render(read_line(root), PARAMS)


class Reader(HTMLParser):
    """Tags that are opened and not closed, and whatever would be fetched or run."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("script", "iframe", "object", "embed", "base"):
            self.faults.append(tag)
        for name, value in attrs:
            if name.startswith("on") or (name in ("src", "href", "srcset", "action") and value != "data:,"):
                self.faults.append(f"{tag} {name}={value}")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes something else")


def faults(html: str) -> list[str]:
    reader = Reader()
    reader.feed(html)
    outside = re.findall(r"https?://\S+|@import|url\(", html)
    return [*reader.faults, *reader.open, *outside]


def text(html: str) -> str:
    plain = re.sub(r"<style>.*?</style>|<[^>]+>", " ", html, flags=re.S)
    return re.sub(r"\s+", " ", plain.replace("&#39;", "'"))


def test_a_finished_line_says_so_with_its_figures_and_needs_nothing_from_outside(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    html = page(tmp_path)
    assert faults(html) == []
    said = text(html)
    for words in (
        "Fit to serve",
        "1.62 tokens a verification",
        "1.31 × plain decoding",
        "off above 4",
        "53 / 54",
        "Apache-2.0",
    ):
        assert words in said
    assert "the stream after 16 of 30 layers" in said and "earlier draft" not in said


def test_training_shows_places_speed_memory_waiting_and_what_is_known_by_heart(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    html = page(tmp_path)
    said = text(html)
    assert "Accepted by place in the draft, held out" in said and "draft token 2" in said
    assert "rows trained on" in said and "has 1.88, on held-out ones 1.63" in said
    assert "Training ended after step 420, since nothing improved any more." in said
    assert "At most 1 404 MiB in the first process; at most 1.2 % of the time went to waiting" in said
    held = html[html.index("Held-out accept length, simulated") : html.index("Accepted by place in the draft")]
    assert held.count('class="whisker"') == 7, "an interval at every evaluation"


def test_what_a_server_did_under_load_stands_with_its_conditions(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    evidence.served_benchmark().write(tmp_path / BENCHMARK_EVIDENCE)
    html = page(tmp_path)
    assert faults(html) == []
    said = text(html)
    for words in (
        "Where the policy says off, an engine serves that never had a draft.",
        "Mind: figures of a CPU.",
        "100 / 150 / 190",
        "above the 2.00/s it completes at most: the queue grows",
        "plain: 900 ms cold, 300 ms warm",
        "Engines servers started; prefix cache off, 0 prompt tokens from it",
        "471 settings found equal in all arms",
        "33-64 1.700",
        "8 of 8 drafted answers end where they must (7 of the stops",
    ):
        assert words in said, words
    assert said.index("33-64") < said.index("129-256"), "in the order of lengths, not of letters"


def test_equal_facts_give_equal_bytes(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path / "a")
    evidence.write_whole_line(tmp_path / "b")
    pages = [write_page(tmp_path / name).read_bytes() for name in "ab"]
    assert pages[0] == pages[1]


@pytest.mark.parametrize("missing", ["everything", "draft", "serving", "benchmark", "curves", "data"])
def test_any_part_of_a_line_gives_a_whole_page(tmp_path: Path, missing: str) -> None:
    if missing != "everything":
        evidence.write_whole_line(tmp_path)
    gone = {
        "draft": "models",
        "serving": SERVE_EVIDENCE,
        "benchmark": BENCHMARK_EVIDENCE,
        "curves": "reports/curves",
        "data": "data",
    }
    if missing in gone:
        path = tmp_path / gone[missing]
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    html = page(tmp_path)
    assert faults(html) == []
    assert ("Not finished" in html) == (missing in ("everything", "data", "draft"))


def test_a_refusal_stands_at_the_top_with_rows_and_what_to_do(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    refusal = evidence.report("training", "merged rows and states", evidence.merged().digest(), evidence.shifted())
    refusal.write(tmp_path / report_path("training"))
    said = text(page(tmp_path))
    assert said.index("Refused before the training run") < said.index("every slot is shifted by +1 layer")
    assert "slot 1: claims point 16, nearest is point 17" in said and "dvc repro extract" in said


def test_a_report_on_other_bytes_is_not_taken_for_a_verdict(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    evidence.report("deployment", "draft", "sha256:" + "0" * 64).write(tmp_path / report_path("deployment"))
    said = text(page(tmp_path))
    assert "Fit to serve" not in said and "gate-deployment judged something older than what stands here" in said


def test_figures_of_a_draft_trained_on_other_rows_are_told_from_a_refusal_of_these(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    former = "The figures below are of the draft trained before, on other rows"
    assert former not in text(page(tmp_path))
    evidence.merged().model_copy(update={"tokens": 1}).write(tmp_path / "data/merged/manifest.json")
    assert former in text(page(tmp_path))


def test_figures_of_an_earlier_draft_are_called_that(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    evidence.serve().model_copy(update={"draft_digest": "sha256:" + "1" * 64}).write(tmp_path / SERVE_EVIDENCE)
    assert "These figures are of an earlier draft, 111111111111" in text(page(tmp_path))


def test_a_damaged_fact_is_named_not_a_traceback(tmp_path: Path) -> None:
    evidence.write_whole_line(tmp_path)
    (tmp_path / PREPARED_MANIFEST).write_text('{"version": 1')
    said = text(page(tmp_path))
    assert "Some facts cannot be read" in said and "data/prepared/prepared.json" in said


def test_markup_in_a_failing_row_stays_text(tmp_path: Path) -> None:
    evidence.write_data(tmp_path)
    bad = Check(
        table="rows",
        assertion="<b>no</b>",
        column="x",
        success=False,
        expected="1",
        actual="0",
        failing=("<script>alert(1)</script>",),
    )
    evidence.report("extraction", "prepared rows", evidence.prepared().digest(), bad).write(
        tmp_path / report_path("extraction")
    )
    html = page(tmp_path)
    assert faults(html) == [] and "&lt;script&gt;" in html


@pytest.mark.slow
def test_chromium_shows_it_on_a_phone_without_network_console_errors_or_sideways_scrolling(tmp_path: Path) -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.fail("chromium is not installed; `apt-get install chromium`, as .ci/run does")
    evidence.write_whole_line(tmp_path)
    # the probe is put into a copy: the page itself has no script
    probe = (
        "<script>onload = () => { document.title = [document.documentElement.scrollWidth, innerWidth, "
        "performance.getEntriesByType('resource').length].join('/') }</script></body>"
    )
    shown = tmp_path / "page.html"
    shown.write_text(page(tmp_path).replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    flags += ["--disable-component-update", "--disable-sync", f"--user-data-dir={tmp_path / 'profile'}"]
    flags += ["--window-size=500,900", "--enable-logging=stderr", "--v=0", "--dump-dom"]
    # every name resolves to nothing: what the page or the browser itself might ask for ends here
    flags += ["--host-resolver-rules=MAP * ~NOTFOUND"]
    done = subprocess.run([chromium, *flags, shown.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "CONSOLE" not in done.stderr, done.stderr
    found = re.search(r"<title>(\d+)/(\d+)/(\d+)</title>", done.stdout)
    assert found and int(found[1]) <= int(found[2]), "the page is wider than the screen"
    assert "Fit to serve" in done.stdout and done.stdout.count("<svg") > 5
    assert int(found[3]) == 0, "the page loads something beside itself"
