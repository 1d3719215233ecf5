"""The package uses only MLflow's public API."""

import ast
import re
from pathlib import Path

import pipeline

SRC = Path(pipeline.__file__).parent
ALLOWED = {
    # MLflow tries for 100 s to open a damaged or locked file; SQLite itself answers at once.
    ("tracking/mlflow_store.py", "sqlite3"),
    # This reads SQLite's own table, none of MLflow's.
    (
        "tracking/mlflow_store.py",
        "BEGIN IMMEDIATE; SELECT count(*) FROM sqlite_master; ROLLBACK",
    ),
}
"""Uses that MLflow's public API has no way for, by source."""
PUBLIC = {
    *("mlflow", "mlflow.entities", "mlflow.exceptions", "mlflow.models", "mlflow.onnx"),
    "mlflow.types",
}
"""Modules with a page in MLflow's reference of its Python API."""
TAGS = {
    *("mlflow.data.context", "mlflow.note.content", "mlflow.parentRunId"),
    *("mlflow.source.git.commit", "mlflow.source.name", "mlflow.source.type"),
}
"""Tags that MLflow's pages document."""
_SQL = r"\b(UPDATE \w+ SET|INSERT INTO|DELETE FROM|SELECT .* FROM|ALTER TABLE)\b"


def uses(text: str) -> set[str]:
    """Return the private parts of MLflow in a source: modules, underscored names, tags, SQL."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or ""]
            if modules[0].startswith("mlflow"):
                found |= {alias.name for alias in node.names if alias.name.startswith("_")}
        else:
            modules = []
        found |= {name for name in modules if re.match(r"mlflow\b", name) and name not in PUBLIC}
        found |= {name for name in modules if name in ("sqlite3", "sqlalchemy", "alembic")}
        if isinstance(node, ast.Attribute) and re.match(r"mlflow\.(.+\.)?_", ast.unparse(node)):
            found.add(ast.unparse(node))
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            is_name = re.fullmatch(r"mlflow\.(?!db)[\w.]+", node.value)
            if (is_name and node.value not in TAGS | PUBLIC) or re.search(_SQL, node.value):
                found.add(node.value)
    return found


def test_check_of_the_sources_finds_private_modules_names_tags_and_sql_of_mlflow():
    assert uses("import mlflow\nfrom mlflow.entities import Metric") == set()
    assert uses("import sqlite3") == {"sqlite3"}
    assert uses("from mlflow.utils import x\nfrom mlflow import _y") == {"mlflow.utils", "_y"}
    assert uses("mlflow.tracking._z()") == {"mlflow.tracking._z"}
    assert uses("tags = {'mlflow.runColor': 1}") == {"mlflow.runColor"}
    assert uses("x('UPDATE runs SET a = 1')") == {"UPDATE runs SET a = 1"}


def test_sources_use_only_the_listed_private_parts_of_mlflow():
    sources = [path for path in SRC.rglob("*.py") if "mlflow" in path.read_text().lower()]
    assert len(sources) > 10
    found = {
        (path.relative_to(SRC).as_posix(), use)
        for path in sources
        for use in uses(path.read_text())
    }
    assert found == ALLOWED
