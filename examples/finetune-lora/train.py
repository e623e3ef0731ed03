"""LoRA: adapt a causal language model to sentences.txt, compare it with its base, and export it merged."""

import argparse
import os
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainingArguments,
    set_seed,
)

from cloudtrain_runtime import context
from cloudtrain_runtime.integrations.huggingface import attach

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=float, default=10)
parser.add_argument("--lr", type=float, default=1e-2)
parser.add_argument("--rank", type=int, default=8)
options = parser.parse_args()

set_seed(0)  # before the adapter is made: all ranks start with the same one
base = os.environ.get("SM_CHANNEL_BASE", "base")  # a folder as save_pretrained writes it
tokenizer = AutoTokenizer.from_pretrained(base)
model = get_peft_model(
    AutoModelForCausalLM.from_pretrained(base),
    LoraConfig(
        task_type="CAUSAL_LM",
        r=options.rank,
        lora_alpha=2 * options.rank,
        lora_dropout=0.05,
        target_modules="all-linear",
    ),
)

sentences = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").splitlines()
order = torch.randperm(len(sentences), generator=torch.Generator().manual_seed(0)).tolist()
rows = [tokenizer(f"{sentences[index]} {tokenizer.eos_token}") for index in order]
test, train = rows[:24], rows[24:]

arguments = TrainingArguments(
    output_dir="unused",  # attach chooses the folder
    num_train_epochs=options.epochs,
    learning_rate=options.lr,
    lr_scheduler_type="cosine",
    per_device_train_batch_size=4,
    logging_steps=5,
    ddp_find_unused_parameters=False,
    use_cpu=not torch.cuda.is_available(),
    report_to="none",
    disable_tqdm=True,
)
collator = DataCollatorForLanguageModeling(tokenizer, mlm=False)
trainer = Trainer(model=model, args=arguments, train_dataset=train, data_collator=collator)
callback = attach(trainer)
trainer.train()

if not callback.is_stopped:
    trainer.evaluate(test, metric_key_prefix="test")  # the metric test/loss
    with model.disable_adapter():
        trainer.evaluate(test, metric_key_prefix="test_base")  # test/base_loss, of the base model
    if context().is_main:
        model.save_pretrained(context().output_dir / "adapter")
        model.merge_and_unload().save_pretrained(context().model_dir)
        tokenizer.save_pretrained(context().model_dir)
