"""The window that a model sees: what stays, what goes, and that every call in it has one result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from conversations import asks, conversations, one_result_for_every_call, result, said
from hypothesis import given
from hypothesis import strategies as st

import agentstore
from agentstore import Reported, WindowTooSmall, count_tokens, estimate_message, legal_cuts, text_counter, window
from agentstore.exchange import INTERRUPTED, exchanges, kept_from, pinned_of
from agentstore.tokens import estimate_text

SYSTEM = said("system", "You book flights.")
GOAL = said("user", "Book a flight to Oslo.")


def rounds(count: int, chars: int = 40) -> list[dict[str, Any]]:
    """So many rounds of one call each."""
    return [m for n in range(count) for m in (asks(f"c{n}"), result(f"c{n}", "x" * chars))]


def tokens(messages: Sequence[Any]) -> int:
    return sum(map(estimate_message, messages))


# --- legal cuts ----------------------------------------------------------------------


def test_a_cut_never_parts_a_call_from_its_results() -> None:
    talk = [SYSTEM, GOAL, asks("a", "b"), result("b"), result("a"), said("assistant", "done"), GOAL]
    assert legal_cuts(talk) == [1, 2, 5, 6, 7]


def test_nothing_is_cut_behind_an_open_call() -> None:
    assert legal_cuts([GOAL, *rounds(1), asks("a", "b"), result("a")]) == [1, 3]
    assert legal_cuts([GOAL, asks("a")]) == [1]


def test_an_orphan_call_does_not_hinder_a_cut() -> None:
    assert legal_cuts([GOAL, asks("a", "b"), result("a"), GOAL, asks("c"), result("c")]) == [1, 3, 4, 6]


def test_a_late_result_belongs_to_its_call() -> None:
    talk = [GOAL, asks("a"), said("user", "well?"), result("a"), said("assistant", "done")]
    assert legal_cuts(talk) == [1, 4, 5]
    assert window(talk, 1_000) == [GOAL, asks("a"), result("a"), said("user", "well?"), said("assistant", "done")]


def test_ids_that_repeat_are_paired_by_place() -> None:
    talk = [GOAL, asks("a"), result("a", 1), asks("a"), result("a", 2), asks("a", "a"), result("a", 3), result("a", 4)]
    assert legal_cuts(talk) == [1, 3, 5, 8]
    assert window(talk, 1_000) == talk


def test_calls_without_ids_are_paired_by_place() -> None:
    ask = {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}, {"function": {"name": "g"}}]}
    talk = [GOAL, ask, {"role": "tool", "content": "1"}, said("user", "stop")]
    assert window(talk, 1_000) == [*talk[:3], {"role": "tool", "content": INTERRUPTED}, talk[3]]


# --- what is shown -------------------------------------------------------------------


def test_all_of_it_is_shown_where_it_fits() -> None:
    talk = [SYSTEM, GOAL, *rounds(3)]
    seen = window(talk, tokens(talk))
    assert seen == talk
    assert all(a is not b for a, b in zip(seen, talk, strict=True))  # a model may put keys in
    assert window({"conversation_history": talk, "step": 3}, 1_000) == talk
    assert window({"other": talk}, 1_000, field="other") == talk
    assert window({"step": 3}, 1_000) == []


def test_the_window_begins_with_what_is_pinned() -> None:
    pinned = {**said("user", "never fly at night"), "pinned": True}
    talk = [SYSTEM, GOAL, *rounds(5), pinned, *rounds(20)]
    seen = window(talk, 200)
    assert seen[:3] == [SYSTEM, GOAL, pinned]
    assert tokens(seen) <= 200 < tokens(talk)
    assert seen[3:] == talk[-len(seen) + 3 :]


def test_a_predicate_pins() -> None:
    talk = [SYSTEM, GOAL, *rounds(20), said("user", "rule: no nights"), *rounds(20)]
    seen = window(talk, 200, pinned=lambda m: "rule" in str(m["content"]))
    assert seen[2] == said("user", "rule: no nights")


def test_a_pinned_result_keeps_its_call() -> None:
    talk = [SYSTEM, GOAL, asks("p", "q"), {**result("p"), "pinned": True}, result("q"), *rounds(20)]
    assert window(talk, 200)[:5] == talk[:5]


def test_the_first_goal_stays_behind_a_greeting() -> None:
    talk = [said("assistant", "Hello!"), GOAL, *rounds(20)]
    assert window(talk, 150)[0] == GOAL


def test_a_system_message_in_the_middle_is_no_system_prompt() -> None:
    talk = [SYSTEM, GOAL, said("system", "reminder"), *rounds(20)]
    assert said("system", "reminder") not in window(talk, 150)


def test_without_a_goal_the_system_prompt_stays() -> None:
    talk = [SYSTEM, *[said("assistant", f"thought {n}") for n in range(50)], said("system", "late")]
    seen = window(talk, 60)
    assert seen[0] == SYSTEM
    assert seen[-1] == said("system", "late")


def test_an_orphan_is_answered_in_the_window_only() -> None:
    talk = [GOAL, asks("a", "b"), result("b"), GOAL]
    before = json.dumps(talk)
    seen = window(talk, 1_000)
    assert seen == [GOAL, asks("a", "b"), result("b"), result("a", INTERRUPTED), GOAL]
    assert json.dumps(talk) == before


def test_an_open_call_stays_open() -> None:
    talk = [GOAL, *rounds(30), asks("a", "b"), result("b")]
    assert window(talk, 100)[-2:] == talk[-2:]


def test_a_result_without_a_call_and_a_second_one_are_dropped() -> None:
    talk = [result("x"), GOAL, asks("a"), result("a"), result("a", "again"), result("y"), said("assistant", "done")]
    assert window(talk, 1_000) == [GOAL, asks("a"), result("a"), said("assistant", "done")]


def test_a_legacy_function_call_is_answered_by_a_function() -> None:
    ask = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    assert window([GOAL, ask, GOAL], 1_000)[2] == {"role": "function", "name": "f", "content": INTERRUPTED}


def test_the_newest_rounds_stay_and_are_shortened() -> None:
    talk = [SYSTEM, GOAL, *rounds(10), *rounds(3, chars=4_000)]
    seen = window(talk, 600, keep_rounds=3)
    assert [m["role"] for m in seen] == ["system", "user", *["assistant", "tool"] * 3]
    assert tokens(seen) <= 600
    assert all("characters cut from this window" in m["content"] for m in seen if m["role"] == "tool")


def test_fewer_rounds_where_even_short_ones_do_not_fit() -> None:
    talk = [SYSTEM, GOAL, *rounds(50, chars=4_000)]
    seen = window(talk, 200, keep_rounds=40)
    assert tokens(seen) <= 200
    assert seen[:2] == [SYSTEM, GOAL]
    assert seen[-2]["tool_calls"] == talk[-2]["tool_calls"]
    one_result_for_every_call(seen)


def test_a_content_that_alone_breaks_the_limit_is_shortened_with_a_marker() -> None:
    talk = [SYSTEM, GOAL, asks("a"), result("a", "b" * 100_000 + "e" * 100_000)]
    seen = window(talk, 300)
    short = seen[-1]["content"]
    assert short.startswith("bbb") and short.endswith("eee")
    shown = len(short.replace(short[short.index("[") : short.index("]") + 1], ""))
    assert f"[… {200_000 - shown} characters cut from this window …]" in short
    assert 250 < tokens(seen) <= 300  # as little as need be
    assert len(talk[-1]["content"]) == 200_000


def test_shortened_arguments_are_still_json() -> None:
    ask = asks("a")
    ask["tool_calls"][0]["function"]["arguments"] = json.dumps({"text": "z" * 50_000})
    seen = window([GOAL, ask, result("a")], 200)
    call = seen[1]["tool_calls"][0]
    assert call["id"] == "a" and "zzz" in json.loads(call["function"]["arguments"])["shortened"]


def test_an_image_is_never_halved() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "A" * 90_000}}
    talk = [GOAL, {"role": "user", "content": [{"type": "text", "text": "look"}, image]}]
    assert window(talk, 5_000) == talk
    assert window(talk, 100)[1]["content"][0] == {"type": "text", "text": "look"}
    assert window(talk, 100)[1]["content"][1]["type"] == "text"


def test_pinned_parts_alone_over_the_limit() -> None:
    with pytest.raises(WindowTooSmall, match="alone are"):
        window([said("system", "x" * 1_000), GOAL, *rounds(3)], 100)
    with pytest.raises(WindowTooSmall, match="no room for the newest"):
        window([SYSTEM, GOAL, *rounds(3)], tokens([SYSTEM, GOAL]) + 1)


def test_options_out_of_range() -> None:
    with pytest.raises(ValueError, match="1 or more"):
        window([GOAL], 0)
    with pytest.raises(ValueError, match="1 or more"):
        window([GOAL], 10, keep_rounds=0)
    with pytest.raises(TypeError, match="list of messages"):
        window("hello", 10)
    with pytest.raises(TypeError, match="'conversation_history'"):
        window({"conversation_history": {}}, 10)


# --- tokens --------------------------------------------------------------------------


def test_cjk_counts_a_token_a_character() -> None:
    assert estimate_text("東京都庁へ行きたい") == 9
    assert estimate_text("안녕하세요") == 5
    assert estimate_text("a" * 400) == 100
    assert estimate_text("你好" + "a" * 8) == 4
    assert estimate_text("😀") == 1
    assert 2 <= estimate_text("Привет") <= 6


def test_what_the_provider_reported_is_believed() -> None:
    talk = [SYSTEM, GOAL, *rounds(20)]
    guess = tokens(talk)
    assert count_tokens(talk) == guess
    assert count_tokens(talk, usage=Reported(5_000, len(talk))) == 5_000
    assert count_tokens(talk, usage=(100, 2)) == 100 + tokens(talk[2:])
    assert window(talk, guess, usage=(guess, len(talk))) == talk
    seen = window(talk, guess, usage=(2 * guess, len(talk)))
    assert 2 * tokens(seen) <= guess + len(seen) and seen[:2] == talk[:2]
    with pytest.raises(ValueError, match="usage"):
        window(talk, 100, usage=(5, len(talk) + 1))


def test_the_counter_is_pluggable() -> None:
    talk = [SYSTEM, GOAL, *rounds(20)]
    assert len(window(talk, 6, counter=lambda message: 1)) == 6
    words = text_counter(lambda text: len(text.split()), message_tokens=0)
    assert words(said("user", "one two three")) == 3
    assert sum(map(words, window(talk, 40, counter=words))) <= 40
    with pytest.raises(ValueError, match="counter"):
        window(talk, 10, counter=lambda message: -1)


# --- user data of any shape ----------------------------------------------------------

ODD: list[Any] = [
    {"role": "tool", "tool_call_id": {"no": "id"}, "content": "stray"},
    None,
    "a bare text",
    17,
    b"bytes",
    [1, [2, {"x": None}]],
    {},
    {"role": None, "content": None},
    {"role": ["tool"], "content": {"a": 1}},
    {"role": "user", "content": [{"type": "text", "text": "part"}, {"type": "image_url", "image_url": {"url": "u"}}]},
    {"role": "assistant", "tool_calls": "search"},
    {"role": "assistant", "tool_calls": {"id": "x"}},
    {"role": "assistant", "tool_calls": [None, 5, {"id": 7, "function": "f"}, {"id": ["l"]}]},
    {"role": "assistant", "function_call": 3},
    {"role": "assistant", "content": "x", "extra": {"deep": [object()]}},
    {"agentstore:summary": 3, "role": "user", "content": "no summary"},
]


def test_unknown_shapes_are_counted_and_kept() -> None:
    seen = window([SYSTEM, GOAL, *ODD], 10_000)
    assert [m for m in seen[2:] if not (isinstance(m, dict) and m.get("content") == INTERRUPTED)] == ODD[1:]
    assert all(estimate_message(message) >= 4 for message in ODD)


@pytest.mark.parametrize("at", range(len(ODD)))
def test_the_limit_holds_for_unknown_shapes(at: int) -> None:
    talk = [SYSTEM, GOAL, *ODD * 10, ODD[at]]
    seen = window(talk, 150)
    assert seen[:2] == [SYSTEM, GOAL] and tokens(seen) <= 150


def test_what_cannot_be_shortened_leaves_its_skeleton() -> None:
    ask = {"role": "assistant", "content": [{"n": n} for n in range(5_000)], "tool_calls": asks("a")["tool_calls"]}
    seen = window([GOAL, ask, {"role": "tool", "tool_call_id": "a", "content": list(range(5_000))}], 200)
    assert tokens(seen) <= 200
    assert seen[1]["tool_calls"][0]["id"] == seen[2]["tool_call_id"] == "a"
    assert "characters cut" in seen[2]["content"]
    assert "characters cut" in window([GOAL, list(range(5_000))], 200)[1]


def test_circles_and_deep_values_end() -> None:
    circle: dict[str, Any] = {"role": "user"}
    circle["content"] = [circle]
    deep: Any = "bottom"
    for _ in range(5_000):
        deep = [deep]
    assert estimate_message(circle) < 100 and estimate_message(deep) < 200
    assert window([GOAL, circle, deep], 1_000) == [GOAL, circle, deep]


# --- any conversation ----------------------------------------------------------------


@given(conversations(), st.integers(1, 400), st.integers(1, 5))
def test_any_window_keeps_the_rules(talk: list[Any], max_tokens: int, keep_rounds: int) -> None:
    before = repr(talk)
    found = exchanges(talk)
    stays = pinned_of(talk, found, None)
    try:
        seen = window(talk, max_tokens, keep_rounds=keep_rounds)
    except WindowTooSmall:
        assert tokens(talk) > 0
        return
    assert repr(talk) == before
    assert tokens(seen) <= max_tokens
    one_result_for_every_call(seen)
    pins = [talk[found[place].start] for place in sorted(stays) if not found[place].stray]
    whole = window(talk, 10**9)
    assert [m for m in seen if m in pins][: len(pins)] == [m for m in whole if m in pins][: len(pins)]
    assert tokens(seen) <= tokens(whole)
    if tokens(whole) <= max_tokens:
        assert seen == whole
    else:
        assert tokens(seen) < tokens(whole)


@given(conversations())
def test_everything_before_a_cut_is_closed(talk: list[Any]) -> None:
    for cut in legal_cuts(talk):
        ends = [exchange.reach for exchange in exchanges(talk) if exchange.start < cut]
        assert max(ends) <= cut
        one_result_for_every_call(window(talk[cut:], 10**9))


@given(conversations())
def test_exchanges_hold_every_message_once(talk: list[Any]) -> None:
    found = exchanges(talk)
    assert [at for exchange in found for at in range(exchange.start, exchange.stop)] == list(range(len(talk)))
    answers = [at for exchange in found for at in exchange.answers if at is not None]
    assert len(answers) == len(set(answers))


# --- recorded conversations ----------------------------------------------------------

CUTS_MAX = 10**9 if os.environ.get("AGENTSTORE_ALL_CUTS") else 12
"""How many cuts of a transcript are tried, evenly spread; all of them with AGENTSTORE_ALL_CUTS=1."""


def test_windows_from_every_legal_cut_of_the_transcripts(transcripts: list[Path]) -> None:
    tried = 0
    for path in transcripts:
        talk = [json.loads(line) for line in path.open(encoding="utf-8")]
        found = exchanges(talk)
        whole = tokens(window(talk, 10**9))  # with the results that orphan calls are given
        pinned = sorted(at for place in pinned_of(talk, found, None) for at in found[place].indexes)
        cuts = [cut for cut in legal_cuts(talk) if pinned[-1] + 1 < cut < len(talk)]
        for cut in cuts[:: -(-len(cuts) // CUTS_MAX) or 1]:
            head = [talk[at] for at in pinned]
            rest = window(talk[cut:], 10**9)
            limit = tokens(head) + tokens(rest)
            seen = window(talk, limit)
            if cut <= kept_from(talk, found, 1):  # from a later cut on, the newest round is shortened rather than cut
                assert seen == [*head, *rest], (path.name, cut)
            assert seen[: len(head)] == head
            assert tokens(seen) <= limit < whole
            one_result_for_every_call(seen)
            # With half of that something has to be shortened, or go.
            half = window(talk, tokens(head) + max(150, tokens(rest) // 2))
            assert half[: len(head)] == head and tokens(half) <= tokens(head) + max(150, tokens(rest) // 2)
            one_result_for_every_call(half)
            tried += 1
    assert tried > 400


def test_the_names_are_public_and_loaded_at_their_first_use() -> None:
    for name in ("window", "legal_cuts", "summarize", "originals", "ExtractiveSummarizer", "WindowTooSmall"):
        assert name in agentstore.__all__ and getattr(agentstore, name).__name__ == name
    program = (
        "import sys, agentstore; sys.exit(any(f'agentstore.{m}' in sys.modules for m in ('context', 'summarizing')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
