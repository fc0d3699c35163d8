"""Bounds on what a grammar may cost, in llguidance's units. The same apply when it is proved and when it is used."""

from llguidance import LLParserLimits

HELD_BYTES = 64 * 2**20
"""Memory that a compiled grammar may hold: every request with it holds about as much."""


def parser_limits() -> LLParserLimits:
    """A mask takes some 10 ms at most; each request keeps at most 50,000 lexer states, of 1 to 2 kB."""
    return LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=50_000,
        max_lexer_states=50_000,
        max_grammar_size=500_000,
        verbose_errors=False,
    )
