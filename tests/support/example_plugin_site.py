"""Installs the package of `examples/plugin` into a folder: its files and metadata."""

import shutil
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/plugin"


def install(folder: Path, *, version: str | None = None) -> Path:
    """Write package and metadata into `folder`, in place of another version; return `folder`."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    shutil.copytree(EXAMPLE / "src", folder, dirs_exist_ok=True, ignore=_compiled)
    distribution(
        folder, project["name"], version or project["version"], groups=project["entry-points"]
    )
    return folder


def distribution(
    folder: Path, name: str, version: str, *, groups: dict[str, dict[str, str]]
) -> None:
    """Write the metadata of a distribution with entry points, in place of another version's."""
    for old in folder.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(old)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    points = (
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in points_of_group.items())
        for group, points_of_group in groups.items()
    )
    (info / "entry_points.txt").write_text("\n".join(points))
    files = [p.relative_to(folder).as_posix() for p in info.iterdir()]
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in [*files, f"{info.name}/RECORD"]))


def _compiled(_: str, names: list[str]) -> set[str]:
    return {name for name in names if name == "__pycache__" or name.endswith(".egg-info")}
