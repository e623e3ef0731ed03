"""Program that serves moto with four more operations. The first line of its standard output is the address.

Terraform's provider needs these operations. moto 5.2 responds with status 500, which the provider retries for minutes.
"""

import json
import runpy
from pathlib import Path

from moto.budgets.responses import BudgetsResponse
from moto.stepfunctions.responses import StepFunctionResponse


def list_tags_for_resource(_: BudgetsResponse) -> str:
    """Return no tags of a budget, because moto stores none."""
    return json.dumps({"ResourceTags": []})


def describe_subscribers_for_notification(self: BudgetsResponse) -> str:
    """Return the subscribers of a budget from its CreateBudget request."""
    account, name, wanted = (
        self._get_param(key) for key in ("AccountId", "BudgetName", "Notification")
    )
    budget = self.backend.budgets[account][name]
    return json.dumps(
        {
            "Subscribers": [
                one
                for each in budget.notifications
                if each.details == wanted
                for one in each.subscribers
            ]
        }
    )


def validate_state_machine_definition(_: StepFunctionResponse) -> str:
    """Return that a state machine is valid. test_apply.py checks its definition."""
    return json.dumps({"result": "OK", "diagnostics": []})


def list_state_machine_versions(_: StepFunctionResponse) -> str:
    """Return no published version of a state machine."""
    return json.dumps({"stateMachineVersions": []})


BudgetsResponse.list_tags_for_resource = list_tags_for_resource
BudgetsResponse.describe_subscribers_for_notification = describe_subscribers_for_notification
StepFunctionResponse.validate_state_machine_definition = validate_state_machine_definition
StepFunctionResponse.list_state_machine_versions = list_state_machine_versions
runpy.run_path(str(Path(__file__).parents[1] / "support" / "moto_server.py"))
