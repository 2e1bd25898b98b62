"""How Sphinx builds the site from docs/ and the docstrings: `make docs`.

Nothing is fetched while it builds, or when a page is read. Why Sphinx:
docs/decisions/0035-documentation.md.
"""

import os
import re
import sys
from importlib import metadata
from pathlib import Path

from sphinx.util.inspect import signature, stringify_signature

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "_ext"), str(HERE.parent / "src")]

project = "thinwire"
version = release = metadata.version("thinwire")
copyright = "the authors of thinwire, Apache-2.0"

extensions = [
    "command_help",
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]
smartquotes = False  # what is quoted is mostly code
highlight_language = "text"  # of blocks that name none

# A page called README.md is the first page of its folder, in a checkout and on the site.
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4

html_theme = "furo"
html_title = "thinwire"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"navigation_with_keys": True}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# `make docs-links` follows the links to other sites.
linkcheck_ignore = [r"https?://(localhost|127\.0\.0\.1)\b"]
linkcheck_anchors_ignore_for_url = [r"https://github\.com/"]  # its pages make them by script
linkcheck_timeout = 20
linkcheck_retries = 2

# Docstrings: Google style; words in single backquotes are code.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures stay short; arguments are described in words
autodoc_preserve_defaults = True
napoleon_use_rtype = False
napoleon_use_ivar = True
add_module_names = False
# Frameworks whose adapters are described without them.
autodoc_mock_imports = ["accelerate", "deepspeed", "flwr", "lightning", "torchft", "transformers"]
toc_object_entries_show_parents = "hide"


SECTION = re.compile(r"[A-Z]\w+:$")
KEPT = re.compile(r"(`+[^`]*`+|\*\*[^*]+\*\*|\*\w+\*)")  # code and emphasis


def prepare(app, what, name, obj, options, lines):
    """Docstrings are written to be read as they are: make reStructuredText of them.

    Code and formulas, which stand apart and indented, keep their lines; pages that are named become
    links; |x| is a magnitude and embed* a pattern, not markup.
    """
    # The names of several arguments may take two lines.
    text = re.sub(r"(?m)^(    \w+(?:, \w+)*,)\n +(\w+(?:, \w+)*:)", r"\1 \2", "\n".join(lines))
    found, section, literal = [], "", False
    before = ""
    for line in text.split("\n"):
        if line and not line.startswith(" "):
            literal = False
            section = line if SECTION.match(line) else ""
        elif line.startswith("    ") and not before and not section and not literal:
            literal = True
            if not found[-2].endswith("::"):
                found += ["::", ""]
        if before == "Example:" and ">>>" not in line:
            literal = True
            found += ["    .. code-block:: python", ""]
        before = line
        if literal:
            found.append(f"    {line}" if section else line)
        elif section == "Example:":
            found.append(line)
        else:
            linked = re.sub(r"docs/([\w/-]+)\.md", r":doc:`/\1`", line)
            parts = KEPT.split(linked)
            parts[::2] = [re.sub(r"([|*])", r"\\\1", part) for part in parts[::2]]
            found.append("".join(parts))
    lines[:] = found


def sign(app, what, name, obj, options, arguments, returned):
    """Classes derived from one of a framework that is not there show their own arguments."""
    if what == "class" and arguments == "(*args, **kwargs)" and "__init__" in vars(obj):
        own = signature(obj.__init__, bound_method=True)
        return stringify_signature(own, show_annotation=False), returned
    return None


# Documents that stand in the root of the repository, and their pages.
OUTSIDE = {
    "README.md": "/index.md",
    "CHANGELOG.md": "/project/changelog.md",
    "CONTRIBUTING.md": "/project/contributing.md",
    "SECURITY.md": "/project/security.md",
}


def read(app, name, source):
    """The pages of `project` are documents of the root; links from and to them go to pages."""
    page = HERE / f"{name}.md"
    base = page.parent
    if base.name == "project":
        base = HERE.parent
        source[0] = (base / f"{page.stem.upper()}.md").read_text(encoding="utf-8")

    def place(link):
        path = Path(os.path.normpath(base / link[1]))
        if path.parent == HERE.parent and path.name in OUTSIDE:
            return f"]({OUTSIDE[path.name]}{link[2]})"
        if path.is_relative_to(HERE):
            return f"](/{path.relative_to(HERE)}{link[2]})"
        return f"]({os.path.relpath(path, page.parent)}{link[2]})"

    source[0] = re.sub(r"\]\(([^)#:\s]+)((?:#[^)]*)?)\)", place, source[0])


def setup(app):
    app.connect("autodoc-process-docstring", prepare, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", sign)
    app.connect("source-read", read)
    return {"parallel_read_safe": True}
