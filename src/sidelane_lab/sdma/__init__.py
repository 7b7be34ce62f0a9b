"""Programs as packets of AMD's SDMA engines. Nothing here calls a driver, and nothing of it was run on AMD hardware."""

from sidelane_lab.sdma.encode import PacketQueue, QueueWords, encode, fit
from sidelane_lab.sdma.packets import Packet, decode, disassemble

__all__ = ["Packet", "PacketQueue", "QueueWords", "decode", "disassemble", "encode", "fit"]
