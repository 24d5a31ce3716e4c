"""Addresses of pages of Prefect's UI: of its newer one; a server that has the older one alone leads on to that."""

from uuid import UUID

from prefect.settings import PREFECT_UI_URL

NEWER = "v2"


def ui_url() -> str:
    """Where a browser finds the server of PREFECT_API_URL."""
    return (PREFECT_UI_URL.value() or "").rstrip("/")


def flow_run_page(flow_run_id: UUID | str) -> str:
    """The page of a flow run."""
    return f"{ui_url()}/{NEWER}/runs/flow-run/{flow_run_id}"


def deployment_page(deployment_id: UUID | str) -> str:
    """The page of a deployment."""
    return f"{ui_url()}/{NEWER}/deployments/deployment/{deployment_id}"
