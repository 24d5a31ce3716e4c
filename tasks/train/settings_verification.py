"""A check of `rollmill verify`: the settings by step in run.json against what was measured of each step."""

import math
from collections.abc import Iterator, Mapping

import polars as pl

from rollmill.tasks.errors import ConfigError
from rollmill.tasks.store.folders import MANIFEST
from rollmill.tasks.store.reader import scan
from rollmill.tasks.store.rows import name_first
from rollmill.tasks.store.verify.run_views import RESTORE, Finding, RunView
from rollmill.tasks.train.config import TrainConfig, settings_by_step, with_settings
from rollmill.tasks.train.lr_schedule import learning_rate

RATE, UPDATES, SKIPPED = "train/learning_rate", "train/updates", "train/skipped_updates"
# Every trained step has it, also one without an update.
TRAINED = "train/updated"


def find_wrong_settings(run: RunView) -> Iterator[Finding]:
    """Find records of earlier settings that are out of order, and steps with another learning rate than their settings give."""
    ends = [each.until_step for each in run.manifest.earlier_settings]
    n_done = max(run.done_steps, default=-1) + 1
    where = run.folder.path(MANIFEST)
    if ends != sorted({*ends}) or any(not 0 < end <= n_done for end in ends):
        what = f"its earlier_settings end at steps {name_first(map(str, ends))}, and {n_done} steps are done"
        yield Finding(where, what, RESTORE)
        return
    try:
        wrong = list(_list_wrong_rates(run))
    except (ConfigError, ZeroDivisionError) as error:
        yield Finding(where, f"settings of a step are invalid: {error}", RESTORE)
        return
    if wrong:
        what = (
            f"the learning rate of {len(wrong)} steps is not the one of their settings: {name_first(wrong)}"
        )
        remedy = (
            "these steps were trained under other settings: restore run.json from a copy. If an older Rollmill, which did not record "
            "changes, resumed this run with other settings, there is nothing to restore"
        )
        yield Finding(where, what, remedy)


def _list_wrong_rates(run: RunView) -> Iterator[str]:
    """Yield a text for each step whose measured learning rate is another than its settings and the earlier updates give."""
    defaults, n_updates = settings_by_step(TrainConfig()), 0
    for expected, (step, found) in enumerate(sorted(_read_measured(run).items())):
        if step != expected:
            # Without the metrics of a step, which another check reports, the number of earlier updates is not known.
            return
        if (measured := found.get(RATE)) is None:
            continue
        recorded = run.manifest.find_settings(step, defaults)
        config = with_settings(TrainConfig(), {name: recorded[name] for name in defaults})
        made = int(found.get(UPDATES, 0))
        # An update that was dropped has a rate too, and the next one the same.
        least, most = max(1, made), max(1, made + bool(found.get(SKIPPED)))
        rates = [learning_rate(config, n_updates + number) for number in range(most)]
        if not any(math.isclose(measured, max(each)) for each in (rates[:least], rates)):
            yield f"step {step} has {measured!r}, {max(rates)!r} expected"
        n_updates += made


def _read_measured(run: RunView) -> Mapping[int, Mapping[str, float]]:
    """Read what the check needs of each step's metrics; of a step that was applied again the last value counts."""
    rows = scan(run.folder, "metrics", ["step", "name", "env", "value"])
    rows = rows.filter((pl.col("env") == "all") & pl.col("name").is_in([TRAINED, RATE, UPDATES, SKIPPED]))
    found: dict[int, dict[str, float]] = {}
    for step, name, value in rows.select("step", "name", "value").collect().iter_rows():
        found.setdefault(step, {})[name] = value
    return found
