"""The travel desk: the tools of the demo's agent, as a user of the runtime would write them.

Each tool says what may be done when nobody knows whether its call happened: that one word
is all that recovery needs from the author of a tool.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from agentstore.runtime import Agent, NotDone, Reply, RunEvent, ToolContext, tool

from . import script
from .world import OutsideWorld

Moment = Literal["before", "after"]
Hook = Callable[[Moment, str], None]
"""Called inside a tool, before and after it touches the world: where a crash hurts most."""


def no_hook(_moment: Moment, _tool: str) -> None:
    """Nothing happens in the middle of a call."""


def travel_desk(
    world: OutsideWorld,
    *,
    hook: Hook = no_hook,
    ledger: bool = True,
    on_event: Callable[[RunEvent], None] | None = None,
) -> Agent:
    """The agent of the demo over `world`.

    `ledger=False` declares every tool a ``read``: no intents, no receipts, checkpoints only.
    It is there to show what is lost with them: the same kills then make duplicates.
    """
    rules = {"reserve_seat": "replay", "charge_card": "query", "send_confirmation": "ask"}

    def rule(name: str) -> Any:
        return rules[name] if ledger else "read"

    def find_charge(key: str, arguments: dict[str, Any]) -> Any:
        found = world.find_charge(key)
        return NotDone if found is None else found

    @tool(recovery="read")
    def search_flights(origin: str, destination: str, day: str) -> list[dict[str, object]]:
        """Flights of a day, cheapest first."""
        hook("before", "search_flights")
        found = world.search_flights(origin, destination, day)
        hook("after", "search_flights")
        return found

    @tool(recovery=rule("reserve_seat"))
    def reserve_seat(flight: str, seat: str, passenger: str, context: ToolContext) -> dict[str, object]:
        """Reserve a seat. The airline takes our key: the same key twice is one reservation."""
        hook("before", "reserve_seat")
        reserved = world.reserve_seat(context.key, flight, seat, passenger)
        hook("after", "reserve_seat")
        return reserved

    @tool(recovery=rule("charge_card"), query=find_charge if ledger else None)
    def charge_card(card: str, amount_cents: int, purpose: str, context: ToolContext) -> dict[str, object]:
        """Charge a card. The bank charges each time it is asked, but it can say whether it saw our key."""
        hook("before", "charge_card")
        charged = world.charge_card(context.key, card, amount_cents, purpose)
        hook("after", "charge_card")
        return charged

    @tool(recovery=rule("send_confirmation"))
    def send_confirmation(recipient: str, subject: str, body: str) -> dict[str, object]:
        """Send a mail. Nobody but a person who looks into the outbox can say whether it went out."""
        hook("before", "send_confirmation")
        sent = world.send_mail(recipient, subject, body)
        hook("after", "send_confirmation")
        return sent

    return Agent(
        model=_model,
        tools=[search_flights, reserve_seat, charge_card, send_confirmation],
        on_event=on_event,
    )


def _model(messages: list[dict[str, Any]], tools: object) -> Reply:
    return Reply(message=script.next_message(messages))
