"""One worker process of a replay: claims threads by their lease and plays them until all are finished.

python -m agentstore.tools.replay_worker --store DIR --world FILE --number N --list FILE.json
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence

from agentstore import Store
from agentstore.errors import AgentStoreError, LeaseHeld
from agentstore.runtime import RunEvent

from .demo.lines import emit
from .replay_player import Player
from .replay_world import ReplayWorld
from .transcript import Transcript, read_transcripts

WAIT_S = 0.02
"""Pause before a thread that another worker holds is tried again, in seconds."""


def play(store: Store, world: ReplayWorld, transcripts: Sequence[Transcript], *, number: int) -> None:
    """Play all `transcripts`, those that others are playing last. Returns when every one is finished, by whomever.

    Workers begin at different places; after that only the leases keep them apart.
    """
    begin = number * 7919 % max(1, len(transcripts))
    left = [*range(begin, len(transcripts)), *range(begin)]
    while left:
        held = []
        for file in left:
            try:
                _play_one(store, world, transcripts[file], file)
            except LeaseHeld:
                held.append(file)
            except AgentStoreError as error:
                print(f"{transcripts[file].path}: {type(error).__name__}: {error}", file=sys.stderr)
                raise SystemExit(2) from error
        if len(held) == len(left):
            time.sleep(WAIT_S)
        left = held


def _play_one(store: Store, world: ReplayWorld, transcript: Transcript, file: int) -> None:
    def on_event(event: RunEvent) -> None:
        emit(event.kind, file=file, tool=event.tool)

    def on_progress(position: int) -> None:
        emit("progress", file=file, messages=position)

    player = Player(transcript, store, world, on_event=on_event, on_progress=on_progress)
    if not player.finished():
        player.run()
    emit("progress", file=file, messages=len(transcript.messages))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="agentstore.tools.replay_worker")
    parser.add_argument("--store", required=True)
    parser.add_argument("--world", required=True)
    parser.add_argument("--number", type=int, required=True)
    parser.add_argument("--list", required=True, help="a JSON file with the paths of the transcripts")
    given = parser.parse_args(arguments)
    with open(given.list, encoding="ascii") as file:
        transcripts = read_transcripts(json.load(file))
    with ReplayWorld(given.world) as world, Store.open(given.store) as store:
        play(store, world, transcripts, number=given.number)
    emit("finished")


if __name__ == "__main__":
    main(sys.argv[1:])
