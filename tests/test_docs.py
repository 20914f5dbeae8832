"""Every Python block of the README and the docs runs as it stands."""

import re
from pathlib import Path

import pytest

from compgen_fast import __version__

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
ELSEWHERE = "tutorial.md"  # its blocks need the commands between them: test_tutorial.py


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if "```python" in page.read_text() and page.name != ELSEWHERE],
    ids=lambda page: page.name,
)
def test_the_examples_of_a_page_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    exec(compile("\n".join(blocks), str(page), "exec"), {"__name__": page.stem})


def test_every_link_between_pages_leads_somewhere() -> None:
    for page in [*PAGES, ROOT / "CONTRIBUTING.md"]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name} links to {target}, which is not there"


def test_the_readme_is_read_in_one_sitting() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_the_citation_names_the_version() -> None:
    assert f"\nversion: {__version__}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_page_or_message_calls_the_command_by_its_former_name() -> None:
    """Bash has a builtin of that name, which wins, prints nothing and returns 0."""
    former = re.compile(r"(?<![\w./-])compgen (?=[a-z]+[ `\n])(?!is |as |of )")
    sources = [
        path for folder in ("compgen_fast", "bench", "examples", "docs") for path in (ROOT / folder).rglob("*.*")
    ]
    for path in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "Makefile", *sources]:
        if path.suffix in (".py", ".md", ""):
            assert not former.findall(path.read_text()), f"{path} says compgen where it means cgf"
