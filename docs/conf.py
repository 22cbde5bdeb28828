"""Settings of the documentation site; `make docs` builds it in build/docs."""

import os
import re
import subprocess
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.util.docutils import SphinxDirective
from sphinx.util.logging import getLogger

import einlinear

project = "einlinear"
html_show_copyright = False
author = "The einlinear authors"
release = version = einlinear.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["results/*.json", "results/*.toml", "results/study/*"]
myst_enable_extensions = ["attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
suppress_warnings = ["misc.highlighting_failure"]  # text that shows Python with an ellipsis

autosummary_generate = False
autodoc_default_options = {"members": True, "exclude-members": "extra_repr, register_parameter"}
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_type_aliases = {"Range": "Range", "Rules": "Rules"}  # long unions, which docstrings explain
napoleon_numpy_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 110
default_role = "py:obj"
smartquotes_action = "De"  # dashes, but no curly quotes: "btt(rank=2)" is to be copied
toc_object_entries_show_parents = "hide"
add_module_names = False

html_theme = "furo"
html_title = "einlinear"
html_math_renderer = "mathml"  # drawn by the browser itself, so that the site needs no network
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#2563a8",
        "color-brand-content": "#1d5596",
        "color-brand-visited": "#1d5596",
    },
    "dark_css_variables": {
        "color-brand-primary": "#7fb3f0",
        "color-brand-content": "#8fbdf3",
        "color-brand-visited": "#8fbdf3",
    },
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

SECTION = re.compile(r"(Args|Attributes|Raises|Returns|Yields|Example|Examples):$")
FIELD = re.compile(r"[a-z_]+: +\S")


def plain_docstring(app, what, name, obj, options, lines):
    """Make reStructuredText of a docstring, which is plain text with code in single backticks.

    Indented lines are formulas and become literal blocks; lines such as `field: what it is` become
    a list. Sections such as Args are left to napoleon.
    """
    text, lines[:] = list(lines), []
    in_section = in_list = False
    for before, line in zip(["", *text], text, strict=False):
        if line.strip() and not line.startswith(" "):
            in_section = bool(SECTION.match(line))
        if in_section or not line.strip():
            lines.append(escape(line))
            in_list = False
        elif line.startswith(" "):
            if not before.strip():  # a formula
                lines.extend(["::", ""])
            is_formula = not in_list
            lines.append(line if is_formula else f"  {escape(line.strip())}")
        else:
            is_field = bool(FIELD.match(line))
            if is_field != in_list and before.strip():
                lines.append("")
            lines.append(f"- {escape(line)}" if is_field else escape(line))
            in_list = is_field


def escape(text):
    """A line in which only text in single backticks has a meaning."""
    parts = re.split(r"(`[^`]*`)", text)
    special = re.compile(r"[*|\\]|(?<=\w)_(?!\w)")
    return "".join(p if p.startswith("`") else special.sub(r"\\\g<0>", p) for p in parts)


def short_signature(app, what, name, obj, options, signature, returned):
    """Show arrays as ndarray, and no modules before the names of types."""

    def short(text):
        text = re.sub(
            r"~?(?<![\w.])(?!torch\.)[a-z_]+(?:\.[a-z_]+)*\.(?=[A-Za-z_])",
            "",
            text.replace("<factory>", "..."),
        )
        return re.sub(r"ndarray\[tuple\[Any, \.\.\.\], dtype\[\w+\]\]", "ndarray", text)

    return None if signature is None else (short(signature), returned and short(returned))


def link_outside(app, docname, source):
    """Offer files that are not pages of the site, such as licences, for download."""
    up = "../" * (docname.count("/") + 1)
    outside = re.compile(rf"\[([^]]+)\]\(({re.escape(up)}[^)#]+)\)")
    source[0] = outside.sub(r"{download}`\1 <\2>`", source[0])


class CommandHelp(SphinxDirective):
    """The directive `command-help`: what a command prints for --help."""

    required_arguments = 1

    def run(self):
        """The text as a block of its own."""
        command = [sys.executable, "-m", "einlinear", *self.arguments[0].split(), "--help"]
        environment = os.environ | {"COLUMNS": "90", "NO_COLOR": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        block = nodes.literal_block(done.stdout, done.stdout.rstrip(), language="text")
        return [block]


class NamesOf(SphinxDirective):
    """The directive `names-of`: a table of the names that a page of the reference describes."""

    required_arguments = 1

    def run(self):
        """The table, a line for each name."""
        page = Path(self.env.srcdir, "api", f"{self.arguments[0]}.md").read_text(encoding="utf-8")
        names = re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE)
        table = [".. currentmodule:: einlinear", "", ".. autosummary::", "   :nosignatures:", ""]
        return self.parse_text_to_nodes("\n".join(table + [f"   {name}" for name in names]))


def inline_mathml(translator, node):
    """A formula in a line of text."""
    translator.body.append(mathml(node, as_block=False))
    raise nodes.SkipNode


def block_mathml(translator, node):
    """A formula on a line of its own."""
    translator.body.append(f'<div class="math">{mathml(node, as_block=True)}</div>')
    raise nodes.SkipNode


def mathml(node, *, as_block):
    """The formula of a node, or a warning that says where it is."""
    try:
        return tex2mathml(node.astext(), as_block=as_block)
    except MathError as error:
        getLogger(__name__).warning("%s in %s", error, node.astext(), location=node)
        return ""


def setup(app):
    """Sphinx calls this; napoleon reads docstrings after us, at priority 500."""
    app.add_html_math_renderer("mathml", (inline_mathml, None), (block_mathml, None))
    app.add_directive("command-help", CommandHelp)
    app.add_directive("names-of", NamesOf)
    app.connect("autodoc-process-signature", short_signature)
    app.connect("source-read", link_outside)
    app.connect("autodoc-process-docstring", plain_docstring, priority=400)
