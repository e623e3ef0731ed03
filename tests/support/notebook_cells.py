# ruff: noqa: E501, ISC004 (cells are easier to read in one line each)
"""Notebooks as people write them, as lists of cells; the last one prints `RESULT` and what the run has returned."""

from __future__ import annotations

HEAD = """\
import cloudtrain
import torch
import torch.distributed as dist
remote = cloudtrain.remote
OPTIONS = dict(backend="local", instance_type="ml.m5.large", processes_per_instance=1)
"""
SHOW = "import json; print('RESULT', json.dumps([train(), train.options(instances=2)()]))"

NOTEBOOKS: dict[str, tuple[list[str], object]] = {
    "globals changed between cells": (
        [
            HEAD,
            "WIDTH = 4\nNAMES = ['a']",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return WIDTH * len(NAMES)",
            "WIDTH = 10\nNAMES.append('b')",
        ],
        20,
    ),
    "imports inside functions": (
        [
            HEAD,
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    import math\n    from fractions import Fraction as F\n"
            "    return math.factorial(int(F(8, 2)))",
        ],
        24,
    ),
    "a class in one cell and its base in another": (
        [
            HEAD,
            "class Base(torch.nn.Module):\n    WIDTH = 3\n    def width(self):\n        return self.WIDTH",
            "class Net(Base):\n    def __init__(self):\n        super().__init__()\n        self.layer = torch.nn.Linear(self.width(), 2)\n"
            "    def forward(self, x):\n        return self.layer(x)",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return list(Net()(torch.ones(5, 3)).shape)",
        ],
        [5, 2],
    ),
    "lines for pip and the shell": (
        [
            "%pip --version",
            HEAD,
            "!true\n@cloudtrain.remote(**OPTIONS)\ndef train():\n    return 'piped'",
            "%timeit -n1 -r1 1 + 1",
        ],
        "piped",
    ),
    "dataclasses": (
        [
            HEAD + "from dataclasses import dataclass, field, replace\nfrom enum import Enum",
            "class Kind(Enum):\n    SMALL = 'small'\n    LARGE = 'large'",
            "@dataclass(frozen=True)\nclass Config:\n    width: int = 8\n    kind: Kind = Kind.SMALL\n    layers: list = field(default_factory=list)",
            "config = Config(layers=[1, 2])\nconfig = replace(config, width=5, kind=Kind.LARGE)",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return [config.width, config.kind.value, config.layers]",
        ],
        [5, "large", [1, 2]],
    ),
    "a partial": (
        [
            HEAD + "from functools import partial, lru_cache",
            "@lru_cache(maxsize=None)\ndef power(base, exponent):\n    return base ** exponent\n\ncube = partial(power, exponent=3)",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return cube(3)",
        ],
        27,
    ),
    "lambdas": (
        [
            HEAD,
            "double = lambda x: 2 * x; half = lambda x: x / 2\nsteps = [lambda x: x + 1, double]",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    x = 3\n    for step in steps:\n        x = step(x)\n    return half(x)",
        ],
        4.0,
    ),
    "type hints": (
        [
            "from __future__ import annotations\n" + HEAD,
            "from typing import Callable, NamedTuple, TypeVar\nimport numpy as np\nT = TypeVar('T')\nBatch = dict[str, 'Unknown']\nclass Point(NamedTuple):\n    x: float\n    y: float",
            "def apply(f: Callable[[T], T], x: T) -> T:\n    return f(x)",
            "@cloudtrain.remote(**OPTIONS)\ndef train() -> dict[str, NotThere]:\n    batch: Batch = {}\n    point = apply(lambda p: Point(p.y, p.x), Point(1.0, 2.0))\n    return [point.x, float(np.float32(point.y))]",
        ],
        [2.0, 1.0],
    ),
    "a dataset built in a cell": (
        [
            HEAD + "from torch.utils.data import Dataset, DataLoader",
            "class Squares(Dataset):\n    def __init__(self, count):\n        self.values = torch.arange(count) ** 2\n    def __len__(self):\n        return len(self.values)\n    def __getitem__(self, index):\n        return self.values[index]",
            "dataset = Squares(10)\nlen(dataset)",
            "loader = DataLoader(dataset, batch_size=5)",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return [int(batch.sum()) for batch in loader]",
        ],
        [30, 255],
    ),
    "plots between": (
        [
            HEAD + "import matplotlib\nmatplotlib.use('agg')\nimport matplotlib.pyplot as plt",
            "points = [1, 4, 9]\nplt.plot(points); plt.show()",
            "figure, axes = plt.subplots()\naxes.hist(points)",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return sum(points)",
        ],
        14,
    ),
    "a name that shadows a module": (
        [
            HEAD + "import random, string",
            "random = 4\nstring = str.upper\ndef json(x):\n    return string(x) * random",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return json('a')",
            "import json as real_json; print('RESULT', real_json.dumps([train(), train.options(instances=2)()]))",
        ],
        "AAAA",
    ),
    "cells out of order": (
        [
            HEAD,
            "def outer():\n    return inner() + EXTRA",
            "@cloudtrain.remote(**OPTIONS)\ndef train():\n    return outer()",
            "def inner():\n    return 1",
            "EXTRA = 5",
            "def inner():\n    return 2",
        ],
        7,
    ),
    "what other cells do": (
        [
            HEAD + "from functools import partial",
            "%%time\ndef timed(): return 3",
            "%%capture\nfiles = !ls\ndef captured(): return 4",
            "COUNT = 0\nclass C: pass\nc = C(); c.lr = 3\nq = partial(pow, 2)",
            "1 / 0\nq = partial(pow, 7)",
            "@cloudtrain.remote(**OPTIONS)\ndef inner():\n    return 1",
            "@cloudtrain.remote(**OPTIONS)\ndef train(a, *rest, **more):\n    global COUNT\n    COUNT += 1\n    display(3)\n    open('/dev/null').close()\n"
            "    return repr((timed(), captured(), COUNT, c.lr, q(3), a, rest, more))",
            "import json\ngiven = dict(a={1: (2,)}, b=[3])\nprint('RESULT', json.dumps([train(**given), train.options(instances=2)(**given)]))",
        ],
        "(3, 4, 1, 3, 8, {1: (2,)}, (), {'b': [3]})",
    ),
    "a group of ranks": (
        [
            HEAD,
            "def total(value):\n    number = torch.tensor([value])\n    dist.all_reduce(number)\n    return number",
            "@cloudtrain.remote(**{**OPTIONS, 'processes_per_instance': 2})\ndef train(value: float = 1.5):\n    dist.init_process_group('gloo')\n    return total(value).tolist()",
            "import json; print('RESULT', json.dumps([train()[0] / 2, train.options(instances=2)()[0] / 4]))",
        ],
        1.5,
    ),
}

REFUSED: dict[str, tuple[list[str], str]] = {
    "an open file": (
        [HEAD, "log = open('/dev/null')", "@remote(**OPTIONS)\ndef train():\n    log.write('x')"],
        "cell [3]:3:5  log is an open file (train uses it); open it inside the function, and name it under data",
    ),
    "a live tensor": (
        [HEAD, "x = torch.randn(3)", "@remote(**OPTIONS)\ndef train():\n    return x.sum()"],
        "x is a Tensor of the notebook (train uses it); make it inside the function, or save it",
    ),
    "a model with weights": (
        [HEAD, "net = torch.nn.Linear(2, 2)", "@remote(**OPTIONS)\ndef train():\n    return net"],
        "net is a model of the notebook with weights (train uses it); make it inside the function",
    ),
    "a closure over data": (
        [
            HEAD,
            "def make(data):\n    def score():\n        return len(data)\n    return score",
            "score = make([1])",
            "@remote(**OPTIONS)\ndef train():\n    return score()",
        ],
        "score is defined inside make and uses its data (train uses it); define it at the top level of a cell",
    ),
    "a generator": (
        [
            HEAD,
            "numbers = (x for x in [1])",
            "@remote(**OPTIONS)\ndef train():\n    return next(numbers)",
        ],
        "numbers is a running generator (train uses it); make it inside the function",
    ),
    "a value of a loop": (
        [
            HEAD,
            "import threading\nfor lock in [threading.Lock()]:\n    pass",
            "@remote(**OPTIONS)\ndef train():\n    lock.acquire()",
        ],
        "lock is a lock, and no cell says how to make it with one assignment (train uses it)",
    ),
    "a name that is not there": (
        [HEAD, "WIDTH = 3", "@remote(**OPTIONS)\ndef train():\n    return WIDHT"],
        'cell [3]:3:12  WIDHT is not defined (train uses it); did you mean "WIDTH"?',
    ),
    "an older base": (
        [
            HEAD,
            "class A: ...",
            "class B(A): ...",
            "class A: ...",
            "@remote(**OPTIONS)\ndef train():\n    return B()",
        ],
        "A was defined again after B, which has the older one (train uses it); run the cell of B again",
    ),
    "an argument that it does not take": (
        [HEAD, "@remote(**OPTIONS)\ndef train(rate=1):\n    return rate", "train.submit(rat=2)"],
        "train(): got an unexpected keyword argument 'rat'\n  did you mean \"rate\"?",
    ),
    "an unknown field": (
        [HEAD, "@remote(**OPTIONS, instnces=2)\ndef train():\n    return 1"],
        'instnces: unknown field\n  did you mean "instances"?',
    ),
}
"""Cells of notebooks whose code cannot travel, and a part of the message."""
