"""Which line of ds4's output is about which request."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_engines.ds4.events import Decoding, PromptDone, PromptProgress, PromptStarted, RequestEnded, Span
from weighbridge_engines.ds4.turns import MOST_KEPT, TurnLog


def span(prompt: int, cached: int = 0) -> Span:
    return Span(cached, prompt, prompt - cached)


class Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_start_in_the_order_in_which_they_were_sent():
    log = TurnLog(sessions=2, now=Time())
    first, second = log.begin(), log.begin()
    log.take(PromptStarted(span(5)))
    assert (first.span, second.span) == (span(5), None)
    log.take(PromptStarted(span(6)))
    assert (first.span, second.span) == (span(5), span(6))


def test_with_several_conversations_each_ends_by_its_own_span():
    log = TurnLog(sessions=2, now=Time())
    first, second = log.begin(), log.begin()
    for prompt in (5, 6):
        log.take(PromptStarted(span(prompt)))
    log.take(RequestEnded(span(6), 3, "stop"))
    assert (first.is_over, second.is_over) == (False, True)
    assert second.ended == RequestEnded(span(6), 3, "stop")


def test_with_one_conversation_a_start_ends_all_before():
    log = TurnLog(sessions=1, now=Time())
    first, second = log.begin(), log.begin()
    log.take(PromptStarted(span(5)))
    assert not first.is_over
    log.take(PromptStarted(span(6)))
    assert (first.is_over, first.ended, second.is_over) == (True, None, False)


def test_a_request_that_was_refused_takes_no_line():
    log = TurnLog(sessions=1, now=Time())
    refused, second = log.begin(), log.begin()
    log.forget(refused)
    log.take(PromptStarted(span(5)))
    assert (refused.is_over, refused.span, second.span) == (True, None, span(5))


def test_one_that_never_started_costs_the_next_its_figures_and_no_later_one():
    log = TurnLog(sessions=1, now=Time())
    never, second = log.begin(), log.begin()
    log.take(PromptStarted(span(5)))
    assert never.span == span(5)  # nothing told that it never came to ds4
    log.close(second)  # its answer is complete, so that line was its own
    third = log.begin()
    log.take(PromptStarted(span(6)))
    assert third.span == span(6)


def test_lines_that_come_late_are_still_of_their_request():
    log = TurnLog(sessions=1, now=Time())
    first = log.begin()
    log.close(first)
    second = log.begin()
    log.take(PromptStarted(span(5)))
    log.take(RequestEnded(span(5), 9, "error", "unterminated tool call"))
    assert first.ended is not None and first.ended.error == "unterminated tool call"
    assert (second.span, second.is_over) == (None, False)


def test_an_end_that_names_no_span_is_of_the_only_one_there_is():
    log = TurnLog(sessions=2, now=Time())
    first, second = log.begin(), log.begin()
    log.take(PromptStarted(span(5)))
    log.take(RequestEnded(None))
    assert (first.is_over, second.is_over) == (True, False)
    third = log.begin()
    for prompt in (6, 7):
        log.take(PromptStarted(span(prompt)))
    log.take(RequestEnded(None))
    assert not second.is_over and not third.is_over


def test_lines_of_nobody_change_nothing():
    log = TurnLog(sessions=1, now=Time())
    for event in (PromptStarted(span(5)), PromptDone(span(5), 1.0), RequestEnded(span(5)), RequestEnded(None)):
        log.take(event)
    turn = log.begin()
    assert (turn.span, turn.is_over) == (None, False)


@pytest.mark.parametrize(
    "line",
    [PromptProgress(span(5), 2, 5, 1.0), PromptDone(span(5), 1.0), Decoding(span(55, 5), 50, 9.0)],
)
def test_with_one_conversation_every_line_shows_that_it_lives(line):
    time = Time()
    log = TurnLog(sessions=1, now=time)
    turn = log.begin()
    assert log.heard_of(turn) == 100.0
    time.now = 160.0
    log.take(line)
    assert log.heard_of(turn) == 160.0


def test_with_several_only_its_own_lines_do():
    time = Time()
    log = TurnLog(sessions=2, now=time)
    first, second = log.begin(), log.begin()
    for prompt in (5, 6):
        log.take(PromptStarted(span(prompt)))
    time.now = 160.0
    log.take(PromptProgress(span(6), 2, 6, 1.0))
    assert (log.heard_of(first), log.heard_of(second)) == (100.0, 160.0)


def test_whoever_waits_is_told_of_each_change():
    log, changes = TurnLog(sessions=1, now=Time()), []
    turn = log.begin()
    turn.on_change = lambda: changes.append((turn.span is not None, turn.is_over))
    log.take(PromptStarted(span(5)))
    log.take(RequestEnded(span(5)))
    assert changes == [(True, False), (True, True)]


@given(st.lists(st.sampled_from(["begin", "start", "end", "close", "forget"]), max_size=60), st.integers(1, 3))
def test_whatever_is_printed_a_request_that_is_over_stays_over_and_few_are_kept(steps, sessions):
    log, turns, over, prompt = TurnLog(sessions, Time()), [], set(), 1
    for step in steps:
        if step == "begin":
            turns.append(log.begin())
        elif step == "start":
            prompt += 1
            log.take(PromptStarted(span(prompt)))
        elif step == "end":
            log.take(RequestEnded(span(prompt)))
        elif turns:
            (log.close if step == "close" else log.forget)(turns[-1])
            assert turns[-1].is_over
        over |= {id(turn) for turn in turns if turn.is_over}
        assert all(turn.is_over for turn in turns if id(turn) in over)
        spans = [turn.span for turn in turns if turn.span is not None]
        assert len(spans) == len(set(spans))  # no line is taken for two requests


def test_where_the_output_tells_nothing_not_all_are_kept():
    log = TurnLog(sessions=1, now=Time())
    turns = [log.begin() for _ in range(MOST_KEPT + 1)]
    log.take(PromptStarted(span(5)))
    assert (turns[0].span, turns[1].span) == (None, span(5))
