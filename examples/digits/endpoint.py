"""From training to an endpoint that answers and is deleted, in the sandbox: python endpoint.py."""

import cloudtrain

run = cloudtrain.submit(cloudtrain.JobSpec.from_yaml("job.yaml"), sandbox=True)
assert run.wait().state == "SUCCEEDED"
endpoint = cloudtrain.deploy(run, sandbox=True)
answer = endpoint.invoke({"inputs": [[[[0.5] * 8] * 8]]})  # one image of 8 x 8 pixels
print(len(answer["outputs"][0]), "scores")
print("\n".join(cloudtrain.undeploy(endpoint.name, sandbox=True)))
