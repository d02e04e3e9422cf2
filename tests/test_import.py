"""An import makes the same threads, or none; killed and made again it is as if it had run once."""

from __future__ import annotations

import io
import json
import tempfile
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ops_lab import content, fill, in_child
from test_codec_cbor import ANYTHING, same

from agentstore import Append, Set, Store
from agentstore.testing.faults import killing_files
from agentstore.tools import importing, lines
from agentstore.tools.cli import app
from agentstore.tools.export import export
from agentstore.tools.importing import Imported, import_lines, import_transcript
from agentstore.tools.lines import LineError
from agentstore.tools.transcript import read_transcripts
from agentstore.transfer import NAME_WHILE_ARRIVING, Arrival


def run(*arguments: str) -> tuple[int, str, str]:
    out, err = io.StringIO(), io.StringIO()
    status: Any = 0
    with redirect_stdout(out), redirect_stderr(err):
        try:
            app(args=list(arguments), prog_name="agentstore")
        except SystemExit as end:
            status = end.code or 0
    return status, out.getvalue(), err.getvalue()


def lines_of(store: Store, *, everything: bool = True) -> list[dict[str, Any]]:
    written: list[dict[str, Any]] = []
    export(store, lambda line: written.append(json.loads(line)), everything=everything)
    return written


def write(path: Path, records: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return str(path)


def bring(file: str, path: Path) -> Imported:
    done = Imported()
    with Store.open(path, background=False) as store:
        import_lines(store, file, done)
    return done


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    path = tmp_path / "agents"
    with Store.open(path, background=False) as store:
        fill(store)
    return path


@pytest.fixture
def records(filled: Path) -> list[dict[str, Any]]:
    with Store.open(filled, background=False) as store:
        return lines_of(store)


# --- the same again -------------------------------------------------------------------------


def test_what_was_exported_comes_back(filled: Path, tmp_path: Path, records: list[dict[str, Any]]) -> None:
    done = bring(write(tmp_path / "out", records), tmp_path / "new")
    with Store.open(filled, background=False) as old, Store.open(tmp_path / "new", background=False) as new:
        assert new.check() == []
        assert content(new, lsn=False) == content(old, lsn=False)
        again = lines_of(new)
    assert done.threads == records[-1]["threads"] and done.there == 0
    changing = ("at", "status", "why", "duplicates")
    assert [without(line, *changing) for line in again] == [without(line, *changing) for line in records]


def without(line: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in line.items() if line["record"] == "checkpoint" or name not in names}


def test_effects_are_known_by_their_keys(filled: Path, tmp_path: Path, records: list[dict[str, Any]]) -> None:
    """What was done is not done again, and what was open waits for a person, in the thread and in its fork."""
    bring(write(tmp_path / "out", records), tmp_path / "new")
    with Store.open(tmp_path / "new", background=False) as store:
        for name in ("main", "main/fork"):
            thread = store.thread(name)
            decision = thread.decision
            assert decision is not None
            done = thread.effect(decision=decision, index=0, tool="tool-0", arguments={"n": 0}, rule="query")
            assert done.done and done.result == {"ok": [1, (2,)]}
            waiting = thread.effects(open=True)
            assert [(one.tool, one.status) for one in waiting] == [("tool-2", "in_doubt")]
        undone = store.thread("undone")
        decision = undone.decision
        assert decision is not None
        assert not undone.effect(decision=decision, index=0, tool="t", arguments={}, rule="ask").done


def test_heads_alone_come_too(filled: Path, tmp_path: Path) -> None:
    with Store.open(filled, background=False) as store:
        file = write(tmp_path / "out", lines_of(store, everything=False))
        wanted = content(store, lsn=False)
    done = bring(file, tmp_path / "new")
    with Store.open(tmp_path / "new", background=False) as store:
        assert store.check() == []
        found = content(store, lsn=False)
        for name, thread in found.items():
            assert thread["head"] == wanted[name]["head"]  # and the decision on whose line it stands
            assert thread["effects"] == wanted[name]["effects"]
            assert [cp[0] for cp in thread["checkpoints"]] == [thread["head"][0]]
            assert thread["checkpoints"][0][2:] == wanted[name]["checkpoints"][0][2:]
        cp = store.thread("branches").commit(Set("last", 1))
        assert (cp.seq, cp.parent) == (6, 5)
    assert done.bare > 0


STATES = st.dictionaries(st.text(max_size=5) | st.just("$a"), ANYTHING, max_size=4)


@settings(max_examples=60)
@given(st.lists(st.tuples(STATES, st.integers(0, 3)), min_size=1, max_size=6))
def test_any_states_come_back(states: list[tuple[dict[str, Any], int]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with Store.open(path / "a", background=False) as store:
            thread = store.thread("t")
            for n, (state, back) in enumerate(states):
                parent = max(0, n - 1 - back) if n else None
                thread.commit_state(state, parent=parent, metadata={"state": state})
            file = write(path / "out", lines_of(store))
        bring(file, path / "b")
        with Store.open(path / "b", background=False) as store:
            assert store.check() == []
            thread = store.thread("t")
            for n, (state, back) in enumerate(states):
                assert same(thread.load(at=n), state)
                assert thread.checkpoint(n).parent == (max(0, n - 1 - back) if n else None)
                assert same(thread.checkpoint(n).metadata, {"state": state})


# --- again, and killed ------------------------------------------------------------------------


def test_an_import_made_again_changes_nothing(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    file = write(tmp_path / "out", records)
    bring(file, tmp_path / "new")
    with Store.open(tmp_path / "new", background=False) as store:
        before, lsn = content(store), store.stats()["lsn"]
    done = bring(file, tmp_path / "new")
    assert (done.threads, done.there) == (0, records[-1]["threads"])
    with Store.open(tmp_path / "new", background=False) as store:
        assert content(store) == before and store.stats()["lsn"] == lsn


def test_a_thread_that_went_on_is_left_alone(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    file = write(tmp_path / "out", records)
    bring(file, tmp_path / "new")
    with Store.open(tmp_path / "new", background=False) as store:
        store.thread("main").commit(Set("later", 1))
    assert bring(file, tmp_path / "new").threads == 0
    with Store.open(tmp_path / "new", background=False) as store:
        assert store.thread("main").load()["later"] == 1


@pytest.mark.parametrize("when", ["before", "inside", "after"])
def test_killed_at_any_commit_it_completes_when_it_is_made_again(filled: Path, tmp_path: Path, when: Any) -> None:
    with Store.open(filled, background=False) as store:
        records = [line for line in lines_of(store) if line.get("thread") in (None, "main", "branches")]
        wanted = {name: thread for name, thread in content(store, lsn=False).items() if name in ("main", "branches")}
    records[-1]["threads"] = 2
    file = write(tmp_path / "out", records)
    n = 0
    while True:
        n += 1
        path = tmp_path / f"new-{n}"
        status = in_child(lambda path=path: bring(file, path), killing_files(n, when))  # type: ignore[misc]  # defaults of a lambda have no types
        if status == 0:
            break
        assert status == -9
        with Store.open(path, background=False) as store:
            assert store.check() == []
            for name in store.threads():  # whole, or not under its name
                if not name.startswith(NAME_WHILE_ARRIVING):
                    assert content(store, lsn=False)[name] == wanted[name]
        bring(file, path)
        with Store.open(path, background=False) as store:
            assert store.check() == []
            assert content(store, lsn=False) == wanted
    assert n > 12


# --- what is no export ------------------------------------------------------------------------


def edited(records: list[dict[str, Any]], change: Callable[[dict[str, Any]], object], index: int) -> list[Any]:
    copy = json.loads(json.dumps(records))
    change(copy[index])
    return list(copy)


def place(records: list[dict[str, Any]], kind: str, thread: str = "main", nth: int = 0) -> int:
    return [n for n, line in enumerate(records) if line["record"] == kind and line.get("thread") == thread][nth]


DAMAGES: list[tuple[str, int, dict[str, Any], str]] = [
    ("checkpoint", 1, {"seq": 0}, "above the one before"),
    ("checkpoint", 1, {"seq": "1"}, "'seq' is no int"),
    ("checkpoint", 1, {"seq": True}, "'seq' is no int"),
    ("checkpoint", 1, {"parent": 7}, "its parent 7 has no line before"),
    ("checkpoint", 1, {"parent": None}, "no parent"),
    ("checkpoint", 1, {"reason": "because"}, "there is no reason"),
    ("checkpoint", 1, {"created_at": "now"}, "Invalid isoformat"),
    ("checkpoint", 1, {"created_at": "2026-01-01T00:00:00"}, "no offset"),
    ("checkpoint", 1, {"created_at": "0001-01-01T00:00:00+00:00"}, "not before 1970"),
    ("checkpoint", 1, {"changes": [["append", "nothing", []]]}, "does not fit"),
    ("checkpoint", 1, {"changes": [["set", "x", 1]]}, "another sha256"),
    ("checkpoint", 1, {"changes": 5}, "changes are an array"),
    ("checkpoint", 1, {"metadata": {"$what": 1}}, "no tag"),
    ("checkpoint", 1, {"metadata": [1]}, "metadata is a dict"),
    ("checkpoint", 1, {"step": "one"}, "step is an int"),
    ("checkpoint", 0, {"state": []}, "'state' is no dict"),
    ("checkpoint", 0, {"state": {"\ud800": 1}}, "surrogates not allowed"),
    ("checkpoint", 0, {"record": "effect"}, "a checkpoint of thread"),
    ("checkpoint", 0, {"thread": "other"}, "a checkpoint of thread"),
    ("effect", 0, {"key": "00"}, "the key of the effect is not"),
    ("effect", 0, {"tool": 5}, "the name of a tool"),
    ("effect", 0, {"rule": "hope"}, "there is no rule"),
    ("effect", 0, {"decision": ["00", 1]}, "no decision"),
    ("effect", 0, {"decision": None}, "a decision is"),
    ("effect", 0, {"attempt": 0}, "no attempt"),
    ("effect", 0, {"outcome": "sure"}, "no outcome"),
    ("effect", 0, {"finished_at": None}, "'finished_at'"),
    ("pin", 0, {"seq": 77}, "no checkpoint 77"),
    ("pin", 0, {"note": "x" * 5000}, "at most"),
    ("pin", 0, {"note": 5}, "a note is a text"),
    ("effect", 0, {"why": 5}, "why is a text"),
    ("effect", 1, {"error": ["no"]}, "an error is a text"),
    ("thread", 0, {"thread": ""}, "a thread id has"),
    ("thread", 0, {"uuid": "xyz"}, "hex"),
    ("thread", 0, {"uuid": "00"}, "16 bytes"),
    ("thread", 0, {"head": 1}, "the head is checkpoint 1"),
    ("thread", 0, {"checkpoints": 99}, "a checkpoint of thread"),
    ("thread", 0, {"checkpoints": 1}, "an? effect of thread"),
    ("thread", 0, {"checkpoints": -1}, ""),
    ("thread", 0, {"decision": 5}, "a decision is"),
]


@pytest.mark.parametrize(("kind", "nth", "change", "why"), DAMAGES, ids=lambda value: str(value)[:40])
def test_a_malformed_line_is_named_and_nothing_of_its_thread_comes(
    tmp_path: Path, records: list[dict[str, Any]], kind: str, nth: int, change: dict[str, Any], why: str
) -> None:
    damaged = edited(records, lambda line: line.update(change), place(records, kind, nth=nth))
    file = write(tmp_path / "out", damaged)
    with pytest.raises(LineError, match=rf"out:\d+: .*{why}"):
        bring(file, tmp_path / "new")
    with Store.open(tmp_path / "new", background=False) as store:
        assert store.check() == []
        assert "main" not in [*store.threads()]
        assert not [name for name in store.threads() if name.startswith(NAME_WHILE_ARRIVING)]
    assert bring(write(tmp_path / "out", records), tmp_path / "new").threads > 0  # and the whole file completes it


def test_files_that_are_cut_or_something_else(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    whole = Path(write(tmp_path / "whole", records)).read_bytes()
    for content_, why in [
        (b"", "not an export"),
        (b"\n", "not JSON"),
        (b'{"role": "user"}\n', "transcripts need --transcripts"),
        (b"[1]\n", "a line is an object"),
        (b'{"record": "export", "version": 2}\n', "version 2"),
        (b'{"record": "export", "version": 1}\n', "cut short"),
        (b'{"record": "export", "version": 1}\n{"record": "pin"}\n', "of a thread was expected"),
        (b'{"record": "export", "version": NaN}\n', "NaN is not JSON"),
        (b"\xff\n", "not UTF-8"),
        (b"[" * 100_000 + b"\n", "nested too deeply"),
        (b"1" * 5_000 + b"\n", "not readable"),
        (whole[:-1], None),
        (whole[:-10], "in the middle of a line"),
        (whole[: whole.rindex(b"\n", 0, -1) + 1], "cut short"),
        (whole + b"{}\n", "behind the end"),
    ]:
        file = tmp_path / "file"
        file.write_bytes(content_)
        if why is None:
            bring(str(file), tmp_path / "new")
            continue
        with pytest.raises(LineError, match=why):
            bring(str(file), tmp_path / "new")


def test_a_line_that_is_too_long_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "LINE_BYTES_MAX", 1000)
    (tmp_path / "file").write_bytes(b"{" + b" " * 5000)
    with pytest.raises(LineError, match="more than 1,000 bytes"):
        bring(str(tmp_path / "file"), tmp_path / "new")


def test_another_thread_of_the_same_id_is_refused(tmp_path: Path, records: list[dict[str, Any]]) -> None:
    file = write(tmp_path / "out", records)
    with Store.open(tmp_path / "new", background=False) as store:
        store.thread("main").commit(Set("mine", 1))
    with pytest.raises(LineError, match="the store has another thread 'main'"):
        bring(file, tmp_path / "new")
    with Store.open(tmp_path / "new", background=False) as store:
        assert store.thread("main").load() == {"mine": 1}


def test_a_thread_that_is_gone_is_left_out(tmp_path: Path) -> None:
    with Store.open(tmp_path / "agents", background=False) as store:
        for n in range(3):
            store.thread("t").commit(Set("n", n))
        records = lines_of(store)
    records[3:] = [{"record": "gone", "thread": "t"}, {"record": "end", "threads": 0}]
    assert bring(write(tmp_path / "out", records), tmp_path / "new").threads == 0
    with Store.open(tmp_path / "new", background=False) as store:
        assert [*store.threads()] == []


def test_two_arrivals_of_one_thread_at_once(tmp_path: Path) -> None:
    with Store.open(tmp_path / "new", background=False) as store:
        first = Arrival(store, "t", bytes(16))
        first.commit(0, {"n": 0})
        second = Arrival(store, "t", bytes(16))
        second.commit(0, {"n": 0})
        with pytest.raises(Exception, match="deleted"):
            first.commit(1, {"n": 1}, parent=0)
        second.publish()
        assert store.thread("t").load() == {"n": 0} and store.check() == []


# --- transcripts --------------------------------------------------------------------------------


MESSAGES = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]},
    {"role": "tool", "tool_call_id": "1", "content": "42"},
    {"role": "assistant", "content": "done \ud800"},
]


def test_a_transcript_becomes_a_thread(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(message) + "\n" for message in MESSAGES))
    for expected in ((1, 4, 0), (0, 0, 1)):
        status, out, err = run("import", "--transcripts", str(file), str(tmp_path / "new"), "--json")
        assert status == 0, err
        told = json.loads(out)
        assert (told["threads"], told["checkpoints"], told["there"]) == expected
    with Store.open(tmp_path / "new", background=False) as store:
        assert store.thread("talk").load() == {"conversation_history": MESSAGES}
        reasons = [cp.reason for cp in store.thread("talk").history()]
        assert reasons == ["round", "tool_result", "decision", "input"]


def test_a_transcript_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(message) + "\n" for message in MESSAGES))
    [transcript] = read_transcripts([str(file)])

    def act() -> None:
        with Store.open(tmp_path / "new", background=False) as store:
            import_transcript(store, transcript, Imported())

    assert in_child(act, killing_files(3, "inside")) == -9
    act()
    with Store.open(tmp_path / "new", background=False) as store:
        assert store.thread("talk").load() == {"conversation_history": MESSAGES}
        assert [cp.step for cp in store.thread("talk").history()] == [3, 2, 1, 0]
        store.thread("talk").commit(Append("conversation_history", {"role": "user", "content": "more"}))
        with pytest.raises(LineError, match="another thread"):
            import_transcript(store, transcript, Imported())


def test_a_transcript_of_other_messages_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "talk.jsonl"
    file.write_text("".join(json.dumps(message) + "\n" for message in MESSAGES))
    with Store.open(tmp_path / "new", background=False) as store:
        store.thread("talk").commit(Append("conversation_history", {"role": "user", "content": "ho"}))
    status, _, err = run("import", "--transcripts", str(file), str(tmp_path / "new"))
    assert status == 2 and "another message" in err


# --- the command ----------------------------------------------------------------------------------


def test_errors_are_one_sentence(tmp_path: Path) -> None:
    for file, why in [(tmp_path / "nothing", "cannot be read"), (tmp_path, "cannot be read")]:
        status, _, err = run("import", str(file), str(tmp_path / "new"))
        assert status == 2 and why in err and len(err.splitlines()) == 1, err


def test_it_says_what_waits(filled: Path, tmp_path: Path) -> None:
    assert run("export", "--jsonl", "--all", str(filled), str(tmp_path / "out"))[0] == 0
    status, out, _ = run("import", str(tmp_path / "out"), str(tmp_path / "new"))
    assert status == 0 and "calls have no receipt" in out
    assert importing.size_of(str(tmp_path / "out")) > 0
