# Kernels are Triton's language, which Python's type checker cannot read.
# mypy: disable-error-code="untyped-decorator, no-untyped-def, assignment"

"""Access to bytes at addresses: pointers, tiles, and words of four bytes at any alignment. Portable Triton.

Loads and stores are weak, like those of any kernel, and order no memory. An address may be this rank's or a peer's.

Legend: UNIT, the bytes of one access: 1, 2, 4, or 16 where addresses and sizes allow it; TILE, the bytes that a thread
block moves at a time.
"""

from __future__ import annotations

from sidelane.device.language import tl, triton

WORD = tl.constexpr(4)


@triton.jit
def pointer(address, DTYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """Return a pointer to elements of ``DTYPE``; ``ALIGNED`` promises that it is a multiple of 16 bytes."""
    result = address.to(tl.pointer_type(DTYPE))
    return tl.multiple_of(result, 16) if ALIGNED else result


@triton.jit
def unit_pointer(address, UNIT: tl.constexpr):
    """Return a pointer to integers of UNIT bytes; of 8 bytes for UNIT 16, where two neighbours make one access."""
    if UNIT == 16:
        return pointer(address, tl.int64, True)
    elif UNIT == 4:
        return pointer(address, tl.int32, False)
    elif UNIT == 2:
        return pointer(address, tl.int16, False)
    else:
        return pointer(address, tl.int8, False)


@triton.jit
def get(address, tile, nbytes, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Load tile number ``tile`` of the ``nbytes`` at ``address``, maybe a peer's. ``WHOLE``: the tile is full."""
    ELEMENT: tl.constexpr = 8 if UNIT == 16 else UNIT
    offsets = tl.arange(0, TILE // ELEMENT)
    source = unit_pointer(address + tile * TILE, UNIT) + offsets
    if WHOLE:
        return tl.load(source)
    else:
        return tl.load(source, mask=offsets < count_in(tile, nbytes, UNIT, ELEMENT, TILE))


@triton.jit
def put(address, values, tile, nbytes, UNIT: tl.constexpr, TILE: tl.constexpr, WHOLE: tl.constexpr):
    """Store a tile that :func:`get` has loaded at ``address``, which may be a peer's."""
    ELEMENT: tl.constexpr = 8 if UNIT == 16 else UNIT
    offsets = tl.arange(0, TILE // ELEMENT)
    target = unit_pointer(address + tile * TILE, UNIT) + offsets
    if WHOLE:
        tl.store(target, values)
    else:
        tl.store(target, values, mask=offsets < count_in(tile, nbytes, UNIT, ELEMENT, TILE))


@triton.jit
def count_in(tile, nbytes, UNIT: tl.constexpr, ELEMENT: tl.constexpr, TILE: tl.constexpr):
    """Return the number of elements of a tile in 32 bits: 64-bit masks and addresses would take too many registers.

    It is negative for a tile beyond the end.
    """
    there = tl.minimum(nbytes - tile * TILE, TILE).to(tl.int32)
    return count_of(there, UNIT, ELEMENT)


@triton.jit
def count_of(nbytes, UNIT: tl.constexpr, ELEMENT: tl.constexpr):
    """Return the number of elements in ``nbytes``, in a form that shows the compiler that no mask splits an access."""
    if UNIT > ELEMENT:
        return nbytes // UNIT * (UNIT // ELEMENT)
    else:
        return nbytes // ELEMENT


@triton.jit
def load_words(address, index, nbytes, UNIT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr = False):
    """Return words ``index`` of the ``nbytes`` at ``address``, int32, composed of units of 1, 2 or 4 bytes.

    Bytes beyond the end are 0. With UNIT 1, the word of the bytes 0x11 0x22 0x33 is 0x00332211. ``WHOLE`` promises that
    no word ends beyond the end, for wide accesses.
    """
    if UNIT == WORD and WHOLE:
        return tl.load(pointer(address, tl.int32, ALIGNED) + index)
    elif UNIT == WORD:
        return tl.load(pointer(address, tl.int32, ALIGNED) + index, mask=index < nbytes // WORD, other=0)
    else:
        word = tl.zeros_like(index).to(tl.int32)
        for piece in tl.static_range(WORD // UNIT):
            place = index * (WORD // UNIT) + piece
            part = tl.load(unit_pointer(address, UNIT) + place, mask=place < nbytes // UNIT, other=0).to(tl.int32)
            word |= (part & ((1 << (8 * UNIT)) - 1)) << (8 * UNIT * piece)
        return word


@triton.jit
def store_words(
    address, index, words, nbytes, mask, UNIT: tl.constexpr, ALIGNED: tl.constexpr, WHOLE: tl.constexpr = False
):
    """Store words where :func:`load_words` loads them. Bytes beyond the end are not stored."""
    if UNIT == WORD and WHOLE:
        tl.store(pointer(address, tl.int32, ALIGNED) + index, words, mask=mask)
    elif UNIT == WORD:
        tl.store(pointer(address, tl.int32, ALIGNED) + index, words, mask=mask & (index < nbytes // WORD))
    else:
        for piece in tl.static_range(WORD // UNIT):
            place = index * (WORD // UNIT) + piece
            part = words >> (8 * UNIT * piece)
            target = unit_pointer(address, UNIT)
            tl.store(target + place, part.to(target.dtype.element_ty), mask=mask & (place < nbytes // UNIT))
