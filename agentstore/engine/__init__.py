"""The durable ordered key-value engine: a write-ahead log whose base and tail are LMDB files."""
