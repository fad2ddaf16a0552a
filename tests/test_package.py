"""What is installed: packages, data, versions, import hygiene, documented commands."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Iterable
from importlib import metadata, resources
from pathlib import Path
from typing import Any

import click
import pytest

REPOSITORY = Path(__file__).parents[1]
PROJECT: dict[str, Any] = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = PROJECT["tool"]["setuptools"]
FOLDERS: dict[str, str] = SETUPTOOLS["package-dir"]
SOURCES_IN_C = [REPOSITORY / source for module in SETUPTOOLS["ext-modules"] for source in module["sources"]]

# What the recorder may not load into other people's processes.
HEAVY = ("duckdb", "pandas", "matplotlib", "scipy", "torch", "click", "jinja2", "cuda.bindings")


def folder_of(package: str) -> Path:
    top = next(name for name in FOLDERS if package == name or package.startswith(name + "."))
    return REPOSITORY / FOLDERS[top] / package[len(top) + 1 :].replace(".", "/")


def python(code: str, cwd: Path, *flags: str) -> str:
    done = subprocess.run(
        [sys.executable, *flags, "-c", code], cwd=cwd, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


# --- pyproject.toml ---------------------------------------------------------------------------


def shipped_files() -> set[Path]:
    """Every file in the packages' folders, as it should be in a wheel; without what is compiled, and from what."""
    return {
        path
        for folder in FOLDERS.values()
        for path in (REPOSITORY / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".so" and path not in SOURCES_IN_C
    }


def test_every_folder_of_code_or_data_is_a_listed_package() -> None:
    assert {path.parent for path in shipped_files()} == {folder_of(package) for package in SETUPTOOLS["packages"]}


def test_the_lowest_versions_in_ci_are_those_of_pyproject() -> None:
    lines = (REPOSITORY / ".ci" / "lowest.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    bounds = dict(entry.split(";")[0].split(">=") for entry in PROJECT["project"]["dependencies"])
    assert pins == {name: ".".join([*bound.split("."), "0", "0"][:3]) for name, bound in bounds.items()}


def test_every_foreign_import_is_a_declared_dependency() -> None:
    declared = {entry.split(">=")[0] for entry in PROJECT["project"]["dependencies"]}
    imported = set()
    for path in shipped_files():
        if path.suffix == ".py":
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.split(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and not node.level:
                    imported.add((node.module or "").split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - {"nanalyze"}
    optional = {"torch", "pyspark", "sqlglot"}
    assert {{"cuda": "cuda-bindings"}.get(name, name) for name in foreign} - optional <= declared


def test_linters_are_pinned_exactly() -> None:
    dev = PROJECT["project"]["optional-dependencies"]["dev"]
    assert all("==" in entry for entry in dev if entry.startswith(("ruff", "mypy")))
    assert sum(entry.startswith(("ruff", "mypy")) for entry in dev) == 2


def test_every_data_file_is_matched_by_package_data() -> None:
    """A file beside the code that no pattern names would be missing from the wheel."""
    patterns: dict[str, list[str]] = SETUPTOOLS["package-data"]
    covered = {
        path
        for package in SETUPTOOLS["packages"]
        for pattern in [*patterns["*"], *patterns.get(package, [])]
        for path in folder_of(package).glob(pattern)
    }
    data = {path for path in shipped_files() if path.suffix != ".py"}
    assert data - covered == set()
    assert REPOSITORY / "recorder" / "peaks.csv" in data


# --- the installed package ----------------------------------------------------------------------


def test_data_files_are_found_through_importlib() -> None:
    assert "Hopper" in resources.files("nanalyze.recorder").joinpath("peaks.csv").read_text(encoding="utf-8")
    shipped = {path.relative_to(REPOSITORY / "queries") for path in (REPOSITORY / "queries").rglob("*.sql")}
    for path in shipped:
        source = resources.files("nanalyze.queries").joinpath(*path.parts).read_text(encoding="utf-8")
        assert source == (REPOSITORY / "queries" / path).read_text(encoding="utf-8")


def test_the_command_line_tells_the_version() -> None:
    script = Path(sys.executable).with_name("nanalyze")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    assert metadata.version("nanalyze") in done.stdout
    assert metadata.version("nanalyze") == PROJECT["project"]["version"]


def test_importing_the_recorder_loads_nothing_heavy_and_prints_nothing(tmp_path: Path) -> None:
    code = f"""
import sys
from nanalyze import recorder
import nanalyze.recorder.peaks, nanalyze.rundir.shards, nanalyze.rundir.runfile
print(sorted(set({HEAVY!r}) & set(sys.modules)))
"""
    assert python(code, tmp_path, "-W", "error") == "[]"
    assert list(tmp_path.iterdir()) == []


def modules() -> list[str]:
    return [
        ".".join((package, path.stem)) if path.stem != "__init__" else package
        for package in SETUPTOOLS["packages"]
        for path in sorted(folder_of(package).glob("*.py"))
        if path.stem != "__main__"
    ]


def test_every_module_imports_without_side_effects(tmp_path: Path) -> None:
    """No GPU, no output, no files, no threads, no changed signal handlers, no environment."""
    code = f"""
import importlib, os, signal, threading
before = (dict(os.environ), threading.active_count(), [signal.getsignal(n) for n in (2, 15)])
for name in {modules()!r}:
    importlib.import_module(name)
assert before == (dict(os.environ), threading.active_count(), [signal.getsignal(n) for n in (2, 15)])
"""
    assert python(code, tmp_path) == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", sorted(set(FOLDERS.values())))
def test_a_users_own_module_of_the_same_name_is_not_shadowed(tmp_path: Path, name: str) -> None:
    (tmp_path / f"{name}.py").write_text("whose = 'mine'\n")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
from nanalyze import {name} as ours
import {name}
print({name}.whose, ours.__name__)
"""
    assert python(code, tmp_path.parent, "-P") == f"mine nanalyze.{name}"


def test_nothing_is_installed_at_the_top_but_the_namespace(tmp_path: Path) -> None:
    code = f"""
import importlib.util
print([name for name in {sorted(FOLDERS.values())!r} if importlib.util.find_spec(name)])
"""
    assert python(code, tmp_path, "-P") == "[]"


# --- what is built ----------------------------------------------------------------------------


def copy_sources(target: Path) -> None:
    target.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, target)
    for folder in FOLDERS.values():
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(REPOSITORY / folder, target / folder, ignore=ignored)
    # What an editable install leaves there; it may fit another Python, so it may not get into anything built.
    (target / "recorder" / "_callbacks.abi3.so").write_bytes(b"stray")


def build(what: str, folder: Path, **environment: str) -> Path:
    """Without isolation, so that the tests need no network."""
    source = folder / "source"
    copy_sources(source)
    done = subprocess.run(
        [sys.executable, "-c", f"from setuptools import build_meta as b; b.build_{what}({str(folder)!r})"],
        cwd=source,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    (built,) = (path for path in folder.iterdir() if path.is_file())
    return built


def packaged(names: Iterable[str]) -> list[str]:
    return sorted(name for name in names if name.startswith("nanalyze/"))


def expected(*more: str) -> list[str]:
    return sorted([f"nanalyze/{path.relative_to(REPOSITORY).as_posix()}" for path in shipped_files()] + list(more))


def compiles() -> bool:
    compiler = os.environ.get("CC") or str(sysconfig.get_config_var("CC"))
    return bool(shutil.which(compiler.split()[0])) and Path(sysconfig.get_path("include"), "Python.h").exists()


@pytest.mark.skipif(not compiles(), reason="needs a C compiler and Python's headers")
def test_a_wheel_holds_code_data_license_and_the_callbacks_in_c(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path)
    assert wheel.name.startswith(f"nanalyze-{PROJECT['project']['version']}-cp311-abi3-")
    with zipfile.ZipFile(wheel) as file:
        names = file.namelist()
        compiled = "nanalyze/recorder/_callbacks.abi3.so"
        assert packaged(names) == expected(compiled)
        assert file.read(compiled).startswith(b"\x7fELF")
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not any(name.startswith(tuple(f"{folder}/" for folder in FOLDERS.values())) for name in names)


def test_without_a_compiler_a_wheel_is_built_and_works_without_the_callbacks_in_c(tmp_path: Path) -> None:
    wheel = build("wheel", tmp_path, CC="/bin/false")
    assert packaged(zipfile.ZipFile(wheel).namelist()) == expected()
    target = tmp_path / "installed"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    done = subprocess.run(
        [*pip, "--target", target, wheel],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    code = f"""
import sys
sys.path[:0] = [{str(target)!r}, {sysconfig.get_path("purelib")!r}, {sysconfig.get_path("platlib")!r}]
from nanalyze import recorder
from nanalyze.recorder import buffers
print(recorder.__file__.startswith({str(target)!r}), buffers.native)
"""
    # -S: without it the path files of an editable install would win.
    assert python(code, tmp_path, "-S", "-P", "-W", "error") == "True None"


def test_a_source_distribution_holds_the_c_source_and_nothing_compiled(tmp_path: Path) -> None:
    with tarfile.open(build("sdist", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {path.relative_to(REPOSITORY).as_posix() for path in [*shipped_files(), *SOURCES_IN_C]}
    assert wanted <= names
    assert not any(name.endswith(".so") for name in names)


# --- docs ---------------------------------------------------------------------------------------


def command_line() -> click.Group:
    from nanalyze import commands

    main: click.Group = commands.main
    return main


def test_the_page_of_commands_is_what_their_help_gives() -> None:
    from nanalyze.commands import document

    assert (REPOSITORY / document.DOCUMENT).read_text(encoding="utf-8") == document.document(command_line())


def test_every_command_and_option_explains_itself() -> None:
    for name, command in command_line().commands.items():
        assert f"nanalyze {name}" in (command.help or ""), f"nanalyze {name}: has no example in its help"
        for parameter in command.params:
            if isinstance(parameter, click.Option) and not parameter.hidden:
                assert (parameter.help or "").endswith("."), f"nanalyze {name} {parameter.opts[0]}: no sentence of help"


def test_a_page_shows_arguments_options_choices_defaults_and_examples() -> None:
    from nanalyze.commands import document

    @click.command(help="Compare | runs.\n\n    \b\n      nanalyze compare a b\n\fhidden")
    @click.argument("runs", nargs=-1, required=True)
    @click.option(
        "--format", "-f", type=click.Choice(["table", "csv"]), default="table", show_default=True, help="How."
    )
    @click.option("--limit", type=click.IntRange(min=1), help="Rows | lines.")
    @click.option("--force/--no-force", help="Overwrite.")
    @click.option("--secret", hidden=True)
    def compare() -> None: ...

    page = document.document(click.Group("nanalyze", {"compare": compare}))
    assert page.split("\n## ", 1)[1] == (
        "nanalyze compare\n\n    nanalyze compare [OPTIONS] RUNS...\n\nCompare | runs.\n\n"
        "```\n  nanalyze compare a b\n```\n\n| option | meaning |\n|---|---|\n"
        "| `--format`, `-f` table\\|csv | How. [default: table] |\n"
        "| `--limit` INTEGER | Rows \\| lines. |\n"
        "| `--force`, `--no-force` | Overwrite. |\n"
    )


@pytest.mark.parametrize(
    "page", [*sorted((REPOSITORY / "docs").glob("*.md")), REPOSITORY / "README.md"], ids=lambda path: path.name
)
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.parametrize(("verb", "threads"), [("report", "1"), ("record", "None")])
def test_only_commands_that_start_no_job_choose_threads(tmp_path: Path, verb: str, threads: str) -> None:
    code = (
        "import click, os; from nanalyze.commands import main; os.environ.pop('OPENBLAS_NUM_THREADS', None);"
        f"main.get_command(click.Context(main), {verb!r}); print(os.environ.get('OPENBLAS_NUM_THREADS'))"
    )
    assert python(code, tmp_path) == threads
