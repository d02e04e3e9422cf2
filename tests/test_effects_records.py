"""The bytes of the ledger: as its documentation has them, back again, and never taken for something else."""

from __future__ import annotations

import hashlib
from typing import Any

import cbor2
import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agentstore import CorruptionError, LimitExceeded, UnencodableState, rules
from agentstore.effect_records import (
    COMPRESS_BYTES_MIN,
    MARK_FORKED,
    Identity,
    Intent,
    Receipt,
    decode_intent,
    decode_pair,
    decode_receipt,
    effect_slot,
    encode_intent,
    encode_pair,
    encode_receipt,
    hash_call,
    identity_of,
    intent_space,
    pack,
    receipt_space,
    unpack,
)
from agentstore.engine import keys
from agentstore.errors import UnsupportedRule
from agentstore.rules import RULES, Action, EffectState, NotDone, Unknown

INTENT = Intent(bytes(32), bytes(16), "charge", "ask", pack({"a": 1}, ()), 20_000, bytes(36), 3, 1, bytes(8), 10**15,
                1_700_000_000_000_000, 17, MARK_FORKED, "why")  # fmt: skip
RECEIPT = Receipt(bytes(8), "result", "call", pack([1, (2,)], ()), "", 4, bytes(36), 3, 1, 1_700_000_000_000_000, 18)


def test_records_come_back() -> None:
    assert decode_intent(encode_intent(INTENT)) == INTENT
    for receipt in (RECEIPT, RECEIPT._replace(seq=None)):
        assert decode_receipt(encode_receipt(receipt)) == receipt
        assert decode_pair(encode_pair(INTENT, receipt)) == (INTENT, receipt)


def test_any_cbor_decoder_reads_them() -> None:
    assert cbor2.loads(encode_intent(INTENT)) == [1, *INTENT]
    assert cbor2.loads(encode_pair(INTENT, RECEIPT)) == [[1, *INTENT], [1, *RECEIPT]]
    assert cbor2.loads(INTENT.arguments[1:]) == {"a": 1}
    big = pack({"text": "a" * COMPRESS_BYTES_MIN}, ())
    assert big[0] == 1
    assert cbor2.loads(zstandard.decompress(big[1:])) == {"text": "a" * COMPRESS_BYTES_MIN}


def test_keys_are_where_the_documentation_says() -> None:
    identity = Identity(b"\0" * 15 + b"\1", 300, 2, 1)
    slot = effect_slot(b"P", identity, b"h" * 16)
    assert slot.intent == b"P" + keys.encode("i", b"\0" * 15 + b"\1", 300, 2, 1)
    assert slot.receipt == b"P" + keys.encode("e", b"\0" * 15 + b"\1", 300, 2, 1)
    assert slot.by_call == b"P" + keys.encode("r", b"h" * 16, b"\0" * 15 + b"\1", 300, 2, 1)
    assert identity_of(slot.intent, intent_space(b"P")) == (identity, None)
    assert identity_of(slot.receipt + keys.encode(b"12345678"), receipt_space(b"P")) == (identity, b"12345678")
    largest = Identity(bytes(16), 2**64 - 1, 100_000, 100_000)
    assert len(effect_slot(keys.encode(2**64 - 1), largest, bytes(16)).by_call) < 511


def test_every_part_of_the_identity_is_in_the_key() -> None:
    identity = Identity(bytes(16), 1, 2, 3)
    others = [
        identity._replace(decision_uuid=bytes(15) + b"\1"),
        identity._replace(decision_seq=2),
        identity._replace(call=1),
        identity._replace(generation=0),
    ]
    hashes = [hash_call(each, "charge", b"\xa0") for each in (identity, *others)]
    hashes += [
        hash_call(identity, "charge", b"\xa1"),
        hash_call(identity, "charg", b"e\xa0"),
    ]
    assert len({key for key, _ in hashes}) == len(hashes)
    assert len({call for _, call in hashes[:5]}) == 1
    assert hashes[0][1] == hashlib.sha256(keys.encode("charge") + b"\xa0").digest()[:16]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(max_size=2000),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=20,
)


@given(values)
def test_values_come_back(value: Any) -> None:
    assert unpack(pack(value, ())) == value


def test_values_that_cannot_be_kept_are_named() -> None:
    with pytest.raises(UnencodableState, match=r"result\.a"):
        pack({"a": object()}, ("result",))


@given(st.binary(max_size=300))
def test_no_bytes_are_taken_for_a_record(data: bytes) -> None:
    for read in (decode_intent, decode_receipt, decode_pair, unpack):
        try:
            read(data)
        except (CorruptionError, LimitExceeded):
            pass
        else:
            assert read is unpack  # which decodes whatever is CBOR behind its first byte
            assert data[:1] in (b"\0", b"\1")


@pytest.mark.parametrize("encoded", [encode_intent(INTENT), encode_receipt(RECEIPT), encode_pair(INTENT, RECEIPT)])
def test_a_record_with_another_shape_is_damage(encoded: bytes) -> None:
    read = {15: decode_intent, 11: decode_receipt}.get(len(cbor2.loads(encoded)) - 1, decode_pair)
    read(encoded)
    for cut in range(len(encoded)):
        with pytest.raises(CorruptionError):
            read(encoded[:cut])
    parts = cbor2.loads(encoded)
    flat = parts if read is not decode_pair else parts[0]
    for place, value in enumerate(flat):
        flat[place] = {"no": "record has a map"}
        if not (read is decode_receipt and place == 6):  # seq: an int or null, and checked where it is used
            with pytest.raises(CorruptionError):
                read(cbor2.dumps(parts))
        flat[place] = value
    flat.append(0)
    with pytest.raises(CorruptionError):
        read(cbor2.dumps(parts))


# --- the rules ----------------------------------------------------------------------------


def test_what_follows_from_each_state_and_rule() -> None:
    expected = {"read": "call", "replay": "call", "query": "query", "skip": "skip", "ask": "ask"}
    for rule, action in expected.items():
        assert rules.decide(EffectState.NOT_STARTED, rule).action is Action.CALL
        assert rules.decide(EffectState.IN_FLIGHT, rule).action is Action.WAIT
        assert rules.decide(EffectState.DONE, rule).action is Action.RETURN
        ruling = rules.decide(EffectState.IN_DOUBT, rule)
        assert ruling.action.value == action
        assert rule in ruling.why


def test_rules_that_cannot_be_followed() -> None:
    assert set(RULES) == {"read", "replay", "query", "compensate", "skip", "ask"}
    for state in EffectState:
        with pytest.raises(UnsupportedRule, match="compensate"):
            rules.decide(state, "compensate")
        with pytest.raises(ValueError, match="no rule"):
            rules.decide(state, "guess")


def test_answers() -> None:
    not_done: list[object] = [NotDone, NotDone("no such key")]
    unknown: list[object] = [Unknown, Unknown("down")]
    results: list[object] = [None, False, 0, "", {}, "NotDone"]
    assert {rules.decide_answer(answer).action for answer in not_done} == {Action.CALL}
    assert {rules.decide_answer(answer).action for answer in unknown} == {Action.ASK}
    assert {rules.decide_answer(answer).action for answer in results} == {Action.RECORD}
    assert (repr(NotDone("x")), repr(Unknown())) == ("NotDone('x')", "Unknown")
