"""What ranks tell the process that started them: a JSON object a line, on standard output."""

import json
from typing import Any

_MARK = "@thinwire "  # what a script prints is not taken for an event


def tell(event: str, **values: Any) -> None:
    """Say something, as {"event": event, ...}, on a line of its own: a script may have left one
    unfinished."""
    print(f"\n{_MARK}{json.dumps({'event': event, **values})}", flush=True)


def heard(line: str) -> dict[str, Any] | None:
    """The event in a line, if there is one."""
    if not line.startswith(_MARK):
        return None
    try:
        event = json.loads(line[len(_MARK) :])
    except json.JSONDecodeError:
        return None
    return event if isinstance(event, dict) else None
