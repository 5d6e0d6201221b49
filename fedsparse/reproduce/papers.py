"""The papers by name."""

from fedsparse.errors import unknown_name
from fedsparse.reproduce.basu2019 import BASU2019
from fedsparse.reproduce.claims import Paper
from fedsparse.reproduce.sahu2021 import SAHU2021
from fedsparse.reproduce.stich2018 import STICH2018

PAPERS: dict[str, Paper] = {paper.key: paper for paper in (SAHU2021, STICH2018, BASU2019)}


def find_paper(name: str) -> Paper:
    """Return a paper by name.

    Raises
    ------
    ConfigError
        Where there is none; says the nearest.
    """
    if name not in PAPERS:
        raise unknown_name("paper", name, PAPERS)
    return PAPERS[name]
