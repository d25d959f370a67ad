"""The CSV of the raw page: the measured one, and what others and their tools make of it."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from kda2.errors import InvalidValue
from kda2.workbench.profiler.ncu import Report, read_report
from kda2.workbench.profiler.ncu.csv_page import HOW

SMALL = """"ID","Kernel Name","Block Size","Grid Size","CC","gpu__time_duration.sum","dram__bytes_read.sum","smsp__inst_executed.sum","lts__t_sector_hit_rate.pct"
"","","","","","ns","Mbyte","inst","%"
"0","copy(float *)","(256, 1, 1)","(64, 1, 1)","9.0","1,500","2.5","1,234","n/a"
"""  # noqa: E501


def written(rows: list[list[str]], delimiter: str = ",") -> str:
    text = io.StringIO()
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows(rows)
    return text.getvalue()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "report.csv"


def small(file: Path, text: str) -> Report:
    file.write_text(text)
    return read_report(file)


def test_the_measured_report(measured: Report) -> None:
    prepare, recurrence = measured.kernels
    instructions = [k.metrics["smsp__inst_executed.sum"] for k in measured.kernels]
    assert (prepare.duration_us, instructions[0], prepare.registers) == (90.528, 29994504, 32)
    assert (recurrence.duration_us, instructions[1], recurrence.registers) == (113.472, 26761987, 80)
    assert [k.short_name for k in measured.kernels] == ["_flash_kda_fwd_prepare", "_flash_kda_fwd_recurrence"]
    assert (prepare.grid, prepare.block, prepare.launch) == ((64, 96, 1), (256, 1, 1), 0)
    assert (recurrence.grid, recurrence.block, recurrence.launch) == ((1, 96, 1), (192, 1, 1), 1)
    assert (measured.device, measured.cc, measured.notes) == ("NVIDIA H200", "9.0", ())


def test_units_of_the_measured_report(measured: Report) -> None:
    prepare, recurrence = measured.kernels
    assert (prepare.shared_bytes, recurrence.shared_bytes) == (22272, 99456)
    assert prepare.metrics["dram__bytes_read.sum"] == 75994368
    assert prepare.metrics["dram__bytes.sum.per_second"] == pytest.approx(1.533469e12)
    names = ("gpu__time_duration.sum", "dram__bytes_read.sum", "dram__bytes.sum.per_second", "smsp__inst_executed.sum")
    assert [prepare.units[name] for name in names] == ["us", "byte", "byte/s", "inst"]


def test_what_is_not_there_is_absent_and_what_is_zero_is_zero(measured: Report) -> None:
    metrics = measured.kernels[1].metrics
    assert "derived_tempMetric4" not in metrics  # nan
    assert "LTS.TriageCompute.lts__throughput.avg.pct_of_peak_sustained_elapsed" not in metrics  # an empty cell
    assert "device__attribute_display_name" not in metrics  # words
    assert metrics["smsp__sass_inst_executed_op_global_ld.sum"] == 0.0


def test_a_small_one(file: Path) -> None:
    (kernel,) = small(file, SMALL).kernels
    assert kernel.metrics == {
        "gpu__time_duration.sum": 1.5, "dram__bytes_read.sum": 2.5e6, "smsp__inst_executed.sum": 1234.0,
    }  # fmt: skip
    assert (kernel.name, kernel.grid, kernel.block, kernel.cc) == ("copy(float *)", (64, 1, 1), (256, 1, 1), "9.0")


@pytest.mark.parametrize(
    "text",
    [
        f"hello\n\n==PROF== Connected to process 1 (python)\n==PROF== Disconnected\n{SMALL}==WARNING== a word\n",
        SMALL.replace('","', '";"'),
        SMALL.replace('","', '"\t"'),
        SMALL.replace("\n", "\r\n"),
        SMALL.replace('"1,500"', '"1.500"').replace('"2.5"', '"2,50"').replace('"1,234"', '"1.234"'),
        SMALL.replace('"","","","","","ns"', '"","","ns"'),  # the units row begins later
        SMALL.replace('"ns"', '"usecond"').replace('"1,500"', '"1.50"'),
        SMALL.replace('"Mbyte"', '"byte"').replace('"2.5"', '"2,500,000"'),
        "\ufeff" + SMALL,
    ],
    ids=["words around", "semicolons", "tabs", "crlf", "comma", "short units", "usecond", "byte", "bom"],
)
def test_the_same_numbers_written_otherwise(file: Path, text: str) -> None:
    (kernel,) = small(file, text).kernels
    assert kernel.metrics == {
        "gpu__time_duration.sum": 1.5, "dram__bytes_read.sum": 2.5e6, "smsp__inst_executed.sum": 1234.0,
    }  # fmt: skip


def test_utf16_as_a_windows_shell_redirects(file: Path) -> None:
    file.write_bytes(SMALL.encode("utf-16"))
    assert read_report(file).kernels[0].duration_us == 1.5


def test_the_measured_report_in_a_locale_with_commas(file: Path, rows: list[list[str]], measured: Report) -> None:
    swap = str.maketrans(",.", ".,")
    is_text = [i for i, name in enumerate(rows[0]) if "_" not in name]
    for row in rows[2:]:
        row[:] = [cell if i in is_text else cell.translate(swap) for i, cell in enumerate(row)]
    found = small(file, written(rows, ";"))
    assert [k.metrics for k in found.kernels] == [k.metrics for k in measured.kernels]


def test_without_a_units_row_scaled_numbers_are_unknown(file: Path, rows: list[list[str]], measured: Report) -> None:
    found = small(file, written([rows[0], *rows[2:]]))
    prepare, expected = found.kernels[0].metrics, measured.kernels[0].metrics
    assert not {"gpu__time_duration.sum", "dram__bytes_read.sum", "launch__shared_mem_per_block"} & set(prepare)
    assert {name for name in prepare if prepare[name] != expected[name]} == set()  # nothing is off by a scale
    assert prepare["smsp__inst_executed.sum"] == 29994504
    assert prepare["lts__t_sector_hit_rate.pct"] == expected["lts__t_sector_hit_rate.pct"]
    assert found.notes == ("the file has no units row: times, bytes and rates are n/a",)


def test_columns_may_be_missing(file: Path) -> None:
    (kernel,) = small(file, '"ID","Kernel Name","smsp__inst_executed.sum"\n"","","inst"\n"7","k","5"\n').kernels
    assert (kernel.metrics, kernel.grid, kernel.block, kernel.device, kernel.cc) == (
        {"smsp__inst_executed.sum": 5.0}, None, None, None, None,
    )  # fmt: skip


def test_each_process_may_print_a_table(file: Path) -> None:
    other = '"ID","Kernel Name","smsp__inst_executed.sum"\n"","","inst"\n"0","second","5"\n"1","third","6"\n'
    found = small(file, SMALL + other)
    assert [(k.launch, k.short_name) for k in found.kernels] == [(0, "copy"), (1, "second"), (2, "third")]
    assert [k.metrics["smsp__inst_executed.sum"] for k in found.kernels] == [1234, 5, 6]


def test_a_row_that_was_cut_is_left_out_and_named(file: Path) -> None:
    found = small(file, SMALL + '"1","cut","(1, 1, 1)')
    assert ([k.short_name for k in found.kernels], found.notes) == (
        ["copy"], ("a row of 3 cells below a header of 9 was left out",),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("data", "got"),
    [
        (b"", "an empty file"),
        (b" \n\n", "an empty file"),
        (bytes(range(256)) * 9, "a binary file"),
        (b"time,size\n1,2\n", "a file without a header row"),
        (b"==ERROR== ERR_NVGPUCTRPERM\n", "a file without a header row"),
        (b'"ID","Kernel Name","Metric Name","Metric Value"\n"0","k","Duration","1"\n', "the details page"),
        (b'"ID","Kernel Name","Grid Size"\n"0","k","1"\n', "a page without metrics"),
        (SMALL.splitlines()[0].encode(), "a page without a launch"),
    ],
)
def test_what_is_no_raw_page_is_refused(file: Path, data: bytes, got: str) -> None:
    file.write_bytes(data)
    with pytest.raises(InvalidValue, match=got) as refused:
        read_report(file)
    assert refused.value.fix.endswith(HOW)
    assert "--csv --page raw" in HOW


def test_kernels_are_chosen_by_name(measured: Report) -> None:
    path = Path(measured.source)
    assert [k.short_name for k in read_report(path, "recurrence").kernels] == ["_flash_kda_fwd_recurrence"]
    with pytest.raises(InvalidValue, match="finds one of _flash_kda_fwd_prepare, _flash_kda_fwd_recurrence, got"):
        read_report(path, "gemm")
    with pytest.raises(InvalidValue, match="--kernels must be a regular expression"):
        read_report(path, "(")


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(FileNotFoundError):
        read_report(Path("nowhere.csv"))
