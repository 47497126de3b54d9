# SPDX-License-Identifier: Apache-2.0
"""The docs build in strict mode. Links, paths, commands, tables and examples of docs and READMEs are right."""

import dataclasses
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import sglang
import torch

from sglang_reasoncache import compat, policy_options, registry
from sglang_reasoncache.attention import families, models, rotations
from sglang_reasoncache.filter.settings import PRESETS
from sglang_reasoncache.plugin import report
from sglang_reasoncache.plugin.refusals import CONFLICTS, CORRECTED_CONFLICTS
from sglang_reasoncache.sharing.rules import Refusal
from sglang_reasoncache.sharing.stats import SharingStats
from tests.eviction.rows import evict, view

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
TEXT = {page.stem: page.read_text() for page in PAGES}
#: These pages are not part of the site, so MkDocs does not check their links.
READMES = [*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("*/README.md"))]
READMES += sorted(ROOT.glob("eval/*/README.md"))
_LINK = re.compile(r"\]\((?!https?://)([^)#\s]*)(?:#([^)\s]+))?\)")
#: Finds `sharing/rules.py`, `config.py: ReasonCacheConfig`, `filter/structure/`, `eval/tiny_reasoner/README.md`
_SOURCE = re.compile(
    r"`((?:[a-z_]+/)*[a-z_0-9]+\.(?:py|cpp|sh)|(?:[a-z_]+/)+(?:README\.md)?)(?:: (\w+))?`"
)
_PLACES = [ROOT, ROOT / "sglang_reasoncache", ROOT / "sglang_reasoncache" / "kernels"]
#: Folders that commands write to; a checkout may lack their files.
_MADE = ("build/", "out/", "docs/")


def _ids(path: Path) -> str:
    return str(path.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    """Anchors of headings, as MkDocs and GitHub make them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}


def test_the_site_builds_strictly(tmp_path: Path) -> None:
    """Builds the site like ``make docs``, which fails on a broken link, anchor or navigation entry."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", READMES, ids=_ids)
def test_links_of_readmes(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text()):
        found = (page.parent / target).resolve() if target else page
        assert found.exists(), target
        assert not anchor or anchor in _anchors(found), f"{target}#{anchor}"


@pytest.mark.parametrize("page", [*PAGES, *READMES], ids=_ids)
def test_source_paths_and_commands_exist(page: Path) -> None:
    text = page.read_text()
    for path, name in _SOURCE.findall(text):
        if path.startswith(_MADE):
            continue
        existing = [place / path for place in (*_PLACES, page.parent) if (place / path).exists()]
        assert existing, path
        assert not name or re.search(rf"\b{name}\b", existing[0].read_text()), f"{path}: {name}"
    if page.stem == "history":
        return  # Commands in this page work at the commit named beside them.
    for module in re.findall(r"python -m\s((?:eval|sglang_reasoncache)[\w.]*\w)", text):
        made = ROOT / module.replace(".", "/")
        assert made.with_suffix(".py").exists() or (made / "__main__.py").exists(), module
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert not set(re.findall(r"`make ([\w-]+)", text)) - set(targets)


def test_the_supported_versions_are_named() -> None:
    """The image and the pinned packages have the newest."""
    supported = compat.SUPPORTED_SGLANG
    newest = supported[-1]
    both = " and ".join(filter(None, (", ".join(supported[:-1]), newest)))
    for page in ("README.md", "CHANGELOG.md", "docs/index.md", "docs/versions.md"):
        assert re.search(rf"SGLang \[?{re.escape(both)}\b", (ROOT / page).read_text()), page
    assert f"\n| | {' | '.join(supported)} |" in TEXT["versions"]
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert re.findall(r"^FROM .*:v(\S+)", image, re.MULTILINE) == [newest]
    assert f'"sglang>={supported[0]},<={newest}"' in (ROOT / "pyproject.toml").read_text()
    assert f"\nsglang=={newest}\n" in (ROOT / "constraints.txt").read_text()


def _table(page: str, heading: str) -> str:
    """First column of the table whose first heading is ``heading``."""
    rows = TEXT[page].partition(f"\n| {heading} |")[2].partition("\n\n")[0]
    return "\n".join(re.findall(r"^\| (.*?) \|", rows, re.MULTILINE))


def test_what_the_code_names_is_in_its_page() -> None:
    series = [*(field.removesuffix("_total") for field in report.COUNTERS)]
    kinds = [*rotations.ROTARY_KINDS, *rotations.SCALES_ROTATED_KEYS, *rotations.WITHOUT_POSITIONS]
    kinds += rotations.WINDOWED
    refused, corrected = (
        [f"--{field.replace('_', '-')}" for field in fields]
        for fields in (CONFLICTS, CORRECTED_CONFLICTS)
    )
    told = ("index", [*series, *refused]), ("architecture", corrected), ("kernels", kinds)
    for page, names in told:
        assert not [name for name in names if f"`{name}" not in TEXT[page]]
    totals = set(re.findall(r"`(\w+)`", _table("evaluation", "total")))
    assert totals == SharingStats().to_dict().keys()
    names = re.findall(r"^`(\w+)`$", _table("architecture", "reason"), re.MULTILINE)
    assert names == [each.value for each in Refusal]
    page = Path(report.__file__).with_name("page.html").read_text()
    assert not [name for name in names if f" {name}: " not in page]
    assert re.findall(r"`([^`]+)`", _table("filter", "preset")) == [*PRESETS]
    table = TEXT["kernels"].partition("\n| layer | served |")[2].partition("\n\n")[0]
    layers = re.findall(r"^\| (.*?) \| `(.*?)`", table, re.MULTILINE)
    assert dict(layers) == {name: str(values[0]) for name, _, values in models.LAYER_ATTRIBUTES}


def test_every_family_is_told() -> None:
    rows = [
        f"| {family.models} | {family.attention} | {family.answer} | {family.tried} |"
        for family in families.FAMILIES
    ]
    table = TEXT["index"].partition(
        "| models | attention | | tried |\n| --- | --- | --- | --- |\n"
    )[2]
    assert table.partition("\n\n")[0].splitlines() == rows


def _of_sglang(name: str) -> set[str]:
    """The names of SGLang's class ``name`` (``module.Class``, or a rotary embedding) and of those it extends,
    as far as they are in its module. Reads source, because importing all models takes minutes."""
    folder = Path(sglang.__file__).with_name("srt")
    module, _, kind = name.rpartition(".")
    places = [folder / "models" / f"{module}.py"] if module else []
    bases: dict[str, set[str]] = {}
    for place in places or (folder / "layers" / "rotary_embedding").glob("*.py"):
        for found, of in re.findall(
            r"^class (\w+)(?:\(([^)]*)\))?:", place.read_text(), re.MULTILINE
        ):
            bases[found] = {each.strip().rpartition(".")[2] for each in of.split(",")}
    assert kind in bases, f"SGLang has no {name}"
    waiting = [kind]
    names = set[str]()
    for each in waiting:
        names.add(each)
        waiting += bases.get(each, set()) - names
    return names


@pytest.mark.parametrize("family", families.FAMILIES, ids=lambda family: family.models)
def test_the_table_of_families_says_what_the_code_does(family: families.Family) -> None:
    kinds = {name.rpartition(".")[2] for name in family.modules}
    bases = [_of_sglang(name) for name in family.modules]
    attention = family.attention
    served = family.answer == "served"
    assert served == (attention not in families.REFUSED)
    if "windows" in attention:
        assert kinds <= set(rotations.WINDOWED) if served else kinds.isdisjoint(rotations.WINDOWED)
    if "without positions" in attention:
        assert all(not each.isdisjoint(rotations.WITHOUT_POSITIONS) for each in bases)
    elif served and not attention.startswith("latent"):
        assert all(each.isdisjoint(rotations.WITHOUT_POSITIONS) for each in bases)
    scaled = not kinds.isdisjoint(rotations.SCALES_ROTATED_KEYS)
    assert scaled == (attention == "full, keys scaled once rotated")
    # Names without a module are those of rotary embeddings, which are not among the linear ones.
    assert kinds.isdisjoint(rotations.ROTARY_KINDS)
    if attention == "by Hugging Face's code":
        source = Path(sglang.__file__).with_name("srt") / "models" / "transformers.py"
        assert f"self.{models.FALLBACK} =" in source.read_text()


def test_every_policy_and_option_is_in_the_tables() -> None:
    text = TEXT["eviction"]
    for name, target in registry.BUILT_IN.items():
        [row] = re.findall(rf"^\| `{name}` \|.*$", text, flags=re.MULTILINE)
        for field in dataclasses.fields(pkgutil.resolve_name(target)):
            common = re.search(rf"^\| `{field.name}\b|`{field.name}=F`", text, flags=re.MULTILINE)
            assert f"`{field.name}={field.default}" in row or common, field.name


def test_the_example_of_a_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example policies in docs/eviction.md, in a module outside the package, evict what the page says."""
    source = "\n\n".join(re.findall(r"```python\n(.*?)```", TEXT["eviction"], flags=re.DOTALL))
    [flag] = re.findall(r"`--reasoncache-policy (thin:.*?)`", TEXT["eviction"])
    (tmp_path / "thin.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    try:
        [(_, policy)] = policy_options.parse(flag).evictors
        with pytest.raises(policy_options.PolicyError, match="keep of thin:Thinning between 2 and"):
            policy_options.parse(flag.replace("keep=4", "keep=1"))
        [(_, fading)] = policy_options.parse("thin:Fading:budget=9").evictors
    finally:
        policy_options.parse.cache_clear()
        sys.modules.pop("thin")
    policy = dataclasses.replace(policy, budget=10, recent=2)
    assert evict(policy, view(20, owned=3), 20, 8) == [3, 5, 6, 7, 9, 10, 11, 13]
    assert evict(policy, view(30, page=2), 30, 5) == [2, 3, 4, 5, 6, 7]
    weights = np.random.default_rng(1).random((300, 300))
    assert fading.accumulates and fading.queries == 32
    now = dataclasses.replace(view(300, weights), earlier=torch.ones(300), seen=44)
    expected = torch.from_numpy(0.5 + weights[44:].sum(axis=0)).float()
    torch.testing.assert_close(fading.scores(now), expected)


def test_the_worked_example_of_the_kernels(capsys: pytest.CaptureFixture[str]) -> None:
    """The example in docs/kernels.md prints the numbers that the page shows."""
    [source] = re.findall(r"```python\n(.*?)```", TEXT["kernels"], flags=re.DOTALL)
    exec(source, {})
    printed = capsys.readouterr().out
    assert printed.count("3.1779") == 2 and "-0.6536, -0.7568" in printed
    for name in ("kv_indptr", "kv_indices", "shift", "tile_ptr", "by", "bits"):
        for numbers in re.findall(rf"{name} = (\[[^\]]+\])", TEXT["kernels"]):
            assert f"{name}=tensor({numbers}" in printed, (name, numbers)
