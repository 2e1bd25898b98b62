"""What `thinwire compare` found, as a page with pictures and as data.

`write` makes a folder of report.html, one PNG a picture and data.json; `read` loads such a
data.json again. Needs matplotlib; `require_matplotlib` says so before minutes of work.
"""

from thinwire.report.document import read
from thinwire.report.figure import require_matplotlib
from thinwire.report.write import write

__all__ = ["read", "require_matplotlib", "write"]
