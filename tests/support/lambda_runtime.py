"""Program that calls the handler of a Lambda function as AWS does: `lambda_runtime.py MODULE.HANDLER EVENT RESULT`."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path

_MILLISECONDS = 240_000
_LARGE = ("moto", "numpy", "sagemaker", "torch")


class Context:
    """Lambda's context, of which a handler reads the time that is left."""

    def get_remaining_time_in_millis(self) -> int:
        """Return the time that is left."""
        return _MILLISECONDS


def main(handler: str, event: str, result: str) -> None:
    """Call the handler with the event in a file; write its result, and the large packages that it has imported."""
    module, _, name = handler.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    found = function(json.loads(Path(event).read_text(encoding="utf-8")), Context())
    imported = [each for each in _LARGE if each in sys.modules]
    Path(result).write_text(json.dumps({"result": found, "imported": imported}), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
