"""The loop that moves an agent one step only after the write of the step before is confirmed."""
