"""Serve moto, and what Terraform's provider asks that moto lacks; the first line of standard output is its address.

Each of these is answered with status 500 by moto 5.2, which the provider takes for a fault that passes, and repeats for
many minutes. It is the only fake of AWS here.
"""

import json
import runpy
from pathlib import Path

from moto.budgets.responses import BudgetsResponse
from moto.stepfunctions.responses import StepFunctionResponse


def list_tags_for_resource(_: BudgetsResponse) -> str:
    """Answer that a budget has no tags; moto keeps none."""
    return json.dumps({"ResourceTags": []})


def describe_subscribers_for_notification(self: BudgetsResponse) -> str:
    """Return the subscribers of a budget from its CreateBudget request."""
    account, name, wanted = (self._get_param(key) for key in ("AccountId", "BudgetName", "Notification"))
    budget = self.backend.budgets[account][name]
    return json.dumps(
        {"Subscribers": [who for each in budget.notifications if each.details == wanted for who in each.subscribers]}
    )


def validate_state_machine_definition(_: StepFunctionResponse) -> str:
    """Answer that a state machine is sound; a test of its own looks at it."""
    return json.dumps({"result": "OK", "diagnostics": []})


def list_state_machine_versions(_: StepFunctionResponse) -> str:
    """Return no published version of a state machine."""
    return json.dumps({"stateMachineVersions": []})


BudgetsResponse.list_tags_for_resource = list_tags_for_resource
BudgetsResponse.describe_subscribers_for_notification = describe_subscribers_for_notification
StepFunctionResponse.validate_state_machine_definition = validate_state_machine_definition
StepFunctionResponse.list_state_machine_versions = list_state_machine_versions
runpy.run_path(str(Path(__file__).parents[1] / "support" / "moto_server.py"))
