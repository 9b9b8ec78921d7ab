"""Removal of old runs, by hand or on a schedule."""

from __future__ import annotations

from prefect import flow, get_run_logger
from prefect.client.schemas.objects import State
from prefect.states import Completed

from tasks import clean as cleaning
from tasks.stages.attempts import names_going_on
from tasks.stages.endings import end_in_plain_words

# Prefect shows this on the deployment's page, as Markdown with every line a paragraph.
CLEAN = """
Remove old runs that nothing needs: their directories, weights and traces. Figures, configurations and evaluations \
stay in MLflow.

Kept are runs at work or suspended, runs of which a version has an alias, waits for approval or would be champion \
again after a rollback, and what these need. Run → Custom run, `dry_run`: only say what would be removed.
"""


@flow(name="clean", description=CLEAN)
@end_in_plain_words
def clean(keep_days: float = cleaning.KEEP_DAYS, dry_run: bool = False) -> State[None]:
    """Remove old runs that nothing needs.

    Args:
        keep_days: Keep what has changed within these days.
        dry_run: Only say what would be removed.
    """
    log, items = get_run_logger(), []
    for item in cleaning.clean(keep_days, dry_run, names_going_on()):
        items.append(item)
        log.info("%s", cleaning.describe(item, dry_run))
    return Completed(message=cleaning.summarize(items, keep_days, dry_run))
