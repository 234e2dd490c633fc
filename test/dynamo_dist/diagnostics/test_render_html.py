"""The page: well-formed, self-contained, escaped, complete."""

import dataclasses
import re
from html.parser import HTMLParser

from dynamo_dist.diagnostics import (
    BreakRecord,
    Fact,
    RecompileRecord,
    RunReport,
    merge_ranks,
    render_html,
)

VOID = {"meta", "input", "br", "link", "img", "hr"}
EVIL = (
    "</script></title></pre><script>alert(1)</script>\"' onload=alert(2) {{ 7*7 }} {% raw %}&amp;"
)


class Page(HTMLParser):
    """Elements, attributes and text of a page; ``problems`` lists tags that do not match."""

    def __init__(self, text):
        super().__init__(convert_charrefs=True)
        self.open, self.problems, self.elements, self.text = [], [], [], []
        self.feed(text)
        self.close()
        self.problems += [f"<{tag}> is never closed" for tag in self.open]

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.problems.append(f"</{tag}> at {self.getpos()}")

    def handle_data(self, data):
        if self.open and self.open[-1] not in ("script", "style"):
            self.text.append(data)

    def count(self, tag, **attributes):
        wanted = {name.rstrip("_"): value for name, value in attributes.items()}
        return sum(
            t == tag and all(a.get(k) == v for k, v in wanted.items()) for t, a in self.elements
        )

    @property
    def words(self):
        return " ".join(" ".join(self.text).split())


def test_well_formed(report):
    for shown in (report(), RunReport(), merge_ranks([report(), report(rank=0)])):
        assert Page(render_html(shown)).problems == []


def test_nothing_is_fetched(report):
    text = render_html(report())
    page = Page(text)
    loading = {"src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"}
    assert [a for _, a in page.elements if loading & set(a)] == []
    assert not re.search(r"https?:|@import|url\(|//[a-z]+\.[a-z]", text)
    (policy,) = [a["content"] for _, a in page.elements if "http-equiv" in a]
    assert policy.startswith("default-src 'none'")


def test_figures_stand_in_the_page(report):
    words = Page(render_html(report())).words
    for part in (
        "rank 1 of 8",
        "80 µs → 20 µs",
        "\N{MINUS SIGN}75 %",
        "simulated on h100x8",
        "3 MiB → 4 MiB",
        "230 µs → 170 µs",
        "Data-dependent branching splits the graph 2 times model.py:30 if x.sum() > 0:",
        "Why The branch depends on data. What to write instead y = torch.where(x > 0, a, b)",
        "1 launches removed",
        "skipped triton is missing",
        "fuse failed and was left out",
        "order kept in the generated code",
        "model.py:12 w = self.weight.full_tensor()",
        "n == 3",
        "5.5 → 2.25",
        "measured, CPU",
        "12.25 ms",
    ):
        assert part in words, part


def test_the_picture_shows_both_timelines(report):
    page = Page(render_html(report()))
    assert page.count("svg", class_="plot") == 2
    assert page.count("rect", class_="exposed") == 2
    assert page.count("rect", class_="hidden") == 1
    assert page.count("rect", class_="compute") == 4
    assert page.count("rect", class_="wait") == 2
    assert page.count("rect", class_="lane-back") == 4
    assert "all_gather 1 MiB all_gather bfloat16, 80 µs on the link" in page.words
    assert "100 µs to 180 µs: 80 µs exposed" in page.words


def test_both_timelines_have_one_scale(report):
    boxes = [a for _, a in Page(render_html(report())).elements if a.get("class") == "boxes"]
    assert [a["viewbox"] for a in boxes] == ["0 0 230.0 53", "0 0 230.0 53"]


def test_the_order_of_the_generated_code_is_told(report, graph):
    assert "NOT kept" in Page(render_html(report(graphs=(graph(order_kept=False),)))).words
    assert "not looked at" in Page(render_html(report(graphs=(graph(order_kept=None),)))).words


def test_text_of_users_is_escaped_everywhere(report, graph):
    launch = dataclasses.replace(
        graph().collectives[0],
        name="all_gather",
        stack=f"{EVIL}.py:3: {EVIL}",
        dtype=EVIL,
        group_name=EVIL,
    )
    record = graph(
        collectives=(launch,),
        warnings=(EVIL,),
        phase=EVIL,
        topology=EVIL,
        graph_id=EVIL,
        passes=(dataclasses.replace(graph().passes[2], reason=EVIL, name=EVIL),),
    )
    evil = report(
        graphs=(record,),
        breaks=(BreakRecord(EVIL, EVIL, EVIL, EVIL, EVIL, EVIL, "error", 1, (EVIL,)),),
        recompiles=(RecompileRecord(EVIL, EVIL, EVIL),),
        facts=(Fact(EVIL, EVIL, EVIL, EVIL),),
        topology=EVIL,
        torch_version=EVIL,
    )
    text = render_html(merge_ranks([evil, dataclasses.replace(report(rank=2), breaks=())]))
    page = Page(text)
    assert page.problems == []
    assert page.count("script") == 1
    assert "<script>alert" not in text
    assert not any(name.startswith("on") for _, attributes in page.elements for name in attributes)
    assert page.words.count("<script>alert(1)</script>") > 10
    assert "49" not in page.words


def test_no_graph(report):
    words = Page(render_html(RunReport())).words
    assert words.count("No process of this run called torch.compile.") == 1
    assert "Exposed communication" not in words
    failed = report(graphs=(), breaks=(dataclasses.replace(report().breaks[0], effect="error"),))
    assert "No graph was compiled: see the failed compile." in Page(render_html(failed)).words
    uncalled = RunReport(torch_version="2.13.0")
    assert "No graph came to Inductor" in Page(render_html(uncalled)).words


def test_what_upstream_compiled_is_shown_once(report, graph):
    same = graph(passes=(), after=graph().before)
    page = Page(render_html(report(graphs=(same,))))
    assert page.count("svg", class_="plot") == 1
    assert "Upstream Inductor compiled these graphs." in page.words
    assert "80 µs → 80 µs" not in page.words
    assert "Upstream Inductor compiled" not in Page(render_html(report())).words


def test_ranks_that_differ_come_first(report):
    merged = merge_ranks([report(rank=0), dataclasses.replace(report(rank=1), breaks=())])
    words = Page(render_html(merged)).words
    assert words.index("Ranks differ") < words.index("Graph breaks")
    assert "No report from 6 ranks: 2-7. Ranks of a fake group have no process" in words
    agreed = Page(render_html(merge_ranks([report(rank=r, world_size=2) for r in (0, 1)]))).words
    assert "2 ranks agree" in agreed


def test_not_a_number_in_a_series_does_no_harm(report):
    facts = (Fact("loss", (1.0, float("nan"), float("inf"), 2.0)),)
    page = Page(render_html(report(facts=facts)))
    (line,) = [a for tag, a in page.elements if tag == "polyline"]
    assert line["points"] == "0.0,22.0 120.0,2.0"
