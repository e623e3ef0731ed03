"""Serving of a Task's model, over SageMaker's contract: GET /ping and POST /invocations.

`application` is the deployment that AWS's image of Ray Serve imports from a model's package, and `server` runs the same
package on this machine without Ray. Both read `serving.json` in the package, and answer requests by `http_requests`
and `model_service`.
"""
