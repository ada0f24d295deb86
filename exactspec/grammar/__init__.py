"""Constrained output: grammars compiled off the step's path, and masks that follow a draft block and step back."""

from exactspec.grammar.compiler import GrammarCompiler, check_grammar, needs_grammar
from exactspec.grammar.owner import MaskOwner

__all__ = ["GrammarCompiler", "MaskOwner", "check_grammar", "needs_grammar"]
