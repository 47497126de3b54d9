# SPDX-License-Identifier: Apache-2.0
"""What a run lacks of what it was asked for."""

from __future__ import annotations

from typing import Any

from eval.report.data import Run

#: Share of the KV budget below which a server lacks memory that was asked for.
_LEAST = 0.99


def shortfalls(run: Run) -> list[str]:
    """What a run's configuration asks for and it lacks, a line each.

    Cells not begun or resumed, problems without an answer or a grade, legs without a
    record, prompts that were cut, KV slots that were not there.
    """
    config, groups = run.config, run.groups
    found = []
    budget = config.get("kv_budget")
    for (task, method), begun in groups.items():
        # A server rounds down to whole pages; that much is no shortfall.
        if isinstance(budget, int) and begun.kv_slots and begun.kv_slots[0] < _LEAST * budget:
            found.append(
                f"{task}, {method}: a server had {begun.kv_slots[0]} KV slots, not {budget}"
            )
        if begun.cut_prompts:
            found.append(f"{task}, {method}: {begun.cut_prompts} prompts were cut by the server")
    for task in config["tasks"]:
        of_task = [group for (name, _), group in groups.items() if name == task]
        # A configuration without numbers: every method and seed is asked the same problems.
        most = max(
            (
                sum(other == seed for _, other in group.responses)
                for group in of_task
                for seed in group.cells
            ),
            default=0,
        )
        for method in config["methods"]:
            group = groups.get((task, method))
            for seed in config["seeds"]:
                name = f"{task}, {method}, seed {seed}"
                if group is None or seed not in group.cells:
                    found.append(f"{name}: not begun")
                    continue
                answered = sum(other == seed for _, other in group.responses)
                graded = sum(other == seed for _, other in group.results)
                cell = group.cells[seed]
                asked = _asked(config, task, seed) or most
                if answered < asked:
                    found.append(f"{name}: {answered} of {asked} problems answered")
                if graded < answered:
                    found.append(f"{name}: {graded} of {answered} responses graded")
                if cell.speed.resumed:
                    found.append(f"{name}: stopped or resumed, so it has no throughput")
                if cell.speed.unrecorded:
                    found.append(
                        f"{name}: {cell.speed.unrecorded} responses in legs without a record"
                    )
    return found


def _asked(config: dict[str, Any], task: str, seed: int) -> int | None:
    """Number of problems of a cell as configured."""
    entry = config.get("problems")
    for key in (task, str(seed), "count"):
        entry = entry.get(key) if isinstance(entry, dict) else None
    return entry if isinstance(entry, int) else None
