"""The help texts of `thinwire` and all its commands, as the command prints them."""

import argparse
import os
from unittest.mock import patch

from docutils import nodes
from sphinx.util.docutils import SphinxDirective

WIDTH = "90"  # columns of a help text


def commands(parser, words):
    """Each command with its parser, in the order of `--help`."""
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                yield from commands(inner, f"{words} {name}")


class CommandHelp(SphinxDirective):
    """A section for each command."""

    def run(self):
        from thinwire.cli.entry import _parser

        with patch.dict(os.environ, COLUMNS=WIDTH):  # argparse asks for it
            texts = {words: each.format_help() for words, each in commands(_parser(), "thinwire")}
        found = []
        for words, text in texts.items():
            section = nodes.section(
                ids=[nodes.make_id(words)], names=[nodes.fully_normalize_name(words)]
            )
            section += nodes.title(words, words)
            section += nodes.literal_block(text, text, language="text")
            self.state.document.note_explicit_target(section)
            found.append(section)
        return found


def setup(app):
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True}
