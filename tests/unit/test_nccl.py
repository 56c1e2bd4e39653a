"""The binding of NCCL: against a library in C that writes down how it is called, and as far as that goes without a GPU
against the real one.
"""

from __future__ import annotations

import ctypes
import importlib.util
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ocomm.errors import HorovodInternalError
from ocomm.transport import nccl
from ocomm.transport.nccl import NcclLibrary, Piece

#: Its functions have the prototypes of nccl.h. Rank 7 as a peer is an error.
LIBRARY = r"""
#include <stddef.h>
#include <stdio.h>
#include <string.h>
typedef struct { char internal[128]; } ncclUniqueId;
typedef struct ncclComm { int size, rank, async; } *ncclComm_t;
static char text[4096];
static struct ncclComm only;
#define SAY(...) snprintf(text + strlen(text), sizeof text - strlen(text), __VA_ARGS__)
const char *said(void) { return text; }
void fail(int code) { only.async = code; }
int ncclGetVersion(int *version) { *version = VERSION; return 0; }
const char *ncclGetErrorString(int code) { return code == 6 ? "remote process exited" : "invalid argument"; }
int ncclGetUniqueId(ncclUniqueId *id) { for (int i = 0; i < 128; i++) id->internal[i] = (char)i; return 0; }
int ncclCommInitRank(ncclComm_t *comm, int size, ncclUniqueId id, int rank) {
    for (int i = 0; i < 128; i++)
        if (id.internal[i] != (char)i) return 4;
    only.size = size, only.rank = rank, *comm = &only;
    SAY("init %d of %d;", rank, size);
    return 0;
}
int ncclGroupStart(void) { SAY("group("); return 0; }
int ncclGroupEnd(void) { SAY(");"); return 0; }
int ncclSend(const void *at, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    SAY("send %zx %zu type %d to %d on %zx;", (size_t)at, count, type, peer, (size_t)stream);
    return comm != &only || peer == 7 ? 4 : 0;
}
#ifndef OLD
int ncclRecv(void *at, size_t count, int type, int peer, ncclComm_t comm, void *stream) {
    SAY("receive %zx %zu type %d from %d on %zx;", (size_t)at, count, type, peer, (size_t)stream);
    return comm != &only ? 4 : 0;
}
#endif
int ncclCommGetAsyncError(ncclComm_t comm, int *code) { *code = comm->async; return comm != &only; }
int ncclCommAbort(ncclComm_t comm) { SAY("abort;"); return comm != &only; }
"""


def built(folder: Path, *options: str) -> str:
    (folder / "nccl.c").write_text(LIBRARY)
    library = folder / f"libnccl{len(list(folder.iterdir()))}.so"
    subprocess.run(["gcc", "-shared", "-fPIC", *options, folder / "nccl.c", "-o", library], check=True)
    return str(library)


def test_the_library_is_called_as_its_header_says(tmp_path: Path) -> None:
    path = built(tmp_path, "-DVERSION=22304")
    library = NcclLibrary(path)
    assert (str(library), library.version) == ("2.23.4", (2, 23, 4))
    communicator = library.communicator(library.unique_id(), 4, 2)
    far = 0x7F00_0000_0000
    communicator.exchange([Piece(0, far + 1, 1 << 33), Piece(3, 2, 5)], [Piece(1, far + 3, 6)], far + 7)
    with pytest.raises(HorovodInternalError, match="ncclSend: invalid argument"):
        communicator.exchange([Piece(7, 1, 1)], [], 0)
    recorder: Any = ctypes.CDLL(path)
    recorder.said.restype = ctypes.c_char_p
    assert recorder.said().decode().split(";") == [
        "init 2 of 4",
        "group(send 7f0000000001 8589934592 type 1 to 0 on 7f0000000007",
        "send 2 5 type 1 to 3 on 7f0000000007",
        "receive 7f0000000003 6 type 1 from 1 on 7f0000000007",
        ")",
        "group(send 1 1 type 1 to 7 on 0",
        ")",
        "",
    ], "a group is ended, also where a call in it fails"
    assert communicator.failure() == ""
    for code, words in ((7, ""), (6, "remote process exited")):
        recorder.fail(code)
        assert communicator.failure() == words
    communicator.abort()
    assert recorder.said().endswith(b"abort;")
    with pytest.raises(HorovodInternalError, match="ncclCommInitRank: invalid argument"):
        library.communicator(bytes(128), 2, 0)


def test_a_library_that_cannot_send_and_receive_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HorovodInternalError, match=r"is NCCL 2\.6\.4, which cannot send and receive"):
        NcclLibrary(built(tmp_path, "-DVERSION=2604"))
    with pytest.raises(HorovodInternalError, match="has no ncclRecv"):
        NcclLibrary(built(tmp_path, "-DVERSION=2604", "-DOLD"))


def test_the_wheels_library_comes_before_the_loaders(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libnccl.so.2").touch()

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name)

    spec = SimpleNamespace(submodule_search_locations=[str(tmp_path), str(tmp_path / "elsewhere")])
    assert nccl.candidates(lambda name: spec) == [str(tmp_path / "lib" / "libnccl.so.2"), "libnccl.so.2"]
    assert nccl.candidates(lambda name: None) == nccl.candidates(missing) == ["libnccl.so.2"]


def _has_wheel() -> bool:
    try:
        return importlib.util.find_spec("nvidia.nccl") is not None
    except ModuleNotFoundError:
        return False


@pytest.mark.skipif(not _has_wheel(), reason="no wheel nvidia-nccl-cu12 or -cu13, which Torch's CUDA builds bring")
def test_the_real_library_has_all_functions_and_words_for_its_errors() -> None:
    library = nccl.load()
    assert library.version >= (2, 7, 0)
    assert library.words(4).startswith("invalid argument")
    assert len({library.unique_id() for _ in range(2)}) == 2
