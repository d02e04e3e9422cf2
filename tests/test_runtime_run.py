"""A run from its input to its end: the state it leaves, inputs and their ids, limits, and what models do wrong."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from runtime_agents import ask, say, script

from agentstore import LeaseHeld, RunFailed, RuntimeStateError, RunUnfinished, Set, Store, UnencodableState
from agentstore.runtime import (
    Agent,
    Interrupted,
    Reply,
    RunEvent,
    Tool,
    ToolContext,
    ToolError,
    ToolMessage,
    Usage,
    tool,
)
from agentstore.runtime.states import new_turn


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "agents") as opened:
        yield opened
        assert opened.check() == []


@tool(recovery="read")
def look(what: str) -> str:
    """Look at something."""
    return f"saw {what}"


@tool(recovery="replay")
def put(what: str, ctx: ToolContext) -> dict[str, Any]:
    """Put something somewhere."""
    return {"put": what, "attempt": ctx.attempt}


def reasons(store: Store, thread_id: str = "t") -> list[str]:
    return [checkpoint.reason for checkpoint in reversed(store.thread(thread_id).history())]


def roles(messages: list[dict[str, Any]]) -> list[str]:
    return [message["role"] for message in messages]


# --- the way through ------------------------------------------------------------------


def test_a_turn_without_tools_is_two_commits(store: Store) -> None:
    result = Agent(model=script(say("hello"))).run(store, "t", "hi")
    assert (result.status, result.output, result.thread_id) == ("COMPLETED", "hello", "t")
    assert result.messages == [{"role": "user", "content": "hi"}, say("hello")]
    assert reasons(store) == ["input", "final"]
    assert store.thread("t").load() == result.state
    assert store.thread("t").head == result.checkpoint


def test_a_round_is_the_decision_and_one_commit_for_each_call(store: Store) -> None:
    model = script(
        Reply(ask(("look", {"what": "a"}), ("put", {"what": "b"})), usage=Usage(10, 2)),
        Reply(ask(("put", {"what": "c"})), usage={"prompt_tokens": 20, "completion_tokens": 3}, plan=["c", "d"]),
        Reply(say("done"), partial="a draft"),
    )
    result = Agent(model=model, tools=[look, put], system="be brief").run(store, "t", "go", "1")
    assert reasons(store) == ["input", "decision", "tool_result", "tool_result", "plan", "tool_result", "final"]
    state = result.state
    assert roles(state["conversation_history"]) == [
        "system", "user", "assistant", "tool", "tool", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert [m["content"] for m in result.messages if m["role"] == "tool"] == [
        "saw a", '{"put": "b", "attempt": 1}', '{"put": "c", "attempt": 1}',
    ]  # fmt: skip
    assert state["token_usage"] == {"prompt": 30, "completion": 5, "total": 35}
    assert (state["state"], state["step"], state["task_id"]) == ("COMPLETED", 3, "t")
    assert (state["execution_plan"], state["partial_outputs"]) == (["c", "d"], ["a draft"])
    assert [(e["tool"], e["outcome"], e["message"]) for e in state["tool_call_results"]] == [
        ("look", "ok", 3), ("put", "ok", 4), ("put", "ok", 6),
    ]  # fmt: skip
    assert [e["key"] is None for e in state["tool_call_results"]] == [True, False, False]
    assert state["metadata"]["retry_count"] == 0
    assert state["metadata"]["last_checkpoint_at"] >= state["metadata"]["created_at"]
    effects = store.thread("t").effects()
    assert [(e.tool, e.status, e.result) for e in effects] == [
        ("put", "done", {"put": "b", "attempt": 1}),
        ("put", "done", {"put": "c", "attempt": 1}),
    ]
    assert [(c.step, c.status) for c in reversed(store.thread("t").history())] == [
        (0, "RUNNING"), *[(1, "RUNNING")] * 3, *[(2, "RUNNING")] * 2, (3, "COMPLETED"),
    ]  # fmt: skip


def test_model_and_tools_are_called_on_what_is_stored_only(store: Store) -> None:
    """Each looks into the store: the model finds what it is shown, a tool finds its decision and its own intent."""
    says = script(ask(("act", {}), ("act", {}), ("peek", {})), ask(("act", {})), say("done"))
    looked: list[str] = []

    def model(messages: list[dict[str, Any]], tools: Any) -> Reply:
        assert store.thread("t").load()["conversation_history"] == messages
        looked.append("model")
        return says(messages, tools)

    @tool(recovery="ask")
    def act(ctx: ToolContext) -> str:
        (mine,) = [effect for effect in store.thread("t").effects(open=True) if effect.key == ctx.key]
        assert (mine.status, mine.index, mine.attempt) == ("in_flight", ctx.index, ctx.attempt)
        decided = store.thread("t").load(ctx.decision)["conversation_history"][-1]
        assert decided["tool_calls"][ctx.index] == ctx.call
        assert 0 < ctx.remaining_s() <= 65
        looked.append("act")
        return "ok"

    @tool(recovery="read")
    def peek(ctx: ToolContext) -> str:
        assert ctx.key not in [effect.key for effect in store.thread("t").effects()]
        assert store.thread("t").load(ctx.decision)["conversation_history"][-1]["tool_calls"][2] == ctx.call
        looked.append("peek")
        return "ok"

    assert Agent(model=model, tools=[act, peek]).run(store, "t", "go").output == "done"
    assert sorted(looked) == ["act"] * 3 + ["model"] * 3 + ["peek"]


def test_messages_keep_what_nobody_knows(store: Store) -> None:
    said = {**ask(("look", {"what": "a"}), ids=[None]), "reasoning": {"x": [1, None]}, "content": [{"type": "text"}]}
    given: list[dict[str, Any]] = [
        {"role": "system", "content": [{"type": "text", "text": "s"}]},
        {"role": "user", "content": None, "n": 1},
    ]
    result = Agent(model=script(said, {**say(""), "refusal": None}), tools=[look]).run(store, "t", given)
    assert result.messages == [*given, said, {"role": "tool", "content": "saw a"}, {**say(""), "refusal": None}]
    assert list(result.messages[2]) == list(said)
    assert store.thread("t").load() == result.state


def test_messages_of_others_are_copied(store: Store) -> None:
    given: dict[str, Any] = {"role": "user", "content": ["a"]}
    said: dict[str, Any] = {"role": "assistant", "content": ["b"]}
    agent = Agent(model=lambda messages, tools: Reply(said))
    agent.run(store, "t", given)
    given["content"].append("x")
    said["content"].append("y")
    result = agent.run(store, "t", "more")
    assert result.messages[:2] == [{"role": "user", "content": ["a"]}, {"role": "assistant", "content": ["b"]}]
    assert store.thread("t").load() == result.state


def test_async_models_and_tools(store: Store) -> None:
    @tool(recovery="replay")
    async def later(what: str) -> str:
        await asyncio.sleep(0)
        return f"{what} later"

    class Model:
        async def __call__(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Reply:
            assert [each["function"]["name"] for each in tools] == ["later", "look"]
            await asyncio.sleep(0)
            return Reply(say(messages[-1]["content"]) if len(messages) > 1 else ask(("later", {"what": "x"})))

    async def main() -> list[str | None]:
        agent = Agent(model=Model(), tools=[later, look])
        both = await asyncio.gather(agent.arun(store, "a", "hi"), agent.arun(store, "b", "hi"))
        return [each.output for each in both]

    assert asyncio.run(main()) == ["x later", "x later"]


def test_run_inside_a_running_loop_says_what_to_do(store: Store) -> None:
    async def main() -> None:
        Agent(model=script(say("x"))).run(store, "t", "hi")

    with pytest.raises(RuntimeError, match="await agent"):
        asyncio.run(main())


def test_a_legacy_function_call(store: Store) -> None:
    said = {"role": "assistant", "content": None, "function_call": {"name": "put", "arguments": '{"what": "a"}'}}
    result = Agent(model=script(said, say("ok")), tools=[put]).run(store, "t", "go")
    assert result.messages[2] == {"role": "function", "name": "put", "content": '{"put": "a", "attempt": 1}'}


def test_a_thread_with_fields_of_its_own(store: Store) -> None:
    store.thread("t").commit(Set("customer", {"id": 7}), Set("conversation_history", [say("welcome")]))
    result = Agent(model=script(None, say("hello")), system="unused: the conversation has begun").run(store, "t", "hi")
    assert result.state["customer"] == {"id": 7}
    assert result.messages == [say("welcome"), {"role": "user", "content": "hi"}, say("hello")]
    assert store.thread("t").load() == result.state


# --- parallel calls --------------------------------------------------------------------


def test_calls_run_side_by_side_and_their_messages_stand_in_order(store: Store) -> None:
    """Each call waits for the one behind it, so they can only end if all run at once, and they end backwards."""

    async def main() -> tuple[Any, list[int]]:
        ended = [asyncio.Event() for _ in range(5)]
        order: list[int] = []

        @tool(recovery="skip")
        async def wait(n: int) -> str:
            if n + 1 < len(ended):
                await ended[n + 1].wait()
            ended[n].set()
            order.append(n)
            return f"result {n}"

        model = script(ask(*[("wait", {"n": n}) for n in range(5)], ids=["same"] * 5), say("ok"))
        result = await Agent(model=model, tools=[wait]).arun(store, "t", "go")
        return result, order

    result, order = asyncio.run(main())
    assert order == [4, 3, 2, 1, 0]
    assert [m["content"] for m in result.messages[2:7]] == [f"result {n}" for n in range(5)]
    assert sorted((e["call"], e["message"]) for e in result.state["tool_call_results"]) == [
        (n, n + 2) for n in range(5)
    ]
    # In every checkpoint on the way the references are right.
    for checkpoint in store.thread("t").history():
        state = store.thread("t").load(checkpoint.seq)
        for entry in state["tool_call_results"]:
            assert state["conversation_history"][entry["message"]]["content"] == f"result {entry['call']}"
    assert store.thread("t").load() == result.state


def test_no_more_calls_at_once_than_allowed(store: Store) -> None:
    running = most = 0

    @tool(recovery="replay")
    async def work(n: int) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        while most < 2:  # the first waits for the second
            await asyncio.sleep(0)
        running -= 1
        return n

    model = script(ask(*[("work", {"n": n}) for n in range(7)]), say("ok"))
    result = Agent(model=model, tools=[work], calls_at_once=2).run(store, "t", "go")
    assert most == 2
    assert [m["content"] for m in result.messages[2:9]] == [str(n) for n in range(7)]
    assert len(store.thread("t").effects(open=False)) == 7


# --- inputs and their ids ---------------------------------------------------------------


def test_an_input_id_is_answered_once_however_often_it_comes(store: Store) -> None:
    agent = Agent(model=script(say("one"), say("two"), say("three")))
    first = agent.run(store, "t", "a", "1")
    assert agent.run(store, "t", "a", "1").output == "one"
    assert agent.run(store, "t", "something else", "1").output == "one"  # the id decides
    second = agent.run(store, "t", "b", input_id="2")
    assert (first.output, second.output) == ("one", "two")
    earlier = agent.run(store, "t", "a", "1")
    assert (earlier.output, earlier.status, earlier.checkpoint) == ("one", "COMPLETED", first.checkpoint)
    assert earlier.messages == first.messages
    assert agent.run(store, "t", "a").output == "three"  # without an id, an input after COMPLETED is a new turn
    assert len(store.thread("t").history()) == 6
    assert [turn["input_id"] for turn in store.thread("t").load()["turns"]] == ["1", "2"]


def test_an_unfinished_turn_is_carried_on_by_its_own_input_only(store: Store) -> None:
    agent = Agent(model=script(ask(("look", {"what": "x"})), say("one")), tools=[look], max_steps=0)
    assert agent.run(store, "t", "a", "1").status == "PAUSED"
    for given, input_id in (("b", None), ("a", "2"), ("b", "2")):
        with pytest.raises(RunUnfinished, match="'t' is PAUSED in a turn with another input"):
            agent.run(store, "t", given, input_id)
    assert agent.run(store, "t", "a").status == "PAUSED"  # equal to the unfinished turn's
    assert agent.run(store, "t", "whatever", "1").status == "PAUSED"
    assert agent.run(store, "t").status == "PAUSED"  # no input: carry on
    assert len(store.thread("t").history()) == 2
    assert agent.run(store, "t", max_steps=5).output == "one"
    assert agent.run(store, "t").output == "one"  # nothing left to carry on: the result
    assert roles(store.thread("t").load()["conversation_history"]) == ["user", "assistant", "tool", "assistant"]


def test_no_input_needs_a_thread(store: Store) -> None:
    with pytest.raises(ValueError, match="nothing to carry on"):
        Agent(model=script(say("x"))).run(store, "t")
    assert list(store.threads()) == [] or store.thread("t").head is None


@pytest.mark.parametrize("given", [7, ["text"], [{"content": "no role"}], {"role": None}])
def test_what_is_no_input(store: Store, given: Any) -> None:
    with pytest.raises(TypeError, match="an input is"):
        Agent(model=script(say("x"))).run(store, "t", given)


def test_an_input_that_cannot_be_stored_is_refused_and_nothing_is_left_behind(store: Store) -> None:
    with pytest.raises(UnencodableState, match="content"):
        Agent(model=script(say("x"))).run(store, "t", {"role": "user", "content": object()})
    assert list(store.threads()) == []
    assert Agent(model=script(say("x"))).run(store, "t", "hi").output == "x"


def test_an_empty_input_asks_the_model(store: Store) -> None:
    agent = Agent(model=script(say("one"), say("two")))
    assert agent.run(store, "t", [], "1").messages == [say("one")]
    assert agent.run(store, "t", [], "2").messages == [say("one"), say("two")]
    assert agent.run(store, "t", [], "1").output == "one"


def test_a_model_with_nothing_to_say_ends_the_turn(store: Store) -> None:
    result = Agent(model=script(None)).run(store, "t", "note this")
    assert (result.status, result.message, result.output) == ("COMPLETED", None, None)
    assert roles(result.messages) == ["user"]


def test_calls_of_an_input_run_only_where_that_was_asked_for(store: Store) -> None:
    given = {**ask(("put", {"what": "x"})), "role": "user"}
    refused = Agent(model=script(say("no")), tools=[put]).run(store, "a", given)
    assert roles(refused.messages) == ["user", "assistant"]
    assert store.thread("a").effects() == []
    run = Agent(model=script(say("yes")), tools=[put], input_calls=True).run(store, "b", given)
    assert roles(run.messages) == ["user", "tool", "assistant"]
    assert [e.status for e in store.thread("b").effects()] == ["done"]


def test_two_workers_cannot_run_one_thread(store: Store) -> None:
    agent = Agent(model=script(say("x")))
    with store.thread("t").lease("another worker", ttl_s=600), pytest.raises(LeaseHeld, match="another worker"):
        agent.run(store, "t", "hi")
    assert agent.run(store, "t", "hi").output == "x"


# --- steps and pauses --------------------------------------------------------------------


def test_a_turn_is_paused_at_its_steps_and_goes_on_with_more(store: Store) -> None:
    says = [ask(("look", {"what": str(n)})) for n in range(4)]
    agent = Agent(model=script(*says, say("done")), tools=[look], max_steps=2)
    first = agent.run(store, "t", "go", "1")
    assert (first.status, first.state["step"], first.output) == ("PAUSED", 2, None)
    assert agent.run(store, "t", "go", "1").checkpoint == first.checkpoint  # the steps are the turn's, not the call's
    second = agent.run(store, "t", "go", "1", max_steps=3)
    assert (second.status, second.state["step"]) == ("PAUSED", 3)
    third = agent.run(store, "t", "go", "1", max_steps=9)
    assert (third.status, third.state["step"], third.output) == ("COMPLETED", 5, "done")
    assert [c.status for c in reversed(store.thread("t").history()) if c.reason == "round"] == [
        "PAUSED", "RUNNING", "PAUSED", "RUNNING",
    ]  # fmt: skip


# --- what models do wrong ----------------------------------------------------------------


def test_an_output_that_is_no_message_is_asked_for_again(store: Store) -> None:
    outputs: list[Any] = ["text", Reply({"role": "tool"}), Reply({"role": "assistant", "x": object()}), say("sorry")]
    seen: list[list[dict[str, Any]]] = []

    def model(messages: list[dict[str, Any]], _tools: Any) -> Any:
        seen.append(messages)
        return outputs[len(seen) - 1]

    result = Agent(model=model).run(store, "t", "hi")
    assert result.messages == [{"role": "user", "content": "hi"}, say("sorry")]  # the garbage is not kept
    assert [len(messages) for messages in seen] == [1, 2, 2, 2]
    assert "could not be used: the output is a str" in seen[1][1]["content"]
    assert "conversation_history" in seen[3][1]["content"]  # the path of what cannot be stored


def test_a_model_that_never_makes_sense_fails_the_run(store: Store) -> None:
    agent = Agent(model=lambda messages, tools: 7, reasks=2, max_retries=1)
    with pytest.raises(RunFailed, match=r"malformed 3 times: the output is a int.*0 of 1 retries"):
        agent.run(store, "t", "hi", "1")
    state = store.thread("t").load()
    assert state["state"] == "FAILED" and "malformed 3 times" in state["turn"]["error"]
    with pytest.raises(RunFailed, match="1 of 1 retries"):
        agent.run(store, "t", "hi", "1")
    calls = len(store.thread("t").history())
    with pytest.raises(RunFailed, match="1 of 1 retries"):
        agent.run(store, "t", "hi", "1")
    assert len(store.thread("t").history()) == calls  # no retries left: nothing was tried
    with pytest.raises(RunUnfinished):
        agent.run(store, "t", "another", "2")
    fixed = Agent(model=script(say("better")))
    assert fixed.run(store, "t", "hi", "1", max_retries=2).output == "better"
    assert store.thread("t").load()["metadata"]["retry_count"] == 2
    assert fixed.run(store, "t", "hi", "1").error is None


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "content": nested(2000)}, "cannot be copied: RecursionError"),
        ({"role": "assistant", "content": threading.Lock()}, "cannot be copied: TypeError"),
        ({"role": "assistant", "content": nested(150)}, "below 100 levels"),
        ({"role": "assistant", "content": None, "tool_calls": "look"}, "tool_calls of the message must be an array"),
    ],
)
def test_a_message_that_cannot_be_kept_is_asked_for_again(store: Store, message: Any, problem: str) -> None:
    """Some of them ended the run with a raw error, RUNNING for ever; calls that were a text were taken for none."""
    answers = iter([message, say("better")])
    assert Agent(model=lambda messages, tools: Reply(next(answers))).run(store, "a", "hi").output == "better"
    with pytest.raises(RunFailed, match=problem):
        Agent(model=script(message), reasks=0).run(store, "b", "hi")
    assert store.thread("b").load()["state"] == "FAILED"


def test_usage_is_counted_in_ints() -> None:
    for wrong in ("a", -1, 1.5, True):
        with pytest.raises(TypeError, match="tokens are counted"):
            Usage(prompt=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "before",
    [
        {"metadata": None}, {"conversation_history": 5}, {"turn": 5}, {"turn": {}}, {"turn": {**new_turn(None, 0, 0)}},
        {"token_usage": []},
    ],
)  # fmt: skip
def test_a_thread_whose_fields_are_not_a_runs_is_refused(store: Store, before: dict[str, Any]) -> None:
    store.thread("t").commit_state(before)
    with pytest.raises(RuntimeStateError, match="something else wrote it"):
        Agent(model=script(say("x"))).run(store, "t", "hi")
    assert store.thread("t").load() == before


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_an_exception_without_a_text_is_an_exception(store: Store) -> None:
    """It escaped the retries, and what had been called was not recorded."""
    with pytest.raises(RunFailed, match="WithoutText, whose text cannot be had"):
        Agent(model=script(WithoutText()), model_retries=0).run(store, "a", "hi")

    @tool(recovery="skip")
    def act() -> None:
        raise WithoutText

    result = Agent(model=script(ask(("act", {})), say("done")), tools=[act]).run(store, "b", "hi")
    assert result.output == "done"
    assert result.state["tool_call_results"][0]["outcome"] == "unknown"


def test_calls_that_cannot_be_made_are_answered_and_bounded(store: Store) -> None:
    bad = ask(("look", "{"), ("look", {"what": 1}), ("nothing", {}), ("look", {"what": "b"}))
    bad["tool_calls"].append("not a call")
    result = Agent(model=script(bad, say("ok")), tools=[look]).run(store, "t", "go")
    contents = [m["content"] for m in result.messages[2:7]]
    assert contents[0].startswith("error: the arguments are not valid JSON")
    assert contents[1] == "error: arguments.what must be a string, not an integer (1)"
    assert contents[2] == "error: there is no tool 'nothing' (there are: look)"
    assert contents[3] == "saw b"
    assert contents[4] == "error: the call is a str, not an object"
    assert [e["outcome"] for e in result.state["tool_call_results"]].count("malformed") == 4
    for entry in result.state["tool_call_results"]:
        assert entry["message"] == 2 + entry["call"]
    assert reasons(store) == ["input", "decision", "tool_result", "final"]

    stubborn = Agent(model=lambda messages, tools: Reply(ask(("nothing", {}))), tools=[look], reasks=2)
    with pytest.raises(RunFailed, match="3 decisions in a row had calls that could not be made"):
        stubborn.run(store, "stubborn", "go")
    assert roles(store.thread("stubborn").load()["conversation_history"]) == ["user", *["assistant", "tool"] * 3]


def test_good_calls_between_bad_ones_start_the_count_anew(store: Store) -> None:
    bad, good = ask(("nothing", {})), ask(("look", {"what": "x"}))
    model = script(bad, good, bad, good, bad, say("ok"))
    assert Agent(model=model, tools=[look], reasks=1).run(store, "t", "go").output == "ok"


def test_a_model_that_raises_is_tried_again_then_fails_the_run(store: Store) -> None:
    raised: list[Exception] = [ConnectionError("no route"), TimeoutError("slow")]

    def model(messages: Any, tools: Any) -> Reply:
        if raised:
            raise raised.pop(0)
        return Reply(say("at last"))

    assert Agent(model=model, model_backoff_s=0).run(store, "a", "hi").output == "at last"

    broken = Agent(model=script(ValueError("bad key")), model_retries=1, model_backoff_s=0)
    with pytest.raises(RunFailed, match="the model failed 2 times; the last time: ValueError: bad key") as caught:
        broken.run(store, "b", "hi")
    assert isinstance(caught.value.__cause__, ValueError)
    assert store.thread("b").load()["state"] == "FAILED"


def test_a_model_that_hangs_is_given_up(store: Store) -> None:
    async def model(messages: Any, tools: Any) -> Reply:
        await asyncio.Event().wait()
        raise AssertionError

    hanging = Agent(model=model, model_retries=0, model_timeout_s=0.01)
    with pytest.raises(RunFailed, match=r"no answer within 0.01 s"):
        hanging.run(store, "t", "hi")


def test_tokens_of_outputs_that_were_thrown_away_are_counted(store: Store) -> None:
    replies = [Reply({"role": "assistant", "x": object()}, usage=Usage(5, 1)), Reply(say("ok"), usage=Usage(6, 2))]
    result = Agent(model=lambda messages, tools: replies.pop(0)).run(store, "t", "hi")
    assert result.state["token_usage"] == {"prompt": 11, "completion": 3, "total": 14}


# --- what tools give back ----------------------------------------------------------------


def test_results_of_every_kind_become_messages(store: Store) -> None:
    results: dict[str, Any] = {
        "text": "é", "none": None, "object": {"a": [1]}, "bytes": b"\xff",
        "message": ToolMessage(role="tool", name="n", content=[]),
    }  # fmt: skip

    @tool(recovery="skip")
    def give(what: str) -> Any:
        return results[what]

    said = ask(*[("give", {"what": what}) for what in results])
    result = Agent(model=script(said, say("ok")), tools=[give]).run(store, "t", "go")
    assert [m["content"] for m in result.messages[2:7]] == ["é", "null", '{"a": [1]}', "\"b'\\\\xff'\"", []]
    assert result.messages[6] == {"role": "tool", "name": "n", "content": []}
    assert [e.result for e in store.thread("t").effects()][:4] == ["é", None, {"a": [1]}, b"\xff"]


def test_a_result_that_cannot_be_stored_is_kept_as_text(store: Store) -> None:
    calls = 0

    class Odd:
        def __repr__(self) -> str:
            return "<odd>"

    @tool(recovery="ask")
    def give() -> Any:
        nonlocal calls
        calls += 1
        return Odd()

    result = Agent(model=script(ask(("give", {})), say("ok")), tools=[give]).run(store, "t", "go")
    assert calls == 1  # it happened: it may not happen again because its result was unusual
    assert result.messages[2]["content"].startswith("<odd> (as text, since it cannot be stored")
    assert store.thread("t").effects()[0].result == result.messages[2]["content"]


def test_a_tool_error_is_told_to_the_model(store: Store) -> None:
    calls = 0

    @tool(recovery="replay")
    def pay(amount: int) -> None:
        nonlocal calls
        calls += 1
        raise ToolError("the card is refused")

    result = Agent(model=script(ask(("pay", {"amount": 1})), say("ok")), tools=[pay]).run(store, "t", "go")
    assert (calls, result.messages[2]["content"]) == (1, "error: the card is refused")
    effect = store.thread("t").effects()[0]
    assert (effect.outcome, effect.error) == ("failed", "ToolError: the card is refused")
    assert result.state["tool_call_results"][0]["outcome"] == "error"


def test_an_interrupted_call_ends_the_turn_without_a_message(store: Store) -> None:
    @tool(recovery="ask")
    def work() -> None:
        raise Interrupted("Esc")

    said = ask(("work", {}), ("put", {"what": "x"}))
    agent = Agent(model=script(said, say("what now?")), tools=[work, put])
    result = agent.run(store, "t", "go", "1")
    assert (result.status, result.message) == ("COMPLETED", None)
    assert roles(result.messages) == ["user", "assistant", "tool"]
    assert [
        (e["outcome"], e["message"]) for e in sorted(result.state["tool_call_results"], key=lambda e: e["call"])
    ] == [
        ("interrupted", None),
        ("ok", 2),
    ]
    assert store.thread("t").effects(open=True) == []
    shown: list[Any] = []

    def model(messages: list[dict[str, Any]], tools: Any) -> Reply:
        shown.extend(messages)
        return Reply(say("what now?"))

    after = Agent(model=model, tools=[work, put]).run(store, "t", "never mind", "2")
    assert roles(after.messages) == ["user", "assistant", "tool", "user", "assistant"]
    assert roles(shown) == ["user", "assistant", "tool", "tool", "user"]  # the gap is filled for the model only
    assert shown[3]["content"] == "interrupted: this call has no result"


def test_a_fallback_takes_every_call_that_no_tool_can(store: Store) -> None:
    got: list[Any] = []

    def anything(arguments: Any, ctx: ToolContext) -> str:
        got.append((ctx.tool, arguments))
        return "ok"

    said = ask(("look", {"what": "x"}), ("other", "{"))
    said["tool_calls"] += [{"id": "z"}, 7]
    fallback = Tool(anything, name="anything", recovery="replay", raw=True)
    result = Agent(model=script(said, say("ok")), tools=[look], fallback=fallback).run(store, "t", "go")
    assert [m["content"] for m in result.messages[2:6]] == ["saw x", "ok", "ok", "ok"]
    assert sorted(got, key=str) == sorted([("other", "{"), ("anything", None), ("anything", None)], key=str)
    with pytest.raises(ValueError, match="raw=True"):
        Agent(model=script(), fallback=look)


# --- watching ----------------------------------------------------------------------------


def test_events_tell_the_story_and_an_observer_that_fails_stops_nothing(store: Store) -> None:
    events: list[RunEvent] = []

    def observe(event: RunEvent) -> None:
        events.append(event)
        raise ValueError("the screen is gone")

    said = ask(("look", {"what": "x"}), ("put", {"what": "y"}))
    Agent(model=script(said, say("ok")), tools=[look, put], on_event=observe, calls_at_once=1).run(
        store, "t", "go", "1"
    )
    assert [(e.kind, e.tool) for e in events] == [
        ("input", ""), ("decision", ""), ("call", "look"), ("result", "look"), ("call", "put"), ("receipt", "put"),
        ("state", ""),
    ]  # fmt: skip
    assert events[-1].detail == "COMPLETED"
    keys = {e.key for e in events if e.kind == "receipt"}
    assert keys == {e.key for e in store.thread("t").effects()}


def test_limits_that_make_no_sense_are_refused() -> None:
    for options in (
        {"calls_at_once": 0}, {"calls_at_once": 1.5}, {"max_steps": -1}, {"lease_s": 0.0}, {"lease_s": 1e9},
        {"grace_s": -1.0}, {"reasks": -1}, {"model_timeout_s": 0}, {"model_backoff_s": float("nan")},
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"calls_at_once is an int of 1 or more|lease_s is above 0 and at most"):
            Agent(model=script(), **options)
