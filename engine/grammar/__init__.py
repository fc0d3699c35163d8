"""Grammars: which tokens may come next, so that what a request generates has the form that its client asked for.

    Vocabulary       the checkpoint's tokens as bytes
    GrammarCompiler  compiles `control.grammar.Grammar` on threads, after a proof of harmlessness in another process
    CompiledGrammar  what requests with the same grammar share
    GrammarState     where one request is in its grammar
    MaskWriter       the masks of a step's requests, for the sampler

**Why llguidance.** 1.9.1 beside xgrammar 0.2.8 (processor time, AMD EPYC; a BPE of 129,280 tokens; masks along a real
answer: a JSON object, a schema of 5 properties, one of 11 KiB with 120, a regular expression):

| | llguidance | xgrammar |
| --- | --- | --- |
| compilation, ms | 1.5, 2.1, 8.2, 1.4 | 79, 1577, 7492, 48 |
| mask, mean, us | 97, 79, 234, 127 | 88, 110, 1445, 1806 |
| import | 0.16 s, 6 MB | 0.66 s and 23 MB beside torch |
| download | 3 MB, depends on nothing | 1.3 MB and torch, transformers, tvm-ffi, Triton |
| memory with the vocabulary | 143 MB | 101 MB |

xgrammar knows the tool formats of DeepSeek and GLM; here chat formats write theirs in Lark (`gateway/formats/`).

**Why proofs.** llguidance bounds the fuel of its lexer and parser, their states and the size of a grammar. It does not
bound everything: a chain of 20,000 rules overflows its stack, which ends the process, and whether the intersection of
17 patterns is empty takes it longer than anyone waits. So `proofs.py` tries each grammar first.
"""


class GrammarError(Exception):
    """The grammar cannot be compiled, at this node or any other: the client's mistake. The message names the part."""


class CompilerBusy(Exception):
    """Too many grammars wait to be compiled here, or the node stops: another node, or later, may do."""


class GrammarViolation(Exception):
    """A request cannot go on in its grammar: a token that it does not allow, or a state that is too complex."""


class UnsupportedTokenizer(Exception):
    """The checkpoint's tokenizer cannot be used with grammars. The node can serve requests without one."""
