"""The start hook: which processes of a job are recorded, and that none of them notices. All in real processes.

A stand-in for PyTorch has what leads to CUDA there; the GPU is `fake_gpu`'s.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
import venv
from pathlib import Path
from typing import Any

import pytest
from fake_gpu import read_table, shard_paths, shards_claimed, shards_on_disk

from nanalyze.commands.info import ending
from nanalyze.recorder import launch, nvtx
from nanalyze.recorder.start_hook import nanalyze_start_hook as hook

TESTS = Path(__file__).parent
NOT_USED = "nanalyze: no process used CUDA, so nothing was recorded\n"
STAND_INS = {
    "torch/__init__.py": """
import contextlib, ctypes
def _preload_cuda_lib():
    with contextlib.suppress(OSError):
        ctypes.CDLL("libcudart.so.99")
_preload_cuda_lib()
from torch import cuda
""",
    "torch/cuda/__init__.py": """
import sys
initialized = []
def _lazy_init():
    "Initialize."
    initialized.append("nanalyze.recorder.session" in sys.modules)
    return "initialized"
""",
    "cupy.py": "import sys\nwas_recorded = 'nanalyze.recorder.session' in sys.modules\n",
    "mine.py": "import cupy\n",
}

# What a job does that has a GPU: `use(name)` initialises CUDA as PyTorch does and launches a kernel.
PRELUDE = f"""
import os, signal, subprocess, sys, threading, time
import torch.cuda
def use(name):
    sys.path.append({str(TESTS)!r})
    import pytest
    from fake_gpu import FakeGpu
    gpu = FakeGpu()
    gpu.install(pytest.MonkeyPatch())
    torch.cuda._lazy_init()
    gpu.launch(name)
    return gpu
"""


class Job:
    """A script in a folder of its own, run with and without the start hook."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.library = folder / "library"
        for name, text in STAND_INS.items():
            (self.library / name).parent.mkdir(parents=True, exist_ok=True)
            (self.library / name).write_text(text)

    def write(self, program: str, name: str = "job.py", prelude: str = PRELUDE) -> Path:
        (self.folder / name).write_text(prelude + textwrap.dedent(program))
        return self.folder / name

    def environment(self, path: str | None = None, **variables: str) -> dict[str, str]:
        clean = {name: value for name, value in os.environ.items() if not name.startswith(("NANALYZE", "PYTHON"))}
        path = str(self.library) if path is None else path
        return {**clean, "PYTHONPATH": path, "PYTHONWARNINGS": "ignore", "PYTHONDONTWRITEBYTECODE": "1", **variables}

    def start(self, *words: str, env: dict[str, str] | None = None, **request: Any) -> subprocess.Popen[str]:
        """The job, started as `nanalyze record` would have turned into it."""
        first = {"layers": ("timeline", "ranges"), **request}
        program = (
            "import os, sys; from nanalyze.recorder import launch\n"
            f"launch.become(sys.argv[1:], launch.environment(launch.Request(run_dir={str(self.run_dir)!r}, "
            f"shown='run', **{first!r})))"
        )
        return subprocess.Popen(
            [sys.executable, "-I", "-c", program, *words],
            env=env or self.environment(),
            cwd=self.folder,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, program: str, *, prelude: str = PRELUDE, **settings: Any) -> tuple[int, str, str]:
        process = self.start(sys.executable, str(self.write(program, prelude=prelude)), **settings)
        out, error = process.communicate(timeout=60)
        return process.returncode, out, error

    def bare(self, *words: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
        done = subprocess.run(
            [*(words or (sys.executable, str(self.folder / "job.py")))],
            env=env or self.environment(),
            cwd=self.folder,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        return done.returncode, done.stdout, done.stderr

    def kernels(self) -> dict[str, list[str]]:
        """Names of the kernels in each process's part."""
        names = {row["kernel_class_id"]: row["name"] for row in read_table(self.run_dir, "kernel_classes")}
        parts: dict[str, list[str]] = {}
        for path in shard_paths(self.run_dir, "kernels"):
            rows = read_rows(path)
            parts.setdefault(path.parent.name, []).extend(names[row["kernel_class_id"]] for row in rows)
        return parts

    def endings(self) -> dict[int, str]:
        """How each process ended, by pid."""
        latest: dict[int, dict[str, Any]] = {}
        for row in sorted(read_table(self.run_dir, "processes"), key=lambda row: row["recorded_ns"]):
            latest[row["pid"]] = row
        return {pid: ending(row) for pid, row in latest.items()}


def read_rows(path: Path) -> list[dict[str, Any]]:
    import pyarrow.parquet as pq

    rows: list[dict[str, Any]] = pq.ParquetFile(path).read().to_pylist()
    return rows


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def recorded(count: int) -> str:
    return f"nanalyze: recorded {count} process{'es' if count > 1 else ''} into run. Next: nanalyze report run\n"


# --- a process that does not use CUDA ------------------------------------------------------------

LOOK = """
import sys, os
names = sorted(sys.modules.keys() - {"nanalyze_start_hook", "atexit"})  # atexit is built in, and nobody's name
print(sys.path)
print(names)
print(sys.argv, __name__, sys.flags)
print([os.path.basename(entry) for entry in sys.path_importer_cache if "start_hook" in entry])
print(sorted(os.environ.keys() - {"NANALYZE_RECORD", "NANALYZE_RECORD_ON", "NANALYZE_RECORD_PID", "LC_CTYPE"}))
"""


@pytest.mark.parametrize("path", ["", "library", "library:", ":library", "library:/absent:library"])
def test_paths_and_modules_are_as_without(job: Job, path: str) -> None:
    env = job.environment(path=path)
    code, out, error = job.run(LOOK, prelude="", env=env)
    assert (code, out) == job.bare(env=env)[:2]
    assert error == NOT_USED
    assert not job.run_dir.exists()


def test_nothing_of_the_recorder_is_loaded_and_nothing_is_left(job: Job) -> None:
    code, out, error = job.run(
        """
        import ctypes, json, threading
        heavy = ("numpy", "pyarrow", "nanalyze", "nanalyze.recorder")
        print([name for name in heavy if name in sys.modules], threading.active_count())
        """
    )
    assert (code, out, error) == (0, "[] 1\n", NOT_USED)
    assert not job.run_dir.exists()


def test_importing_pytorch_alone_starts_nothing(job: Job) -> None:
    code, out, error = job.run(
        """
        module = torch.cuda
        print(module._lazy_init.__name__, module._lazy_init.__doc__, type(module.__loader__).__name__)
        print(module.__spec__.loader is module.__loader__, module.__file__, module.__spec__.origin)
        """
    )
    assert (code, out, error) == (*job.bare()[:2], NOT_USED)
    assert out.startswith("_lazy_init Initialize. SourceFileLoader\nTrue ")


def test_a_process_without_cuda_costs_less_than_50_ms(job: Job) -> None:
    """Best of several of each, in turn, for the machine may be busy."""
    request = launch.Request(str(job.run_dir), "run")
    plain = job.environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", plain["PYTHONPATH"])
        armed = {**plain, **{k: v for k, v in launch.environment(request).items() if k.startswith(("NAN", "PYTHONP"))}}
    times: dict[str, list[float]] = {"plain": [], "armed": []}
    for _ in range(10):
        for name, env in (("plain", plain), ("armed", armed)):
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import ctypes"], env=env, check=True, cwd=job.folder)
            times[name].append(time.perf_counter() - start)
    assert min(times["armed"]) - min(times["plain"]) < 0.05


# --- the job's own start-up code -----------------------------------------------------------------


@pytest.mark.parametrize("end", ["", "raise RuntimeError('mine')", "import absent", "sys.exit(4)"])
def test_the_jobs_own_sitecustomize_runs_as_always(job: Job, end: str) -> None:
    (job.library / "sitecustomize.py").write_text(
        "import sys\nmine = [__name__, __file__, __spec__.origin, list(sys.path)]\nprint(mine)\n"
        f"sys.path.append('/added')\n{end}\n"
    )
    program = "import sys; print(sys.path, getattr(sys.modules.get('sitecustomize'), 'mine', None))"
    result = job.run(program, prelude="")
    assert result[:2] == job.bare()[:2]
    shown = result[2].removesuffix(NOT_USED)
    assert shown == job.bare()[2] or "SystemExit: 4" in shown  # a fatal error, shown with every frame
    assert str(job.library / "sitecustomize.py") in result[1]


def test_a_job_with_the_names_of_our_packages(job: Job) -> None:
    for name in ("recorder", "analysis", "queries", "launch", "rundir"):
        (job.folder / f"{name}.py").write_text(f"whose = 'the job: {name}'\n")
    code, out, error = job.run(
        """
        import recorder, analysis
        use("a")
        import queries, launch, rundir
        print(*(module.whose for module in (recorder, analysis, queries, launch, rundir)))
        """
    )
    assert (code, error) == (0, recorded(1))
    assert out == "the job: recorder the job: analysis the job: queries the job: launch the job: rundir\n"
    assert list(job.kernels().values()) == [["a"]]


def test_arming_again_changes_nothing(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    code, out, error = job.run(
        """
        import nanalyze_start_hook as hook
        before = list(sys.meta_path)
        hook.arm()
        print(sys.meta_path == before, sum(type(finder).__module__ == "nanalyze_start_hook" for finder in before))
        """
    )
    assert (code, out, error) == (0, "True 1\n", NOT_USED)
    request = launch.Request("/r", "r")
    monkeypatch.setenv("PYTHONPATH", "/a::/b")
    once = launch.environment(request)
    monkeypatch.setenv("PYTHONPATH", once["PYTHONPATH"])
    assert launch.environment(request)["PYTHONPATH"] == once["PYTHONPATH"] == f"{launch.HOOK_DIR}:/a::/b"


# --- what starts the recorder --------------------------------------------------------------------


def test_it_runs_before_pytorch_initialises_cuda_and_leaves_no_trace_there(job: Job) -> None:
    code, out, error = job.run(
        """
        original = torch.cuda._lazy_init.__wrapped__
        use("a")
        print(torch.cuda._lazy_init is original, torch.cuda.initialized)
        """
    )
    assert (code, out, error) == (0, "True [True]\n", recorded(1))
    assert list(job.kernels().values()) == [["a"]]
    assert list(job.endings().values()) == ["exit"]
    assert shards_claimed(job.run_dir) == shards_on_disk(job.run_dir)


def test_a_module_that_is_for_gpus_only_starts_it_by_its_import(job: Job) -> None:
    code, out, _ = job.run("import cupy\nprint(cupy.was_recorded, cupy.__spec__.origin)", prelude="")
    assert (code, out) == (0, f"True {job.library / 'cupy.py'}\n")
    assert len(job.endings()) == 1


def test_asking_whether_a_module_is_installed_starts_nothing(job: Job) -> None:
    program = """
        import importlib.util, inspect, sys
        found = [importlib.util.find_spec(name) for name in ("cupy", "tensorflow", "torch.cuda")]
        print(found[0].origin, found[0].loader.get_source("cupy"), found[1], found[2].loader.is_package("torch.cuda"))
        print("nanalyze.recorder" in sys.modules)
        """
    code, out, error = job.run(program, prelude="")
    assert (code, out, error) == (*job.bare()[:2], NOT_USED)
    assert out.endswith("None True\nFalse\n")


def test_a_library_loaded_by_ctypes_starts_it(job: Job) -> None:
    program = """
        import ctypes, sys
        for name in ("libc.so.6", None):
            ctypes.CDLL(name)
        print("nanalyze.recorder" in sys.modules)
        try:
            ctypes.CDLL("libcudart.so.99")
        except OSError as error:
            print(error, "nanalyze.recorder.session" in sys.modules)
        """
    code, out, _ = job.run(program, prelude="")
    assert (code, out.splitlines()[0]) == (0, "False")
    assert out.splitlines()[1].endswith("No such file or directory True")
    assert len(job.endings()) == 1


def test_libraries_that_pytorch_loads_ahead_do_not(job: Job) -> None:
    """Its import alone uses no CUDA: launchers, loaders' workers and the like leave nothing."""
    program = 'import torch, sys\nprint("nanalyze.recorder" in sys.modules, torch.cuda.initialized)\n'
    code, out, error = job.run(program, prelude="")
    assert (code, out, error) == (0, "False []\n", NOT_USED)
    assert not job.run_dir.exists()


def test_ctypes_is_its_own_again_once_the_recorder_runs(job: Job) -> None:
    """And while it is watched nothing else is: no hook that each event of the interpreter would go through."""
    program = """
        import ctypes, _ctypes, os
        def show(who):
            print(who, ctypes._dlopen is _ctypes.dlopen, flush=True)
        ctypes.CDLL(None)
        show("before")
        try:
            ctypes.CDLL("libcudart.so.99", mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            print(error, flush=True)
        show("after")
        child = os.fork()
        if child == 0:
            show("child")
            os._exit(0)
        os.waitpid(child, 0)
        """
    code, out, _ = job.run(program, prelude="")
    before, error, *rest = out.splitlines()
    assert (code, before, rest) == (0, "before False", ["after True", "child False"])
    assert error.endswith("No such file or directory")


def test_a_module_that_the_user_names_starts_it(job: Job) -> None:
    program = "import mine, cupy; print(cupy.was_recorded)"
    code, out, _ = job.run(program, prelude="", start_on=("mine",))
    assert (code, out) == (0, "True\n")
    code, out, _ = job.run(
        "import torch.cuda, sys; print('pyarrow' in sys.modules)", prelude="", start_on=("torch.cuda",)
    )
    assert (code, out) == (0, "True\n")


def test_threads_that_start_together_have_one_recorder(job: Job) -> None:
    code, out, error = job.run(
        """
        barrier = threading.Barrier(8)
        recorders = set()
        def work():
            barrier.wait()
            torch.cuda._lazy_init()
            from nanalyze import recorder
            recorders.add((id(recorder._active), recorder._active.is_stopped))
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads: thread.start()
        for thread in threads: thread.join()
        print(len(recorders), recorders.pop()[1])
        """
    )
    assert (code, out) == (0, "1 False\n"), error
    assert list(job.endings().values()) == ["exit"]


def test_a_job_that_records_itself_is_left_to_that(job: Job) -> None:
    code, out, error = job.run(
        """
        from nanalyze import recorder
        import pytest
        sys.path.append(os.environ["TESTS"])
        from fake_gpu import FakeGpu
        gpu = FakeGpu()
        gpu.install(pytest.MonkeyPatch())
        with recorder.record("own", layers=("timeline",)):
            torch.cuda._lazy_init()
            gpu.launch("mine")
        print("done")
        """,
        env=job.environment(TESTS=str(TESTS)),
    )
    assert (code, out) == (0, "done\n")
    assert error.endswith("records itself, so `nanalyze record` leaves it to that\n" + NOT_USED)
    assert len(read_table(job.folder / "own", "kernels")) == 1
    assert not job.run_dir.exists()


# --- children --------------------------------------------------------------------------------------


def test_forked_children_have_parts_of_their_own_if_they_use_cuda(job: Job) -> None:
    code, out, error = job.run(
        """
        children = []
        for number in range(3):
            child = os.fork()
            if child == 0:
                if number < 2:
                    use(f"child {number}")
                sys.exit(number)
            children.append(child)
        print([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children])
        """
    )
    assert (code, out, error) == (0, "[0, 1, 2]\n", recorded(2))
    assert sorted(job.kernels().values()) == [["child 0"], ["child 1"]]
    assert list(job.endings().values()) == ["exit", "exit"]


def test_a_child_forked_from_a_recorded_process_is_armed_again(job: Job) -> None:
    code, _, error = job.run(
        """
        use("parent")
        child = os.fork()
        if child == 0:
            use("child")
            sys.exit(0)
        os.waitpid(child, 0)
        """
    )
    assert (code, error) == (0, recorded(2))
    assert sorted(job.kernels().values()) == [["child"], ["parent"]]
    assert list(job.endings().values()) == ["exit", "exit"]


def test_a_child_that_pytorch_will_refuse_cuda_is_left_alone(job: Job) -> None:
    code, _, error = job.run(
        """
        use("parent")
        torch.cuda._is_in_bad_fork = lambda: True
        child = os.fork()
        if child == 0:
            torch.cuda._lazy_init()
            sys.exit(0)
        os.waitpid(child, 0)
        """
    )
    assert (code, error) == (0, recorded(1))
    assert sorted(job.kernels().values()) == [["parent"]]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing_write_everything(job: Job, method: str) -> None:
    code, out, error = job.run(
        f"""
        import multiprocessing
        if __name__ == "__main__":
            context = multiprocessing.get_context({method!r})
            with_gpu = [context.Process(target=use, args=(f"child {{number}}",)) for number in range(2)]
            without = context.Process(target=print, args=("no GPU",))
            for child in (*with_gpu, without): child.start()
            for child in (*with_gpu, without): child.join()
            print([child.exitcode for child in (*with_gpu, without)])
        """
    )
    assert (code, out, error) == (0, "no GPU\n[0, 0, 0]\n", recorded(2))
    assert sorted(job.kernels().values()) == [["child 0"], ["child 1"]]
    assert list(job.endings().values()) == ["exit", "exit"]
    assert shards_on_disk(job.run_dir)["processes"] == 4


def test_ranks_of_a_launcher_are_told_apart(job: Job) -> None:
    code, _, error = job.run(
        """
        if "RANK" in os.environ:
            use("rank " + os.environ["RANK"])
        else:
            env = {**os.environ, "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "x"}
            ranks = [
                subprocess.Popen([sys.executable, __file__], env={**env, "RANK": rank, "LOCAL_RANK": rank})
                for rank in "01"
            ]
            sys.exit(max(rank.wait() for rank in ranks))
        """
    )
    assert (code, error) == (0, recorded(2))
    rows = {row["rank"]: row for row in read_table(job.run_dir, "processes")}
    assert {rank: (row["local_rank"], row["world_size"]) for rank, row in rows.items()} == {0: (0, 2), 1: (1, 2)}
    assert sorted(job.kernels().values()) == [["rank 0"], ["rank 1"]]


def test_a_process_that_becomes_another_is_followed(job: Job) -> None:
    """Through a shell, which is not Python, and by exec."""
    code, out, error = job.run(
        """
        if len(sys.argv) == 1:
            os.execv("/bin/sh", ["sh", "-c", f"echo shell; exec '{sys.executable}' '{__file__}' again"])
        use("at last")
        print(os.getpid())
        """
    )
    assert (code, error) == (0, recorded(1))
    assert list(job.kernels().values()) == [["at last"]]
    assert list(job.endings()) == [int(out.split()[1])]


def test_workers_of_a_recorded_process_that_only_compute_leave_nothing(job: Job) -> None:
    """As a DataLoader's: forked from a process that is recorded and uses CUDA, ended by SIGTERM or os._exit."""
    code, out, error = job.run(
        """
        import multiprocessing
        def load(number):
            return os.getpid(), "nanalyze.recorder.session" in sys.modules, threading.active_count()
        if __name__ == "__main__":
            gpu = use("step 0")
            for epoch in range(3):
                with multiprocessing.get_context("fork").Pool(4) as workers:
                    for number, (pid, _, threads) in enumerate(workers.imap(load, range(8))):
                        assert pid != os.getpid() and threads == 1
                        gpu.launch(f"step {number}")
            print("done")
        """
    )
    assert (code, out, error) == (0, "done\n", recorded(1))
    (kernels,) = job.kernels().values()
    assert len(kernels) == 1 + 3 * 8
    assert list(job.endings().values()) == ["exit"]


def test_long_lived_workers_that_another_program_starts(job: Job) -> None:
    """As Ray's: Python processes under a launcher that is not Python, each with a session of its own, given work
    over time; one is told to end, one is killed, one never gets any work."""
    job.write(
        """
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        gpu = None
        print(os.getpid(), flush=True)
        for line in sys.stdin:
            gpu = gpu or use("first")
            gpu.launch(line.strip())
            print(f"did {line.strip()}", flush=True)
        """,
        "worker.py",
    )
    code, out, error = job.run(
        """
        from pathlib import Path
        start = f"exec setsid '{sys.executable}' worker.py"
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers = [subprocess.Popen(["/bin/sh", "-c", start], **pipes) for _ in range(3)]
        pids = [int(worker.stdout.readline()) for worker in workers]
        for task in ("a", "b"):
            for worker in workers[:2]:
                worker.stdin.write(f"{task}\\n")
                worker.stdin.flush()
                assert worker.stdout.readline() == f"did {task}\\n"
        until = time.monotonic() + 20
        while len(list(Path("run").glob("kernels/*/*.parquet"))) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        time.sleep(0.3)
        for worker, number in zip(workers, (signal.SIGTERM, signal.SIGKILL, signal.SIGTERM)):
            worker.send_signal(number)
        codes = [worker.wait() for worker in workers]
        print(codes, *pids)
        """,
        prelude="import os, signal, subprocess, sys, time\n",
        flush_s=0.1,
    )
    assert (code, error) == (0, recorded(2))
    codes, pids = out.split("] ")
    ended, killed, _ = map(int, pids.split())
    assert codes == "[0, -9, 0"
    assert list(job.kernels().values()) == [["first", "a", "b"]] * 2
    assert job.endings() == {ended: "exit", killed: "cut off"}


@pytest.mark.parametrize(
    "variables",
    [
        "OMPI_COMM_WORLD_RANK=$r OMPI_COMM_WORLD_LOCAL_RANK=$r OMPI_COMM_WORLD_SIZE=2",
        "PMI_RANK=$r MPI_LOCALRANKID=$r PMI_SIZE=2",
        "SLURM_PROCID=$r SLURM_LOCALID=$r SLURM_NTASKS=2 SLURM_JOB_ID=9",
        "RANK=$r LOCAL_RANK=$r WORLD_SIZE=2 SLURM_PROCID=0 SLURM_LOCALID=0 SLURM_NTASKS=1 SLURM_JOB_ID=9",
        "MV2_COMM_WORLD_RANK=$r MV2_COMM_WORLD_LOCAL_RANK=$r MV2_COMM_WORLD_SIZE=2",
        "PALS_RANKID=$r PALS_LOCAL_RANKID=$r PMI_SIZE=2",
        "FLUX_TASK_RANK=$r FLUX_TASK_LOCAL_ID=$r FLUX_JOB_SIZE=2",
        "JSM_NAMESPACE_RANK=$r JSM_NAMESPACE_LOCAL_RANK=$r JSM_NAMESPACE_SIZE=2",
    ],
)
def test_ranks_that_a_launcher_starts_which_is_not_python(job: Job, variables: str) -> None:
    name = job.write("use('a')")
    launcher = f"for r in 0 1; do {variables} '{sys.executable}' '{name}' & done; wait"
    process = job.start("/bin/sh", "-c", launcher)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (0, "", recorded(2))
    rows = {row["rank"]: row for row in read_table(job.run_dir, "processes")}
    assert {rank: (row["local_rank"], row["world_size"]) for rank, row in rows.items()} == {0: (0, 2), 1: (1, 2)}
    assert sorted(part.split("-")[-2] for part in job.kernels()) == ["0", "1"]


def test_a_process_that_takes_the_request_out_of_its_environment_is_left_alone(job: Job) -> None:
    code, out, error = job.run(
        """
        del os.environ["NANALYZE_RECORD"]
        use("a")
        print("nanalyze.recorder.session" in sys.modules)
        """
    )
    assert (code, out, error) == (0, "False\n", "")
    assert not job.run_dir.exists()


# --- Pythons that cannot or will not ---------------------------------------------------------------


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_a_python_that_ignores_the_environment_is_not_disturbed(job: Job, flag: str) -> None:
    name = job.write("import sys; print(sys.flags, sys.argv)", prelude="")
    words = (sys.executable, flag, str(name), "x")
    process = job.start(*words)
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == job.bare(*words)


def test_a_python_without_nanalyze_is_not_disturbed(job: Job) -> None:
    venv.create(job.folder / "other", with_pip=False, symlinks=True)
    other = str(job.folder / "other" / "bin" / "python")
    name = job.write("import torch.cuda, cupy, sys; print(torch.cuda._lazy_init(), sys.prefix)", "a.py", prelude="")
    process = job.start(other, str(name))
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == job.bare(other, str(name))[:2]
    assert error == f"nanalyze: nothing was recorded, because {other} has no nanalyze. Install it there.\n"
    code, out, error = job.run(f"print(subprocess.run([{other!r}, {str(name)!r}, 'x']).returncode)")
    assert (code, out.splitlines()[-1], error) == (0, "0", NOT_USED)
    assert not job.run_dir.exists()


@pytest.mark.parametrize("quiet", [False, True])
def test_a_python_that_is_too_old_says_so_at_its_end(job: Job, quiet: bool) -> None:
    program = (
        "import os, sys; sys.version_info = (3, 9, 1); path = os.environ['HOOK']\n"
        "sys.modules['sitecustomize'] = sys\n"
        "space = {'__name__': 'sitecustomize', '__file__': path}\n"
        "try: exec(compile(open(path).read(), path, 'exec'), space)\n"
        "except ImportError: pass\n"  # there is no other one
        "print('nanalyze_start_hook' in sys.modules)"
    )
    process = job.start(
        sys.executable,
        "-S",
        "-c",
        program,
        quiet=quiet,
        env=job.environment(HOOK=str(launch.HOOK_DIR / "sitecustomize.py")),
    )
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out) == (0, "False\n")
    said = "nanalyze: nothing was recorded: this is Python 3.9, and recording needs 3.11 or newer\n"
    assert error == ("" if quiet else said)


def test_a_damaged_hook_does_no_harm(job: Job) -> None:
    broken = job.folder / "hook"
    shutil.copytree(launch.HOOK_DIR, broken, ignore=shutil.ignore_patterns("__pycache__"))
    (broken / "nanalyze_start_hook.py").write_text("this is not Python\n")
    env = job.environment(path=f"{broken}:{job.library}", NANALYZE_RECORD="{}")
    name = job.write("import torch.cuda, sys; print(torch.cuda._lazy_init(), sys.path)", prelude="")
    assert job.bare(sys.executable, str(name), env=env) == job.bare(sys.executable, str(name))
    shutil.copy(launch.HOOK_DIR / "nanalyze_start_hook.py", broken)
    for request in ("{}", "not JSON", '{"run_dir": 3}'):
        code, out, error = job.bare(
            sys.executable, str(name), env={**env, "NANALYZE_RECORD": request, "NANALYZE_RECORD_PID": "x"}
        )
        assert (code, out) == job.bare(sys.executable, str(name))[:2]
        assert error.startswith("nanalyze: this process is not recorded: ")
        assert error.count("\n") == 1


# --- ends ------------------------------------------------------------------------------------------


def test_a_killed_process_is_seen_as_cut_off(job: Job) -> None:
    program = """
        use("a")
        print("ready", flush=True)
        time.sleep(60)
        """
    process = job.start(sys.executable, str(job.write(program)), flush_s=0.1)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    deadline = time.monotonic() + 30
    while not shard_paths(job.run_dir, "kernels"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert job.endings() == {process.pid: "running"}
    process.send_signal(signal.SIGKILL)
    assert process.wait(30) == -signal.SIGKILL
    process.communicate()
    assert job.endings() == {process.pid: "cut off"}
    assert list(job.kernels().values()) == [["a"]]


@pytest.mark.parametrize(
    ("end", "code"),
    [("raise RuntimeError('mine')", 1), ("sys.exit(7)", 7), ("os._exit(3)", 3), ("os.kill(os.getpid(), 15)", -15)],
)
def test_the_exit_code_of_a_recorded_process_is_its_own(job: Job, end: str, code: int) -> None:
    result = job.run(f"use('a')\nprint('out', flush=True)\n{end}")
    assert result[:2] == (code, "out\n")
    assert ("RuntimeError: mine" in result[2]) is (code == 1)
    assert result[2].endswith(recorded(1)) is (code > 0 and code != 3)


def test_a_recording_may_start_late_and_end_early(job: Job) -> None:
    program = """
        gpu = use("early")
        from nanalyze import recorder
        def wait(state):
            deadline = time.monotonic() + 20
            while (recorder._active is not None and not recorder._active.is_stopped) is not state:
                assert time.monotonic() < deadline
                time.sleep(0.01)
        print(recorder._active)
        wait(True)
        gpu.launch("recorded")
        wait(False)
        gpu.launch("late")
        """
    code, out, error = job.run(program, delay_s=0.3, duration_s=0.5)
    assert (code, out, error) == (0, "None\n", recorded(1))
    assert list(job.kernels().values()) == [["recorded"]]
    assert list(job.endings().values()) == ["stop"]


def test_a_job_that_is_over_before_the_delay_leaves_nothing(job: Job) -> None:
    result = job.run("torch.cuda._lazy_init()", delay_s=30.0)
    assert result == (0, "", "nanalyze: no process went on for --delay after it turned to CUDA: nothing was recorded\n")
    assert not job.run_dir.exists()


def test_a_command_that_is_not_python_gets_its_last_line_too(job: Job) -> None:
    """From a process beside it, however the command ends."""
    name = job.write("use('a')\nprint('used')")
    process = job.start("/bin/sh", "-c", f"'{sys.executable}' '{name}'; kill -9 $$")
    out, error = process.communicate(timeout=60)
    assert (process.returncode, out, error) == (-9, "used\n", recorded(1))
    process = job.start("/bin/sh", "-c", "exit 3", quiet=True)
    assert (*process.communicate(timeout=60), process.returncode) == ("", "", 3)


def test_the_process_beside_the_job_is_not_its_child_and_leaves_its_output_alone(job: Job) -> None:
    """Standard output is at its end as soon as the job closes it, long before the job ends."""
    process = job.start("/bin/sh", "-c", 'read -r line < /proc/$$/task/$$/children; echo "<$line>"; exec >&-; read x')
    assert process.stdout is not None
    assert process.stdout.read() == "<>\n"
    assert process.poll() is None
    _, error = process.communicate("\n", timeout=60)
    assert (process.returncode, error) == (0, NOT_USED)


@pytest.mark.parametrize(
    ("content", "is_python"),
    [
        ("#!/usr/bin/env python3\n", True),
        ("#!/opt/x/bin/python\n", True),
        ("#!/bin/sh\n'''exec' \"/a b/python3\" \"$0\" \"$@\"\n' '''\nimport sys\n", True),
        ("#!/bin/sh\necho python\n", False),
        ("\x7fELF", False),
    ],
)
def test_which_commands_are_python(tmp_path: Path, content: str, is_python: bool) -> None:
    (tmp_path / "tool").write_text(content)
    (tmp_path / "tool").chmod(0o755)
    assert launch.is_python([str(tmp_path / "tool")]) is is_python
    assert launch.is_python(["python3.11", "x"]) is True
    assert launch.is_python([sys.executable]) is True


def test_a_run_directory_that_cannot_be_made_is_the_recorders_trouble(job: Job) -> None:
    code, out, error = job.run("open('run', 'w').close()\nuse('a')\nprint('went on')\nsys.exit(6)")
    assert (code, out) == (6, "went on\n")
    first, last = error.splitlines()
    assert first.startswith(f"nanalyze: this process is not recorded: RunError: {job.run_dir}: ")
    assert last + "\n" == NOT_USED


def test_a_closed_stderr_is_no_trouble(job: Job) -> None:
    code, out, _ = job.run("os.close(2)\nuse('a')\nprint('went on')\nsys.exit(6)")
    assert (code, out) == (6, "went on\n")
    assert list(job.kernels().values()) == [["a"]]


def test_quiet_leaves_out_the_last_line(job: Job) -> None:
    assert job.run("use('a')", quiet=True) == (0, "", "")
    assert list(job.kernels().values()) == [["a"]]


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="needs a machine without a driver")
def test_a_run_without_a_driver_says_why_it_is_empty(job: Job) -> None:
    code, out, error = job.run("torch.cuda._lazy_init()\nprint('went on')")
    assert (code, out) == (0, "went on\n")
    first, last = error.splitlines()
    assert first.startswith("nanalyze: no kernels can be recorded here, there is no NVIDIA driver")
    assert last == "nanalyze: recorded 1 process into run, but no kernels. Next: nanalyze info run"


def test_cuda_that_began_unnoticed_is_mentioned(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(hook, "_phase", hook._ARMED)
    monkeypatch.setattr(hook, "_armed_pid", os.getpid())
    monkeypatch.delenv("NANALYZE_RECORD_PID", raising=False)
    hook._at_exit()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(hook, "_has_context", lambda: True)
    monkeypatch.setattr(hook, "_phase", hook._ARMED)
    hook._at_exit()
    assert "began in a way that was not noticed: it is not recorded" in capsys.readouterr().err
    monkeypatch.setattr(hook, "_phase", hook._ARMED)
    monkeypatch.setattr(hook, "_armed_pid", os.getppid())  # as in a forked child
    hook._at_exit()
    assert capsys.readouterr().err == ""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_driver_that_was_loaded_and_not_used_leaves_nothing(job: Job) -> None:
    """As torchrun does, which asks whether there are GPUs: asking for a context at the end starts no recorder."""
    source, library = job.folder / "driver.c", job.folder / "libcuda.so.1"
    source.write_text("int cuDeviceGetCount(int *count) { return 3; }")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(source)], check=True)
    code, out, error = job.run(f"import _ctypes\nprint(_ctypes.dlopen({str(library)!r}, 2) > 0)\n", prelude="")
    assert (code, out, error) == (0, "True\n", NOT_USED)
    assert not job.run_dir.exists()


# --- NVTX ------------------------------------------------------------------------------------------

NVTX_STAND_INS = {
    "nvtx.py": "import os\nat_import = os.environ.get('NVTX_INJECTION64_PATH')\n",
    "torch/cuda/nvtx.py": """
import os
class _Calls:
    def rangePushA(self, name):
        return name, os.environ.get('NVTX_INJECTION64_PATH')
_nvtx = _Calls()
def range_push(name):
    return _nvtx.rangePushA(name)
""",
}
CUPTI = "/somewhere/libcupti.so.13"
INJECTED = nvtx._our_library() or CUPTI  # compiled or not, as here


@pytest.fixture
def nvtx_job(job: Job) -> Job:
    for name, text in NVTX_STAND_INS.items():
        (job.library / name).write_text(text)
    return job


def test_nvtx_calls_cupti_from_its_first_call_long_before_cuda(nvtx_job: Job) -> None:
    program = """
        import torch.cuda.nvtx, os, sys
        print(os.environ.get("NVTX_INJECTION64_PATH"))
        push = torch.cuda.nvtx.range_push
        print(push("a"), push("b"), type(torch.cuda.nvtx._nvtx).__name__)
        import nvtx
        heavy = ("numpy", "pyarrow", "nanalyze.recorder.session")
        print(nvtx.at_import, [name for name in heavy if name in sys.modules])
        """
    env = nvtx_job.environment(NANALYZE_CUPTI=CUPTI)
    code, out, error = nvtx_job.run(program, prelude="", env=env)
    assert (code, error) == (0, NOT_USED)
    assert out == f"None\n('a', '{INJECTED}') ('b', '{INJECTED}') _Calls\n{INJECTED} []\n"
    assert not nvtx_job.run_dir.exists()


def test_the_nvtx_package_alone_is_enough(nvtx_job: Job) -> None:
    env = nvtx_job.environment(NANALYZE_CUPTI=CUPTI)
    assert nvtx_job.run("import nvtx; print(nvtx.at_import)", prelude="", env=env) == (0, f"{INJECTED}\n", NOT_USED)


@pytest.mark.parametrize("request_", [{"nvtx": False}, {"layers": ("timeline",)}])
def test_nvtx_is_left_alone_unless_its_ranges_are_recorded(nvtx_job: Job, request_: dict[str, Any]) -> None:
    program = "import nvtx, torch.cuda.nvtx; print(nvtx.at_import, torch.cuda.nvtx.range_push('a'))"
    env = nvtx_job.environment(NANALYZE_CUPTI=CUPTI)
    assert nvtx_job.run(program, prelude="", env=env, **request_) == (0, "None ('a', None)\n", NOT_USED)


def test_the_jobs_own_library_for_nvtx_stays(nvtx_job: Job) -> None:
    env = nvtx_job.environment(NANALYZE_CUPTI=CUPTI, NVTX_INJECTION64_PATH="/mine.so")
    assert nvtx_job.run("import nvtx; print(nvtx.at_import)", prelude="", env=env) == (0, "/mine.so\n", NOT_USED)
    code, _, error = nvtx_job.run("use('a')", env={**env, "NANALYZE_CUPTI": ""})
    assert (code, error.count("\n")) == (0, 2)
    assert error.startswith("nanalyze: NVTX ranges are not recorded: NVTX_INJECTION64_PATH is already set, to /mine.so")


def test_children_do_not_inherit_their_parents_library_for_nvtx(nvtx_job: Job) -> None:
    """They may be another Python with another CUPTI."""
    program = """
        use("a")
        print(os.environ["NANALYZE_NVTX_CUPTI"], flush=True)
        child = "import os; print([name for name in os.environ if 'NVTX' in name])"
        subprocess.run([sys.executable, "-c", child])
        """
    code, out, _ = nvtx_job.run(program)
    assert (code, out) == (0, "/fake/libcupti.so.13\n[]\n")
