"""When the demo kills its worker: chosen by seed, all kinds of moments among them."""

from __future__ import annotations

import random

from .crash import Death, Kind

_KINDS: tuple[Kind, ...] = ("tool-before", "tool-after", "commit-before", "commit-after", "wal", "outside")


def deaths(kills: int, rng: random.Random) -> list[Death]:
    """`kills` moments. From 8 on each kind that recovery treats differently is there at least once.

    >>> planned = deaths(8, random.Random(0))
    >>> sorted({death.kind for death in planned})
    ['commit-after', 'commit-before', 'outside', 'tool-after', 'tool-before', 'wal']
    >>> deaths(8, random.Random(0)) == planned
    True
    """
    planned = [
        Death("tool-after", rng.randint(1, 5), tool="reserve_seat"),
        Death("tool-after", 1, tool="charge_card"),
        Death("tool-after", 1, tool="send_confirmation"),
        Death("tool-before", 1, tool="send_confirmation"),
        Death("wal", rng.randint(1, 6), part=_part(rng)),
        Death("commit-before", rng.randint(1, 4)),
        Death("commit-after", rng.randint(1, 4)),
        Death("outside", rng.randint(1, 12), part=rng.random()),
    ]
    rng.shuffle(planned)
    planned += [_any(rng) for _ in range(kills - len(planned))]
    planned = planned[:kills]
    rng.shuffle(planned)
    return planned


def _any(rng: random.Random) -> Death:
    kind = rng.choice(_KINDS)
    return Death(kind, rng.randint(1, 6), tool="*" if kind.startswith("tool") else "", part=_part(rng))


def _part(rng: random.Random) -> float:
    """None, some or all of a frame: all of it is a commit that its dead writer never heard of."""
    return rng.choice((0.0, rng.random(), rng.random(), 1.0))
