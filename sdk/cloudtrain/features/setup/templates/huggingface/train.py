"""A Trainer of Transformers. One line, attach(trainer), gives it progress, checkpoints, stops and resumes."""

import argparse
import os

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

from cloudtrain_runtime.integrations.huggingface import attach

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=5)
parser.add_argument("--lr", type=float, default=0.01)
options = parser.parse_args()


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences such as 3, 4, 5, ..., which a small language model learns to continue."""

    def __len__(self) -> int:
        return 256

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(16)) % 50
        return {"input_ids": tokens, "labels": tokens}


set_seed(0)
config = LlamaConfig(
    vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
    max_position_embeddings=64, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
arguments = TrainingArguments(
    output_dir="unused",  # attach chooses the folder
    num_train_epochs=options.epochs,
    learning_rate=options.lr,
    per_device_train_batch_size=8,
    logging_steps=5,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=Counting())
callback = attach(trainer)
trainer.train()
if not callback.is_stopped:
    trainer.save_model(os.environ.get("SM_MODEL_DIR", "model"))
