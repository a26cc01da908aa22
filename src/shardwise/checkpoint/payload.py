"""Find the bytes of a tensor inside what ``torch.save`` wrote, so that they can be read in place.

That is a zip archive, uncompressed, with the elements in one record. Anything unusual is left to
``torch.load``.

Source: PKWARE, .ZIP File Format Specification 6.3.10, sections 4.3.7, 4.3.12 and 4.3.16.
"""

from __future__ import annotations

import os
import struct

TAIL_BYTES = 2048
"""Enough for the directory of an archive of one tensor."""
_RECORD = b"/data/0"
_END, _END_SIZE = b"PK\x05\x06", 22
_ENTRY = struct.Struct("<4s6H3I5H2I")
_LOCAL_SIZE = 30


def find_payload(descriptor: int, start_byte: int, length_bytes: int) -> tuple[int, int] | None:
    """Return the first byte in the file and the number of bytes of a tensor's elements.

    Args:
        descriptor: The open file.
        start_byte: Where the archive begins.
        length_bytes: Its size.

    Returns:
        None where the archive is not of the simple kind.
    """
    size = min(TAIL_BYTES, length_bytes)
    tail = os.pread(descriptor, size, start_byte + length_bytes - size)
    end = tail.rfind(_END)
    if end < 0 or len(tail) - end < _END_SIZE:
        return None
    num_entries, _, directory_start = struct.unpack_from("<HII", tail, end + 10)
    position = directory_start - (length_bytes - size)
    for _ in range(num_entries):
        if position < 0 or position + _ENTRY.size > end:
            return None
        fields = _ENTRY.unpack_from(tail, position)
        method, stored_bytes, num_bytes = fields[4], fields[8], fields[9]
        name_bytes, extra_bytes, comment_bytes, local_start = (*fields[10:13], fields[16])
        name_start = position + _ENTRY.size
        name = tail[name_start : name_start + name_bytes]
        position = name_start + name_bytes + extra_bytes + comment_bytes
        if name.endswith(_RECORD):
            is_simple = method == 0 and stored_bytes == num_bytes and num_bytes < 2**32 - 1
            if not is_simple or local_start + _LOCAL_SIZE > length_bytes:
                return None
            local = os.pread(descriptor, _LOCAL_SIZE, start_byte + local_start)
            own_name_bytes, own_extra_bytes = struct.unpack_from("<2H", local, 26)
            data_start = local_start + _LOCAL_SIZE + own_name_bytes + own_extra_bytes
            if data_start + num_bytes > length_bytes:
                return None
            return start_byte + data_start, num_bytes
    return None
