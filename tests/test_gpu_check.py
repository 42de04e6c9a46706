"""``python -m tests.gpu_check``: what can be proven of it without a GPU, which is everything but the card."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import msgspec
import pytest

from tests import gpu_check
from tests.gpu import stand_in
from tests.gpu.figures import Figure, Report, Target
from tests.gpu.lane import BROKEN, NO_GPU, Lane, NoGpuError, Outcome

ROOT = Path(__file__).parent.parent
ABSENT = ("msgspec", "numba", "llvmlite", "psutil", "gguf", "PySide6", "pytest", "platformdirs", "rich", "pynvml")
"""What need not be there on a machine with a GPU."""

HIDE = f"""
import sys


class Without:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, *rest):
        return None if name.partition(".")[0] in {ABSENT!r} else self.finder.find_spec(name, *rest)

    def __getattr__(self, name):
        return getattr(self.finder, name)


sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
"""


def _run(arguments: list[str], environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu_check", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        capture_output=True,
        text=True,
        timeout=1200,
    )


@pytest.mark.timeout(1200)
def test_the_rehearsal_passes_where_little_is_installed(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    done = _run(["--rehearsal", "--json", str(tmp_path / "out.json")], {"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["ok"] and not result["failed"] and not result["targets"]
    assert {figure["section"] for figure in result["figures"]} == set(gpu_check.LIMITS)
    # Whatever has the unit of a rate has no value: nothing here could be taken for a GPU's.
    rates = [figure for figure in result["figures"] if figure["unit"] not in ("", "GiB", "MiB")]
    assert len(rates) > 15 and all(figure["value"] is None and not figure["detail"] for figure in rates)
    for unit in ("TB/s", "FLOP/s", "tokens/s", "GB/s", "µs"):
        assert unit not in done.stdout


def test_without_a_gpu_it_says_so() -> None:
    done = _run(["--only", "environment"], {"CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 2 and "--rehearsal" in done.stdout
    assert done.stdout.startswith("There is no GPU to check here (torch ") and done.stdout.count("\n") == 1


def test_a_file_that_cannot_be_written_is_found_out_before_the_work(tmp_path: Path) -> None:
    done = _run(["--rehearsal", "--json", str(tmp_path / "no" / "out.json")])
    assert done.returncode == 2 and "there is no folder" in done.stderr and not done.stdout


def test_an_unknown_section_is_wrong_usage() -> None:
    done = _run(["--rehearsal", "--only", "decode,nonsense"])
    assert done.returncode == 2 and "nonsense" in done.stderr


WRONG = {
    "kernels": (
        """
        import kernels.triton.verification.elementwise as checked
        checked.silu_mul_reference = lambda gate_up: gate_up.float().chunk(2, dim=-1)[0]
        """,
        "silu_mul",
    ),
    "ids": (
        """
        import tests.gpu.ids as ids
        right = ids.answered
        def answered(*arguments, **options):
            result = right(*arguments, **options)
            result.token_ids[1][-1] ^= 1
            return result
        ids.answered = answered
        """,
        "1 different",
    ),
    "swap": ("import tests.gpu.swap as swap; swap.TritonBackend.swap_out = None", "NoneType"),
}


@pytest.mark.parametrize("section", WRONG)
@pytest.mark.timeout(600)
def test_what_is_wrong_fails(section: str, tmp_path: Path) -> None:
    change, words = WRONG[section]
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os, sys\nos.environ['TRITON_INTERPRET'] = '1'\n"
        + textwrap.dedent(change)
        + "\nfrom tests.gpu.worker import main\nsys.exit(main(json.loads(sys.argv[1]), int(sys.argv[2])))\n"
    )
    run = gpu_check.Run(rehearsal=True)
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(worker)]
    Lane([section], lambda item: 300.0, run.add_figure, run.add_outcome, True, {}, environment, command).run()
    assert run.failed
    said = json.dumps(run.figures, ensure_ascii=False) + str([outcome.error for outcome in run.outcomes])
    assert words in said


def test_an_answer_may_leave_the_reference_at_a_near_tie_only() -> None:
    from tests.gpu.ids import Reference, compare

    reference = Reference([5, 6, 7], [1.0, 5e-5, 1.0])
    assert compare([[5, 6, 7]], [reference]).equal == 1
    assert compare([[5, 9, 1]], [reference]).near_ties == 1
    assert compare([[5, 6, 8]], [reference]).different == [0]
    assert compare([[4, 6, 7]], [reference]).different == [0]
    assert compare([[5, 9]], [reference]).different == [0], "an answer that is too short is another answer"
    assert compare([[5, 6]], [reference]).different == [0]


class TestReport:
    def _figures(self, *, rehearsal: bool) -> tuple[Report, list[Figure]]:
        figures: list[Figure] = []
        return Report("decode", figures.append, rehearsal=rehearsal), figures

    def test_a_target_is_met_or_missed(self) -> None:
        report, figures = self._figures(rehearsal=False)
        report.rate("share", 85.0, "%", Target(85.0))
        report.rate("share", 84.9, "%", Target(85.0))
        report.rate("over", 1.6, "×", Target(1.5, at_most=True))
        report.rate("copy", 4.0, "TB/s")
        assert [figure.met for figure in figures] == [True, False, False, None]
        assert [figure.target for figure in figures] == ["≥ 85 %", "≥ 85 %", "≤ 1.5 ×", ""]

    def test_a_rehearsal_tells_no_rate(self) -> None:
        report, figures = self._figures(rehearsal=True)
        report.rate("share", 3.0, "%", Target(85.0), seconds=0.5)
        assert (figures[0].value, figures[0].met, figures[0].detail) == (None, None, {})

    @pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
    def test_what_is_no_rate_is_an_error(self, value: float) -> None:
        report, _ = self._figures(rehearsal=True)
        with pytest.raises(ValueError, match="share"):
            report.rate("share", value, "%")

    def test_the_summary_names_the_worst(self) -> None:
        run = gpu_check.Run(rehearsal=False)
        report = Report("decode", lambda figure: run.add_figure(figure.to_json()), rehearsal=False)
        report.rate("batch 1: share of copy bandwidth", 90.0, "%", Target(85.0))
        report.rate("batch 8: share of copy bandwidth", 80.0, "%", Target(85.0))
        run.add_outcome(Outcome("decode", None, 1.0))
        table = "\n".join(gpu_check.summary(run))
        assert "1 of 2 met, the worst 80 % (batch 8)" in table
        assert run.failed and run.to_json()["targets"]["decode: batch 8: share of copy bandwidth"] == "missed"

    def test_nothing_done_is_not_well_done(self) -> None:
        assert gpu_check.Run(rehearsal=False).failed


WORKER = """
import json, os, sys, time
job, pipe = json.loads(sys.argv[1]), os.fdopen(int(sys.argv[2]), "w", buffering=1)
def send(**message): pipe.write(json.dumps(message) + "\\n")
for item in job["items"]:
    send(begin=item)
    if item == "dies": os._exit(9)
    if item == "hangs": time.sleep(60)
    if item == "no gpu": print("no driver"); sys.exit({no_gpu})
    if item == "finds": send(fact=["bandwidth", 7.0])
    if item == "needs": send(figure={{"bandwidth": job["facts"].get("bandwidth")}})
    if item == "breaks": send(again="rest"); send(end=item, error="broken"); sys.exit({broken})
    if item == "leaves": sys.exit({broken})
    send(end=item, error="it raised" if item == "raises" else None)
"""


class TestLane:
    def _run(self, items: list[str], limit: float = 30.0) -> tuple[dict[str, str | None], list[dict[str, object]]]:
        outcomes: dict[str, str | None] = {}
        figures: list[dict[str, object]] = []
        command = [sys.executable, "-c", WORKER.format(no_gpu=NO_GPU, broken=BROKEN)]
        lane = Lane(
            list(items),
            lambda item: limit,
            figures.append,
            lambda outcome: outcomes.update({outcome.item: outcome.error}),
            rehearsal=True,
            command=command,
        )
        lane.run()
        return outcomes, figures

    def test_one_that_dies_costs_itself(self) -> None:
        outcomes, figures = self._run(["finds", "dies", "raises", "needs"])
        assert outcomes["finds"] is None and outcomes["needs"] is None
        assert "ended with 9" in str(outcomes["dies"]) and outcomes["raises"] == "it raised"
        assert figures == [{"bandwidth": 7.0}], "a new process is told what an earlier one found out"

    def test_one_that_hangs_is_ended(self) -> None:
        begin = time.monotonic()
        outcomes, _ = self._run(["hangs", "fine"], limit=3.0)
        assert "its limit" in str(outcomes["hangs"]) and outcomes["fine"] is None
        assert time.monotonic() - begin < 30

    def test_what_a_broken_context_left_undone_goes_on_in_another(self) -> None:
        outcomes, _ = self._run(["breaks", "fine"])
        assert outcomes == {"breaks": "broken", "rest": None, "fine": None}

    def test_a_worker_that_does_nothing_is_not_started_for_ever(self) -> None:
        outcomes, _ = self._run(["leaves", "leaves too"])
        assert "ended with" in str(outcomes["leaves"]) and outcomes["leaves too"] is None

    def test_no_time_is_said(self) -> None:
        outcomes, _ = self._run(["fine"], limit=0.0)
        assert "no time" in str(outcomes["fine"])

    def test_no_gpu_is_no_failure_of_a_section(self) -> None:
        with pytest.raises(NoGpuError, match="no driver"):
            self._run(["no gpu"])


def _records(base: type) -> list[object]:
    """The same structs, made from ``base``."""

    class Event(base, frozen=True, tag=True, tag_field="event", gc=False):
        pass

    class Placed(Event, frozen=True):
        request_id: int
        blocks: list[int] = []  # noqa: RUF012
        reason: str = ""

    class Options(base, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
        size: int = 3
        name: str

    class Timings(base, frozen=True, array_like=True):
        schedule: float = 0.0
        forward: float = 0.5

        @property
        def total(self) -> float:
            return self.schedule + self.forward

    return [Placed, Options, Timings]


@pytest.mark.parametrize("library", ["msgspec", "stand-in"])
def test_the_stand_in_is_like_msgspec(library: str) -> None:
    base, replace = (
        (msgspec.Struct, msgspec.structs.replace)
        if library == "msgspec"
        else (stand_in.Struct, stand_in.dataclasses.replace)
    )
    placed, options, timings = _records(base)
    first, second = placed(1), placed(1, [2], reason="why")
    first.blocks.append(5)
    assert placed(1).blocks == [] and placed(3) != first and placed(1, [2], "why") == second
    assert isinstance(first, base) and replace(second, blocks=[7]) == placed(1, [7], "why")
    assert options(name="a").size == 3 and placed.__struct_fields__ == ("request_id", "blocks", "reason")
    with pytest.raises(TypeError):
        options("a")
    with pytest.raises(TypeError):
        placed()
    assert timings(1.0).total == 1.5 and hash(timings(1.0)) == hash(timings(1.0, 0.5))


def test_the_stand_in_stays_away_where_msgspec_is() -> None:
    assert not stand_in.install_where_missing()
    assert sys.modules["msgspec"] is msgspec
