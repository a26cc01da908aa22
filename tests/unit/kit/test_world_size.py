"""The multi-rank marker: what a rank does is what its test reports."""

from __future__ import annotations

import textwrap

import pytest
import torch
import torch.distributed as dist

pytest_plugins = ["pytester"]

_HEADER = """
import os, signal, sys, time, warnings
import pytest, torch, torch.distributed as dist
"""


def _run(pytester: pytest.Pytester, source: str, *arguments: str) -> pytest.RunResult:
    pytester.makepyfile(_HEADER + textwrap.dedent(source))
    return pytester.runpytest_inprocess(
        "-p", "tests.kit.world_size", "-p", "no:xdist", "-p", "no:hypothesispytest", *arguments
    )


@pytest.mark.world_size(1, 2, 3)
def test_every_rank_is_in_one_group(world_size):
    total = torch.ones(())
    dist.all_reduce(total)
    assert total.item() == world_size == dist.get_world_size()


@pytest.mark.world_size(2)
@pytest.mark.parametrize("shape", [(2,), (3, 1)])
def test_parametrize_multiplies(shape, world_size, tmp_path):
    assert world_size == 2
    assert torch.zeros(shape).shape == shape
    (tmp_path / f"rank{dist.get_rank()}").touch()


class TestMethods:
    @pytest.mark.world_size(2)
    def test_methods_run_on_their_own_instance(self):
        assert isinstance(self, TestMethods)
        assert dist.get_world_size() == 2


def test_a_raising_rank_fails_with_its_own_traceback(pytester):
    result = _run(
        pytester,
        """
        @pytest.mark.world_size(2, timeout_s=20)
        def test_raises():
            if dist.get_rank() == 1:
                raise KeyError("only here")
            dist.barrier()
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["[[]rank 1[]] Traceback*", "*KeyError: 'only here'"])
    assert result.duration < 20


def test_a_dying_rank_fails_with_its_exit_code(pytester):
    result = _run(
        pytester,
        """
        @pytest.mark.world_size(2, timeout_s=20)
        def test_dies():
            if dist.get_rank() == 0:
                os._exit(7)
            dist.barrier()

        @pytest.mark.world_size(1)
        def test_crashes():
            os.kill(os.getpid(), signal.SIGSEGV)
        """,
    )
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(["[[]rank 0[]] died with exit code 7"])
    result.stdout.fnmatch_lines(["[[]rank 0[]] died with exit code -11", "*in test_crashes"])


def test_a_hanging_rank_fails_and_says_where(pytester):
    result = _run(
        pytester,
        """
        def wait_for_nothing():
            time.sleep(60)

        @pytest.mark.world_size(2, timeout_s=4)
        def test_hangs():
            if dist.get_rank() == 1:
                wait_for_nothing()
        """,
    )
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["[[]rank 1[]] no answer within 4 s*", "*in wait_for_nothing"])
    result.stdout.no_fnmatch_line("[[]rank 0[]]*")


def test_a_skip_on_every_rank_skips(pytester):
    result = _run(
        pytester,
        """
        @pytest.mark.world_size(2)
        def test_skips():
            pytest.skip("not today")
        """,
        "-rs",
    )
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["*not today*"])


def test_a_failure_beside_a_skip_fails(pytester):
    result = _run(
        pytester,
        """
        @pytest.mark.world_size(2)
        def test_skips_or_fails():
            if dist.get_rank() == 0:
                pytest.skip("not here")
            raise ValueError("but here")
        """,
    )
    result.assert_outcomes(failed=1)


def test_ranks_take_the_warning_filters_of_the_test(pytester):
    result = _run(
        pytester,
        """
        @pytest.mark.world_size(1)
        def test_warns():
            warnings.warn("loud", UserWarning)

        @pytest.mark.world_size(1)
        @pytest.mark.filterwarnings("ignore:loud")
        def test_is_allowed_to_warn():
            warnings.warn("loud", UserWarning)
        """,
        "-W",
        "error",
    )
    result.assert_outcomes(passed=1, failed=1)


def test_what_a_rank_prints_is_in_the_report_of_a_failure(pytester):
    result = _run(
        pytester,
        """
        @pytest.mark.world_size(1)
        def test_prints():
            print("a clue", file=sys.stderr)
            assert False
        """,
    )
    result.stdout.fnmatch_lines(["*output of rank 0*", "a clue"])


@pytest.mark.parametrize("marker", ["world_size()", "world_size(2, timeout=3)"])
def test_a_wrong_marker_is_refused(pytester, marker):
    result = _run(pytester, f"@pytest.mark.{marker}\ndef test_marked():\n    pass\n")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["*world_size takes sizes and timeout_s*"])
