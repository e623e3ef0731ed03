"""Invented keys and tokens in the formats of real ones."""

from __future__ import annotations

import random


def made_up(count: int, letters: str, seed: int = 0) -> str:
    """Return a text that looks like a key. It is generated so that this file triggers no secret scanner."""
    generator = random.Random(seed)  # noqa: S311 (no secret)
    return "".join(generator.choice(letters) for _ in range(count))


CAPITALS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567"
MIXED = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
HEX = "0123456789abcdef"

KEY_ID = "AKIA" + made_up(16, CAPITALS)
SESSION_KEY_ID = "ASIA" + made_up(15, CAPITALS) + "7"
KEY = made_up(38, MIXED) + "/9"
TOKEN = "IQoJ" + made_up(200, MIXED) + "=="
SIGNATURE = made_up(64, HEX)
HF = "hf_" + made_up(34, MIXED)
GITHUB = "ghp_" + made_up(36, MIXED)
OPENAI = "sk-proj-" + made_up(40, MIXED) + "1"
SLACK = "xoxb-" + made_up(24, "0123456789")
WANDB = made_up(40, HEX)
JWT = f"eyJ{made_up(20, MIXED)}.eyJ{made_up(40, MIXED)}.{made_up(40, MIXED)}"
BODY = "\n".join(made_up(64, MIXED, seed) for seed in range(3))
PEM = f"-----BEGIN RSA PRIVATE KEY-----\n{BODY}\n-----END RSA PRIVATE KEY-----"  # gitleaks:allow
DIGEST = made_up(64, HEX, 1)
COMMIT = made_up(40, HEX, 2)
