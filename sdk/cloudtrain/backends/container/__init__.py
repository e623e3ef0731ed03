"""SageMaker's training containers on this machine.

`job.run_job` executes a CreateTrainingJob document: one `/opt/ml` tree and one process tree per instance, the JSON files
and variables that SageMaker provides, `model.tar.gz` at the end and `output/failure` on failure. Its only input is the
document; it does not use cloudtrain's plans.
"""
