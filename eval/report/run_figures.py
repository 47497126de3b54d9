# SPDX-License-Identifier: Apache-2.0
"""The figures of one run."""

from __future__ import annotations

from pathlib import Path

from eval.report import bars, curves, heatmap, points, steps
from eval.report.data import DENSE, Run
from eval.report.markdown import code, plain
from eval.report.page import Page, slug
from eval.report.samples import samples

#: Dense responses among which the heat map's steps are looked for.
_HEATMAP_SAMPLES = 20


def add_figures(out: Page, run: Run, prefix: str) -> None:
    """Add them under a heading; ``prefix`` of the files' names, "" if there is no other run."""

    def named(name: str) -> str:
        return prefix + name

    out.heading("Figures" + (f" of {plain(run.label)}" if prefix else ""))
    for name, caption, drawer, otherwise in (
        ("throughput", "Throughput by task and method", bars.throughput, "no leg records"),
        ("ablation", "Stage by stage", bars.ablation, "fewer than two of the stages have run"),
        ("percentile", "Accuracy and throughput against the percentile", points.percentile,
         "fewer than two percentiles have run"),
        ("lengths", "Response lengths", bars.lengths, "no complete responses"),
    ):  # fmt: skip
        name = named(name)
        out.figure(name, caption, drawer(run, out.path(name)), otherwise)
    for task in run.tasks:
        name = named(f"memory_{slug(task)}")
        out.figure(
            name,
            f"Memory over time, {plain(task)}",
            curves.memory(run, task, out.path(name)),
            "no timeline of dense, ReasonCache or random sharing",
        )
    name = named("redundancy")
    out.options.say(f"redundancy of {run.label}")
    found = steps.redundancy(run, out.options.redundancy_responses, out.path(name))
    out.figure(
        name,
        "Redundancy of the dense responses (taken to be the papers' Figure 2)",
        found and found[1],
        "no dense responses",
    )
    if found:
        out.say(
            f"At most {out.options.redundancy_responses} responses a task. " + found[0], out.source
        )
    _heatmap(out, run, named("heatmap"))


def _heatmap(out: Page, run: Run, name: str) -> None:
    caption = "Distances between the blocks of two similar steps, by layer"
    wanted = out.options.heatmap_model
    folder = Path(wanted) if wanted else run.model_folder
    if wanted == "":
        out.say(f"*{caption}*: not drawn: switched off.")
        return
    if folder is None:
        out.say(f"*{caption}*: not drawn: the model is in no local folder; see --heatmap-model.")
        return
    if not wanted and heatmap.weight_bytes(folder) > heatmap.MAX_WEIGHT_BYTES:
        out.say(f"*{caption}*: not drawn: a large model; ask for it by --heatmap-model.")
        return
    out.options.say(f"heat map of {run.label}")
    task = next((task for task in run.tasks if (task, DENSE) in run.groups), None)
    rows = [] if task is None else samples(run, task, _HEATMAP_SAMPLES)
    try:
        if not rows:
            raise heatmap.HeatmapError("no dense response")
        found = heatmap.measure(folder, rows, run.block)
    except heatmap.HeatmapError as error:
        out.say(f"*{caption}*: not drawn: {code(str(error))}.")
        return
    name_of_model = folder.resolve().name if wanted else run.model
    pair = found.pair
    title = (
        f"Blocks of {pair.block} tokens: step at {pair.later[0]} against step at {pair.earlier[0]}, "
        f"similarity {pair.similarity:.2f}; circles: blocks that the filter pairs"
    )
    data = steps.heatmap(found, title, out.path(name))
    out.figure(name, caption, data, "")
    out.say(
        f"One dense response of {plain(str(task))} through {plain(name_of_model)} in "
        f"fp32, {'after its prompt' if found.prompt_tokens else 'without its prompt'}. Distance of "
        "a layer and side: norm of the difference over 2 d h, as the filter's second stage adds them "
        "up over layers. Keys at the later position are rotated to where they would be used; as "
        "cached is the papers' mode."
    )
