"""Ids and secrets: as many random bits as they promise, and none twice."""

from weighbridge_ledger.service.tokens import FETCHED_BYTES, TOKEN_BYTES, Tokens


def test_no_token_comes_twice_over_several_fetches() -> None:
    tokens = Tokens()
    given = [tokens() for _ in range(3 * FETCHED_BYTES // TOKEN_BYTES + 1)]
    assert len(set(given)) == len(given)
    assert all(len(bytes.fromhex(token)) == 16 for token in given)


def test_two_ledgers_give_different_tokens() -> None:
    assert Tokens()() != Tokens()()
