"""Analysis of a classified split: confusion matrix, and precision, recall and F1 of each class."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from cloudtrain_runtime.contract.events import SCORES
from cloudtrain_runtime.contract.strict_json import dump_json

_MAX_COLUMNS = 20
"""Most columns of a confusion matrix in analysis.md: wider tables are hard to read."""

_MAX_MATRIX_CLASSES = 1000
"""Most classes with a full matrix in analysis.json; with more, it only lists the most confused pairs."""

_MAX_EVENT_CLASSES = 200
_MAX_EVENT_MATRIX = 50
"""Most classes of the event's scores and of its matrix: CloudWatch limits a log line to 256 kB."""

_MOST_CONFUSED = 20


@dataclass(frozen=True)
class ClassScore:
    """Precision, recall and F1 of one class."""

    # name of the class
    name: str
    # share of the samples predicted as this class that belong to it; None without predictions
    precision: float | None
    # share of the samples of this class that were predicted as it; None without samples
    recall: float | None
    # harmonic mean of precision and recall; None without predictions and samples
    f1: float | None
    # number of samples of this class
    support: int


class ClassificationAnalysis:
    """The predictions of a model for one split, by class.

    Args:
        confusion: Number of samples by true and predicted class. Samples with a class below 0 are ignored.
        names: Names of the classes, by class number; a class without a name is named by its number.
        step: Step of the weights.
        metrics: Mean metrics by split and name.
    """

    def __init__(
        self,
        confusion: Counter[tuple[int, int]],
        names: Sequence[str],
        *,
        split: str,
        step: int,
        metrics: Mapping[str, Mapping[str, float]],
    ) -> None:
        self._pairs = Counter({pair: count for pair, count in confusion.items() if min(pair) >= 0})
        self._classes = sorted(
            {*range(len(names)), *(kind for pair in self._pairs for kind in pair)}
        )
        self._names = {
            kind: str(names[kind]) if kind < len(names) else str(kind) for kind in self._classes
        }
        self._true: Counter[int] = Counter()
        self._predicted: Counter[int] = Counter()
        for (true, predicted), count in self._pairs.items():
            self._true[true] += count
            self._predicted[predicted] += count
        self.split = split
        self.step = step
        self.metrics = metrics

    @property
    def samples(self) -> int:
        """Number of samples that have a class."""
        return self._pairs.total()

    @property
    def accuracy(self) -> float:
        """Share of samples whose class was predicted correctly."""
        return sum(self._pairs[kind, kind] for kind in self._classes) / max(self.samples, 1)

    @property
    def scores(self) -> list[ClassScore]:
        """Scores of each class, by class number."""
        return [self._score(kind) for kind in self._classes]

    @property
    def averages(self) -> dict[str, dict[str, float]]:
        """Mean scores of the classes with samples: unweighted (`macro`) and weighted by support (`weighted`)."""
        scores = [score for score in self.scores if score.support]
        return {
            "macro": {
                name: sum(getattr(score, name) or 0.0 for score in scores) / max(len(scores), 1)
                for name in SCORES
            },
            "weighted": {
                name: sum((getattr(score, name) or 0.0) * score.support for score in scores)
                / max(self.samples, 1)
                for name in SCORES
            },
        }

    @property
    def most_confused(self) -> list[tuple[str, str, int]]:
        """The true class, the predicted class and the number of samples of the most frequent wrong predictions."""
        wrong = Counter({pair: count for pair, count in self._pairs.items() if pair[0] != pair[1]})
        ordered = sorted(wrong.items(), key=lambda entry: (-entry[1], entry[0]))[:_MOST_CONFUSED]
        return [(self._names[true], self._names[guess], count) for (true, guess), count in ordered]

    @property
    def matrix(self) -> list[list[int]]:
        """Samples by true class (row) and predicted class (column)."""
        return [[self._pairs[true, guess] for guess in self._classes] for true in self._classes]

    def write(self, folder: Path) -> Path:
        """Write `analysis.json` and `analysis.md`; return the path of the latter."""
        (folder / "analysis.json").write_text(
            dump_json(self.to_json(), indent=1) + "\n", encoding="utf-8"
        )
        text = folder / "analysis.md"
        text.write_text("\n".join(self.lines()) + "\n", encoding="utf-8")
        return text

    def to_json(self) -> dict[str, object]:
        """Return the content of `analysis.json`."""
        has_matrix = len(self._classes) <= _MAX_MATRIX_CLASSES
        return {
            "split": self.split,
            "step": self.step,
            "samples": self.samples,
            "metrics": {split: dict(values) for split, values in self.metrics.items()},
            "accuracy": self.accuracy,
            "averages": self.averages,
            "classes": [asdict(score) for score in self.scores],
            "confusion": self.matrix if has_matrix else None,
            "most_confused": [
                {"true": true, "predicted": guess, "count": count}
                for true, guess, count in self.most_confused
            ],
        }

    def to_event(self) -> dict[str, object]:
        """Return the fields of the event `analysis`, which must fit into one log line: without a large matrix."""
        scores = [asdict(score) for score in self.scores[:_MAX_EVENT_CLASSES]]
        has_matrix = len(self._classes) <= _MAX_EVENT_MATRIX
        return {
            "split": self.split,
            "step": self.step,
            "samples": self.samples,
            "classes": scores,
            "confusion": self.matrix if has_matrix else None,
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of `analysis.md`."""
        yield f"# Analysis of the {self.split} split"
        yield ""
        yield f"{self.samples:,} samples, weights of step {self.step:,}, accuracy {self.accuracy:.4f}."
        yield ""
        metrics = list(dict.fromkeys(name for values in self.metrics.values() for name in values))
        rows = [
            (split, *(f"{values[name]:.6g}" if name in values else "" for name in metrics))
            for split, values in self.metrics.items()
        ]
        yield from _section("Metrics", ("split", *metrics), rows)
        rows = [
            (score.name, *(_rounded(getattr(score, name)) for name in SCORES), f"{score.support:,}")
            for score in self.scores
        ]
        for name, values in self.averages.items():
            means = (_rounded(values[each]) for each in SCORES)
            rows.append((f"*{name} average*", *means, f"{self.samples:,}"))
        yield from _section("Classes", ("class", *SCORES, "support"), rows)
        if len(self._classes) <= _MAX_COLUMNS:
            names = [self._names[kind] for kind in self._classes]
            rows = [
                (f"**{name}**", *map(str, row))
                for name, row in zip(names, self.matrix, strict=True)
            ]
            note = ("Rows are true classes, columns predicted ones.", "")
            yield from _section("Confusion matrix", ("", *names), rows, note)
        if self.most_confused:
            rows = [(true, guess, f"{count:,}") for true, guess, count in self.most_confused]
            yield from _section("Most confused", ("true", "predicted", "samples"), rows)

    def _score(self, kind: int) -> ClassScore:
        hits = self._pairs[kind, kind]
        predicted = self._predicted[kind]
        support = self._true[kind]
        both = predicted + support
        return ClassScore(
            name=self._names[kind],
            precision=hits / predicted if predicted else None,
            recall=hits / support if support else None,
            f1=2 * hits / both if both else None,
            support=support,
        )


def _rounded(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _section(
    title: str, heads: Sequence[str], rows: Sequence[Sequence[str]], note: Sequence[str] = ()
) -> Iterator[str]:
    """Yield the lines of a section with a table, in Markdown."""
    yield f"## {title}"
    yield ""
    yield from note
    yield _row(heads)
    yield _row(["---"] + ["---:"] * (len(heads) - 1))
    yield from (_row(row) for row in rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"
