"""The travel desk: an agent that is killed again and again, and an outside world that counts."""
