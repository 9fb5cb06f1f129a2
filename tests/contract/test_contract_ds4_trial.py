"""The page's trial without a card: its commands make what its later commands name. (Loads of both: tests/e2e.)"""

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = REPOSITORY / "docs" / "engines" / "ds4.md"


def trial() -> list[str]:
    """The commands of the section."""
    section = PAGE.read_text(encoding="utf-8").partition("\n### Without a card\n")[2].partition("\n## ")[0]
    return section.split("```")[1].strip().splitlines()


def test_the_trial_on_the_page_makes_the_program_and_the_model_that_it_then_names(tmp_path: Path) -> None:
    *making, starting, asking = trial()
    environ = {**os.environ, "HOME": str(tmp_path), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for command in making:
        subprocess.run(["sh", "-c", command], cwd=REPOSITORY, env=environ, check=True, timeout=60)

    (folder,) = re.findall(r"WEIGHBRIDGE_ENGINES_DS4_SERVER=~/(\S+)", starting)
    assert os.access(tmp_path / folder / "ds4-server", os.X_OK)
    (model,) = re.findall(r"weighbridge chat ~/(\S+)", asking)
    made = (tmp_path / model).stat()
    # As the page says: 86.7 GB long, and the header alone on disk.
    assert f"{made.st_size / 1e9:.1f}" == "86.7"
    assert made.st_blocks * 512 < 10e6
    # Not the machine that is here, on which such a model may not run.
    assert "WEIGHBRIDGE_LEDGER_MACHINE=unified:128" in starting and starting.endswith("weighbridge up --engines ds4")
