"""A program with Transformers' Trainer as people write it: a small GPT-2 with random weights learns to count."""

import os

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

VOCABULARY, LENGTH, SAMPLES = 97, 64, 256


class Counting(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from a start, modulo the vocabulary."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = (index + torch.arange(LENGTH)) % VOCABULARY
        return {"input_ids": tokens, "labels": tokens}


set_seed(1)
config = GPT2Config(vocab_size=VOCABULARY, n_positions=LENGTH, n_embd=64, n_layer=2, n_head=2)
arguments = TrainingArguments(
    "checkpoints",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    logging_steps=8,
    save_steps=16,
    bf16=torch.cuda.is_available(),
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Counting())
trainer.train()
trainer.save_model(os.environ["SM_MODEL_DIR"])
