"""Answers in the format of each endpoint, whole and in chunks."""
