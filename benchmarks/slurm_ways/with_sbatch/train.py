import os
import signal

import torch
import torch.distributed as dist
from net import EPOCHS, SAVE_STEPS, make_data, make_net, record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

is_stopping = False


def stop(*_):
    global is_stopping
    is_stopping = True


def save(step, epoch, index):
    rngs = [None] * dist.get_world_size()
    dist.all_gather_object(rngs, torch.get_rng_state())
    if dist.get_rank() == 0:
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rngs": rngs}
        torch.save({**state, "step": step, "epoch": epoch, "index": index}, "checkpoint.tmp")
        os.replace("checkpoint.tmp", "checkpoint.pt")


signal.signal(signal.SIGTERM, stop)
dist.init_process_group("gloo")
rank = dist.get_rank()
data, net = make_data(), make_net()
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
sampler = DistributedSampler(data)
loader = DataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator())
torch.manual_seed(1 + rank)
step, first_epoch, done = 0, 0, -1
if os.path.exists("checkpoint.pt"):
    state = torch.load("checkpoint.pt", weights_only=True)
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["rngs"][rank])
    step, first_epoch, done = state["step"], state["epoch"], state["index"]
for epoch in range(first_epoch, EPOCHS):
    sampler.set_epoch(epoch)
    for index, (inputs, labels) in enumerate(loader):
        if epoch == first_epoch and index <= done:
            continue
        optimizer.zero_grad()
        cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        step += 1
        record(step)
        asked = torch.tensor(int(is_stopping))
        dist.all_reduce(asked)
        if asked or step % SAVE_STEPS == 0:
            save(step, epoch, index)
        if asked:
            open("stopped", "w").close()
            dist.destroy_process_group()
            raise SystemExit
if rank == 0:
    torch.save(net.state_dict(), "model.pt")
dist.destroy_process_group()
