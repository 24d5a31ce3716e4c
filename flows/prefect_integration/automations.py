"""The automations of automations.yaml, which `rollmill deploy` creates on the Prefect server."""

from pathlib import Path

import yaml
from prefect import get_client
from prefect.client.orchestration import PrefectClient
from prefect.events.schemas.automations import AutomationCore

FILE = Path(__file__).with_suffix(".yaml")


def read_automations() -> list[AutomationCore]:
    """Read the automations in automations.yaml."""
    return [AutomationCore.model_validate(each) for each in yaml.safe_load(FILE.read_text())["automations"]]


async def put_automations(automations: list[AutomationCore]) -> None:
    """Create automations on the server of PREFECT_API_URL; one with the same name is updated, and further ones are deleted."""
    async with get_client() as client:
        for each in automations:
            await _put(client, each)


async def put_shipped_automations() -> None:
    """Create or update the automations of automations.yaml on the Prefect server.

    A build step of deploy/kubernetes/deployments.yaml.
    """
    await put_automations(read_automations())


async def _put(client: PrefectClient, automation: AutomationCore) -> None:
    existing = await client.read_automations_by_name(automation.name)
    for duplicate in existing[1:]:
        await client.delete_automation(duplicate.id)
    if existing:
        await client.update_automation(existing[0].id, automation)
    else:
        await client.create_automation(automation)
