"""What an installed wheel can do outside the checkout: everything that needs no training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(out), str(ROOT)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("dplab-*.whl"))


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """A folder on the path that holds the wheel alone; the dependencies are those of this environment."""
    target = tmp_path_factory.mktemp("site")
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target),
                           str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def dplab(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs the wheel's dplab; `-P` keeps the working directory, the path puts the wheel before the checkout."""
    return subprocess.run([sys.executable, "-P", "-m", "dplab", *arguments], cwd=cwd, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(installed)}, check=False)


def test_the_wheel_holds_what_it_needs_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert "dplab/py.typed" in names
    assert "dplab/_data/corpora.md" in names
    assert any(name.startswith("dplab/widgets/") and name.endswith(".js") for name in names)
    assert sorted(name.rsplit("/", 1)[1] for name in names if name.endswith(".ipynb")) == NOTEBOOKS
    assert any(name.endswith("licenses/LICENSE") for name in names)
    outside = [name for name in names if not name.startswith(("dplab/", "dplab-"))]
    assert outside == []
    assert not [name for name in names if "__pycache__" in name or "-checkpoint." in name]


def test_version_and_place(installed, tmp_path):
    assert dplab(installed, tmp_path, "--version").stdout.startswith("dplab 0.")
    code = "import dplab, sys; print(dplab.__file__)"
    place = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
                           env={**os.environ, "PYTHONPATH": str(installed)}, check=True).stdout
    assert Path(place).is_relative_to(installed)


def test_estimate(installed, tmp_path):
    done = dplab(installed, tmp_path, "estimate", "--params", "7.5e9", "--world-size", "64", "--strategy", "zero2",
                 "--json")
    assert round(json.loads(done.stdout)["total_bytes"] / 1e9, 1) == 16.6


def test_lab_lays_notebooks_never_over_a_changed_one(installed, tmp_path):
    first = json.loads(dplab(installed, tmp_path, "lab", "--copy-only", "--json").stdout)
    assert first["written"] == NOTEBOOKS
    assert first["kept"] == []
    assert sorted(path.name for path in tmp_path.iterdir()) == NOTEBOOKS
    if not NOTEBOOKS:
        return
    changed = tmp_path / NOTEBOOKS[0]
    changed.write_text("mine")
    again = json.loads(dplab(installed, tmp_path, "lab", "--copy-only", "--json").stdout)
    assert again["kept"] == NOTEBOOKS[:1]
    assert changed.read_text() == "mine"
    told = dplab(installed, tmp_path, "lab", "--copy-only").stdout
    assert f"{NOTEBOOKS[0]} is left as you changed it; delete it to get the original" in told


def test_data_is_found(installed, tmp_path):
    code = "from dplab import resources; print(resources.folder('data'), resources.is_checkout())"
    told = subprocess.run([sys.executable, "-P", "-c", code], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(installed)}, check=True).stdout.split()
    assert Path(told[0]) == installed / "dplab" / "_data"
    assert told[1] == "False"
