"""Which extra of the distribution brings a module that is not installed: the base reads stored runs, extras do the rest."""

import re
from collections import Counter
from importlib.metadata import requires

# Modules whose distribution has another name, or comes with another one.
_DISTRIBUTIONS = {
    "botocore": "s3fs",
    "fsspec": "s3fs",
    "lance": "pylance",
    "opentelemetry": "opentelemetry-sdk",
}
_REQUIREMENT = re.compile(r"""([\w.-]+).*;.*extra == ['"]([\w-]+)['"]""")
# Everything that developers of Rollmill need.
_DEVELOPMENT = "dev"


def find_extra(module: str) -> str:
    """Return the smallest extra that installs a module; empty if none does.

    Example: find_extra("prefect.flows") is "flow".
    """
    name = module.partition(".")[0]
    distribution = _DISTRIBUTIONS.get(name, name.replace("_", "-")).lower()
    found = [match.groups() for each in requires("rollmill") or () if (match := _REQUIREMENT.match(each))]
    sizes = Counter(extra for _, extra in found)
    extras = {extra for brought, extra in found if brought.lower() == distribution} - {_DEVELOPMENT}
    return min(extras, key=lambda extra: (sizes[extra], extra), default="")
