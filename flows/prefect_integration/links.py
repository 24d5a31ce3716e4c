"""Addresses of pages of Prefect's newer UI; a server with the older one redirects to its own pages."""

from uuid import UUID

from prefect.settings import PREFECT_UI_URL

NEWER = "v2"


def ui_url() -> str:
    """Return the address of the UI of the server of PREFECT_API_URL."""
    return (PREFECT_UI_URL.value() or "").rstrip("/")


def flow_run_page(flow_run_id: UUID | str) -> str:
    """Return the address of a flow run's page in Prefect's UI."""
    return f"{ui_url()}/{NEWER}/runs/flow-run/{flow_run_id}"


def deployment_page(deployment_id: UUID | str) -> str:
    """Return the address of a deployment's page in Prefect's UI."""
    return f"{ui_url()}/{NEWER}/deployments/deployment/{deployment_id}"
