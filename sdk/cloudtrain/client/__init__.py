"""Functions that carry out each verb, such as plan, check, submit, status and stop.

- `jobs`: validate, plan, check and files; `plan_builder`, `source_checks` and `resume_checks` do their work.
- `submission`: submit and resume; `sagemaker_submission` and `capacity` send a plan to SageMaker.
- `runs`: find, list, stop and explain runs, and read their logs and checkpoints.
- `account`: settings, profiles and prices.
- `sandbox`: the local AWS of this machine.
- `backend_lookup` and `home`: the backends at hand, and the folder of local runs.
"""
