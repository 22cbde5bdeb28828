"""Arrays of .npz files: what they claim is compared with what they hold."""

import zipfile

import numpy as np
import pytest

from einlinear.files.arrays import open_arrays

ARRAYS = {
    "bytes": np.arange(24, dtype=np.uint8).reshape(2, 3, 4),
    "fortran": np.asfortranarray(np.arange(6, dtype=np.int64).reshape(2, 3)),
    "big_endian": np.arange(5, dtype=">f4"),
    "flags": np.array([True, False]),
    "number": np.array(7),
    "empty": np.zeros((0, 3)),
}


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_arrays_are_what_numpy_reads(save, tmp_path):
    save(tmp_path / "a.npz", **ARRAYS)
    with open_arrays(tmp_path / "a.npz") as held:
        assert set(held.names) == set(ARRAYS)
        for name, array in ARRAYS.items():
            read = held.read(name)
            assert (read.dtype, read.shape) == (array.dtype, array.shape)
            assert (read == array).all()


def npz(path, header, body=b"", *, version=1, name="x.npy"):
    """An archive of one array with a header of one's own."""
    text = header.encode("latin-1")
    length = len(text).to_bytes(2 if version == 1 else 4, "little")
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(name, b"\x93NUMPY" + bytes([version, 0]) + length + text + body)
    return path


HEADER = "{'descr': '|u1', 'fortran_order': False, 'shape': (%s), }\n"


@pytest.mark.parametrize("version", [1, 2, 3])
def test_headers_of_all_versions_and_of_python_2(version, tmp_path):
    for shape in ("2, 3", "2L, 3L", "2,3,", " 2 , 3 "):
        path = npz(tmp_path / "a.npz", HEADER % shape, b"abcdef", version=version)
        with open_arrays(path) as held:
            assert held.read("x").shape == (2, 3)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (HEADER % "1000000, 1000000", "claims 1,000,000,000,000 bytes and has 6"),
        (HEADER % ("9" * 300), "claims"),
        (HEADER % "2, 2", "claims 4 bytes and has 6"),
        (HEADER % "-2, 3", "does not hold plain numbers"),
        ("{'descr': '|O', 'fortran_order': False, 'shape': (6,)}", "does not hold plain numbers"),
        ("{'descr': '|u7', 'fortran_order': False, 'shape': (6,)}", "not a type of numbers"),
        ("{'descr': '|u1', 'shape': (6,)}", "does not hold plain numbers"),
        ("(" * 5000, "does not hold plain numbers"),
        ("{'descr': '|u1', 'fortran_order': False, 'shape': (6,)", "does not hold plain numbers"),
        ("{" + " " * 20_000, "a header of 20,001 bytes"),
        ("__import__('os').system('true')", "does not hold plain numbers"),
    ],
)
def test_headers_that_are_refused(header, message, tmp_path):
    path = npz(tmp_path / "a.npz", header, b"abcdef")
    with pytest.raises(ValueError, match=message), open_arrays(path) as held:
        held.read("x")


def test_bombs_are_not_unpacked(tmp_path):
    # The directory of the archive says how large an array is before a byte of it is unpacked.
    header = HEADER % (2**31)
    path = npz(tmp_path / "a.npz", header, b"\0" * 1000)
    data = bytearray(path.read_bytes())
    true_size = 10 + len(header) + 1000
    claimed = (10 + len(header) + 2**31).to_bytes(4, "little")
    assert data.count(true_size.to_bytes(4, "little")) == 2
    path.write_bytes(bytes(data).replace(true_size.to_bytes(4, "little"), claimed))
    with pytest.raises(ValueError, match="claims 2,147,483,648 bytes, packed into"):
        with open_arrays(path) as held:
            held.read("x")


def test_archives_that_end_early_or_are_none(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.arange(1000))
    data = (tmp_path / "a.npz").read_bytes()
    middle = bytearray(data)
    middle[120:140] = bytes(20)
    for raw in (b"", b"PK", data[:-30], bytes(middle)):
        (tmp_path / "b.npz").write_bytes(raw)
        with pytest.raises(ValueError, match=r"\w+"), open_arrays(tmp_path / "b.npz") as held:
            held.read("x")
