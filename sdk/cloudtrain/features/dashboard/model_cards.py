"""Model cards: what is known about a run's model, as Markdown with the metadata of Hugging Face's model cards."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloudtrain.client.client import Client, client_of
from cloudtrain.errors import CloudError, UserError
from cloudtrain.runs.billing import Billing
from cloudtrain.runs.comparison import known_evaluations, read_plan, settings_of
from cloudtrain.runs.downloads import BEST
from cloudtrain.runs.evaluations import Evaluation, Measurement, evaluated_by
from cloudtrain.runs.history import SPEED_METRICS, MetricHistory, read_events
from cloudtrain.runs.known_runs import job_name
from cloudtrain.runs.run import Run, RunLike
from cloudtrain.runs.shown_metrics import describe_metric
from cloudtrain.runs.status import State, Status
from cloudtrain.settings.settings import Settings
from cloudtrain.support.backend_facts import place_name
from cloudtrain.support.notebook.summary import count
from cloudtrain.support.units import format_duration, format_usd
from cloudtrain_runtime.contract.events import Event
from cloudtrain_runtime.contract.redaction import redact

_MOST_CLASSES = 20
_SCORES = ("precision", "recall", "f1", "support")
_SPLITS = ("test", "validation")
_NO_DATA = "The job has no data channel: the code itself reads or creates the data."


def model_card(
    run: RunLike, *, settings: Settings | None = None, client: Client | None = None
) -> str:
    """Return the model card of a run: data, code, job, metrics with intervals, cost and limits.

    Markdown, with a YAML head of the metadata that Hugging Face's Hub reads. Intervals come from the newest evaluation
    (`evaluate`) of the final weights; without one, the metrics are the last ones of the training.

    Args:
        run: The run.
        settings: The account; by default from environment and files.
        client: The client that finds the run, in place of `settings`.

    Raises:
        RunNotFoundError: There is no such run.
        UserError: The run is an evaluation, which has no model.
        CloudError: AWS refused or cannot be reached.
    """
    handle = client_of(client, settings).get_run(run)
    plan = read_plan(handle)
    if evaluated := evaluated_by(plan):
        raise UserError(
            f"{handle.id} evaluates {evaluated} and has no model", f"cloudtrain card {evaluated}"
        )
    return make_card(handle, handle.status(), plan, read_events(handle))


def make_card(run: Run, status: Status, plan: Mapping[str, Any], events: Iterable[Event]) -> str:
    """Return the model card of a run from what is known about it.

    Args:
        run: The run.
        status: Its status.
        plan: Its plan.json, which may be empty.
        events: The events of its log.

    Raises:
        CloudError: AWS refused or cannot be reached.
    """
    history = MetricHistory()
    by_kind: dict[str, Event] = {}
    for event in events:
        by_kind[event["event"]] = event
        history.add(event)
    exports_best = ((plan.get("job") or {}).get("train") or {}).get("export") == BEST
    best = by_kind.get("finished", {}).get("best_step") if exports_best else None
    evaluation = _evaluation_of_model(
        known_evaluations(run), str(status.artifacts.get("model", ""))
    )
    facts = _Facts(
        status,
        plan,
        by_kind.get("started", {}),
        by_kind.get("analysis"),
        evaluation,
        _billing(run),
        best,
        {} if best is None else _values_at(history, best),
    )
    head = _yaml(facts.metadata())
    return redact("\n".join(["---", *head, "---", "", *facts.lines()]) + "\n")


def _evaluation_of_model(found: Sequence[Evaluation], model: str) -> Evaluation | None:
    """Return the newest evaluation of a run's final weights, of other splits than train if there is one.

    Without final weights, it is the newest evaluation of a checkpoint.
    """
    place = Path(model).as_uri() if model.startswith("/") else model
    own = [each for each in found if not each.is_initial and (not model or each.weights == place)]
    return next((each for each in own if set(each.splits) - {"train"}), own[0] if own else None)


def _values_at(history: MetricHistory, step: int) -> dict[str, float | None]:
    """Return the values of a step by metric."""
    return {
        name: each.value
        for name, values in history.metrics.items()
        for each in values
        if each.step == step
    }


def _billing(run: Run) -> Billing | None:
    try:
        return run.billing()
    except (CloudError, UserError):
        return None


@dataclass(frozen=True)
class _Facts:
    """What is known about a run.

    Attributes:
        status: Its status.
        plan: Its plan.json.
        started: Its newest event `started`.
        analysis: Its newest event `analysis`, or None.
        evaluation: Its newest evaluation, or None.
        billing: What AWS bills for it, or None.
        best_step: Step of the exported weights, where the job exports the best ones.
        at_best: Values of its metrics at that step.
    """

    status: Status
    plan: Mapping[str, Any]
    started: Event
    analysis: Event | None
    evaluation: Evaluation | None
    billing: Billing | None
    best_step: int | None = None
    at_best: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the job."""
        return str(self._part("job").get("name") or job_name(self.status.run))

    @property
    def metrics(self) -> dict[str, Measurement]:
        """Metrics of the evaluation, else those of the exported weights in the training's own evaluations."""
        if self.evaluation is not None:
            return self.evaluation.metrics
        last = {**self.status.progress.metrics, **self.at_best}
        names = [
            name for name in last if name not in SPEED_METRICS and not name.startswith("train/")
        ]
        return {name: Measurement(last[name]) for name in names}

    @property
    def data(self) -> dict[str, str]:
        """Uri by channel, as the training read them."""
        channels = self._part("request").get("InputDataConfig") or ()
        own = self._part("job").get("data") or {}
        found = {}
        for channel in channels:
            if channel.get("ChannelName") in own:
                source = channel.get("DataSource", {})
                place = source.get("S3DataSource", {}).get("S3Uri") or str(
                    source.get("FileSystemDataSource", "")
                )
                found[str(channel["ChannelName"])] = str(place)
        return found

    def metadata(self) -> dict[str, Any]:
        """Return the metadata of the Hub: https://huggingface.co/docs/hub/model-cards#model-card-metadata."""
        values = {name: each.value for name, each in self.metrics.items() if each.value is not None}
        results = []
        for split in dict.fromkeys(name.partition("/")[0] for name in values):
            own = {name: value for name, value in values.items() if name.startswith(f"{split}/")}
            results.append(
                {
                    "task": {"type": self._task_type()},
                    "dataset": {"name": self._dataset(), "type": self.name, "split": split},
                    "metrics": [
                        {"type": name.partition("/")[2], "name": name, "value": value}
                        for name, value in own.items()
                    ],
                }
            )
        return {
            "library_name": "pytorch",
            "tags": [
                "cloudtrain",
                *(f"{key}:{value}" for key, value in sorted(self._tags().items())),
            ],
            "metrics": sorted({name.partition("/")[2] for name in values}),
            "model-index": [{"name": self.name, "results": results}],
        }

    def lines(self) -> Iterator[str]:
        """Yield the lines of the text."""
        yield from (
            f"# {self.name}",
            "",
            f"Model of the cloudtrain run `{self.status.reference}`.",
            "",
        )
        yield from self._model()
        data = [_NO_DATA]
        if self.data:
            data = _table(("channel", "uri"), self.data.items())
        yield from _section("Data", data)
        yield from self._training()
        yield from self._results()
        yield from self._cost()
        yield from _section("Limits", [f"- {text}" for text in self._limits()])

    def _model(self) -> Iterator[str]:
        code = self._part("bundle")
        source = self._part("source")
        commit = ""
        if source:
            changes = " with uncommitted changes" if source.get("dirty") else ""
            commit = f"{source['commit']}{changes}"
        content = ""
        if code.get("digest"):
            content = f"sha256 {code['digest']}, {count(code['files'], 'file')}"
        step = self._step()
        rows = {
            "entry": f"`{self._part('command').get('text', '')}`",
            "parameters": _grouped(self.started.get("parameters")),
            "steps": "" if step is None else f"{step:,}",
            "weights": str(self.status.artifacts.get("model", "")),
            "code": content,
            "commit": commit,
            "trained": f"{self.status.started:%Y-%m-%d}" if self.status.started else "",
        }
        # An entry without a text is "``".
        shown = {name: text for name, text in rows.items() if text.strip("`")}
        yield from _section("Model", _table(("", ""), shown.items()))

    def _step(self) -> int | None:
        """Return the step of the weights: the evaluated one, else the best, else the last."""
        if self.evaluation is not None and self.evaluation.step is not None:
            return self.evaluation.step
        if self.best_step is not None:
            return self.best_step
        return self.status.progress.last_step

    def _place(self, cluster: Mapping[str, Any]) -> str:
        instances = cluster.get("instances")
        kind = cluster.get("instance_type")
        if not kind:
            # A cluster's nodes have no type.
            site = self._part("batch_job").get("site", "")
            return f"{instances} nodes {place_name(self.status.backend)} ({site})"
        local = "" if self.status.uses_account else "this machine, planned for "
        return f"{local}{instances} x {kind}"

    def _training(self) -> Iterator[str]:
        cluster = self._part("cluster")
        place = ""
        if cluster:
            place = self._place(cluster)
        rows = {
            "cluster": place,
            "ranks": str(self.started.get("world_size") or cluster.get("world_size") or ""),
            "device": str(self.started.get("device") or ""),
            "training samples": _grouped(self.started.get("train_samples")),
            "image": str(self.plan.get("image") or "") if self.status.uses_account else "",
        }
        hidden = ("cluster.", "code.", "data.", "tags.", "global batch", "ranks", "name")
        settings = {
            path: value
            for path, value in settings_of(self.plan).items()
            if not path.startswith(hidden)
        }
        shown = {name: text for name, text in rows.items() if text}
        shown |= {path: f"`{value}`" for path, value in settings.items()}
        yield from _section("Training", _table(("", ""), shown.items()))

    def _results(self) -> Iterator[str]:
        evaluation = self.evaluation
        if evaluation is not None:
            at = f"of step {evaluation.step:,} " if evaluation.step is not None else ""
            when = f"{evaluation.created:%Y-%m-%d}"
            note = (
                f"Weights {at}evaluated on {when} by `{evaluation.run}`. 95 % bootstrap intervals."
            )
        else:
            more = f"For intervals: `cloudtrain evaluate {self.status.run}`."
            of = "Last values"
            if self.best_step is not None:
                of = f"Values of step {self.best_step:,}, the best one,"
            note = f"{of} of the training, without intervals. {more}"
        if not self.metrics:
            note = "The run has reported no metric of an evaluation."
        rows = []
        for name, each in self.metrics.items():
            figures = (each.value, each.low, each.high)
            rows.append(
                (name, *("" if part is None else describe_metric(part) for part in figures))
            )
        table = _table(("metric", "value", "low", "high"), rows) if rows else []
        yield from _section("Results", [note, "", *table])
        split, classes = self._classes()
        if classes:
            scores = [
                (str(each["name"]), *(_score(each.get(part)) for part in _SCORES))
                for each in classes
            ]
            yield from _section(
                f"Classes of the {split} split", _table(("class", *_SCORES), scores)
            )

    def _classes(self) -> tuple[str, Sequence[Mapping[str, Any]]]:
        """Return a split and the scores of its classes, if they are few."""
        splits = {} if self.evaluation is None else self.evaluation.splits
        for split in (*_SPLITS, *splits):
            if split not in splits:
                continue
            analysis = splits[split].analyses.get("classification")
            if analysis and _has_few_classes(analysis):
                return split, analysis["classes"]
        if self.analysis is not None and _has_few_classes(self.analysis):
            return str(self.analysis["split"]), self.analysis["classes"]
        return "", ()

    def _cost(self) -> Iterator[str]:
        billing = self.billing
        if billing is None:
            text = "Unknown: AWS did not report what it bills for the run."
        elif not billing.instance_type and billing.instances:
            hours = billing.instances * billing.billable_seconds / 3600
            price = f", {format_usd(billing.cost_usd)}" if billing.cost_usd else ""
            text = f"{hours:,.1f} node hours {place_name(self.status.backend)}{price}."
        elif not billing.instance_type:
            text = "Trained on a machine of the user's own, which AWS does not bill."
        else:
            cost = billing.cost_usd
            usd = "an unknown price" if cost is None else format_usd(cost)
            spot = ""
            if billing.is_spot:
                spot = f", spot, which saved {format_usd(billing.saved_usd)}"
            simulated = "The sandbox simulated this: " if self.status.is_simulated else ""
            duration = format_duration(billing.billable_seconds)
            text = f"{simulated}{usd} for {billing.instances} x {billing.instance_type}, {duration} billed each{spot}."
        lines = [text]
        if billing is not None and billing.instance_type:
            lines += ["", "Prices are on demand, without storage, discounts and earlier attempts."]
        yield from _section("Cost", lines)

    def _limits(self) -> Iterator[str]:
        status = self.status
        if status.state is not State.SUCCEEDED:
            yield f"The run is {status.state}: its training is not complete. {status.reason}".rstrip()
        if not self.metrics:
            yield "Nothing is known about the quality of the model: no split was evaluated."
        elif not any(name.startswith("test/") for name in self.metrics):
            yield "There is no test split: the figures may come from data by which the model was chosen."
        if self.evaluation is None:
            yield "The figures have no confidence intervals."
        else:
            yield "The intervals cover the choice of the samples, not another seed or another training."
        if (self._part("source") or {}).get("dirty"):
            yield "The code had changes that are in no commit."
        if self.plan and not self._part("source"):
            yield "The code was in no git repository. Its digest identifies it."
        yield from (*status.alarms(), *status.host_warnings())
        yield "Intended uses, biases, risks and the license are not recorded by the training: add them here."

    def _task_type(self) -> str:
        splits = () if self.evaluation is None else self.evaluation.splits.values()
        analyses = next((split.analyses for split in splits), {})
        if any(name.endswith("/perplexity") for name in self.metrics):
            return "text-generation"
        if analyses.get("residuals"):
            return "regression"
        if analyses.get("classification") or self.analysis is not None:
            return "classification"
        return "other"

    def _dataset(self) -> str:
        data = self.data
        if self.evaluation is not None and self.evaluation.data:
            data = dict(self.evaluation.data)
        if uris := ", ".join(data.values()):
            return uris
        return f"data of {self._part('command').get('entry') or self.name}"

    def _tags(self) -> Mapping[str, str]:
        tags = self._part("job").get("tags")
        return tags if isinstance(tags, Mapping) else {}

    def _part(self, name: str) -> Mapping[str, Any]:
        found = self.plan.get(name)
        return found if isinstance(found, Mapping) else {}


def _yaml(content: Mapping[str, Any]) -> list[str]:
    import yaml

    text: str = yaml.safe_dump(dict(content), sort_keys=False, allow_unicode=True, width=1_000)
    return text.rstrip("\n").splitlines()


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    yield from (f"## {title}", "", *lines, "")


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [_row(heads), _row(["---"] * len(heads)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(' '.join(str(cell).replace('|', '/').split()) for cell in cells)} |"


def _score(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}"


def _grouped(number: int | None) -> str:
    """Return a number with separators of thousands; empty for none and for 0."""
    return f"{number:,}" if number else ""


def _has_few_classes(analysis: Mapping[str, Any]) -> bool:
    return 0 < len(analysis.get("classes") or ()) <= _MOST_CLASSES
