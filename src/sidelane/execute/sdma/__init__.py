"""Programs as packets of AMD's SDMA engines. Nothing here calls a driver, and nothing of it was run on AMD hardware."""

from sidelane.execute.sdma.encode import PacketQueue, QueueWords, encode, fit
from sidelane.execute.sdma.packets import Packet, decode, disassemble

__all__ = ["Packet", "PacketQueue", "QueueWords", "decode", "disassemble", "encode", "fit"]
