"""Units, run ids, atomic writes and other helpers without dependencies."""
