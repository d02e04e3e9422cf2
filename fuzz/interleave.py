"""All orders of short programs of two and three processes on one store: ``python -m fuzz interleave``.

A program says how the store was left before, and what each of its actors does (`fuzz.actors`). It is run in every order
without a pre-emption, then with one at every point (`fuzz.points`), also with the actor killed there, then with two and
three, and at last with many at random. Then all actors are killed, and the store is opened, written, killed and opened
again: everything confirmed must be there, in whole prefixes of what each writer did, and nothing else.
"""

from __future__ import annotations

import copy
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from agentstore.engine.embedded import EmbeddedEngine
from agentstore.engine.files import default_files, set_default_files
from agentstore.testing.crashsim import in_memory
from agentstore.testing.faults import abandon
from agentstore.testing.limits import small_limits
from fuzz import threadactors
from fuzz.actors import FOR_EVER, Actor, Step, heads_in, write
from fuzz.campaign import Campaign, Case, Counts, Violation
from fuzz.points import Unsynced
from fuzz.programs import PROGRAMS, Program
from fuzz.schedule import Choice, Schedule, Stretch, Watch
from fuzz.threadactors import ThreadActor, small_packs

PREEMPTIONS_MAX = 3
RANDOM_CHOICES = (4, 12)
RANDOM_POINTS = (1, 40)


class InterleaveCampaign:
    """Orders of `PROGRAMS`."""

    name = "interleave"
    repeats = True

    def __init__(self, programs: dict[str, Program] | None = None) -> None:
        self._programs = PROGRAMS if programs is None else programs
        self._left: dict[str, Watch] = {}
        self._last: tuple[str, list[Stretch]] = "", []
        self._root: tempfile.TemporaryDirectory[str] | None = None

    def missing(self) -> str | None:
        """Nothing."""
        return None

    # --- which ------------------------------------------------------------------------------

    def cases(self, seed: int) -> Iterator[Case]:
        """Of all programs in turn. Endless."""
        each = [self.orders(name, seed) for name in self._programs]
        while True:
            for orders in each:
                yield next(orders)

    def orders(self, name: str, seed: int) -> Iterator[Case]:
        """Of one program: with no pre-emption, with one, two, three, then at random. Within that, shuffled."""
        rng = random.Random(f"{seed} {name}")
        program = self._programs[name]
        seen: set[str] = set()
        level = [self._case(program, name, [[actor, FOR_EVER]]) for actor in range(len(program.parts))]
        for preemptions in range(PREEMPTIONS_MAX + 1):
            following: list[Case] = []
            for case in level:  # which grows meanwhile
                yield case
                if case["schedule"][-1][-1] == "kill":
                    continue
                stretches = self._stretches(case)
                mark = repr([(each.actor, each.points) for each in stretches])
                if mark in seen:
                    continue
                seen.add(mark)
                for free, child in self._children(case, stretches, deaths=preemptions == 0 and program.deaths):
                    (level if free else following).append(child)
            rng.shuffle(following)
            level = following
        while True:
            yield self._drawn(program, name, rng)

    def _case(self, program: Program, name: str, schedule: list[Choice], *, fine: bool = False) -> Case:
        # With the program in it: a case plays again when the programs have changed.
        return {"program": name, **program.as_json(), "schedule": schedule, "fine": fine}

    def _children(self, case: Case, stretches: list[Stretch], *, deaths: bool) -> Iterator[tuple[bool, Case]]:
        """With one more switch, behind those that were chosen; free is one where an actor could not go on."""
        before: list[Choice] = []
        fixed = len(case["schedule"]) - 1
        for at, stretch in enumerate(stretches):
            if at >= fixed:
                for points in range(len(stretch.points)):
                    here = [*before, [stretch.actor, points]] if points else before
                    if points or at > fixed:
                        for other in stretch.runnable:
                            yield not points, {**case, "schedule": [*here, [other, FOR_EVER]]}
                            if deaths:
                                # Dies while the other waits, or is done.
                                dies = [stretch.actor, 0, "kill"]
                                yield False, {**case, "schedule": [*here, [other, FOR_EVER], dies]}
                    if deaths:
                        yield False, {**case, "schedule": [*before, [stretch.actor, points, "kill"]]}
            before = [*before, [stretch.actor, len(stretch.points)]]

    def _drawn(self, program: Program, name: str, rng: random.Random) -> Case:
        choices: list[Choice] = []
        for _ in range(rng.randint(*RANDOM_CHOICES)):
            choices.append([rng.randrange(len(program.parts)), int(RANDOM_POINTS[1] ** rng.random())])
        if program.deaths and rng.random() < 0.3:
            choices[rng.randrange(len(choices))].append("kill")
        return self._case(program, name, choices, fine=rng.random() < 0.5)

    def smaller(self, case: Case) -> Iterator[Case]:
        """With fewer choices, then with fewer steps, then with shorter choices."""
        schedule: list[Choice] = case["schedule"]
        for at in range(len(schedule)):
            yield {**case, "schedule": schedule[:at] + schedule[at + 1 :]}
        for actor, steps in enumerate(case["parts"]):
            for at in range(len(steps)):
                parts = [*case["parts"]]
                parts[actor] = steps[:at] + steps[at + 1 :]
                yield {**case, "parts": parts}
        for at, (actor, points, *how) in enumerate(schedule):
            if points > 1:
                yield {**case, "schedule": [*schedule[:at], [actor, points // 2, *how], *schedule[at + 1 :]]}

    # --- running ----------------------------------------------------------------------------

    def run(self, case: Case, counts: Counts) -> None:
        """Run one order. Raises Violation."""
        schedule = self.play(case)
        counts.faults["pre-emptions"] += max(0, len(case["schedule"]) - 1)
        counts.faults["kills"] += sum(len(choice) > 2 for choice in case["schedule"])
        counts.faults["points"] += sum(len(each.points) for each in schedule.stretches)
        counts.outcomes[case["program"]] += 1

    def _stretches(self, case: Case) -> list[Stretch]:
        if self._last[0] != json.dumps(case):
            self.play(case)
        return self._last[1]

    def play(self, case: Case) -> Schedule:
        """Run one order, and look at what it left. Raises Violation."""
        with small_limits(), small_packs():
            return self._play(case)

    def _play(self, case: Case) -> Schedule:
        if self._root is None:
            self._root = tempfile.TemporaryDirectory(dir=in_memory(), prefix="agentstore-interleave-")
        place = Place(self._root.name, self._left)
        watch = place.lay_out(case)
        parts: list[list[Step]] = case["parts"]
        schedule = Schedule(KINDS[case["kind"]], place.store, place.turns, case["begin"], parts, watch)
        self._last = json.dumps(case), schedule.stretches
        schedule.run(case["schedule"], fine=case["fine"])
        check(place.store, watch, len(parts), *ENDS[case["kind"]])
        return schedule


@dataclass
class Place:
    """Where schedules are run, one after the other."""

    root: str
    left: dict[str, Watch]
    """What was watched while the store was written that a program begins with."""

    @property
    def store(self) -> str:
        return os.path.join(self.root, "store")

    @property
    def turns(self) -> str:
        return os.path.join(self.root, "turns")

    def lay_out(self, case: Case) -> Watch:
        """Put the store there that the program begins with, and nothing else."""
        key = f"{case['kind']} {len(case['parts'])} {json.dumps(case['before'])}"
        number = [*self.left, key].index(key)
        kept = os.path.join(self.root, f"left-{number}")
        if key not in self.left:
            self._clean()
            watch = Watch()
            setup = len(case["parts"])
            parts: list[list[Step]] = [*([] for _ in range(setup)), case["before"]]
            Schedule(KINDS[case["kind"]], self.store, self.turns, [], parts, watch).run([[setup, FOR_EVER]])
            if os.path.exists(self.store):
                shutil.copytree(self.store, kept)
            self.left[key] = watch
        self._clean()
        if os.path.exists(kept):
            shutil.copytree(kept, self.store)
        return copy.deepcopy(self.left[key])

    def _clean(self) -> None:
        shutil.rmtree(self.store, ignore_errors=True)
        os.makedirs(self.turns, exist_ok=True)


# --- what must be there ---------------------------------------------------------------------


Look = Callable[[EmbeddedEngine, int], dict[int, int]]
"""What an open store holds of so many writers: the number of the newest commit of each."""


def check(path: str, watch: Watch, parts: int, look: Look, mark: Callable[[EmbeddedEngine, int], None]) -> None:
    """Hold the store that killed actors left to what they had been promised. Raises Violation."""
    files = Unsynced()
    before = default_files()
    writers = parts + 2
    """The actors, who wrote before, and we."""
    set_default_files(files)
    engine = EmbeddedEngine.open(path, background=False)
    try:
        there = look(engine, writers)
        for writer in range(writers - 1):
            commits = there.get(writer, -1) + 1
            confirmed, begun = watch.confirmed.get(writer, 0), watch.begun.get(writer, 0)
            if not confirmed <= commits <= begun:
                raise Violation(f"of writer {writer} {commits} commits are there, {confirmed} confirmed, {begun} begun")
        mark(engine, writers - 1)
        there[writers - 1] = 0
        abandon(engine)
        engine = EmbeddedEngine.open(path, background=False)
        if look(engine, writers) != there:
            raise Violation("after a commit and a kill the store is another one")
        findings = engine.verify()
        if findings:
            raise Violation(f"verify: {findings[0]}")
        engine.close()
        engine = EmbeddedEngine.open(path, background=False)
        if look(engine, writers) != there:
            raise Violation("after a close the store is another one")
    finally:
        abandon(engine)
        set_default_files(before)


def heads(engine: EmbeddedEngine, writers: int) -> dict[int, int]:
    with engine.read() as snap:
        return {writer: number for writer, (number, _) in heads_in(snap, writers).items()}


def one_more(engine: EmbeddedEngine, writer: int) -> None:
    engine.transact(lambda tx: write(tx, writer, 0, 40))


KINDS: dict[str, type[Actor]] = {"engine": Actor, "store": ThreadActor}
ENDS: dict[str, tuple[Look, Callable[[EmbeddedEngine, int], None]]] = {
    "engine": (heads, one_more),
    "store": (threadactors.look, threadactors.mark),
}

CAMPAIGN: Campaign = InterleaveCampaign()
