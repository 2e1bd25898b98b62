"""The look of a page, light or dark as the reader's system is, on a screen of any width."""

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --line: #ddd; --soft: #666;
  --blue: #0072b2; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #16181c; --line: #3a3d42; --soft: #a0a0a0;
    --blue: #2f8fd0; }
}
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper);
  max-width: 80rem; margin: 0 auto; padding: 1rem; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { color: var(--soft); margin: .25rem 0; overflow-wrap: anywhere; }
.panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr));
  gap: 1rem; }
svg { width: 100%; height: auto; color: var(--ink); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; text-align: right; white-space: nowrap;
  border-bottom: 1px solid var(--line); }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0;
  background: var(--paper); }
th { vertical-align: bottom; } th.new, td.new { padding-left: 1.4rem; }
dl { font-size: .85rem; display: grid; grid-template-columns: max-content 1fr; gap: .1rem 1rem; }
dt { font-weight: 600; } dd { margin: 0; color: var(--soft); }
"""


def page(title: str, body: str, style: str = "") -> str:
    """A whole page. `title` and `body` are HTML; `style` comes after that of all pages."""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}{style}</style>
</head>
<body>
{body}</body>
</html>
"""
