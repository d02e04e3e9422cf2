"""What the product and the crash tests both need: fault injection, process helpers, checkers."""
