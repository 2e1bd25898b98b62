"""What ranks tell the process that started them: a JSON object a line, on standard output."""

import json
import sys
from typing import Any

_MARK = "@thinwire "  # what a script prints is not taken for an event


def tell(event: str, **values: Any) -> None:
    """Say something, as {"event": event, ...}."""
    line = _MARK + json.dumps({"event": event, **values})
    print(f"\n{line}" if _column else line, flush=True)


_column = False  # whether somebody else's unfinished line may stand before ours


def heard(line: str) -> dict[str, Any] | None:
    """The event in a line, if there is one."""
    if not line.startswith(_MARK):
        return None
    try:
        event = json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None


def beside_a_script() -> None:
    """From now on others print too, and may leave a line unfinished."""
    global _column
    _column = True
    sys.stdout.flush()
