# ruff: noqa: E501 (cells are easier to read in one line each)
"""What is sent from a notebook is what its kernel has, or it is refused by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from support.executed_cells import execute, sent_module, value_here

from cloudtrain.errors import SpecError, UserError
from cloudtrain.features.functions.arguments import bind_arguments, check_code, named_space
from cloudtrain.features.functions.cells import ExecutedCode
from cloudtrain.features.functions.job_of import WrittenCode, code_of_cells, make_job
from cloudtrain.features.functions.remote import remote

DATA = "from dataclasses import dataclass, field\n"
REMOTE = "import cloudtrain, functools\nfrom cloudtrain import remote as R\nOPTIONS = dict(backend='local')\n"
DECORATORS = (
    "import functools, contextlib\n"
    "def plain(fn):\n    def w(*a): return fn(*a) + 1\n    return w\n"
    "def labelled(label):\n    def d(fn):\n        @functools.wraps(fn)\n        def w(*a): return fn(*a) + label\n        return w\n    return d"
)


def sent(code: ExecutedCode, name: str = "f") -> WrittenCode:
    """Return what is sent for a function, compared with what is here."""
    return code_of_cells(name, code.names[name], code, is_task=False)


BOX = "class Box:\n    def __init__(self, n): self.lock = object(); self.n = n\n"
"""A class whose objects have no expression."""

SENT: dict[str, list[str]] = {
    "a post-init is not repeated": [
        DATA + "@dataclass\nclass Opt:\n    lr: float = 1\n    def __post_init__(self): self.twice = self.lr * 2",
        "o = Opt(); o.lr = 50",
        "def f(): return o.lr, o.twice",
    ],
    "nested dataclasses with a field that init lacks": [
        DATA + "@dataclass\nclass I:\n    x: int = 1\n    y: int = field(init=False, default=3)\n@dataclass(frozen=True)\nclass O:\n    i: I",
        "o = O(I()); o.i.y = 9",
        "def f(): return o.i.x, o.i.y",
    ],
    "slots": [
        DATA + "@dataclass(slots=True)\nclass C:\n    x: int = 1\nclass E:\n    __slots__ = ('a',)\n    def __init__(self): self.a = 1",
        "c = C(); c.x = 4; e = E(); e.a = 6",
        "def f(): return c.x, e.a",
    ],
    "later changes of standard objects": [
        "from types import SimpleNamespace\nimport argparse, collections\nns = SimpleNamespace(lr=1); a = argparse.Namespace(x=1)",
        "c = collections.Counter('aab'); d = collections.defaultdict(list); q = collections.deque(maxlen=2); o = collections.OrderedDict()",
        "ns.lr = 5; a.x = 7; c['z'] += 4; d['x'].append(3); q.extend([1, 2, 3]); o['k'] = 1",
        "def f(): return ns.lr, a.x, c, d, q, o",
    ],
    "other standard values": [
        "import re, decimal, fractions\nfrom datetime import datetime, timedelta, date, timezone\nfrom functools import partial",
        "when = datetime(2026, 1, 1, tzinfo=timezone.utc); day = timedelta(1); when = when + day; d = date(2026, 1, 2)",
        "z = complex(1, -0.0); r = range(3); s = slice(1, None); p = re.compile('a', re.I); n = decimal.Decimal('1.10'); q = fractions.Fraction(1, 3)",
        "def f(): return when, day, d, z, r, s, p, n, q, datetime(2026, 1, 3)",
    ],
    "attributes of own objects": ["class C: pass", "c = C()", "c.lr = 3; b = [c]", "def f(): return c.lr, b[0].lr"],
    "a changed part of a dict": [
        DATA + "@dataclass\nclass C:\n    lr: int = 1\nc = C(); sub = {'c': c}; c.lr = 4",
        "def f(): return sub['c'].lr",
    ],
    "a partial and its values": ["from functools import partial\nbase = 2; z = partial(pow, base)", "base = 50", "def f(): return z(2)"],
    "what was not executed": [
        "from functools import partial\nq = partial(pow, 2)",
        "1 / 0\nq = partial(pow, 7)",
        "def f(): return q(3)",
    ],
    "named tuples and flags": [
        "from typing import NamedTuple\nimport enum\nclass P(NamedTuple):\n    x: int\n    y: int = 2\nclass F(enum.Flag):\n    A = 1\n    B = 2",
        "p = P(1)\np = p._replace(x=5); b = F.A | F.B",
        "def f(): return tuple(p), b.value",
    ],
    "functions by their names in a dict": [
        "def a(): return 1\ndef b(): return 2\nfs = {'a': a}",
        "fs['b'] = b",
        "def f(): return [x() for x in fs.values()]",
    ],
    "decorated functions": [
        DECORATORS,
        "@plain\ndef h(): return 1\n@labelled(4)\ndef g(): return 2\n@contextlib.contextmanager\ndef cm(): yield 3\n@functools.lru_cache\ndef c(): return 7\n@functools.singledispatch\ndef s(x): return x",
        "class M:\n    @plain\n    def go(self): return 5\n    @labelled(2)\n    def on(self): return 6",
        "def f():\n    with cm() as x: return h(), g(), x, c(), s(3), M().go(), M().on()",
    ],
    "definitions in branches and blocks": [
        "x = 1\nif x:\n    def g():\n        return '''a\n  b'''\nelse:\n    def g(): return 2\nwith open('/dev/null'):\n    def h(): return 8\n    k = lambda: 5",
        "def f(): return g(), h(), k()",
    ],
    "a default that is still right": ["k = 3\ndef f(d=k + 1, *, e=k): return d, e"],
    "a global of a base class": [
        "K = 1\nclass Base:\n    def go(self): return K",
        "class B(Base): pass\nb = B()",
        "K = 3",
        "def f(): return b.go()",
    ],
    "a loss without weights": ["import torch.nn as nn\nloss = nn.CrossEntropyLoss(reduction='sum')", "def f(): return loss.reduction"],
    "names that are those of modules": ["import collections as c\ncollections = 3\nx = c.Counter('a')", "def f(): return x, collections"],
    "numbers of NumPy": ["import numpy as np\nlr = np.float32(0.1)", "def f(): return repr(lr)"],
    "an object that a call gets": [BOX + "b = Box(2)\nfill = lambda x: None", "fill(b)", "def f(): return b.n"],
    "a changed argument of a call whose result is used": ["x = [3, 1]", "y = sorted(x); x.sort()", "def f(): return x, y"],
    "an object made twice alike": [BOX + "b = Box(2)", "b = Box(2)", "def f(): return b.n"],
    "a logger that was configured": ["import logging\nlog = logging.getLogger('loud')", "log.setLevel(10)", "def f(): return log.name"],
    "nothing": ["best = None\ndef g(x=best): return x", "def f(): return best, g()"],
    "cached functions": ["import functools\n@functools.cache\ndef g(x): return x + 1\ng(1)", "def f(): return g(1)"],
    "types without a name of their own": ["from types import FunctionType, MappingProxyType as M", "def f(): return isinstance(f, FunctionType), M"],
    "a dict with attributes": ["class D(dict):\n    __getattr__ = dict.__getitem__\ndef g(): return 1\nd = D(g=1)", "def f(): return g(), D(x=1).x"],
    "a long number": ["n = 7 ** 9000", "def f(): return hex(n)"],
    "a function made from another": ["import functools\ndef g(x): return x\nh = functools.lru_cache(g)\nk = functools.wraps(g)(h)", "def f(): return g(1), h(2), k(3)"],
    "a parser of arguments": ["import argparse\np = argparse.ArgumentParser()\np.description = None", "def f(): return p.description"],
    "a logger": ["import logging\nlog = logging.getLogger('notebook')", "log.info('x')", "def f(): return log.name"],
    "star imports": ["from math import *", "def f(): return sqrt(4), pi"],
    "cloudtrain's decorator under other names": [
        REMOTE + "gpu = R(**OPTIONS)\nmade = functools.partial(R, backend='local')",
        "@gpu\ndef a(): return 1\n@made()\ndef b(): return 2\nfor i in [1]:\n    @R(\n        **OPTIONS)\n    def c(): return i",
        "@functools.wraps(print)\n@cloudtrain.remote(backend='local')\ndef unused(): ...",
        "def f(): return [each() if callable(each) else 0 for each in (getattr(x, 'function', x) for x in (a, b, c))]",
    ],
}  # fmt: skip


def execute_where_possible(*cells: str) -> ExecutedCode:
    """Execute cells; skip the test where a library is missing."""
    for library in ("numpy", "torch"):
        if f"import {library}" in "".join(cells):
            pytest.importorskip(library)
    return execute(*cells)


@pytest.mark.parametrize("title", SENT)
def test_the_run_has_what_the_kernel_has(title: str) -> None:
    code = execute_where_possible(*SENT[title])
    sent(code)
    with sent_module(code) as module:
        assert repr(module.f()) == repr(value_here(code))
        assert "cloudtrain.remote" not in vars(module)


CHANGED: dict[str, tuple[list[str], str]] = {
    "a class attribute": (["class Cfg: lr = .1", "Cfg.lr = 99", "def f(): return Cfg.lr"], "Cfg is not what its code makes: its attribute lr differs"),
    "a class attribute in a loop": (["class Cfg: lr = .1", "for k in ['lr']: setattr(Cfg, k, 3)", "def f(): return Cfg.lr"], "its attribute lr differs"),
    "a method": (["class A:\n    def go(self): return 1", "class C(A): ...", "def new(self): return 5\nC.go = new", "def f(): return C().go()"], "C is not what its code makes: its method go differs"),
    "a method of its own": (["class A:\n    def go(self): return 1", "def new(self): return 5\nA.go = new", "def f(): return A().go()"], "its method go"),
    "a nested class": (["class A:\n    class B: x = 3", "A.B.x = 4", "def f(): return A.B.x"], "A is not what its code makes: its attribute B differs"),
    "an attribute of a function": (["def h(): return 1", "h.x = 3", "def f(): return h.x"], "h is not what its code makes: its attribute x differs"),
    "a value in a class body": (["k = 3\nclass A: n = k", "k = 20", "def f(): return A.n"], "A is not what its code makes: its attribute n differs"),
    "a default": (["k = 3\ndef f(d=k): return d", "k = 20"], "f is not what its code makes: the default of d differs"),
    "a default by name only": (["k = 3\ndef f(*, d=k): return d", "k = 20"], "the default of d"),
    "an expression of a default": (["k = 3\ndef f(d=k + 1): return d", "k = 20"], "the default of d differs"),
    "a mutable default": (["def g(x=[]):\n    x.append(1)", "g()", "def f(): return g()"], "the default of x"),
    "a lambda's default": (["for q in range(3):\n    g = lambda q=q: q", "q = 9", "def f(): return g()"], "the default of q"),
    "an object": ([BOX + "b = Box(2)", "b.n = 4", "def f(): return b.n"], "b is not what its code makes: its attribute n differs.* run the cell of b again"),
    "an object in a function": ([BOX + "b = Box(2)", "def grow(): b.n = 5", "grow()", "def f(): return b.n"], "b is not what its code makes: its attribute n differs"),
    "an object by another name": ([BOX + "b = Box(2)\na = b", "a.n = 5", "def f(): return b.n"], "b is not what its code makes"),
    "an object in a list": ([BOX + "b = Box(2)\nL = [b]", "L[0].n = 5", "def f(): return b.n"], "b is not what its code makes"),
    "an argument of an own function": ([BOX + "b = Box(2)\ndef inc(x):\n    x.n = 5\n    return x", "_ = inc(b)", "def f(): return b.n"], "b is not what its code makes"),
    "an equal statement that was not executed": ([BOX + "b = Box(2)", "b.n = 4", "1 / 0\nb = Box(2)", "def f(): return b.n"], "b is not what its code makes"),
    "one of two statements": ([BOX + "b = Box(2)", "1 / 0\nb = Box(7)", "def f(): return b.n"], "b is not what its code makes: its attribute n differs"),
    "what an object was made with": ([BOX + "n = 2\nb = Box(n)", "n = 3", "def f(): return b.n"], "b is not what its code makes: its attribute n differs"),
    "what its class used": (["K = 2\nclass S:\n    def __init__(self): self.m = [object()] * K", "s = S()", "K = 3", "def f(): return len(s.m)"], "s is not what its code makes: its attribute m differs"),
    "a list of lambdas": (["L = []\nfor q in range(3): L.append(lambda q=q: q)", "def f(): return [x() for x in L]"], "L is not what its code makes"),
    "a registry that decorators fill": (["REG = {}\ndef register(c):\n    REG[c.__name__] = c\n    return c", "@register\nclass A: ...", "def f(): return REG"], "REG is filled by what itself needs REG, such as a decorator that registers"),
    "a registry in a class": (["class Reg: items = {}\ndef register(c):\n    Reg.items[c.__name__] = c\n    return c", "@register\nclass A: ...", "def f(): return Reg.items"], "its attribute items"),
    "a dict of an own kind": (["class D(dict): ...\nd = D(); d['x'] = 3", "def f(): return d['x']"], r"d is a D, a dict of its own kind .* use dict\(d\)"),
    "tensors in a list": (["import torch\nxs = [torch.zeros(1)]", "def f(): return xs"], "a part of xs is a Tensor"),
    "a cached function": (["import functools\nK = 2\n@functools.cache\ndef g(x, k=K): return x * k", "K = 5", "def f(): return g(1)"], "g is not what its code makes"),
    "a special attribute": (["class A: ...", "A.__version__ = 2", "def f(): return A.__version__"], "its attribute __version__ differs"),
    "an item of a dict": (["x = {'a': 1, 'b': object()}", "x['a'] = 2", "def f(): return x"], "x is not what its code makes: its item 'a' differs"),
    "a generator in an object": ([BOX + "b = Box((i for i in [1]))", "next(b.n)", "def f(): return b.n"], "b has a generator, whose content cannot be compared"),
    "a variable that a cell has set": (["import os\nos.environ['CT_CELL'] = '7'", BOX + "b = Box(os.environ.get('CT_CELL'))", "def f(): return b.n"], "b is not what its code makes: its attribute n differs"),
    "a random generator": (["import numpy as np\nr = np.random.default_rng(0)", "def f(): return r.random()"], "r is a Generator, which changes with each use"),
    "an iterator": (["r = iter([1])", "def f(): return next(r)"], "r is an iterator"),
    "a method of an object": (["class A:\n    def go(self): return 1\nm = A().go", "def f(): return m()"], "m is a method of an object"),
    "an earlier definition": (["def g(): return 1\nfx = g", "def g(): return 2", "def f(): return fx()"], "fx is an earlier definition of g"),
    "a weighted loss": (["import torch, torch.nn as nn\nloss = nn.CrossEntropyLoss(weight=torch.ones(3))", "def f(): return loss"], "loss is a model of the notebook with weights"),
    "a decorator that hides cloudtrain's": ([REMOTE + "def gpu(fn): return R(fn, backend='local')\n@gpu\ndef f(): return 4"], "f is made remote in a way that its code does not show"),
}  # fmt: skip


@pytest.mark.parametrize("title", CHANGED)
def test_what_differs_is_refused_by_name(title: str) -> None:
    cells, message = CHANGED[title]
    code = execute_where_possible(*cells)
    with pytest.raises(SpecError, match=message):
        sent(code)


def test_code_that_ends_its_process_is_refused() -> None:
    cells = (
        "import os\nis_first = True\ndef end():\n    if not is_first: os._exit(3)\n    return object()",
        "x = end()\nis_first = False",
        "def f(): return x",
    )
    with pytest.raises(SpecError, match="fails in a fresh Python: it ended with exit code 3"):
        sent(execute(*cells))


def test_an_error_in_a_fresh_process_names_its_cell() -> None:
    code = execute("seen = {}", "seen['a'] = object()", "b = [seen['a']]", "def f(): return b")
    with pytest.raises(SpecError, match=r"cell with b:1.* fails in a fresh Python: KeyError: 'a'"):
        sent(code)


def test_settings_of_a_library_are_named() -> None:
    setting = execute("import os", "os.environ['A'] = '1'", "def f(): return os.sep")
    assert sent(setting).notes == ("cell [2] changes a setting of os, which the run does not",)


def test_magics_that_execute_a_cell_are_read() -> None:
    cell = "get_ipython().run_cell_magic('time', '', 'def g():\\n    return 4\\n')"
    code = execute("def get_ipython(): ...", "def g():\n    return 4\n", "def f(): return g()")
    read = type(code.cells[0]).read("cell [4]", 4, cell)
    assert read is not None
    assert read.last_binding("g") is not None
    other = type(code.cells[0]).read("cell [4]", 4, cell.replace("'time'", "'bash'"))
    assert other is not None
    assert other.last_binding("g") is None


def test_builtins_and_imports_inside_functions(tmp_path: Path) -> None:
    (tmp_path / "inner_helper.py").write_text("X = 1\n")
    source = "def f():\n    import inner_helper\n    open('/dev/null'); display(3)\n    return inner_helper.X"
    code = execute(source, folder=tmp_path)
    # The names that IPython adds are no cell's.
    assert isinstance(code.names, dict)
    code.names["open"] = object()
    code.names["display"] = print
    written = code_of_cells("f", code.names["f"], code, is_task=False)
    assert "inner_helper.py" in written.files
    assert b"display = print\n" in written.files["x.py"]
    assert b"open =" not in written.files["x.py"]


def test_a_changed_local_module_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    path = tmp_path / "edited_helper.py"
    first = "RATE = 3\nCONFIG = {'x': 1}\ncount = 0\ndef helper(): return 1\ndef add():\n    global count\n    count += 1\n"
    path.write_text(first)
    code = execute(
        "import edited_helper", "def f(): return edited_helper.helper()", folder=tmp_path
    )
    module = sys.modules["edited_helper"]
    module.add()
    code_of_cells("f", code.names["f"], code, is_task=False)
    for text, part in (
        (first.replace("return 1", "return 2"), "helper"),
        (first.replace("= 3", "= 4"), "RATE"),
    ):
        path.write_text(text)
        with pytest.raises(SpecError, match=f"edited_helper has another {part} here than"):
            code_of_cells("f", code.names["f"], code, is_task=False)
    path.write_text(first)
    module.CONFIG["x"] = 2
    with pytest.raises(SpecError, match="another CONFIG here"):
        code_of_cells("f", code.names["f"], code, is_task=False)
    module.CONFIG["x"] = 1
    code_of_cells("f", code.names["f"], code, is_task=False)
    monkeypatch.delitem(sys.modules, "edited_helper")


def test_arguments_have_names() -> None:
    def takes(a: int, *rest: int, b: int = 1, **more: int) -> None: ...

    def first(a: int, /) -> None: ...

    assert bind_arguments(takes, (1,), {"b": 2, "c": 3}) == {"a": 1, "b": 2, "c": 3}
    for function, args in ((takes, (1, 2)), (first, (1,))):
        with pytest.raises(UserError, match="has no name"):
            bind_arguments(function, args, {})


def test_a_misspelt_name_is_named() -> None:
    def train(lr: float) -> None: ...

    with pytest.raises(UserError, match="unexpected keyword argument 'lrr'"):
        bind_arguments(train, (), {"lrr": 1})
    with pytest.raises(UserError, match="lrr: train has no such argument"):
        named_space(train, {"lrr": {}})
    assert named_space(train, {"lr": 1, "train.epochs": 2}) == {
        "code.args.lr": 1,
        "train.epochs": 2,
    }
    for wrong in (lambda: remote(instnaces=3), lambda: remote(train).options(instnaces=3)):
        with pytest.raises(UserError, match="instnaces: unknown field"):
            wrong()


def test_what_a_run_cannot_call_is_refused() -> None:
    def generate() -> object:
        yield 1

    async def wait() -> None: ...

    for code, message in (
        (42, "expected a function or a Task class, got int"),
        (lambda: 1, "a lambda has no name"),
        ("x".upper, "expected a function"),
        (Path().exists, "is a method of an object"),
        (generate, "generate is a generator function"),
        (wait, "wait is an async function"),
    ):
        with pytest.raises(UserError, match=message):
            check_code(code)


def test_a_run_never_submits_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> None: ...

    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(UserError, match="train is called inside a run"):
        remote(train, backend="local").submit()


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"p": Path("a")}, r"x\['p'\], a .*Path, is no argument of a job"),
        ({1: 2}, "a dict with keys that are no text, is no argument of a Task"),
        ([(1, 2)], r"x\[0\], a tuple, is no argument of a Task"),
    ],
)
def test_arguments_that_would_change_are_refused(value: object, message: str) -> None:
    is_task = "Task" in message
    written = WrittenCode("x", ("task" if is_task else "script", "x"), {})
    with pytest.raises(UserError, match=message):
        make_job(written, "x()", {"x": value}, {}, base=Path())
