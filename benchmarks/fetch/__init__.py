"""Fetching a prefix from a decode node against computing it."""
