"""What `thinwire compare` found, as a page with pictures and as data.

`write` makes a folder of report.html, one PNG per picture and data.json; `read_document` loads such
a data.json again. Needs matplotlib; `require_matplotlib` says so before minutes of work.

page       the folder, and what stands on the page; templates/ has its HTML
template   the environment of templates, which `thinwire.bench` uses too
figure     what all pictures share, also with `thinwire.bench`
picture    a picture of a report, and the look of a method in all of them
curves     loss and metric over time
charts     final metric, parts of a step, layers, rates of the links
words      dates, links and names
"""

from thinwire.compare.document import read_document
from thinwire.report.figure import require_matplotlib
from thinwire.report.page import write

__all__ = ["read_document", "require_matplotlib", "write"]
