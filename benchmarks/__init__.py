"""Measurements of this project beside what it is built on; each prints a table and writes JSON and a PNG."""
