"""Makes what run.py needs: prepare.py FOLDER TORCH_VERSION. In FOLDER are then a virtual environment with the CUDA
build of torch and the Triton that belongs to it (`venv`), CUDA's headers (`headers`) and the stand-in libraries
(`lib`).

Run it with the project's own environment: its packages are used beside the other torch. Needs gcc, nm and readelf,
2.5 GB of disk, and a package index that has torch for CUDA 13 under the plain version number. Nothing of NVIDIA's runs
or is distributed: the headers come from its two small packages, under its licence, into a folder that git ignores.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
HEADERS = ("nvidia-cuda-runtime==13.0.*", "nvidia-cuda-crt==13.0.*")
TOOLS = ("coverage>=7.6",)
LINK = "zz_project.pth"  # written last


def _pip(folder: Path, *words: str) -> None:
    command = [str(folder / "venv/bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*command, *words], check=True)


def make_environment(folder: Path, version: str) -> Path:
    """A virtual environment with torch, Triton, the tools, and the packages of this Python's environment behind them.
    Returns the folder of its packages. One that is there stays."""
    linked = f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n"
    for site in (folder / "venv/lib").glob("python*/site-packages"):
        if (site / LINK).exists() and (site / LINK).read_text() == linked:
            return site
    shutil.rmtree(folder / "venv", ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
    site = next((folder / "venv/lib").glob("python*")) / "site-packages"
    # Three equals signs: 2.13.0+cpu, which an index may offer too, is not 2.13.0. Without dependencies: torch looks for
    # nvidia-* packages beside itself first, and the real ones would start instead of the stand-ins.
    missing = folder / "no-torch"  # tells `make` that the index is at fault
    missing.touch()
    _pip(folder, "--no-deps", f"torch==={version}")
    missing.unlink()
    built_for = re.search(r"^cuda\b[^=]*= '([\d.]+)'", (site / "torch/version.py").read_text(), re.MULTILINE)
    if built_for is None or not built_for[1].startswith("13."):
        found = built_for[1] if built_for else "no CUDA"
        raise SystemExit(f"torch {version} of this package index is built for {found}; one for CUDA 13 is needed")
    metadata = (site / f"torch-{version}.dist-info/METADATA").read_text()
    triton = re.search(r"^Requires-Dist: (triton==[\w.]+)", metadata, re.MULTILINE)
    assert triton is not None, "torch for CUDA brings a Triton"
    _pip(folder, "--no-deps", triton[1])
    _pip(folder, *TOOLS)
    (site / LINK).write_text(linked)
    return site


def main() -> None:
    if len(sys.argv) != 3:
        raise SystemExit(__doc__)
    folder, version = Path(sys.argv[1]).resolve(), sys.argv[2]
    folder.mkdir(parents=True, exist_ok=True)
    site = make_environment(folder, version)
    include = folder / "headers/nvidia/cu13/include"
    if not (include / "cuda_runtime_api.h").exists():
        _pip(folder, "--no-deps", "--upgrade", "--target", str(folder / "headers"), *HEADERS)
    shutil.rmtree(folder / "lib", ignore_errors=True)
    (folder / "lib").mkdir()
    build = str(HERE / "libraries/build.py")
    subprocess.run([sys.executable, build, str(site / "torch/lib"), str(include), str(folder / "lib")], check=True)
    shown = "import torch; print('torch', torch.__version__, 'sees', torch.cuda.get_device_name())"
    subprocess.run([sys.executable, str(HERE / "run.py"), str(folder), "python", "-c", shown], check=True)


if __name__ == "__main__":
    main()
