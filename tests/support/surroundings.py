"""Variables of the environment that change what commands print. A test that needs one sets it itself."""

OF_THE_TERMINAL = (
    "CI",
    "COLUMNS",
    "FORCE_COLOR",
    "JPY_PARENT_PID",
    "LINES",
    "NO_COLOR",
    "TTY_COMPATIBLE",
    "TTY_INTERACTIVE",
)
OF_PYTHON = ("PYTHONDONTWRITEBYTECODE", "PYTHONOPTIMIZE", "PYTHONUNBUFFERED", "PYTHONWARNINGS")
