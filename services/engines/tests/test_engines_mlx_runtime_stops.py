import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from weighbridge_engines.mlx_qwen.runtime.stops import StopScanner


def shown(pieces, stops):
    scanner = StopScanner(stops)
    text = "".join(scanner.feed(piece) for piece in pieces)
    return text + scanner.finish(), scanner.matched


def test_without_stops_every_piece_passes_at_once():
    scanner = StopScanner([])
    assert scanner.feed("abc") == "abc"
    assert scanner.finish() == ""


@pytest.mark.parametrize(
    ("text", "stops", "expected", "matched"),
    [
        ("one\ntwo", ["\n"], "one", "\n"),
        ("say END now", ["END"], "say ", "END"),
        ("ENDING", ["END"], "", "END"),
        ("EN", ["END"], "EN", None),
        ("aab", ["ab"], "a", "ab"),
        # Completed first wins, though the other one begins earlier.
        ("xabcd", ["abcd", "bc"], "xa", "bc"),
        # Completed by the same character: the longer one.
        ("xabc", ["bc", "abc"], "x", "abc"),
        ("ababac", ["abac"], "ab", "abac"),
    ],
)
def test_text_before_the_stop_is_shown_however_it_is_cut(text, stops, expected, matched):
    for size in range(1, len(text) + 1):
        pieces = ["".join(piece) for piece in itertools.batched(text, size)] if hasattr(itertools, "batched") else [
            text[start : start + size] for start in range(0, len(text), size)
        ]  # fmt: skip
        assert shown(pieces, stops) == (expected, matched)


def test_a_possible_start_is_held_back_and_released_when_it_turns_out_otherwise():
    scanner = StopScanner(["<end>"])
    assert scanner.feed("a<en") == "a"
    assert scanner.feed("t") == "<ent"
    assert scanner.feed("<") == ""
    assert scanner.finish() == "<"
    assert scanner.matched is None


def test_nothing_is_shown_after_a_match():
    scanner = StopScanner(["."])
    assert scanner.feed("a.b") == "a"
    assert scanner.feed("c") == ""
    assert scanner.finish() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="empty"):
        StopScanner(["a", ""])


@given(
    text=st.text(alphabet="abc", max_size=40),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=5), max_size=4),
    cuts=st.lists(st.integers(1, 7), max_size=40),
)
def test_what_is_shown_does_not_depend_on_the_cuts_and_holds_no_stop(text, stops, cuts):
    pieces, rest = [], text
    for cut in cuts:
        pieces.append(rest[:cut])
        rest = rest[cut:]
    pieces.append(rest)
    result, matched = shown(pieces, stops)
    # The definition, by brute force: the shortest beginning of the text that ends with a stop.
    ends = [(end, stop) for end in range(1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    if ends:
        first = min(end for end, _ in ends)
        longest = max((stop for end, stop in ends if end == first), key=len)
        assert (result, matched) == (text[: first - len(longest)], longest)
    else:
        assert (result, matched) == (text, None)
