"""Every Python block of the README and the docs runs as it stands."""

import re
from pathlib import Path

import pytest

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
