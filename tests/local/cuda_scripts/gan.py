"""In the style of DCGAN: two networks with an optimizer each, `torch.cuda.FloatTensor`, and a default device."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd import Variable
from torch.nn.parallel import DistributedDataParallel

Tensor = torch.cuda.FloatTensor if torch.cuda.is_available() else None


def main() -> None:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group(
        "nccl", rank=int(os.environ["RANK"]), world_size=int(os.environ["WORLD_SIZE"])
    )
    torch.cuda.set_device(rank)
    with torch.device("cuda"):
        generator, critic = (
            nn.Linear(4, 2),
            nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 1)),
        )
    generator = DistributedDataParallel(generator, device_ids=[rank], broadcast_buffers=False)
    critic = DistributedDataParallel(critic.cuda(), device_ids=[rank], broadcast_buffers=False)
    adversarial = nn.BCEWithLogitsLoss().cuda()
    of_generator = torch.optim.Adam(generator.parameters(), lr=0.001)
    of_critic = torch.optim.Adam(critic.parameters(), lr=0.02)
    valid, fake = Variable(Tensor(32, 1).fill_(1.0)), Variable(Tensor(32, 1).fill_(0.0))
    for _ in range(40):
        real = Variable((torch.randn(32, 2) * 0.1 + 3).type(Tensor))
        made = generator(torch.randn(32, 4).type("torch.cuda.FloatTensor"))
        of_critic.zero_grad()
        loss = adversarial(critic(torch.cat([real, made.detach()])), torch.cat([valid, fake]))
        loss.backward()
        of_critic.step()
        of_generator.zero_grad()
        adversarial(critic(made), valid).backward()
        of_generator.step()
        print(f"gan loss {loss.item():.4f}", flush=True)
    torch.set_default_device("cuda")
    assert torch.zeros(2).sum().item() == 0
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
