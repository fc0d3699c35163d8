"""What it costs that the ranks of a group step together."""
