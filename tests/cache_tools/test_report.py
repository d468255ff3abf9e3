"""The report page: its numbers, that nothing of a manifest becomes markup, and how a browser likes it."""

import html.parser
import json
import os
import pathlib
import re

import pytest
from support import fixed
from support.browser import PROGRAM, Browser
from support.traces import ranks, span, write

from cache_tools.charts import _squarify
from muse_jit.store.layout import Layout

EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&amp;\x1b[31m"
CHARTS = ("bytes", "compile", "time", "use", "trace")


@pytest.fixture
def report(tmp_path, monkeypatch, capfd):
    fixed.stand_still(monkeypatch)

    def report(layout, *arguments, name="report.html"):
        file = tmp_path / name
        code, _, err = fixed.tool(monkeypatch, capfd, "report", file, *arguments, "--cache-dir", layout.root)
        assert (code, err) == (0, "")
        return file

    return report


@pytest.fixture
def cache(tmp_path):
    return fixed.fill(tmp_path / "cache")


@pytest.fixture
def page(report, cache, tmp_path):
    """A report of the fixed cache with a trace."""
    return report(cache, "--trace", write(tmp_path / "trace.json", ranks()))


class _Page(html.parser.HTMLParser):
    """Tags, attributes, and the tables with the section around each."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.attributes, self.tables, self._section, self._cell = [], [], {}, None, False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag == "section":
            self._section = dict(attributes)["id"]
        elif tag == "tr":
            self.tables.setdefault(self._section, []).append([])
        elif tag in ("td", "th"):
            self.tables[self._section][-1].append("")
            self._cell = True

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self.tables[self._section][-1][-1] += data


def test_the_numbers_are_those_of_stats(page, cache, monkeypatch, capfd):
    stats = json.loads(fixed.tool(monkeypatch, capfd, "stats", "--json", "--cache-dir", cache.root)[1])
    tables = _Page(page.read_text()).tables
    rows = tables["bytes"]
    assert rows[0] == ["kernel", "architecture", "entries", "bytes on disk", "size"]
    assert [int(row[3].replace(",", "")) for row in rows if row[0] == "all"] == [stats["total_disk"]]
    sums = {kernel["kernel"]: kernel["disk"] for kernel in stats["kernels"]}
    assert sum(int(row[3].replace(",", "")) for row in rows if row[0] == "toy") == sums["toy"]
    seconds = sum(float(row[3]) for row in tables["compile"][1:])
    assert seconds == pytest.approx(stats["compile_s"], abs=0.05)
    assert tables["time"][-1][-1] == str(stats["entries"])
    assert ["dead here (stale)", str(stats["dead"])] in tables["use"]
    assert ["damaged", str(stats["damaged"]["entries"])] in tables["use"]


def test_damaged_and_stale_entries_and_spills_are_there(page):
    text = page.read_text()
    tables = _Page(text).tables
    assert len(tables["trouble"]) == 1 + 2 + 2
    assert any("bad_manifest" in cell for row in tables["trouble"] for cell in row)
    assert any(row[2] == "made by another toolchain" for row in tables["trouble"])
    assert any(row[3:5] == ["255", "64"] for row in tables["resources"])


def test_the_trace_in_numbers(page):
    rows = _Page(page.read_text()).tables["trace"]
    assert ["compile", "3", "1.200"] in [row[:3] for row in rows]
    assert ["import", "kernel_0"] in [row[:2] for row in rows]


def test_nothing_of_a_manifest_or_a_trace_becomes_markup(report, tmp_path):
    layout = Layout(str(tmp_path / "evil"))
    fixed.put(layout, fixed.key(1, kernel=EVIL, behaviour=EVIL), age=1)
    resources = json.loads(
        pathlib.Path(layout.entry(fixed.key(1, kernel=EVIL, behaviour=EVIL).digest), "entry.json").read_text()
    )
    resources["resources"] = [
        {"name": EVIL, "registers": EVIL, "local_bytes": -1, "code_bytes": 10**400, "shared_bytes": None}
    ]
    path = pathlib.Path(layout.entry(fixed.key(1, kernel=EVIL, behaviour=EVIL).digest), "entry.json")
    path.write_text(json.dumps(resources))
    fixed.put(layout, fixed.key(2))
    pathlib.Path(layout.entry(fixed.key(2).digest), "entry.json").write_text(json.dumps({"schema": EVIL}))
    events = [span(EVIL, 1, 1, kernel=EVIL, digest=EVIL), span("compile", 2, 1, pid=7),
              {"name": "process_name", "ph": "M", "pid": 7, "tid": 7, "args": {"name": EVIL}}]  # fmt: skip
    trace = write(tmp_path / "trace.json", {"traceEvents": events})
    text = report(layout, "--trace", trace).read_text()
    parsed = _Page(text)
    assert parsed.tags.count("script") == 1
    assert "img" not in parsed.tags
    assert not [name for name, _ in parsed.attributes if name.startswith("on") or name == "style"]
    assert "\x1b" not in text
    assert EVIL[:8] not in text.replace("<script>\n(() =>", "")


def test_the_page_names_nothing_to_load(page):
    text = page.read_text()
    parsed = _Page(text)
    assert not {"link", "img", "iframe", "object", "embed", "form", "a"} & set(parsed.tags)
    assert not [name for name, _ in parsed.attributes if name in ("href", "src", "srcset", "action")]
    assert "http://" not in text
    assert "https://" not in text
    assert "url(" not in text
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy


def test_an_empty_cache_and_one_of_very_many(report, tmp_path, monkeypatch):
    monkeypatch.setattr("cache_tools.report._CELLS", 3)
    monkeypatch.setattr("cache_tools.report._ROWS", 4)
    empty = Layout(str(tmp_path / "empty"))
    empty.create()
    assert "There are no entries to draw" in report(empty, name="empty.html").read_text()
    many = fixed.fill(tmp_path / "many")
    text = report(many, name="many.html").read_text()
    assert "Every cell is a kernel on an architecture" in text
    assert "The first 4 of 8 entries" in text


def test_the_file_is_written_whole_or_not_at_all(cache, tmp_path, monkeypatch, capfd):
    fixed.stand_still(monkeypatch)
    arguments = ["--cache-dir", cache.root]
    for target, words in (("/nowhere/r.html", "cannot be written: No such file"), (tmp_path, "Is a directory")):
        code, out, err = fixed.tool(monkeypatch, capfd, "report", target, *arguments)
        assert (code, out) == (2, "")
        assert words in err
    file = tmp_path / "r.html"
    file.write_text("before")
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert fixed.tool(monkeypatch, capfd, "report", file, *arguments)[0] == 2
    assert file.read_text() == "before"
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".muse_jit")] == []


def test_a_link_stays_one_and_a_pipe_takes_the_page(cache, tmp_path, monkeypatch, capfd):
    fixed.stand_still(monkeypatch)
    target = tmp_path / "target.html"
    target.write_text("before")
    os.symlink(target, tmp_path / "link.html")
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for name in ("link.html", "pipe"):
        code, _, err = fixed.tool(monkeypatch, capfd, "report", tmp_path / name, "--cache-dir", cache.root)
        assert (code, err) == (0, "")
    assert target.read_text().startswith("<!doctype html>")
    assert (tmp_path / "link.html").is_symlink()
    assert os.read(reader, 15) == b"<!doctype html>"
    os.close(reader)


@pytest.mark.parametrize("values", [[1.0], [5, 3, 2, 1, 1, 1], [0.001, 1000], [1] * 50, [3, 0.5, 3, 8, 0.1]])
def test_the_cells_of_a_treemap_fill_it_and_do_not_overlap(values):
    boxes = _squarify(values, (0.0, 0.0, 100.0, 100.0))
    for value, (_, _, w, h) in zip(values, boxes, strict=True):
        assert w * h == pytest.approx(1e4 * value / sum(values), rel=1e-6)
    for i, (x, y, w, h) in enumerate(boxes):
        assert x >= -1e-9
        assert y >= -1e-9
        assert x + w <= 100 + 1e-6
        assert y + h <= 100 + 1e-6
        for x2, y2, w2, h2 in boxes[:i]:
            assert min(x + w, x2 + w2) - max(x, x2) <= 1e-6 or min(y + h, y2 + h2) - max(y, y2) <= 1e-6


@pytest.fixture(scope="module")
def browser():
    if PROGRAM is None:
        pytest.skip("no Chromium is installed")
    browser = Browser()
    yield browser
    browser.close()


SIZES = {"wide": 1280, "tablet": 800, "phone": 390}


@pytest.mark.processes
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("size", SIZES)
def test_a_browser_shows_it_without_errors_and_without_scrolling_sideways(browser, page, size, dark):
    browser.open(page, SIZES[size], 900, dark)
    assert browser.problems == []
    assert browser.requests == [f"file://{page}"]  # nothing else was loaded
    assert browser.ask("document.documentElement.scrollWidth") <= SIZES[size]
    background = browser.ask("getComputedStyle(document.body).backgroundColor")
    assert background == ("rgb(13, 13, 13)" if dark else "rgb(249, 249, 247)")
    small = browser.ask(
        "[...document.querySelectorAll('main p, main td, main th, main li, main summary, svg text')]"
        ".filter(e => e.getClientRects().length && parseFloat(getComputedStyle(e).fontSize) < 12).length"
    )
    assert small == 0


@pytest.mark.processes
def test_every_chart_has_its_numbers_as_text(browser, page):
    browser.open(page)
    charts = browser.ask(
        "[...document.querySelectorAll('[data-chart]')].map(f => [f.dataset.chart, "
        "f.querySelectorAll('[data-tip]').length, f.querySelectorAll('tbody tr').length, !!f.querySelector('th')])"
    )
    assert [c[0] for c in charts] == ["bytes", "compile", "time", "use", "resources", "trouble", "trace"]
    for name, marks, rows, head in charts:
        assert rows > 0, name
        assert head, name
        assert marks > 0 or name not in CHARTS, name
    unnamed = browser.ask(
        "[...document.querySelectorAll('[data-tip]')].filter(m => !m.getAttribute('aria-label')).length"
    )
    assert unnamed == 0
    drawn = browser.ask(
        "[...document.querySelectorAll('rect[data-tip]')].filter(r => r.getBoundingClientRect().width < 0.5).length"
    )
    assert drawn == 0


@pytest.mark.processes
def test_words_can_be_read_on_what_is_behind_them(browser, page):
    """Contrast of at least 4.5 to 1 for words, labels inside marks included, in light and dark."""
    script = """
    (() => {
      const rgb = c => c.match(/[\\d.]+/g).slice(0, 3).map(Number);
      const light = c => { const [r, g, b] = rgb(c).map(v => v / 255)
        .map(v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
      const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
        return (x + .05) / (y + .05); };
      const behind = e => { for (; e; e = e.parentElement) { const c = getComputedStyle(e).backgroundColor;
        if (c !== "rgba(0, 0, 0, 0)") return c; } };
      const bad = [];
      for (const e of document.querySelectorAll("h1, h2, p, td, th, summary, .tiles b, .tiles span, .legend li"))
        if (e.textContent.trim() && ratio(getComputedStyle(e).color, behind(e)) < 4.5)
          bad.push(e.outerHTML.slice(0, 90));
      for (const e of document.querySelectorAll("svg .label")) {
        const mark = e.parentElement.querySelector("rect");
        if (ratio(getComputedStyle(e).fill, getComputedStyle(mark).fill) < 4.5) bad.push(e.outerHTML.slice(0, 90)); }
      return bad;
    })()"""
    for dark in (False, True):
        browser.open(page, dark=dark)
        assert browser.ask(script) == []


@pytest.mark.processes
def test_the_keyboard_reaches_every_mark_and_says_what_it_is(browser, page):
    browser.open(page)
    reached = set()
    for _ in range(60):
        browser.press("Tab")
        where = browser.ask("(document.activeElement.closest('[data-chart]') || {dataset: {}}).dataset.chart || ''")
        reached.add(where)
    assert {"bytes", "compile", "time", "use", "resources", "trouble", "trace"} <= reached
    browser.ask("document.querySelector('[data-chart=bytes] [data-tip]').focus()")
    first = browser.ask("document.getElementById('tip').textContent")
    assert not browser.ask("document.getElementById('tip').hidden")
    browser.press("ArrowRight")
    second = browser.ask("document.getElementById('tip').textContent")
    assert second
    assert second != first
    browser.press("ArrowLeft")
    assert browser.ask("document.getElementById('tip').textContent") == first
    browser.press("Escape")
    assert browser.ask("document.getElementById('tip').hidden")
    browser.ask("document.querySelector('[data-chart=bytes] summary').focus()")
    browser.press("Enter")
    assert browser.ask("document.querySelector('[data-chart=bytes] details').open")
    assert browser.problems == []
