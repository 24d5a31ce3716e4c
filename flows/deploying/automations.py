"""Automations of a Prefect server: those of automations.yaml, put there beside the deployments."""

from pathlib import Path

import yaml
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.events.schemas.automations import AutomationCore

FILE = Path(__file__).with_suffix(".yaml")


def shipped() -> list[AutomationCore]:
    """The automations of the file."""
    return [AutomationCore.model_validate(each) for each in yaml.safe_load(FILE.read_text())["automations"]]


async def put_automations(automations: list[AutomationCore]) -> None:
    """Put automations on the server of PREFECT_API_URL, each in the place of one of its name."""
    async with get_client() as client:
        for each in automations:
            await _put(client, each)


async def put_shipped() -> None:
    """Put those of the file: a build step of deploy/kubernetes/deployments.yaml."""
    await put_automations(shipped())


async def _put(client: PrefectClient, automation: AutomationCore) -> None:
    there = await client.read_automations_by_name(automation.name)
    for former in there[1:]:
        await client.delete_automation(former.id)
    if there:
        await client.update_automation(there[0].id, automation)
    else:
        await client.create_automation(automation)
