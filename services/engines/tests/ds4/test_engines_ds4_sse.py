"""Event streams, whatever pieces their bytes come in. The rules are the HTML standard's; the sessions are real ones."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_engines.ds4.answer import AnswerReader
from weighbridge_engines.ds4.sse import Comment, ServerEvent, SseError, SseParser
from weighbridge_proto.engines.v1 import chat_service_pb2 as chat_pb

RECORDED = Path(__file__).with_name("recorded")
ANSWER = (RECORDED / "answer.sse").read_bytes()
THOUGHT = (RECORDED / "thought.sse").read_bytes()
LONG_PROMPT = (RECORDED / "long-prompt.sse").read_bytes()


def parse(*pieces: bytes) -> list[Comment | ServerEvent]:
    parser = SseParser()
    return [found for piece in pieces for found in parser.feed(piece)]


def whole_answer(found: list[Comment | ServerEvent]) -> tuple[str, str, chat_pb.ChatFinished]:
    """Thinking, text and end of an answer."""
    reader = AnswerReader()
    deltas = [delta for each in found if isinstance(each, ServerEvent) for delta in reader.take(each)]
    assert reader.is_done
    return "".join(d.reasoning for d in deltas), "".join(d.text for d in deltas), reader.finished()


@pytest.mark.parametrize(
    ("sent", "meant"),
    [
        (b"data: a\n\n", [ServerEvent("", "a")]),
        (b"data: a\r\n\r\n", [ServerEvent("", "a")]),
        (b"data: a\r\r", [ServerEvent("", "a")]),
        (b"data:a\n\n", [ServerEvent("", "a")]),
        (b"data:  a \n\n", [ServerEvent("", " a ")]),  # one space after the colon is no part of the value
        (b"data: a\ndata: b\n\n", [ServerEvent("", "a\nb")]),
        (b"data: a\r\ndata: b\r\n\r\n", [ServerEvent("", "a\nb")]),
        (b"data: a\rdata: b\r\r", [ServerEvent("", "a\nb")]),
        (b"data\n\n", [ServerEvent("", "")]),
        (b"event: error\ndata: {}\n\n", [ServerEvent("error", "{}")]),
        (b"event: error\n\ndata: a\n\n", [ServerEvent("", "a")]),  # without data it is none, and its name is forgotten
        (b": prefill\n\n", [Comment()]),
        (b"data: a\n: prefill\ndata: b\n\n", [Comment(), ServerEvent("", "a\nb")]),
        (b"id: 1\nretry: 5\nwhat: ever\ndata: a\n\n", [ServerEvent("", "a")]),
        (b"data: a\n\ndata: cut off", [ServerEvent("", "a")]),
        (b"\xef\xbb\xbfdata: a\n\n", [ServerEvent("", "a")]),
        (b"data: \xe2\x82\xac\n\n", [ServerEvent("", "\u20ac")]),
        (b"data: \xe2\x82\n\n", [ServerEvent("", "\ufffd")]),
        (b"\n\n\n", []),
        (b"", []),
    ],
)
def test_each_rule_of_the_standard_in_every_split(sent, meant):
    assert parse(sent) == meant
    assert parse(*(sent[at : at + 1] for at in range(len(sent)))) == meant
    for at in range(len(sent)):
        assert parse(sent[:at], sent[at:]) == meant


@pytest.mark.parametrize("session", [ANSWER, THOUGHT, LONG_PROMPT], ids=["answer", "thought", "long-prompt"])
def test_a_recorded_session_is_the_same_split_at_any_byte(session):
    # Read independently of the parser: this server writes "data: X" and an empty line for each event.
    events = [ServerEvent("", part[6:]) for part in session.decode().split("\n\n") if part.startswith("data: ")]
    whole = parse(session)
    assert [each for each in whole if isinstance(each, ServerEvent)] == events
    assert whole.count(Comment()) == session.count(b": prefill\n")
    assert parse(*(session[at : at + 1] for at in range(len(session)))) == whole
    for at in range(1, len(session)):
        assert parse(session[:at], session[at:]) == whole
    for ending in (b"\r", b"\r\n"):
        assert parse(session.replace(b"\n", ending)) == whole


@given(st.lists(st.integers(0, len(THOUGHT))), st.sampled_from([b"\n", b"\r", b"\r\n"]))
def test_a_recorded_session_is_the_same_in_any_pieces(cuts, ending):
    sent = THOUGHT.replace(b"\n", ending)
    at = [0, *sorted(cuts), len(sent)]
    assert parse(*(sent[begin:end] for begin, end in itertools.pairwise(at))) == parse(THOUGHT)


@given(st.lists(st.text(st.characters(exclude_characters="\r\n", codec="utf-8")), min_size=1))
def test_what_is_written_as_lines_of_data_is_read_as_written(lines):
    sent = "".join(f"data: {line}\n" for line in lines) + "\n"
    assert parse(sent.encode()) == [ServerEvent("", "\n".join(lines))]


def test_recorded_answers_are_what_the_server_counted():
    # The weights are all zero, so every token is as likely as any other; the sparse file names them w0, w1, ...
    reasoning, text, finished = whole_answer(parse(ANSWER))
    assert (reasoning, text) == ("", "w106041w120009w11551w13914w48419w52652")
    assert finished.reason == chat_pb.FINISH_REASON_LENGTH
    assert not finished.ended_in_thinking
    assert (finished.usage.prompt_tokens, finished.usage.output_tokens) == (6, 6)

    reasoning, text, finished = whole_answer(parse(THOUGHT))
    assert reasoning.count("w") == 4
    assert text == ""
    assert finished.reason == chat_pb.FINISH_REASON_LENGTH
    assert finished.ended_in_thinking
    assert finished.usage.output_tokens == finished.usage.reasoning_tokens == 4


def test_an_event_that_never_ends_is_refused_before_it_fills_memory():
    for piece in (b"data: " + b"x" * 80, b"data: xxxxxxxxxxxxxxxxxxxx\n", b":" + b"x" * 80, b"x" * 80):
        parser = SseParser(max_event_bytes=64)
        with pytest.raises(SseError, match="longer than"):
            for _ in range(10):
                parser.feed(piece)


def test_many_short_events_are_no_long_one():
    parser = SseParser(max_event_bytes=64)
    assert sum(len(parser.feed(b"data: 0123456789\n\n")) for _ in range(100)) == 100
