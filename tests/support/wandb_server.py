"""A stand-in for the server of Weights & Biases on loopback, for runs that log online: what a client sends is kept."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

ENTITY = "us"


@dataclass
class KeptRun:
    """A run as the server has it: rows as they were sent, the configuration and the exit codes."""

    rows: list[str] = field(default_factory=list)
    events: list[str] = field(default_factory=list)
    summary: str = "{}"
    config: str = "{}"
    exit_codes: list[int] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        """Steps of the rows, with those that were sent twice."""
        return [json.loads(row)["_step"] for row in self.rows]


@dataclass
class WandbServer:
    """The server's address and its runs by project and id."""

    url: str = ""
    runs: dict[tuple[str, str], KeptRun] = field(default_factory=dict)

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Return the data of a GraphQL request."""
        values = asked["variables"]
        if asked["operationName"] == "RunResumeStatus":
            return {"model": self._status(values["project"], values["name"])}
        if asked["operationName"] == "UpsertBucket":
            kept = self.runs.setdefault((values["project"], values["name"]), KeptRun())
            kept.config = values["config"] or kept.config
            project = {**_named(values["project"]), "entity": _named(ENTITY)}
            bucket = {
                **_named(values["name"]),
                "displayName": values["displayName"],
                "project": project,
            }
            return {"upsertBucket": {"bucket": bucket, "inserted": not kept.rows}}
        if asked["operationName"] == "OrganizationCoreWeaveOrganizationID":
            return {"entity": {"organization": {"coreWeaveOrganizationId": None}}}
        if asked["operationName"] == "CreateRunFiles":
            # The client ends with an error of its own where this answer is empty.
            files = [{"name": name, "uploadUrl": f"{self.url}/upload"} for name in values["files"]]
            return {"createRunFiles": {"runID": "", "uploadHeaders": [], "files": files}}
        return {}

    def _status(self, project: str, name: str) -> dict[str, Any] | None:
        kept = self.runs.get((project, name))
        if kept is None:
            return None
        bucket = {
            **_named(name),
            "displayName": name,
            "summaryMetrics": kept.summary,
            "config": kept.config,
            "historyLineCount": len(kept.rows),
            "eventsLineCount": len(kept.events),
            "logLineCount": 0,
            "historyTail": json.dumps(kept.rows[-1:]),
            "eventsTail": json.dumps(kept.events[-1:]),
            "tags": [],
            "notes": None,
            "wandbConfig": json.dumps({"t": 1}),
        }
        return {**_named(project), "entity": _named(ENTITY), "bucket": bucket}

    def stream(self, path: str, sent: dict[str, Any]) -> None:
        """Keep the rows of a file stream, at the offset that the client names."""
        _, _, _, project, name, _ = path.split("/")
        kept = self.runs.setdefault((project, name), KeptRun())
        for file, part in sent.get("files", {}).items():
            lines = {"wandb-history.jsonl": kept.rows, "wandb-events.jsonl": kept.events}.get(file)
            if lines is not None:
                lines[part["offset"] :] = part["content"]
            elif file == "wandb-summary.json":
                kept.summary = part["content"][-1]
        if sent.get("complete"):
            kept.exit_codes.append(sent["exitcode"])


def _named(name: str) -> dict[str, str]:
    return {"id": name, "name": name}


@contextlib.contextmanager
def serve_wandb() -> Iterator[WandbServer]:
    """Serve on loopback; yield the server."""
    kept = WandbServer()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            sent = json.loads(body)
            answer: dict[str, Any] = {}
            if self.path.endswith("/file_stream"):
                kept.stream(self.path, sent)
            else:
                answer = {"data": kept.answer(sent)}
            content = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(200)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    kept.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()
