"""Refreshing prices: real boto3 over HTTP against a server that answers as the AWS Price List API is documented to."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from datetime import UTC, date, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.jobs import Cli

from cloudtrain import CloudError, SettingsError
from cloudtrain.catalog import read_prices
from cloudtrain.client.account import known_prices, refresh_prices

pytestmark = [pytest.mark.aws, pytest.mark.filterwarnings("ignore")]

TODAY = date(2026, 11, 21)


def product(
    usage: str, usd: str, *, region: str = "eu-west-1", unit: str = "Hrs", **terms: Any
) -> str:
    """Return one entry of PriceList: JSON within JSON, as GetProducts gives it."""
    name = usage.partition(":")[2].removeprefix("JupyterLab-")
    dimension = {
        "unit": unit,
        "endRange": "Inf",
        "description": f"${usd} per hour for {usage}",
        "appliesTo": [],
        "rateCode": "ABCDEFGHIJKLMNOP.JRTCKXETXF.6YS6EN2CT7",
        "beginRange": "0",
        "pricePerUnit": {"USD": usd},
    }
    on_demand = {
        "ABCDEFGHIJKLMNOP.JRTCKXETXF": {
            "priceDimensions": {"ABCDEFGHIJKLMNOP.JRTCKXETXF.6YS6EN2CT7": dimension},
            "sku": "ABCDEFGHIJKLMNOP",
            "effectiveDate": "2026-11-01T00:00:00Z",
            "offerTermCode": "JRTCKXETXF",
            "termAttributes": {},
        }
    }
    attributes = {
        "regionCode": region,
        "servicecode": "AmazonSageMaker",
        "instanceName": name,
        "usagetype": usage,
    }
    return json.dumps(
        {
            "product": {
                "productFamily": "ML Instance",
                "attributes": attributes,
                "sku": "ABCDEFGHIJKLMNOP",
            },
            "serviceCode": "AmazonSageMaker",
            "terms": terms or {"OnDemand": on_demand},
            "version": "20261118000000",
            "publicationDate": "2026-11-18T00:00:00Z",
        }
    )


CATALOG = [
    product("EU-Train:ml.p4d.24xlarge", "27.5000000000"),
    product("EU-Host:ml.p4d.24xlarge", "27.6000000000"),
    product("EU-TrSpt:ml.g6.xlarge", "0.4000000000"),
    product("EU-TrainingPlanUpfrontFee:ml.p5.48xlarge", "13.5700000000"),
    product("EU-Studio:JupyterLab-ml.g5.xlarge", "1.5700000000"),
    product("EU-Train:ml.g5.xlarge", "1.5640000000"),
    product("EU-Train:ml.m5.xlarge", "0.2570000000"),
    product("EU-Train:ml.p99.24xlarge", "99.0000000000"),
    product("EU-Train:ml.c5.xlarge", "0.0000000000"),
    product("EU-Train:ml.c5n.xlarge", "5.0000000000", unit="Quantity"),
    product("EU-Train:ml.c4.xlarge", "0.2", Reserved={}),
    product("USW2-Train:ml.p4d.24xlarge", "24.0000000000", region="us-west-2"),
]


class PriceList:
    """The server's contents, and the requests that it received."""

    def __init__(self) -> None:
        self.products = list(CATALOG)
        self.page_size = 3
        self.errors: list[str] = []
        """Error types of the next answers."""
        self.raw: bytes | None = None
        """The body of the next answers, instead of products."""
        self.requests: list[dict[str, Any]] = []

    def answer(self, target: str, request: dict[str, Any]) -> tuple[int, bytes]:
        """Return status and body for one call."""
        assert target == "AWSPriceListService.GetProducts"
        assert request["ServiceCode"] == "AmazonSageMaker"
        self.requests.append(request)
        if self.errors:
            error = {
                "__type": f"com.amazonaws.pricing.v20171015#{self.errors.pop(0)}",
                "message": "no",
            }
            return 400, json.dumps(error).encode()
        if self.raw is not None:
            return 200, self.raw
        found = [text for text in self.products if self._matches(text, request["Filters"])]
        start = int(request.get("NextToken", "0"))
        end = start + min(self.page_size, request["MaxResults"])
        page: dict[str, Any] = {"FormatVersion": "aws_v1", "PriceList": found[start:end]}
        if end < len(found):
            page["NextToken"] = str(end)
        return 200, json.dumps(page).encode()

    @staticmethod
    def _matches(text: str, filters: list[dict[str, str]]) -> bool:
        try:
            described = json.loads(text)["product"]
            values = {**described["attributes"], "productFamily": described["productFamily"]}
        except (ValueError, KeyError, TypeError):
            return True  # a malformed entry matches every filter
        return all(
            f["Type"] == "TERM_MATCH" and values.get(f["Field"]) == f["Value"] for f in filters
        )


@pytest.fixture
def price_list(monkeypatch: pytest.MonkeyPatch) -> Iterator[PriceList]:
    """Serve a price list on loopback. boto3 finds it by the environment in every process of the test."""
    served = PriceList()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            status, body = served.answer(self.headers["X-Amz-Target"], request)
            self.send_response(status)
            self.send_header("Content-Type", "application/x-amz-json-1.1")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: Any) -> None:
            """Log nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    environment = {
        "AWS_ENDPOINT_URL_PRICING": f"http://127.0.0.1:{server.server_port}",
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    try:
        yield served
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def file() -> Path:
    """Return the file that a refresh writes."""
    return Path.home() / ".config" / "cloudtrain" / "prices.json"


def test_a_refresh_takes_the_training_prices_of_all_pages(
    cli: Cli, price_list: PriceList, file: Path
) -> None:
    done = cli("prices", "--region", "eu-west-1", "--refresh", "--json")
    assert done.code == 0, done.err
    assert {name: entry["usd_per_hour"] for name, entry in done.json["prices"].items()} == {
        "ml.g5.xlarge": 1.564,
        "ml.m5.xlarge": 0.257,
        "ml.p4d.24xlarge": 27.5,
        "ml.p99.24xlarge": 99.0,
    }
    assert done.json["region"] == "eu-west-1"
    assert "ml.p5.48xlarge" in done.json["unknown"]
    assert not set(done.json["prices"]) & set(done.json["unknown"])
    assert done.json["age_days"] == 0
    assert done.json["as_of"] == datetime.now(UTC).date().isoformat()
    assert [request.get("NextToken") for request in price_list.requests] == [None, "3", "6", "9"]
    assert list(file.parent.iterdir()) == [file]  # no temporary file is left


def test_a_table_for_people(cli: Cli, price_list: PriceList) -> None:
    done = cli("prices", "--region", "eu-west-1", "--refresh")
    lines = done.out.splitlines()
    assert lines[0].split() == ["instance", "type", "GPUs", "USD/hour", "USD/GPU-hour", "as", "of"]
    assert lines[1].split()[:6] == ["ml.g5.xlarge", "1", "x", "A10G", "1.5640", "1.5640"]
    assert lines[2].split()[:6] == ["ml.p4d.24xlarge", "8", "x", "A100", "27.5000", "3.4375"]
    assert lines[3].endswith(", 0 days ago")
    assert lines[4].startswith("unknown: ml.g4dn.8xlarge, ")
    assert "ml.p5.48xlarge" in lines[4]
    assert "ml.p4d.24xlarge" not in lines[4]
    assert lines[5].startswith("2 instance types without GPUs: ")
    assert "AWS Price List API" in lines[6]


def test_refresh_updates_one_region_only(cli: Cli, price_list: PriceList, file: Path) -> None:
    bundled = cli("prices", "--region", "us-west-2", "--json").json["prices"]
    assert bundled["ml.p4d.24xlarge"]["usd_per_hour"] == 25.251286
    for region in ("eu-west-1", "us-west-2"):
        assert cli("prices", "--region", region, "--refresh").code == 0
    assert read_prices(file).regions == ("eu-west-1", "us-west-2")
    again = cli("prices", "--region", "us-west-2", "--json").json["prices"]
    assert again["ml.p4d.24xlarge"]["usd_per_hour"] == 24.0
    assert again["ml.p5.48xlarge"] == bundled["ml.p5.48xlarge"]
    assert (
        cli("prices", "--region", "eu-west-1", "--json").json["prices"]["ml.p4d.24xlarge"][
            "usd_per_hour"
        ]
        == 27.5
    )


def test_refresh_in_python(price_list: PriceList, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLOUDTRAIN_REGION", "eu-west-1")
    refreshed = refresh_prices(today=TODAY)
    assert refreshed == known_prices()
    price = refreshed.find("ml.p4d.24xlarge", "eu-west-1")
    assert price is not None
    assert (price.usd_per_hour, price.as_of) == (27.5, "2026-11-21")
    assert refreshed.age_days("eu-west-1", date(2026, 11, 25)) == 4
    assert refreshed.usd_per_hour("ml.p5.48xlarge", "us-west-2") == 63.296
    assert refreshed.hosting_usd_per_hour("ml.p4d.24xlarge", "eu-west-1") == 27.6
    assert (
        refreshed.hosting_usd_per_hour("ml.g5.xlarge", "eu-west-1") == 1.564
    )  # without a price of endpoints


def test_the_highest_of_several_offers_counts(price_list: PriceList) -> None:
    price_list.products = [product("EU-Train:ml.g5.xlarge", usd) for usd in ("1.5", "1.7", "1.6")]
    assert refresh_prices("eu-west-1").usd_per_hour("ml.g5.xlarge", "eu-west-1") == 1.7


def test_one_throttled_call_is_retried(
    cli: Cli, price_list: PriceList, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "3")
    price_list.errors = ["ThrottlingException"]
    assert cli("prices", "--region", "eu-west-1", "--refresh").code == 0
    assert len(price_list.requests) == 5


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("AccessDeniedException", "pricing:GetProducts"),
        ("ThrottlingException", "try again in a minute"),
    ],
)
def test_an_error_of_aws_has_a_hint(
    cli: Cli, price_list: PriceList, file: Path, error: str, hint: str
) -> None:
    price_list.errors = [error]
    done = cli("prices", "--region", "eu-west-1", "--refresh")
    assert done.code == 3
    assert f"AWS says {error}" in done.err
    assert hint in done.err
    assert not file.exists()


def test_a_refresh_needs_credentials(
    cli: Cli, price_list: PriceList, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    done = cli("prices", "--refresh", "--json")
    assert done.code == 3
    assert "there are no AWS credentials" in done.json["error"]["message"]
    assert price_list.requests == []
    assert cli("prices").code == 0  # known prices need no credentials


def test_a_missing_aws_profile_is_reported(cli: Cli, price_list: PriceList) -> None:
    done = cli("prices", "--refresh", environ={"AWS_PROFILE": "missing-profile"})
    assert done.code == 3
    assert "missing-profile" in done.err
    assert "Traceback" not in done.err


def test_an_unreachable_endpoint_is_exit_code_3(cli: Cli, price_list: PriceList) -> None:
    done = cli("prices", "--refresh", environ={"AWS_ENDPOINT_URL_PRICING": "http://127.0.0.1:9"})
    assert done.code == 3
    assert "could not read the price list" in done.err


@pytest.mark.parametrize(
    "broken",
    [
        "not json",
        "[]",
        "{}",
        json.dumps({"product": {"attributes": None}}),
        product("EU-Train:ml.g5.xlarge", "not a number"),
        product("EU-Train:ml.g5.xlarge", "1", OnDemand={"a": {}}),
        product("EU-Train:ml.g5.xlarge", "1", OnDemand=["a"]),
        product(
            "EU-Train:ml.g5.xlarge",
            "1",
            OnDemand={"a": {"priceDimensions": {"b": {"pricePerUnit": {"USD": "1"}}}}},
        ),
    ],
)
def test_a_malformed_entry_writes_nothing(price_list: PriceList, file: Path, broken: str) -> None:
    refresh_prices("eu-west-1", today=TODAY)
    before = file.read_text()
    price_list.products = [*CATALOG, broken]
    with pytest.raises(CloudError, match="an entry has an unknown format"):
        refresh_prices("eu-west-1")
    assert file.read_text() == before


@pytest.mark.parametrize("raw", [b"<html>hello</html>", b"{}", b'{"PriceList": []}'])
def test_a_malformed_page_is_exit_code_3(
    cli: Cli, price_list: PriceList, file: Path, raw: bytes
) -> None:
    price_list.raw = raw
    done = cli("prices", "--region", "eu-west-1", "--refresh")
    assert done.code == 3
    assert "price list" in done.err
    assert "Traceback" not in done.err
    assert not file.exists()


def test_a_region_without_prices(cli: Cli, price_list: PriceList) -> None:
    done = cli("prices", "--region", "eu-wset-1", "--refresh")
    assert done.code == 3
    assert "no training prices for eu-wset-1" in done.err
    unknown = cli("prices", "--region", "eu-wset-1")
    assert unknown.code == 2
    assert 'did you mean "eu-west-1"?' in unknown.err
    known = cli("prices", "--region", "eu-west-3")
    assert known.code == 0
    assert known.out.startswith("no price is known for eu-west-3; known regions: us-west-2")
    found = cli("prices", "--region", "eu-west-3", "--json").json
    assert "ml.p4d.24xlarge" in found.pop("unknown")
    assert found == {"region": "eu-west-3", "as_of": None, "age_days": None, "prices": {}}


def test_a_region_of_china_is_rejected_without_a_request(price_list: PriceList) -> None:
    with pytest.raises(CloudError, match="CNY"):
        refresh_prices("cn-north-1")
    assert price_list.requests == []


def test_a_broken_file_is_named_and_not_overwritten(
    cli: Cli, price_list: PriceList, file: Path
) -> None:
    file.parent.mkdir(parents=True)
    file.write_text('{"sources": {}')
    for arguments in (["prices"], ["prices", "--refresh"]):
        done = cli(*arguments)
        assert done.code == 2
        assert str(file) in done.err
        assert "remove the file" in done.err
    assert file.read_text() == '{"sources": {}'


def test_an_unwritable_folder_is_reported(price_list: PriceList, file: Path) -> None:
    file.parent.parent.mkdir()
    file.parent.write_text("a file where the folder should be")
    with pytest.raises(SettingsError, match="cannot be"):
        refresh_prices("eu-west-1")
