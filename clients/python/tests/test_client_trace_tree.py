"""Traces as trees, whatever order their spans arrive in."""

import random
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from weighbridge.demo.checks import check_trace
from weighbridge.demo.trace_tree import Forest, SpanRecord, build_forest

SERVICES = ("client", "engine", "fit", "ledger")


def span(span_id: str, parent_id: str = "", trace_id: str = "t", service: str = "client", start: int = 0) -> SpanRecord:
    return SpanRecord(trace_id, span_id, parent_id, f"name-{span_id}", service, start, start + 1)


@st.composite
def traces(draw: st.DrawFn) -> list[SpanRecord]:
    """Spans of several complete traces: each span's parent is an earlier one of its trace, the first has none."""
    spans: list[SpanRecord] = []
    for trace in range(draw(st.integers(1, 3))):
        for index in range(draw(st.integers(1, 8))):
            parent = f"{trace}-{draw(st.integers(0, index - 1))}" if index else ""
            spans.append(span(f"{trace}-{index}", parent, f"trace-{trace}", draw(st.sampled_from(SERVICES)), index))
    return spans


def ids(forest: Forest) -> list[str]:
    return [member.span_id for top in (*forest.roots, *forest.orphans) for member in top.walk()]


@given(traces(), st.randoms())
def test_complete_traces_are_one_tree_each_in_any_order(spans: list[SpanRecord], order: random.Random) -> None:
    shuffled = list(spans)
    order.shuffle(shuffled)
    forest = build_forest(shuffled)
    assert forest.orphans == ()
    assert sorted(root.span.trace_id for root in forest.roots) == sorted({member.trace_id for member in spans})
    assert sorted(ids(forest)) == sorted(member.span_id for member in spans)
    assert forest == build_forest(spans)


@given(traces(), st.data())
def test_without_one_span_exactly_its_children_are_orphans(spans: list[SpanRecord], data: st.DataObject) -> None:
    lost = data.draw(st.sampled_from(spans))
    rest = [member for member in spans if member is not lost]
    forest = build_forest(rest)
    expected = sorted(member.span_id for member in rest if member.parent_id == lost.span_id)
    assert sorted(node.span.span_id for node in forest.orphans) == expected
    assert sorted(ids(forest)) == sorted(member.span_id for member in rest)


def test_a_parent_in_another_trace_is_no_parent() -> None:
    forest = build_forest([span("a", trace_id="one"), span("b", "a", trace_id="two")])
    assert [node.span.span_id for node in forest.orphans] == ["b"]


def test_a_repeated_span_counts_once() -> None:
    assert ids(build_forest([span("a"), span("b", "a"), span("b", "a")])) == ["a", "b"]


def test_spans_in_a_circle_are_orphans_and_none_is_lost() -> None:
    forest = build_forest([span("a", "b"), span("b", "a"), span("c", "b"), span("d", "d")])
    assert forest.roots == ()
    assert sorted(ids(forest)) == ["a", "b", "c", "d"]


def test_children_stand_in_the_order_of_their_start() -> None:
    forest = build_forest([span("root"), span("late", "root", start=5), span("early", "root", start=2)])
    assert [member.span_id for member in forest.roots[0].walk()] == ["root", "early", "late"]
    assert [child.span.span_id for child in forest.roots[0].children] == ["early", "late"]


def test_the_demo_demands_one_tree_of_every_service_without_orphans() -> None:
    whole = [span("c"), *(span(name, "c", service=name) for name in SERVICES[1:])]
    assert check_trace(build_forest(whole), "t", SERVICES) == []
    assert "no span from fit" in check_trace(build_forest([s for s in whole if s.service != "fit"]), "t", SERVICES)[0]
    torn = [*whole, replace(span("x", "gone"), trace_id="other")]
    assert any("orphan" in problem for problem in check_trace(build_forest(torn), "t", SERVICES))
    assert any("2 roots" in problem for problem in check_trace(build_forest([*whole, span("r")]), "t", SERVICES))
