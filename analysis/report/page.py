"""report.html: one file that fetches nothing, for one run or several, rendered with autoescaping.

Its one script (tables that sort and search) is named by its hash in the content security policy, so nothing else
in the page can run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import jinja2
from markupsafe import Markup

from nanalyze.analysis.report import content, plots, several, sources, values
from nanalyze.analysis.report.collect import Data
from nanalyze.analysis.report.names import visible

# What a page may weigh; of many runs the later ones are shown without plots, and then shorter, to stay below it.
MOST_BYTES = 2_900_000


@dataclass(frozen=True)
class Part:
    """One run of a report: its data, its directory as a shell word, where its files are, its drawings by plot.

    `folder` is '' or ends in a slash; `drawn` is the plots as `plots.drawings` gives them.
    """

    data: Data
    path: str
    folder: str
    drawn: Mapping[str, Sequence[Mapping[str, Any]]]


def page(parts: Sequence[Part], version: str, comparisons: Sequence[several.Against | None] = ()) -> str:
    """The whole page as HTML text; `comparisons` says of each run how it compares with the first."""
    drawn = detailed = len(parts)
    while True:
        shown = [part if place < drawn else replace(part, drawn={}) for place, part in enumerate(parts)]
        html = _render(shown, version, comparisons, detailed)
        if len(html.encode("utf-8", "backslashreplace")) <= MOST_BYTES or (not drawn and detailed <= 1):
            return html
        if drawn:
            drawn //= 2
        else:
            detailed //= 2


def _render(parts: Sequence[Part], version: str, comparisons: Sequence[several.Against | None], detailed: int) -> str:
    return rendered("report.html.j2", _content(parts, version, comparisons, detailed))


def rendered(template: str, content: Mapping[str, Any]) -> str:
    """The page that `template` makes of `content`, called `page` there, with our own style and script."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_template), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=False, keep_trailing_newline=True,
    )  # fmt: skip
    script = _template("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    # Our own files are the only texts that are not escaped.
    return environment.get_template(template).render(
        page=content,
        css=Markup(_template("report.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
    )


def _template(name: str) -> str:
    return files(__package__).joinpath("templates", name).read_text(encoding="utf-8")


def _content(
    parts: Sequence[Part], version: str, comparisons: Sequence[several.Against | None], detailed: int
) -> dict[str, Any]:
    prefixes = [f"run{place}-" if len(parts) > 1 else "" for place in range(1, len(parts) + 1)]
    runs = [_run(part, prefix) for part, prefix in list(zip(parts, prefixes, strict=True))[:detailed]]
    ids = ", ".join(visible(str(part.data.run.get("run_id")))[:64] for part in parts[:8])
    common = {
        "runs": runs,
        "is_several": len(parts) > 1,
        "queries": sources.appendix(),
        "over_mark": values.OVER_MARK,
        "colophon": f"Written by nanalyze {version}. {'Run' if len(parts) == 1 else 'Runs'} {ids}.",
    }
    if len(parts) == 1:
        (run,) = runs
        return {**common, "title": run["title"], "subtitle": run["subtitle"], "sections": [*run["sections"], QUERIES]}
    datas = [part.data for part in parts]
    return {
        **common,
        "title": f"{len(parts)} runs",
        "subtitle": "" if detailed == len(parts) else f"Details of the first {detailed}, to keep the page light.",
        "sections": [*SEVERAL, *((f"{run['prefix']}run", run["title"]) for run in runs), QUERIES],
        "side_by_side": several.run_grid(datas, comparisons),
        "kernels_across": several.kernel_grid(datas),
    }


QUERIES = ("queries", "Queries")
SEVERAL = (("side-by-side", "Side by side"), ("kernels-across", "Kernels"))


def _run(part: Part, prefix: str) -> dict[str, Any]:
    captions = {plot.name: plot.caption for plot in plots.plots(part.data)}
    drawn = {
        name: {"caption": captions[name], "drawings": part.drawn[name]} if name in part.drawn else None
        for name in captions
    }
    return content.content(part.data, drawn, part.path, prefix, part.folder)
