"""Tensor maps that the device makes for the sequences of a packed operand (kernels/sm90/common/sequence_maps.cuh): what TMA reads
by them, on the emulator and on a GPU, and the misuses that the emulator names."""

import ctypes
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fa_ext import _build
from tests import emulator
from tests.emulator.emulated import replaced

SOURCE = Path(__file__).with_name("sequence_maps.cu")
HEADS, COLUMNS, ROWS = 2, 64, 8  # of the operand; of a box
#: First row and rows of each sequence: beside one another, apart, of one row, of a box, longer.
SEQUENCES = ((0, 5), (5, 1), (6, 8), (20, 30), (50, 13), (63, 1))
TOTAL = 64
FAULTS = ("none", "not acquired", "acquired by another", "published since", "published in use", "stored", "no rows", "misaligned")

on_the_emulator = pytest.mark.skipif(
    shutil.which("g++") is None or sys.platform != "linux" or platform.machine() != "x86_64",
    reason="the emulator is for g++ on x86-64 Linux",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sequence_maps")


class Host:
    """Arrays of the host, for the emulator."""

    encode = None

    @staticmethod
    def place(array):
        """A copy of an array at a multiple of 128 bytes: its address, and a function that reads it and keeps it alive."""
        memory = np.zeros(array.nbytes + 128, np.uint8)
        copy = memory[-memory.ctypes.data % 128 :][: array.nbytes].view(array.dtype).reshape(array.shape)
        copy[...] = array
        return copy.ctypes.data, lambda: copy


def operand():
    """Values that tell rows, heads and columns apart, all of them finite."""
    return np.arange(TOTAL * HEADS * COLUMNS, dtype=np.uint16).reshape(TOTAL, HEADS, COLUMNS) & 0x3FFF


def load(library, boxes, data=None, maps=True, fault="none", machine=Host):
    """The boxes (map, row, head), read by the maps of SEQUENCES or by the operand's own; or the error."""
    data = operand() if data is None else data
    arrays = (
        data,
        np.array(SEQUENCES, np.int32),
        np.zeros((len(SEQUENCES), 128), np.uint8),
        np.array(boxes, np.int32),
        np.full((len(boxes), ROWS, COLUMNS), 0xFFFF, np.uint16),
    )
    placed = [machine.place(array) for array in arrays]
    at = [ctypes.c_void_p(address) for address, _ in placed]
    message = ctypes.create_string_buffer(8000)
    fine = library.run_sequence_maps(
        machine.encode, at[0], len(data), HEADS, at[1], len(SEQUENCES), at[2] if maps else None, at[3], len(boxes), at[4],
        FAULTS.index(fault), message, ctypes.c_size_t(len(message)),
    )  # fmt: skip
    return placed[4][1]() if fine else message.value.decode()


def expected(data, first, rows, row, head):
    """The box at `row` of a sequence: zeros on both sides of it."""
    box = np.zeros((ROWS, COLUMNS), np.uint16)
    for n in range(ROWS):
        if 0 <= row + n < rows:
            box[n] = data[first + row + n, head]
    return box


def assert_right(library, machine=Host):
    """Each sequence's boxes on both sides of its ends, while every row of its neighbours is NaN."""
    for n, (first, rows) in enumerate(SEQUENCES):
        data = np.full_like(operand(), 0x7E00)
        data[first : first + rows] = operand()[first : first + rows]
        places = sorted({-ROWS, 1 - ROWS, -3, 0, rows // 2, rows - ROWS, rows - 1, rows, rows + 40})
        boxes = [(n, row, head) for row in places for head in range(HEADS)]
        found = load(library, boxes, data, machine=machine)
        assert not isinstance(found, str), found
        for box, (_, row, head) in zip(found, boxes):
            assert np.array_equal(box, expected(data, first, rows, row, head)), (n, row, head)


# ---- on the emulator ----


@pytest.fixture(scope="module")
def emulated(folder):
    """emulated(tag, **options): a build of the kernels, once for each tag."""
    built = {}

    def get(tag="right", **options):
        if tag not in built:
            built[tag] = ctypes.CDLL(str(emulator.build(SOURCE, folder / f"{tag}.so", **options)))
        return built[tag]

    return get


@on_the_emulator
@pytest.mark.parametrize("seed", (0, 1, 2))
def test_a_sequence_ends_where_its_map_does(emulated, monkeypatch, seed):
    monkeypatch.setenv("FA_EMULATOR_SEED", str(seed))
    assert_right(emulated())


@on_the_emulator
def test_a_map_is_its_sequence_s_own(emulated):
    """The same box by another map has other rows; a parameter needs no acquisition and has them all."""
    library, data = emulated(), operand()
    boxes = [(n, 0, 1) for n in range(len(SEQUENCES))]
    found = load(library, boxes)
    assert len({box.tobytes() for box in found}) == len(SEQUENCES)
    whole = load(library, [(0, first, 1) for first, _ in SEQUENCES], maps=False)
    for (first, rows), box, unclipped in zip(SEQUENCES, found, whole):
        assert np.array_equal(box, expected(data, first, rows, 0, 1))
        assert np.array_equal(unclipped, expected(data, 0, TOTAL, first, 1))


@on_the_emulator
@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("not acquired", r"has not acquired it since it was published(.|\n)*thread 0 at common/tma\.cuh:\d+"),
        ("acquired by another", "has not acquired it since it was published"),
        ("published since", "has not acquired it since it was published"),
        ("published in use", "is published anew before a bulk load that uses it was done"),
        ("stored", "is no parameter and was not published"),
        ("no rows", "axis 1 gets no elements"),
        ("misaligned", "is no multiple of 16 bytes"),
    ],
)
def test_a_misuse_is_named(emulated, monkeypatch, fault, words):
    monkeypatch.setenv("FA_EMULATOR_SEED", "0")
    found = load(emulated(), [(0, 0, 0)], fault=fault)
    assert isinstance(found, str) and re.search(words, found), found


@on_the_emulator
@pytest.mark.parametrize("barrier", (None, 0, 1, 2))
def test_each_barrier_of_a_warp_is_needed(emulated, monkeypatch, barrier):
    """Without one the warp's lanes race for the scratch; with all of them nothing does."""
    monkeypatch.setenv("FA_EMULATOR_SEED", "0")

    def without(text):
        begin = text.index("make_sequence_map(")
        end = text.index("acquire_sequence_map(")
        return text[:begin] + replaced("__syncwarp();", ";", barrier)(text[begin:end]) + text[end:]

    edit = None if barrier is None else without
    library = emulated(f"races{barrier}", races=True, edit=edit)
    if barrier is None:
        assert_right(library)
    else:
        found = load(library, [(0, 0, 0)])
        assert isinstance(found, str) and "race: " in found and "sequence_maps.cuh" in found, found


# ---- on a GPU ----


@pytest.mark.gpu
@pytest.mark.skipif(_build.find_nvcc() is None, reason="nvcc is not installed")
def test_on_a_gpu(folder):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("tensor maps are changed on Hopper")

    class Gpu:
        encode = ctypes.cast(ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled, ctypes.c_void_p)

        @staticmethod
        def place(array):
            copy = torch.from_numpy(array.view(np.uint8).reshape(-1)).cuda()
            return copy.data_ptr(), lambda: copy.cpu().numpy().view(array.dtype).reshape(array.shape)

    target = folder / "gpu.so"
    includes = [f"-I{emulator.CSRC}", f"-I{emulator.KERNELS}"]
    command = [_build.find_nvcc(), "-std=c++20", "-gencode=arch=compute_90a,code=sm_90a", "-shared", "-Xcompiler=-fPIC", *includes, str(SOURCE), "-o", str(target)]
    subprocess.run(command, check=True)
    assert_right(ctypes.CDLL(str(target)), Gpu)
