"""agentstore: a checkpoint store on a write-ahead log, for agents that must not start over."""

from __future__ import annotations

__version__ = "0.1.0"
