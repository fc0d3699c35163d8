"""What can be wrong with a grammar."""


class GrammarError(Exception):
    """The grammar cannot be compiled, at this node or any other: the client's mistake. The message names the part."""


class CompilerBusy(Exception):
    """Too many grammars wait to be compiled here, or the node stops: another node, or later, may do."""


class GrammarViolation(Exception):
    """A request cannot go on in its grammar: a token that it does not allow, or a state that is too complex."""


class UnsupportedTokenizer(Exception):
    """The checkpoint's tokenizer cannot be used with grammars. The node can serve requests without one."""
