"""How long a decode node's device waits for its host."""
