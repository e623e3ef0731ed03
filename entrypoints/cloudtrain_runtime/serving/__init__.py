"""Serving of a Task's model with Ray Serve, over SageMaker's contract: GET /ping and POST /invocations.

`application` is the deployment that AWS's image imports from a model's package, and `server` runs the same package on
this machine. Both read `serving.json` in the package.
"""
