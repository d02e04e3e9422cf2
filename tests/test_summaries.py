"""Summaries as compaction: what they replace, what they leave, and that a bad one changes nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversations import asks, conversations, one_result_for_every_call, result, said
from hypothesis import given
from hypothesis import strategies as st
from test_context import CUTS_MAX

from agentstore import (
    Append,
    CheckpointNotFound,
    Delete,
    ExtractiveSummarizer,
    NotSummarized,
    Set,
    Splice,
    StaleThread,
    Store,
    Summarized,
    Summary,
    Thread,
    ThreadNotFound,
    WindowTooSmall,
    estimate_message,
    legal_cuts,
    originals,
    summarize,
    window,
)
from agentstore.engine.keys import end_of
from agentstore.exchange import exchanges, is_summary, kept_from, pinned_of
from agentstore.summary import SUMMARY_HEAD
from agentstore.testing.scratch import scratch_store

SYSTEM = said("system", "You book flights.")
GOAL = said("user", "Book a flight to Oslo.")
HISTORY = "conversation_history"
PLACE = "agentstore:summary"


def rounds(first: int, count: int) -> list[dict[str, Any]]:
    return [
        m for n in range(first, first + count) for m in (asks(f"c{n}"), result(f"c{n}", f"flight {n} is full " * 5))
    ]


def short(messages: Sequence[Any], previous: str | None) -> str:
    return f"{len(messages)} messages; before: {previous}"


def thread_of(*messages: Any, store: Store | None = None, **fields: Any) -> Thread:
    thread = (store or scratch_store()).thread("t")
    thread.commit(Append(HISTORY, *messages), *[Set(key, value) for key, value in fields.items()], step=7, status="OK")
    return thread


def history(thread: Thread) -> list[Any]:
    messages: list[Any] = thread.load()[HISTORY]
    return messages


def everything(thread: Thread) -> tuple[dict[str, Any], list[tuple[bytes, bytes]]]:
    """The thread's state, and all its records as they are in the engine."""
    state = thread.load()
    assert thread._keys is not None
    prefix = thread._keys.prefix
    with thread._store._engine.read() as snap:
        return state, list(snap.scan(prefix, end_of(prefix)))


def done(result: Summarized | NotSummarized) -> Summarized:
    assert isinstance(result, Summarized), result
    return result


def why(result: Summarized | NotSummarized) -> str:
    assert isinstance(result, NotSummarized)
    assert not result
    return result.why


# --- what a summary is ---------------------------------------------------------------


def test_a_summary_is_a_checkpoint_that_says_what_it_covers() -> None:
    talk = [SYSTEM, GOAL, *rounds(0, 10)]
    thread = thread_of(*talk)
    made = Summary("Flights 0 to 5 are full.", usage={"prompt_tokens": 90, "completion_tokens": 8}, model="small-1")
    got = done(summarize(thread, lambda messages, previous: made, keep_rounds=4))
    cp = got.checkpoint
    assert (cp.seq, cp.parent, cp.reason, cp.step, cp.status) == (1, 0, "summary", 7, "OK")
    where = {"seq": 0, "commit": thread.checkpoint(0).commit_id.hex(), "start": 2, "count": 12}
    message = {"role": "user", "content": SUMMARY_HEAD + "Flights 0 to 5 are full.", PLACE: where}
    assert history(thread) == [SYSTEM, GOAL, message, *talk[-8:]]
    before = sum(map(estimate_message, talk[2:14]))
    assert thread.history(limit=1)[0].metadata["summary"] == {
        **where,
        "messages": 12,
        "model": "small-1",
        "tokens_before": before,
        "tokens_after": estimate_message(message),
        "usage": {"prompt": 90, "completion": 8},
    }
    assert (got.tokens_before, got.tokens_after) == (before, estimate_message(message))
    assert (got.model, got.usage, got.messages) == ("small-1", {"prompt": 90, "completion": 8}, 12)
    assert isinstance(got.changes[0], Splice)


def test_originals_stay_loadable() -> None:
    talk = [SYSTEM, GOAL, *rounds(0, 10)]
    thread = thread_of(*talk)
    summarize(thread, short, keep_rounds=4)
    assert thread.load(at=0)[HISTORY] == talk
    assert originals(thread, history(thread)[2]) == talk[2:14]


def test_a_rolling_summary_covers_the_old_one_and_the_new_span() -> None:
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
    summarize(thread, short, keep_rounds=4)
    thread.commit(Append(HISTORY, *rounds(10, 6)))
    given: list[Any] = []

    def second(messages: Sequence[Any], previous: str | None) -> str:
        given.extend([list(messages), previous])
        return "all of it"

    before = history(thread)
    got = done(summarize(thread, second, keep_rounds=4))
    assert given == [before[3:-8], "12 messages; before: None"]
    after = history(thread)
    assert [is_summary(m) for m in after] == [False, False, True, *[False] * 8]
    assert got.messages == len(before) - 2 - 8
    covered = originals(thread, after[2])
    assert covered == before[2:-8]
    assert originals(thread, covered[0]) == rounds(0, 10)[:12]  # and so on, back to the beginning


def test_what_a_fork_summarized_before_is_found() -> None:
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
    summarize(thread, short, keep_rounds=4)
    fork = thread.fork(at=1, into="fork")
    assert originals(fork, history(fork)[2]) == rounds(0, 10)[:12]
    fork.commit(Append(HISTORY, *rounds(10, 6)))
    done(summarize(fork, short, keep_rounds=2))
    assert is_summary(originals(fork, history(fork)[2])[0])


def test_originals_of_what_is_no_summary() -> None:
    thread = thread_of(GOAL)
    with pytest.raises(ValueError, match="not a summary"):
        originals(thread, GOAL)
    with pytest.raises(ValueError, match="not a summary"):
        originals(thread, {PLACE: {"seq": "x"}})
    with pytest.raises(CheckpointNotFound):
        originals(thread, {PLACE: {"seq": 0, "commit": "00", "start": 0, "count": 1}})


# --- where it may cut ----------------------------------------------------------------


def test_system_prompt_first_goal_and_pinned_messages_stay() -> None:
    pin = {**said("user", "never at night"), "pinned": True}
    rule = said("user", "rule: window seat")
    talk = [SYSTEM, GOAL, *rounds(0, 3), pin, *rounds(3, 3), rule, *rounds(6, 4)]
    thread = thread_of(*talk)
    done(summarize(thread, short, keep_rounds=3, pinned=lambda m: "rule" in str(m.get("content"))))
    after = history(thread)
    assert after[:4] == [SYSTEM, GOAL, pin, rule]
    assert is_summary(after[4]) and after[5:] == talk[-6:]
    covered = [*rounds(0, 7)]
    assert originals(thread, after[4]) == covered


def test_a_summary_is_not_the_first_goal() -> None:
    thread = thread_of(*[said("assistant", f"thought {n} " * 10) for n in range(10)])
    done(summarize(thread, short, keep_rounds=4))
    done(summarize(thread, short, keep_rounds=1))
    assert [is_summary(m) for m in history(thread)] == [True, False]


def test_the_newest_rounds_stay() -> None:
    for keep in (1, 3, 9):
        thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
        done(summarize(thread, lambda m, p: "s", keep_rounds=keep))
        assert history(thread)[3:] == rounds(0, 10)[-2 * keep :]
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
    assert why(summarize(thread, short, keep_rounds=10)) == "nothing_to_cut"


def test_more_stays_by_tokens() -> None:
    talk = [SYSTEM, GOAL, *rounds(0, 20)]
    thread = thread_of(*talk)
    keep = sum(map(estimate_message, talk[-21:]))  # 10 rounds and a half: a cut falls between rounds
    done(summarize(thread, short, keep_rounds=2, keep_tokens=keep))
    assert history(thread)[3:] == talk[-22:]


def test_nothing_is_done_below_the_high_water_mark() -> None:
    talk = [SYSTEM, GOAL, *rounds(0, 10)]
    total = sum(map(estimate_message, talk))
    assert why(summarize(thread_of(*talk), short, high_water=total)) == "below_high_water"
    assert why(summarize(thread_of(*talk), short, high_water=900, usage=(900, len(talk)))) == "below_high_water"
    done(summarize(thread_of(*talk), short, high_water=899, usage=(900, len(talk))))
    done(summarize(thread_of(*talk), short, high_water=total - 1))


def test_an_open_last_decision_stays() -> None:
    talk = [SYSTEM, GOAL, *rounds(0, 5), asks("a", "b"), result("a")]
    thread = thread_of(*talk)
    done(summarize(thread, short, keep_rounds=1))
    assert history(thread)[3:] == talk[-2:]


def test_an_orphan_call_does_not_block_and_is_summarized_as_interrupted() -> None:
    talk = [SYSTEM, GOAL, asks("lost"), GOAL, *rounds(0, 5)]
    thread = thread_of(*talk)
    given: list[Any] = []
    done(summarize(thread, lambda m, p: given.extend(m) or "s", keep_rounds=4))  # type: ignore[func-returns-value]  # None
    assert given[:2] == [asks("lost"), result("lost", "interrupted: this call has no result")]
    assert originals(thread, history(thread)[2]) == talk[2:6]  # stored history has no such result


def test_an_effect_without_a_receipt_forbids_the_cut() -> None:
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 3))
    decision = thread.commit(Append(HISTORY, asks("pay")), reason="decision")
    effect = thread.effect(decision=decision, index=0, tool="pay", arguments={}, rule="ask")
    thread.commit(Append(HISTORY, said("user", "go on"), *rounds(3, 6)))
    talk = history(thread)
    at = talk.index(asks("pay"))
    with pytest.raises(ValueError, match="not a legal cut"):
        summarize(thread, short, cut=3)
    assert why(summarize(thread, short, cut=at + 1)) == "open"
    done(summarize(thread, short, keep_rounds=2))  # what is before it can go
    assert history(thread)[3:] == talk[at:]
    before = everything(thread)
    assert why(summarize(thread, short, keep_rounds=2)) in ("open", "nothing_to_cut")
    assert everything(thread) == before
    effect.receipt("paid")
    done(summarize(thread, short, keep_rounds=2))
    assert history(thread)[3:] == talk[-4:]


def test_an_open_effect_of_a_forks_origin_forbids_the_cut() -> None:
    thread = thread_of(SYSTEM, GOAL)
    ask = asks("pay")
    decision = thread.commit(Append(HISTORY, ask), reason="decision")
    thread.effect(decision=decision, index=0, tool="f-pay", arguments={}, rule="ask")
    fork = thread.fork(at=decision.seq, into="fork")
    fork.commit(Append(HISTORY, said("user", "go on"), *rounds(0, 9)))
    assert [view.tool for view in fork.effects(open=True)] == ["f-pay"]
    assert why(summarize(fork, short, keep_rounds=2)) == "open"


def test_an_effect_of_no_message_forbids_every_cut() -> None:
    thread = thread_of(SYSTEM, GOAL, *[said("assistant", f"thought {n} " * 9) for n in range(9)])
    decision = thread.commit(Append("notes", "charge"), reason="decision")
    thread.effect(decision=decision, index=0, tool="charge", arguments={}, rule="ask")
    assert why(summarize(thread, short)) == "open"


# --- what changes nothing ------------------------------------------------------------


def boom(messages: Sequence[Any], previous: str | None) -> str:
    raise RuntimeError("secret contents")


USELESS: list[tuple[str, Any]] = [
    ("failed", boom),
    ("failed", lambda messages, previous: 7),
    ("failed", lambda: "takes nothing"),
    ("empty", lambda messages, previous: None),
    ("empty", lambda messages, previous: ""),
    ("empty", lambda messages, previous: " \n\t"),
    ("empty", lambda messages, previous: Summary("  ")),
    ("no_saving", lambda messages, previous: json.dumps(list(messages), default=str) * 2 + "x" * 400),
]


@pytest.mark.parametrize(("reason", "summarizer"), USELESS, ids=lambda each: each if isinstance(each, str) else "")
def test_a_bad_summarizer_changes_nothing(reason: str, summarizer: Any) -> None:
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
    before = everything(thread)
    assert why(summarize(thread, summarizer)) == reason
    assert everything(thread) == before
    thread.commit(Set("step", 2))  # and the handle stands where it stood


def test_the_failure_is_told_and_logged_without_contents(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "agentstore"):
        got = summarize(thread_of(SYSTEM, GOAL, *rounds(0, 10)), boom)
    assert isinstance(got, NotSummarized) and isinstance(got.error, RuntimeError) and got.model == "boom"
    assert "thread 't': not summarized (failed): the summarizer raised RuntimeError" in caplog.text
    assert "secret" not in caplog.text and "Oslo" not in caplog.text


def test_tokens_of_a_summary_that_is_thrown_away_are_told() -> None:
    used = {"input_tokens": 70, "output_tokens": 900}
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
    got = summarize(thread, lambda m, p: Summary("x" * 9_000, usage=used, model="m"))
    assert isinstance(got, NotSummarized)
    assert (got.usage, got.model) == ({"prompt": 70, "completion": 900}, "m")
    assert got.tokens_after > got.tokens_before > 0


def test_an_interrupt_goes_through_and_changes_nothing() -> None:
    def stop(messages: Sequence[Any], previous: str | None) -> str:
        raise KeyboardInterrupt

    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10))
    before = everything(thread)
    with pytest.raises(KeyboardInterrupt):
        summarize(thread, stop)
    assert everything(thread) == before


def test_whoever_moves_the_head_meanwhile_wins() -> None:
    store = scratch_store()
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10), store=store)
    other = store.thread("t")

    def slow(messages: Sequence[Any], previous: str | None) -> str:
        other.commit(Append(HISTORY, said("user", "wait")))
        return "s"

    with pytest.raises(StaleThread):
        summarize(thread, slow)
    assert history(thread) == [SYSTEM, GOAL, *rounds(0, 10), said("user", "wait")]
    assert [cp.reason for cp in thread.history()] == ["manual", "manual"]
    done(summarize(thread, short))


def test_a_handle_that_is_behind_is_stale() -> None:
    store = scratch_store()
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10), store=store)
    store.thread("t").commit(Append(HISTORY, said("user", "wait")))
    with pytest.raises(StaleThread):
        summarize(thread, short)


def test_an_effect_that_begins_meanwhile_wins() -> None:
    store = scratch_store()
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 3), store=store)
    decision = thread.commit(Append(HISTORY, asks("pay")), reason="decision")
    thread.commit(Append(HISTORY, said("user", "go on"), *rounds(3, 6)))
    other = store.thread("t")

    def slow(messages: Sequence[Any], previous: str | None) -> str:
        other.effect(decision=decision, index=0, tool="pay", arguments={}, rule="ask")
        return "s"

    with pytest.raises(StaleThread, match="an effect began"):
        summarize(thread, slow, keep_rounds=2)
    assert not any(is_summary(m) for m in history(thread))


def test_the_store_is_free_while_the_summarizer_runs() -> None:
    store = scratch_store()
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10), store=store)
    done(summarize(thread, lambda m, p: f"s{store.thread('other').commit(Set('x', 1)).seq}"))


# --- the rest of the state -----------------------------------------------------------


def test_a_run_of_the_runtime_is_left_alone_without_also() -> None:
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 10), turn={"first": 0, "decision": 4})
    assert why(summarize(thread, short)) == "indexed"

    def also(state: Any, splice: Splice) -> list[Set]:
        moved = splice.delete - len(splice.items)
        return [Set(("turn", "decision"), state["turn"]["decision"] - moved)]

    got = done(summarize(thread, short, also=also))
    assert thread.load()["turn"] == {"first": 0, "decision": 4 - 11}
    assert len(got.changes) == 2


def test_other_fields_and_roles() -> None:
    thread = thread_of(store=None)
    thread.commit(Append("chat", SYSTEM, GOAL, *rounds(0, 10)), Set("x", 1))
    done(summarize(thread, short, field="chat", role="system"))
    assert thread.load()["chat"][2]["role"] == "system"
    assert thread.load()["x"] == 1
    assert len(originals(thread, thread.load()["chat"][2], field="chat")) == 12


def test_options_out_of_range_and_threads_without_a_conversation() -> None:
    thread = thread_of(GOAL)
    for options in ({"keep_rounds": 0}, {"keep_tokens": -1}, {"high_water": -1}, {"cut": 5}):
        with pytest.raises(ValueError, match="not"):
            summarize(thread, short, **options)  # type: ignore[arg-type]  # one of them is an int
    thread.commit(Delete(HISTORY))
    assert why(summarize(thread, short)) == "below_high_water"
    thread.commit(Set(HISTORY, {"no": "list"}))
    with pytest.raises(TypeError, match="list of messages"):
        summarize(thread, short)
    with pytest.raises(ThreadNotFound):
        summarize(scratch_store().thread("new"), short)


def test_the_window_keeps_the_summary() -> None:
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 20))
    summarize(thread, short, keep_rounds=10)
    seen = window(thread.load(), 200)
    assert seen[:3] == history(thread)[:3] and seen[-2:] == rounds(19, 1)
    thread.commit(Set((HISTORY, 2, "content"), "s" * 9_000))
    assert "characters cut" in window(thread.load(), 200)[2]["content"]


# --- the extractive summarizer -------------------------------------------------------


def test_the_extractive_summarizer_is_bounded_and_rolls() -> None:
    summarizer = ExtractiveSummarizer(max_tokens=60)
    thread = thread_of(SYSTEM, GOAL, *rounds(0, 30))
    sizes = []
    for n in range(3):
        got = done(summarize(thread, summarizer, keep_rounds=3))
        assert got.model == "extractive" and got.usage == {"prompt": 0, "completion": 0}
        sizes.append(got.tokens_after)
        thread.commit(Append(HISTORY, said("user", f"Rather take the train number {n} to Bergen."), *rounds(90, 9)))
    assert max(sizes) < 60 + 60
    assert "Bergen" in history(thread)[2]["content"]


def test_the_extractive_summarizer_takes_any_shape() -> None:
    from test_context import ODD

    summarizer = ExtractiveSummarizer()
    assert summarizer(ODD) == summarizer(ODD)
    assert "a bare text" in summarizer(ODD)
    assert summarizer([], None) == "" and summarizer([None, {"content": ""}]) == ""
    assert "東京" in summarizer([said("user", "東京へ行きたい。明日の朝に出発します。")])


# --- any conversation, and recorded ones ---------------------------------------------


@given(conversations(), st.integers(1, 4), st.integers(0, 200))
def test_any_conversation_is_summarized_by_the_rules(talk: list[Any], keep_rounds: int, keep_tokens: int) -> None:
    thread = STORE.thread(f"any-{next(NUMBERS)}")
    thread.commit(Set(HISTORY, talk))
    before = everything(thread)
    got = summarize(thread, lambda m, p: "s", keep_rounds=keep_rounds, keep_tokens=keep_tokens)
    if not got:
        assert everything(thread) == before
        assert why(got) in ("nothing_to_cut", "no_saving", "below_high_water")
        return
    after = history(thread)
    at = next(n for n, m in enumerate(after) if is_summary(m))
    found = exchanges(talk)
    kept = kept_from(talk, found, keep_rounds)
    cut = len(talk) - (len(after) - at - 1)
    assert cut in legal_cuts(talk) and cut <= kept
    pins = sorted(n for place in pinned_of(talk, found, None) for n in found[place].indexes)
    assert after[:at] == [talk[n] for n in pins if n < cut]
    assert after[at + 1 :] == talk[cut:]
    assert originals(thread, after[at]) == [m for n, m in enumerate(talk[:cut]) if n not in pins]
    assert sum(map(estimate_message, after)) < sum(map(estimate_message, talk))
    one_result_for_every_call(window(after, 10**9))


def test_summaries_of_the_transcripts_from_every_legal_cut(transcripts: list[Path]) -> None:
    """Each on its own branch from the whole conversation; bad summarizers leave the thread byte for byte as it was."""
    store = scratch_store()
    tried = 0
    for path in transcripts:
        talk = [json.loads(line) for line in path.open(encoding="utf-8")]
        thread = store.thread(path.stem)
        thread.commit(Append(HISTORY, *talk))
        found = exchanges(talk)
        pins = sorted(n for place in pinned_of(talk, found, None) for n in found[place].indexes)
        cuts = [cut for cut in legal_cuts(talk) if pins[-1] + 1 < cut]
        before = everything(thread)
        for reason, bad in USELESS:
            assert why(summarize(thread, bad, cut=cuts[len(cuts) // 2])) == reason
        assert everything(thread) == before
        for cut in cuts[:: -(-len(cuts) // max(2, CUTS_MAX // 4))]:
            branch = store.thread(f"{path.stem}/{cut}")
            branch.commit(Append(HISTORY, *talk))
            got = summarize(branch, lambda m, p: "s", cut=cut)
            if not got:
                assert why(got) == "no_saving"  # a greeting is shorter than what a summary says of its place
                continue
            after = history(branch)
            head = [talk[n] for n in pins]
            assert after[: len(head)] == head and is_summary(after[len(head)]) and after[len(head) + 1 :] == talk[cut:]
            limit = max(sum(map(estimate_message, after)) // 2, sum(map(estimate_message, head)) + 100)
            try:
                seen = window(after, limit)
            except WindowTooSmall:
                pytest.fail(f"{path.name}: no window of {limit} tokens from cut {cut}")
            assert seen[: len(head)] == head and sum(map(estimate_message, seen)) <= limit
            one_result_for_every_call(seen)
            tried += 1
    assert tried > 100


STORE = scratch_store()
NUMBERS = iter(range(10**9))
