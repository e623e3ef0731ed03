"""The last import of a fork server: its processes' collector does not traverse what the server has imported.

With torch that is half a million objects, which each collection would visit, and so copy their memory.
"""

import gc

gc.collect()
gc.freeze()
