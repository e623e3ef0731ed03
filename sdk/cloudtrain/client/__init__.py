"""The client: one object with every verb, such as plan, check, submit, status and stop.

- `client`: the class `Client`; `shortcuts` has the same verbs as functions, on a default client.
- `planning_inputs` and `source_checks`: read the code folder and the data, and make the plan.
- `submission`: send a plan, and wait for capacity.
- `observer`: what a client reports while it works.
- `account`, `check_results`, `home` and `sandbox`: settings and prices, failed checks, and folders of this machine.
"""
