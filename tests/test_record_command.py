"""`nanalyze record`: options, where they come from, and that the job stays what it is. All in real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import click
import pytest

from nanalyze.commands.record import record
from nanalyze.recorder import launch
from nanalyze.rundir import runfile
from nanalyze.rundir.errors import RunError

REPOSITORY = Path(__file__).parents[1]
NANALYZE = str(Path(sys.executable).with_name("nanalyze"))
NOT_USED = "nanalyze: no process used CUDA, so nothing was recorded\n"
# Shows what the job was asked: its processes have the request in the environment.
SHOW = ("sh", "-c", 'printf %s "$NANALYZE_RECORD"')


def environment(**variables: str) -> dict[str, str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("NANALYZE", "PYTHON"))}
    return {**clean, **variables}


def run(
    *words: str, cwd: Path, input: bytes = b"", env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        words, cwd=cwd, input=input, capture_output=True, check=False, timeout=60, env=env or environment()
    )


def record_job(*words: str, cwd: Path, **settings: Any) -> subprocess.CompletedProcess[bytes]:
    return run(NANALYZE, "record", *words, cwd=cwd, **settings)


def request_of(*words: str, cwd: Path, **variables: str) -> dict[str, Any]:
    done = record_job(*words, "--", *SHOW, cwd=cwd, env=environment(**variables))
    assert done.returncode == 0, done.stderr
    assert done.stderr.decode() in ("", NOT_USED)
    request: dict[str, Any] = json.loads(done.stdout)
    return request


def script(tmp_path: Path, program: str, name: str = "job.py") -> str:
    (tmp_path / name).write_text(textwrap.dedent(program))
    return name


# --- the job stays what it is ------------------------------------------------------------------


@pytest.mark.parametrize(
    "ending",
    [
        "pass",
        "sys.exit(7)",
        "raise RuntimeError('the job itself')",
        "os._exit(3)",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "os.kill(os.getpid(), signal.SIGKILL)",
        "os.abort()",
        "signal.raise_signal(signal.SIGINT)",
    ],
)
def test_output_and_exit_code_are_those_of_the_bare_job(tmp_path: Path, ending: str) -> None:
    name = script(
        tmp_path,
        f"""
        import os, resource, signal, sys
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        print("out", sys.argv, flush=True)
        print("err", file=sys.stderr, flush=True)
        {ending}
        """,
    )
    bare = run(sys.executable, name, "-x", "--output", "y z", cwd=tmp_path)
    recorded = record_job("-q", name, "-x", "--output", "y z", cwd=tmp_path)
    assert (recorded.returncode, recorded.stdout) == (bare.returncode, bare.stdout)
    assert recorded.stderr == bare.stderr
    assert b"'-x', '--output', 'y z'" in recorded.stdout
    assert os.listdir(tmp_path) == [name]


def test_the_process_is_the_job(tmp_path: Path) -> None:
    name = script(tmp_path, "import os; print(os.getpid(), os.getppid())")
    process = subprocess.Popen([NANALYZE, "record", name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    out, error = process.communicate(timeout=60)
    assert out.split() == [str(process.pid).encode(), str(os.getpid()).encode()]
    assert error.decode() == NOT_USED


def test_standard_input_is_the_jobs(tmp_path: Path) -> None:
    name = script(tmp_path, "import sys; sys.stdout.buffer.write(sys.stdin.buffer.read()[::-1])")
    data = bytes(range(256)) * 500
    assert record_job(name, cwd=tmp_path, input=data).stdout == data[::-1]


def test_signals_reach_the_jobs_own_handlers(tmp_path: Path) -> None:
    name = script(
        tmp_path,
        """
        import signal, sys
        def stop(number, frame):
            print("got", number)
            sys.exit(5)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        signal.pause()
        """,
    )
    process = subprocess.Popen([NANALYZE, "record", name], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error.decode()) == (5, b"got 15\n", NOT_USED)


def test_ignored_signals_and_environment_of_a_command_are_as_without(tmp_path: Path) -> None:
    """Python ignores SIGPIPE and, in a C locale, sets LC_CTYPE: neither may reach a program that is not Python."""
    show = ("sh", "-c", "grep SigIgn /proc/self/status; env | grep -vE '^(_|PYTHONPATH|NANALYZE.*)=' | sort")
    clean = {name: value for name, value in environment().items() if not name.startswith(("LC_", "LANG"))}
    bare = subprocess.run(show, cwd=tmp_path, env=clean, capture_output=True, check=True)
    recorded = record_job("-o", "run", "--", *show, cwd=tmp_path, env=clean)
    assert recorded.stdout == bare.stdout
    assert b"LC_CTYPE" not in recorded.stdout
    assert b"SigIgn" in recorded.stdout


def test_a_path_with_spaces_and_a_module(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    script(tmp_path, "import sys; print(sys.argv[1:], __name__, __package__)", "a b/my job.py")
    done = record_job(str(tmp_path / "a b" / "my job.py"), "x y", "", "--", "-o", cwd=tmp_path)
    assert done.stdout == b"['x y', '', '--', '-o'] __main__ None\n"
    (tmp_path / "package").mkdir()
    script(tmp_path, "import sys; print(sys.argv[1:], __name__, __package__)", "package/train.py")
    done = record_job("-q", "-m", "package.train", "-m", "--lr", "3", cwd=tmp_path)
    assert (done.stdout, done.stderr) == (b"['-m', '--lr', '3'] __main__ package\n", b"")


def test_a_command_that_cannot_be_started(tmp_path: Path) -> None:
    name = script(tmp_path, "print('ran')")
    answers = {
        ("no-such-command", "x"): (127, "no-such-command: no such command. Give a script, -m MODULE or -- COMMAND."),
        ("absent.py",): (127, "absent.py: does not exist. Give a script, -m MODULE or -- COMMAND."),
        ("-m",): (127, "-m: names no module. Give one, such as: nanalyze record -m package.train"),
        ("--", f"./{name}"): (
            126,
            f"./{name}: is not executable. For a Python script: nanalyze record python ./{name}",
        ),
    }
    for words, (code, message) in answers.items():
        done = record_job(*words, cwd=tmp_path)
        assert (done.returncode, done.stderr.decode()) == (code, f"nanalyze: error: {message}\n")
    (tmp_path / "garbage").write_bytes(b"\x7fELF nonsense")
    (tmp_path / "garbage").chmod(0o755)
    done = record_job("--", "./garbage", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (126, b"nanalyze: error: ./garbage: cannot be run: Exec format error.\n")
    done = record_job("-q", cwd=tmp_path)
    assert (done.returncode, b"Give the job: a script, -m MODULE or -- COMMAND." in done.stderr) == (2, True)
    assert sorted(os.listdir(tmp_path)) == ["garbage", name]


def test_python_that_would_not_load_the_hook_is_warned_of(tmp_path: Path) -> None:
    done = record_job("--", sys.executable, "-I", "-c", "print(1)", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (0, b"1\n")
    assert done.stderr == b"nanalyze: warning: Python's option -I keeps the recorder out: nothing is recorded.\n"


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("python -E x.py", "-E"),
        ("/usr/bin/python3.11 -BuI x.py", "-I"),
        ("python -W ignore -X dev -S x.py", "-S"),
        ("python -Wignore::E x.py", None),
        ("python -Xfrozen_modules=off x.py -I", None),
        ("python -c -E", None),
        ("python -m S -I", None),
        ("python -mS", None),
        ("python - -I", None),
        ("pythonic -I", None),
        ("torchrun -E", None),
    ],
)
def test_options_of_python_that_keep_the_hook_out(command: str, option: str | None) -> None:
    assert launch.ignores_environment(command.split()) == option


# --- options -----------------------------------------------------------------------------------


def test_the_defaults_are_the_librarys_but_for_samples(tmp_path: Path) -> None:
    from nanalyze.recorder.samples import Samples
    from nanalyze.recorder.settings import Settings

    request = request_of("-o", "run", cwd=tmp_path)
    assert request["run_dir"] == str(tmp_path / "run")
    assert (request["exact"], request["samples"], request["start_on"]) == (None, {"by_default": True}, [])
    settings = launch.Request.loads(json.dumps(request)).settings()
    assert settings == Settings(append=True, samples=Samples(by_default=True))


def test_every_option_reaches_the_recorder(tmp_path: Path) -> None:
    from nanalyze.recorder.exact import Exact
    from nanalyze.recorder.samples import Samples

    exact = "--exact gemm --exact-first 3 --exact-skip 1 --exact-every 7 --exact-budget 4 --exact-metrics verdict"
    words = f"-o run --layers timeline,ranges --flush 2 --timestamps device --no-launch-times {exact} --no-exact-graphs"
    request = request_of(*words.split(), "--start-on", "mine,theirs.cuda", "-q", cwd=tmp_path)
    assert (request["delay_s"], request["duration_s"]) == (None, None)
    assert (request["start_on"], request["quiet"]) == (["mine", "theirs.cuda"], True)
    settings = launch.Request.loads(json.dumps(request)).settings()
    assert (settings.layers, settings.flush_s, settings.timestamps) == (("timeline", "ranges"), 2.0, "device")
    assert settings.launch_times is False
    assert settings.exact == Exact("gemm", 3, 1, 7, 4.0, False, "verdict")
    words = "-o run --samples --samples-interval 500 --samples-window 2 --samples-overhead 3 --overhead 4 --pause 0"
    settings = launch.Request.loads(json.dumps(request_of(*words.split(), cwd=tmp_path))).settings()
    assert settings.samples == Samples(interval_us=500.0, window_s=2.0, overhead_pct=3.0)
    assert (settings.overhead_pct, settings.pause_pct) == (4.0, 0.0)
    timed = request_of("-q", "-o", "run", "--delay", "2", "--duration", "0.5", cwd=tmp_path)
    assert (timed["delay_s"], timed["duration_s"]) == (2.0, 0.5)
    metrics = request_of("-o", "run", "--exact", ".", "--exact-metrics", "a.sum, b.avg", cwd=tmp_path)
    assert metrics["exact"]["metrics"] == ["a.sum", "b.avg"]


def test_the_budget_and_the_pauses_come_from_the_environment_and_the_file_too(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.nanalyze]\npause = 0\noverhead = 3\n")
    request = request_of("-o", "run", cwd=tmp_path, NANALYZE_OVERHEAD="2.5")
    assert (request["overhead_pct"], request["pause_pct"]) == (2.5, 0.0)


def test_the_command_line_beats_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\n[tool.nanalyze]\nflush = 9\nlayers = ["ranges", "timeline"]\n'
        'exact = "f"\nexact-first = 4\nquiet = true\noutput = "from-file"\n'
    )
    below = tmp_path / "src"
    below.mkdir()
    request = request_of(cwd=below)
    assert (request["flush_s"], request["layers"], request["quiet"]) == (9.0, ["ranges", "timeline"], True)
    assert (request["run_dir"], request["exact"]["first"]) == (str(below / "from-file"), 4)
    request = request_of(cwd=below, NANALYZE_FLUSH="8", NANALYZE_OUTPUT="from-env", NANALYZE_LAYERS="ranges")
    assert (request["flush_s"], request["run_dir"], request["layers"]) == (8.0, str(below / "from-env"), ["ranges"])
    request = request_of("--flush", "7", "-o", "given", cwd=below, NANALYZE_FLUSH="8", NANALYZE_EXACT="g")
    assert (request["flush_s"], request["exact"]["kernels"]) == (7.0, "g")
    assert request["run_dir"] == str(below / "given")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "[tool.nanalyze]\nflsh = 3\n",
            "pyproject.toml: [tool.nanalyze] has no setting 'flsh'. It has append, copies, delay,",
        ),
        ("[tool]\nnanalyze = 3\n", "pyproject.toml: tool.nanalyze is not a table. Write [tool.nanalyze]."),
        ("[tool.nanalyze\n", "pyproject.toml: is not valid TOML ("),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "pyproject.toml").write_text(text)
    done = record_job("--", "echo", "ran", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert message in done.stderr.decode()


@pytest.mark.parametrize(
    ("setting", "wanted"),
    [
        ('flush = "soon"', "flush = 'soon' in [tool.nanalyze] is not a number"),
        ("flush = true", "flush = True in [tool.nanalyze] is not a number"),
        ("force = 1", "force = 1 in [tool.nanalyze] is not true or false"),
        ('samples = "no"', "samples = 'no' in [tool.nanalyze] is not true or false"),
        ("exact = true", "exact = True in [tool.nanalyze] is not text in quotes"),
        ('exact = "."\nexact-first = 2.5', "exact-first = 2.5 in [tool.nanalyze] is not a whole number"),
        ("layers = [1, 2]", "layers = [1, 2] in [tool.nanalyze] is not text in quotes"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused_and_not_guessed_at(tmp_path: Path, setting: str, wanted: str) -> None:
    file = tmp_path / "pyproject.toml"
    file.write_text(f"[tool.nanalyze]\n{setting}\n")
    done = record_job("--", "echo", "ran", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == f"nanalyze: error: {file}: {wanted}. Correct it.\n"


def test_how_to_measure_is_a_default_that_waits_to_be_asked_for(tmp_path: Path) -> None:
    """A file or a scheduler may say how exact counters are to be taken without every job taking them."""
    (tmp_path / "pyproject.toml").write_text("[tool.nanalyze]\nexact-first = 4\nsamples-window = 2\n")
    request = request_of("-o", "run", cwd=tmp_path, NANALYZE_EXACT_EVERY="7")
    assert (request["exact"], request["samples"]) == (None, {"window_s": 2.0, "by_default": True})
    request = request_of("-o", "run", "--exact", "gemm", cwd=tmp_path, NANALYZE_EXACT_EVERY="7")
    assert request["samples"] is None
    assert (request["exact"]["first"], request["exact"]["every"]) == (4, 7)
    assert request_of("-o", "run", "--samples", cwd=tmp_path)["samples"] == {"window_s": 2.0}


def test_what_the_file_asks_for_can_be_taken_back(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.nanalyze]\nsamples = true\ndelay = 0\n")
    assert request_of("-o", "run", cwd=tmp_path)["samples"] == {}
    request = request_of("-o", "run", "--no-samples", "--exact", "gemm", cwd=tmp_path)
    assert (request["samples"], request["exact"]["kernels"]) == (None, "gemm")
    assert request_of("-o", "run", cwd=tmp_path, NANALYZE_SAMPLES="0")["samples"] is None
    (tmp_path / "pyproject.toml").write_text('[tool.nanalyze]\nexact = "gemm"\nexact-first = 1\n')
    assert request_of("-o", "run", "--exact", "", cwd=tmp_path)["exact"] is None
    assert request_of("-o", "run", cwd=tmp_path, NANALYZE_EXACT="")["exact"]["kernels"] == "gemm"  # empty: not given


def test_samples_are_on_unless_something_stands_against_them(tmp_path: Path) -> None:
    def samples(*words: str) -> object:
        return request_of("-o", "run", *words, cwd=tmp_path)["samples"]

    assert samples() == {"by_default": True}
    assert samples("--samples-window", "3") == {"window_s": 3.0, "by_default": True}
    assert samples("--samples") == {}
    assert samples("--layers", "timeline") == {"by_default": True}
    assert samples("--no-samples") is samples("--exact", ".") is samples("--layers", "ranges") is None


def test_short_options_may_be_written_together(tmp_path: Path) -> None:
    assert request_of("-qo", "run", cwd=tmp_path)["run_dir"] == str(tmp_path / "run")
    assert request_of("-qorun", cwd=tmp_path)["run_dir"] == str(tmp_path / "run")


def test_a_file_that_is_not_about_nanalyze_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text("[tool.nanalyze]\nflush = 9\n")
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "pyproject.toml").write_text("broken [")
    assert request_of("-o", "run", cwd=tmp_path / "src")["flush_s"] == 9.0


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("--flush 0", 1, "flush_s=0.0: must be above 0 seconds"),
        ("--layers timeline,ring", 1, "unknown layer 'ring'"),
        ("--exact (", 1, "Exact(kernels='('): not a regular expression"),
        ("--exact . --samples", 1, "samples and exact both need the GPU's counters"),
        ("--exact-first 2", 2, "Options --exact-* need --exact, which chooses the kernels."),
        ("--no-samples --samples-window 2", 2, "Options --samples-* need --samples."),
        ("--exact . --samples-window 2", 2, "Options --samples-* need --samples."),
        ("--delay -1", 1, "delay_s=-1.0: must be 0 seconds or more"),
        ("--flush inf", 1, "flush_s=inf: is longer than any job"),
        ("--append --force", 2, "--force replaces the run, --append adds to it: give one of them."),
        ("--duration nan", 1, "duration_s=nan: must be above 0 seconds"),
        ("--flush soon", 2, "'soon' is not a valid float"),
        ("--nonsense", 2, "No such option"),
    ],
)
def test_wrong_options_are_refused_before_the_job_starts(tmp_path: Path, words: str, code: int, message: str) -> None:
    done = record_job("-o", "run", *words.split(), "--", "echo", "ran", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (code, b"")
    assert message in done.stderr.decode()
    assert os.listdir(tmp_path) == []


def test_every_option_is_documented_with_its_variable() -> None:
    page = (REPOSITORY / "docs" / "record.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| `(--[a-z-]+)`[^|]*\| `([A-Z_]+)` \|", page, re.MULTILINE))
    options = [parameter for parameter in record.params if isinstance(parameter, click.Option)]
    assert rows == {next(o for o in option.opts if o.startswith("--")): option.envvar for option in options}


# --- the run directory -------------------------------------------------------------------------


def made_run(path: Path, job: dict[str, str] | None = None) -> Path:
    runfile.create(path, "recorder", {"job": job or {}})
    (path / "processes" / "process=h-0-1").mkdir(parents=True)
    (path / "processes" / "process=h-0-1" / "000001-x.parquet").write_bytes(b"x")
    return path


def test_a_run_is_neither_overwritten_nor_added_to_without_being_asked(tmp_path: Path) -> None:
    run_dir = made_run(tmp_path / "run")
    done = record_job("-o", "run", "--", "echo", "ran", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (1, b"")
    assert done.stderr.decode() == (
        f"nanalyze: error: {run_dir}: already holds a run. Use --append to add to it, --force to replace it, "
        "or choose another directory with -o.\n"
    )
    assert request_of("-o", "run", "--append", cwd=tmp_path)["processes"] == 1
    assert len(list(run_dir.rglob("*.parquet"))) == 1
    assert request_of("-o", "run", "--force", cwd=tmp_path)["processes"] == 0
    assert os.listdir(tmp_path) == []


def test_what_is_no_run_is_left_alone_whatever_is_asked(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for name, message in {
        "thesis": "exists and is not a run",
        "file": "is a file",
        "file/below": "is a file",
    }.items():
        for option in ((), ("--force",), ("--append",)):
            done = record_job("-o", name, *option, "--", "echo", "ran", cwd=tmp_path)
            assert (done.returncode, done.stdout) == (1, b"")
            assert message in done.stderr.decode()
    assert (tmp_path / "thesis" / "chapter").read_text() == (tmp_path / "file").read_text() == "mine"


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # tests may run as root, for whom nothing is read-only
    with pytest.raises(RunError) as raised:
        launch.claim(tmp_path / "a" / "b", append=False, force=False)
    assert str(raised.value) == f"{tmp_path}: cannot be written. Choose another directory with -o."


def test_ranks_of_one_launch_share_a_run_and_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2", "SLURM_PROCID": "1", "SLURM_NTASKS": "2"}
    for name, value in job.items():
        monkeypatch.setenv(name, value)
    assert launch.default_run_dir(["python", "/x/train me.py"]) == "run-77-2-train_me"
    made_run(tmp_path / "run", {"SLURM_JOB_ID": "77", "SLURM_STEP_ID": "2"})
    assert launch.claim(tmp_path / "run", append=False, force=True) == (1, 0)
    assert (tmp_path / "run" / "processes").is_dir()
    for variable, value in (("SLURM_JOB_ID", "78"), ("SLURM_STEP_ID", "3")):
        with monkeypatch.context() as patch:
            patch.setenv(variable, value)
            with pytest.raises(RunError):
                launch.claim(tmp_path / "run", append=False, force=False)


def test_what_a_batch_script_runs_one_after_another_is_not_one_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm gives the script itself the rank 0 and its number of tasks, but no step."""
    monkeypatch.chdir(tmp_path)
    for name, value in {"SLURM_JOB_ID": "77", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SLURM_STEP_ID", raising=False)
    assert launch.default_run_dir(["python", "train.py"]).startswith("run-20")
    made_run(tmp_path / "run", {})
    with pytest.raises(RunError):
        launch.claim(tmp_path / "run", append=False, force=False)


def test_ranks_of_mpirun_within_a_job_of_slurm_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the first node mpirun starts them itself; on the others srun has started its daemon, in a step."""
    for name, value in {"SLURM_JOB_ID": "77", "PMIX_NAMESPACE": "prterun-1", "PMIX_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    names = []
    for step in (None, "0"):
        if step is not None:
            monkeypatch.setenv("SLURM_STEP_ID", step)
        names.append(launch.default_run_dir(["python", "train.py"]))
    assert names == ["run-77-prterun-1-train"] * 2


def test_the_default_name_says_when_and_what_and_is_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(time, "strftime", lambda _: "20260102-030405")
    assert launch.default_run_dir(["torchrun", "--nproc", "2", "a/train.py"]) == "run-20260102-030405-train"
    (tmp_path / "run-20260102-030405-train").mkdir()
    assert launch.default_run_dir(["python", "train.py"]) == "run-20260102-030405-train-2"
    assert launch.job_name(["python", "-m", "pkg.train", "x.py"]) == "pkg.train"
    assert launch.job_name(["/usr/bin/make", "all"]) == "make"


def test_starting_costs_little(tmp_path: Path) -> None:
    """Best of several, for the machine may be busy: the command's own imports, then the hook in the job."""
    bare, recorded = [], []
    for _ in range(5):
        for times, words in ((bare, ()), (recorded, (NANALYZE, "record", "-o", "run", "-q", "--"))):
            start = time.perf_counter()
            subprocess.run([*words, sys.executable, "-c", "pass"], cwd=tmp_path, env=environment(), check=True)
            times.append(time.perf_counter() - start)
    assert min(recorded) - min(bare) < 0.5
