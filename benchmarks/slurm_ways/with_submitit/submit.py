import os

import submitit
from train import Training

executor = submitit.AutoExecutor(folder="logs")
executor.update_parameters(
    name="digits",
    nodes=2,
    tasks_per_node=1,
    timeout_min=60,
    slurm_partition=os.environ["PARTITION"],
)
job = executor.submit(Training(), "checkpoint.pt")
print(job.job_id)
