"""The client: one object with the verbs of the core, such as plan, check, submit, status and stop.

- `client`: the class `Client`; `shortcuts` has the same verbs as functions, on a default client.
- `planning_inputs`: read and check the code folder and the data, and make the plan.
- `submission`: send a plan after the checks, and wait for capacity.
- `observer`: what a client reports while it works.
- `machine_report`: checks of this machine.
- `account` and `home`: settings and prices, and the folder of local runs.
"""
