import os

import torch
import torch.distributed as dist
from net import EPOCHS, make_data, make_net, record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

from cloudtrain_runtime import GlobalOrderSampler, checkpoint

dist.init_process_group("gloo")
data, net = make_data(), make_net()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = GlobalOrderSampler(len(data), batch_size=16)
loader = DataLoader(data, batch_sampler=sampler, generator=torch.Generator())
torch.manual_seed(1 + dist.get_rank())
training = {"model": model, "optimizer": optimizer, "sampler": sampler}
checkpoint.load(**training)
is_stopping = False
while sampler.epoch < EPOCHS and not is_stopping:
    batches = iter(loader)
    for step in sampler.schedule():
        optimizer.zero_grad()
        for micro in step.micro_batches:
            inputs, labels = next(batches)
            loss = cross_entropy(model(inputs), labels)
            (loss * micro.count * sampler.world_size / step.samples).backward()
        optimizer.step()
        sampler.advance()
        record(sampler.step)
        checkpoint.save(sampler.step, **training)
        if is_stopping := checkpoint.should_stop():
            break
if dist.get_rank() == 0 and not is_stopping:
    torch.save(net.state_dict(), os.path.join(os.environ["SM_MODEL_DIR"], "model.pt"))
dist.destroy_process_group()
