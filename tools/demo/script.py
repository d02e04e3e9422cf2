"""The demo's model: a travel desk that books trips for a team, as a function of the messages so far.

A script and no model, so that the demo needs no network and every run wants the same
effects. It keeps nothing between calls: any process that has the conversation can go on
with it, which is all that a real model does too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from .world import Wanted

Message = dict[str, Any]

PASSENGERS = ("Ada", "Grace", "Edsger", "Barbara", "Donald")
_SEATS = ("12A", "12B", "12C", "14D", "14E")


def trip_input(trip: int) -> Message:
    """What the team asks for; trip 1 is the first."""
    names = ", ".join(PASSENGERS)
    return {
        "role": "user",
        "content": f"Trip {trip}: please book {names} from BER to LIS on Monday and confirm by mail.",
    }


def input_id(trip: int) -> str:
    return f"trip-{trip}"


def wanted(trips: int) -> list[Wanted]:
    """The effects that `trips` finished trips want, each exactly once."""
    return [
        effect
        for trip in range(1, trips + 1)
        for name in PASSENGERS
        for effect in (
            ("reserve_seat", f"{_passenger(name, trip)} on FR 1142"),
            ("charge_card", f"{_passenger(name, trip)} on FR 1142"),
            ("send_confirmation", f"FR 1142 for {_passenger(name, trip)}"),
        )
    ]


def next_message(messages: Sequence[Message]) -> Message:
    """The assistant message that follows `messages`: two searches at once, five seats at once, then a charge and a mail
    for every passenger, and a summary: 17 calls.

    It reads fares and seats from the results, as a model would: a lost or changed result shows in what follows.
    """
    start = max(n for n, message in enumerate(messages) if message["role"] == "user")
    trip = sum(message["role"] == "user" for message in messages)
    turn = messages[start + 1 :]
    said = sum(message["role"] == "assistant" for message in turn)
    results = [json.loads(message["content"]) for message in turn if message["role"] == "tool"]
    if said == 0:
        return _calls(
            trip,
            said,
            "I look at the flights there and back first.",
            ("search_flights", {"origin": "BER", "destination": "LIS", "day": "Monday"}),
            ("search_flights", {"origin": "LIS", "destination": "BER", "day": "Friday"}),
        )
    best = results[0][0]
    names = [_passenger(name, trip) for name in PASSENGERS]
    if said == 1:
        seats = [
            {"flight": best["flight"], "seat": seat, "passenger": name}
            for name, seat in zip(names, _SEATS, strict=True)
        ]
        return _calls(trip, said, "Five seats together.", *(("reserve_seat", seat) for seat in seats))
    passenger, stage = divmod(said - 2, 2)
    if passenger == len(names):
        total = sum(result["amount_cents"] for result in results[2:] if "amount_cents" in result)
        sent = sum("sent_to" in result for result in results[2:])
        return {
            "role": "assistant",
            "content": f"Trip {trip} is booked: {total / 100:.2f} EUR, {sent} confirmations sent.",
        }
    name = names[passenger]
    if stage == 0:
        charge = {
            "card": f"{name}'s card",
            "amount_cents": best["fare_cents"],
            "purpose": f"{name} on {best['flight']}",
        }
        return _calls(trip, said, None, ("charge_card", charge))
    seat = results[2 + passenger]["seat"]
    mail = {
        "recipient": f"{PASSENGERS[passenger].lower()}@example.org",
        "subject": f"{best['flight']} for {name}",
        "body": f"Dear {name}, your seat is {seat}, departure {best['departs']}.",
    }
    return _calls(trip, said, None, ("send_confirmation", mail))


def _passenger(name: str, trip: int) -> str:
    return name if trip == 1 else f"{name} ({trip})"


def _calls(trip: int, said: int, content: str | None, *calls: tuple[str, dict[str, Any]]) -> Message:
    return {
        "role": "assistant",
        "content": content,
        "tool_calls": [
            {
                "id": f"call_{trip}_{said}_{index}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments)},
            }
            for index, (name, arguments) in enumerate(calls)
        ],
    }
