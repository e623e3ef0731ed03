"""Write a base model with random weights, so that the example runs without a download: python make_base.py.

It is a Llama of 100,000 parameters and a tokenizer of whole words, in the folder base, as save_pretrained writes them.
Replace the folder by a model of your own.
"""

from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed

FOLDER = Path(__file__).parent / "base"
WORDS = Path(__file__).with_name("sentences.txt").read_text(encoding="utf-8").split()

set_seed(0)
special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
vocabulary = {word: index for index, word in enumerate([*special.values(), *sorted(set(WORDS))])}
tokenizer = Tokenizer(models.WordLevel(vocabulary, special["unk_token"]))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(FOLDER)
config = LlamaConfig(
    vocab_size=len(vocabulary), hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64, initializer_range=0.2, pad_token_id=0, eos_token_id=1, bos_token_id=1,
)  # fmt: skip
LlamaForCausalLM(config).save_pretrained(FOLDER)
