import pytest
from weighbridge_engines.mlx_qwen.runtime.answer import AnswerText, Delta

OPEN, CLOSE = 100, 101


class Detokenizer:
    """Token n is the n-th word; a token above 1000 completes only with the one after it, like half a character."""

    def __init__(self, words):
        self.words = words
        self.pending = ""
        self.text = ""
        self.seen = 0

    def add_token(self, token):
        if token >= 1000:
            self.pending += self.words[token - 1000]
            return
        self.text += self.pending + self.words[token]
        self.pending = ""

    def finalize(self):
        self.text += self.pending
        self.pending = ""

    @property
    def last_segment(self):
        segment, self.seen = self.text[self.seen :], len(self.text)
        return segment


class Tokenizer:
    def __init__(self, words, thinking=False):
        self.words = words
        self.has_thinking = thinking
        self.think_start_tokens, self.think_end_tokens = (OPEN,), (CLOSE,)

    @property
    def detokenizer(self):
        return Detokenizer(self.words)


def deltas(answer, tokens):
    return [*(answer.add(token) for token in tokens), answer.finish()]


def total(pieces):
    return sum(pieces, Delta())


def test_text_streams_piece_by_piece():
    answer = AnswerText(Tokenizer(["a", "b"]), [], [])
    assert deltas(answer, [0, 1]) == [Delta("a"), Delta("b"), Delta()]


def test_what_is_incomplete_is_shown_at_the_end():
    answer = AnswerText(Tokenizer(["a", "b"]), [], [])
    assert deltas(answer, [0, 1001]) == [Delta("a"), Delta(), Delta("b")]


def test_a_stop_sequence_may_span_tokens():
    answer = AnswerText(Tokenizer(["ab", "cd", "ef"]), ["bcde"], [])
    assert total(deltas(answer, [0, 1, 2])) == Delta("a")
    assert answer.stopped_by == "bcde"


def test_held_text_comes_out_when_the_answer_ends_otherwise():
    answer = AnswerText(Tokenizer(["ab", "cd"]), ["cdX"], [])
    assert deltas(answer, [0, 1]) == [Delta("ab"), Delta(), Delta("cd")]
    assert answer.stopped_by is None


@pytest.mark.parametrize("in_prompt", [True, False])
def test_thinking_is_told_from_answering(in_prompt):
    words = ["\n", "hm", "\n\n", "yes"]
    prompt = [7, OPEN] if in_prompt else [7]
    tokens = ([] if in_prompt else [OPEN]) + [0, 1, CLOSE, 2, 3]
    answer = AnswerText(Tokenizer(words, thinking=True), [], prompt)
    assert total(deltas(answer, tokens)) == Delta(text="yes", reasoning="hm")
    # The thought's tokens and its tags; a tag in the prompt is not the answer's.
    assert answer.reasoning_tokens == (3 if in_prompt else 4)


def test_a_closed_thought_in_the_prompt_means_answering():
    answer = AnswerText(Tokenizer(["a"], thinking=True), [], [OPEN, CLOSE])
    assert total(deltas(answer, [0])) == Delta(text="a")
    assert answer.reasoning_tokens == 0


def test_stop_sequences_are_not_looked_for_in_thoughts():
    answer = AnswerText(Tokenizer(["stop", "go"], thinking=True), ["stop"], [OPEN])
    assert total(deltas(answer, [0, CLOSE, 1])) == Delta(text="go", reasoning="stop")
    assert answer.stopped_by is None


def test_text_pending_at_a_tag_belongs_to_the_side_before_it():
    answer = AnswerText(Tokenizer(["a", "b"], thinking=True), [], [OPEN])
    assert total(deltas(answer, [1000, CLOSE, 1])) == Delta(text="b", reasoning="a")


def test_line_breaks_within_an_answer_stay():
    answer = AnswerText(Tokenizer(["a", "\n\n", "b"], thinking=True), [], [])
    assert total(deltas(answer, [0, 1, 2])) == Delta(text="a\n\nb")
