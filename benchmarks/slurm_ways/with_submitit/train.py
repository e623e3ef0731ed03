import os

import net as net_module  # of the test cluster
import submitit
import torch
import torch.distributed as dist
from net import EPOCHS, SAVE_STEPS, make_data, make_net, record
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Training(submitit.helpers.Checkpointable):
    def __call__(self, path):
        submitit.helpers.TorchDistributedEnvironment().export(set_cuda_visible_devices=False)
        net_module.name_nodes()  # of the test cluster
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        data, net = make_data(), make_net()
        model = DistributedDataParallel(net)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        sampler = DistributedSampler(data)
        loader = DataLoader(data, batch_size=16, sampler=sampler, generator=torch.Generator())
        torch.manual_seed(1 + rank)
        step, first_epoch, done = 0, 0, -1
        if os.path.exists(path):
            state = torch.load(path, weights_only=True)
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
                if step % SAVE_STEPS == 0:
                    self.save(path, net, optimizer, step, epoch, index)
        if rank == 0:
            torch.save(net.state_dict(), "model.pt")
        dist.destroy_process_group()

    def save(self, path, net, optimizer, step, epoch, index):
        rngs = [None] * dist.get_world_size()
        dist.all_gather_object(rngs, torch.get_rng_state())
        if dist.get_rank() == 0:
            state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "rngs": rngs}
            torch.save({**state, "step": step, "epoch": epoch, "index": index}, f"{path}.tmp")
            os.replace(f"{path}.tmp", path)
