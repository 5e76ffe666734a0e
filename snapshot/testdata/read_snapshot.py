#!/usr/bin/env python3
"""Reads the RAM of a snapshot, by nothing but FORMAT.md.

    read_snapshot.py DIRECTORY            prints number and SHA-256 of each page that is not zeros
    read_snapshot.py DIRECTORY --raw      writes all of RAM, slot after slot, to the standard output

It needs the standard library of Python 3.9 and the zstd command. It checks all that can be checked and ends with
status 1 and one line if anything is wrong.
"""
import hashlib
import json
import os
import struct
import subprocess
import sys

PAGE = 4096
CHUNK = 512  # pages
VERSION = 2


class Refused(Exception):
    pass


def need(ok, what):
    if not ok:
        raise Refused(what)


def make_crc_table():
    table = []
    for n in range(256):
        for _ in range(8):
            n = n >> 1 ^ 0x82F63B78 if n & 1 else n >> 1
        table.append(n)
    return table


CRC_TABLE = make_crc_table()


def crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    return crc ^ 0xFFFFFFFF


def read_file(directory, name):
    with open(os.path.join(directory, name), "rb") as f:
        return f.read()


def read_manifest(directory):
    data = read_file(directory, "manifest")
    need(len(data) >= 64 and data[:8] == b"DROWSEMF", "manifest: it does not begin like one")
    version, doc, state, count, zero = struct.unpack_from("<IIQII", data, 8)
    need(version == VERSION, "manifest: format %d" % version)
    need(doc <= 4 << 20 and state <= 64 << 20 and count <= 1024 and zero == 0, "manifest: impossible header")
    need(len(data) == 64 + doc + state, "manifest: %d bytes instead of %d" % (len(data), 64 + doc + state))
    need(hashlib.sha256(data[:-32]).digest() == data[-32:], "manifest: wrong SHA-256")
    body = data[32:32 + doc]
    manifest = json.loads(body)
    again = json.dumps(manifest, ensure_ascii=False, separators=(",", ":")) + "\n"
    need(again.encode() == body, "manifest: the JSON is not in its one form")
    need(manifest["version"] == VERSION and manifest["arch"] == "x86_64", "manifest: of another kind")
    at, end = 32 + doc, 32 + doc + state
    for _ in range(count):
        need(end - at >= 12, "manifest: a payload is cut off")
        name, kind, _, size = struct.unpack_from("<HHII", data, at)
        at += 12 + name + kind + size
    need(at == end, "manifest: the payloads do not fill their section")
    return manifest


class MemoryFile:
    def __init__(self, directory, entry, chunks, last):
        self.number, self.index = entry["number"], entry["index"]
        name = "memory" if last else "memory-" + entry["id"]
        need(entry["name"] == name, "memory file %d has the name %r" % (self.number, entry["name"]))
        self.data = read_file(directory, name)
        need(len(self.data) == entry["size"], "%s: %d bytes instead of %d" % (name, len(self.data), entry["size"]))
        self.root = len(self.data) - 16 * chunks
        need(64 <= self.index <= self.root, "%s: impossible index" % name)
        header = struct.pack("<8sIIII16s20s", b"DROWSEMM", VERSION, PAGE, CHUNK, 0, bytes.fromhex(entry["id"]), b"")
        need(self.data[:64] == header + struct.pack("<I", crc32c(header)), "%s: another header" % name)
        self.used = [0, 0, 0]  # pages, bytes of frames, bytes of leaves
        self.said = [entry["pages"], entry["frame_bytes"], entry["leaf_bytes"]]


def read_leaf(files, chunk, entry, pages):
    """Returns the frames of a chunk: (codec, pages in it, stored bytes, {slot: page of RAM})."""
    number, crc, where = struct.unpack("<IIQ", entry)
    if entry == bytes(16):
        return []
    need(number in files, "root: chunk %d is in file %d" % (chunk, number))
    file, offset, count = files[number], where & (1 << 48) - 1, where >> 48
    size = 8 + 24 * count + 2 * CHUNK
    need(1 <= count <= CHUNK and file.index <= offset and offset + size <= file.root, "root: chunk %d is nowhere" % chunk)
    leaf = file.data[offset:offset + size]
    need(crc32c(leaf) == crc, "leaf of chunk %d: wrong checksum" % chunk)
    need(struct.unpack_from("<IHH", leaf) == (chunk, count, 0), "leaf of chunk %d: it is of another" % chunk)
    file.used[2] += size
    frames = []
    for i in range(count):
        at, stored, crc, n, codec, held, zero = struct.unpack_from("<QIIIBBH", leaf, 8 + 24 * i)
        need(n in files and n <= number and zero == 0, "chunk %d: frame %d is in file %d" % (chunk, i, n))
        need(1 <= held <= 64 and 64 <= at and at + stored <= files[n].index, "chunk %d: frame %d is nowhere" % (chunk, i))
        need(codec == 0 and stored == PAGE * held or codec == 1 and 0 < stored < PAGE * held, "chunk %d: frame %d: codec" % (chunk, i))
        data = files[n].data[at:at + stored]
        need(crc32c(data) == crc, "chunk %d: frame %d: wrong checksum" % (chunk, i))
        files[n].used[1] += stored
        frames.append((codec, held, data, {}, files[n]))
    for i, place in enumerate(struct.unpack_from("<%dH" % CHUNK, leaf, 8 + 24 * count)):
        if place == 0:
            continue
        slot, frame = place & 63, place >> 6 & 511
        need(place >> 15 and i < pages and frame < count and slot < frames[frame][1], "chunk %d: page %d is nowhere" % (chunk, i))
        need(slot not in frames[frame][3], "chunk %d: page %d is where another is" % (chunk, i))
        frames[frame][3][slot] = chunk * CHUNK + i
        frames[frame][4].used[0] += 1
    need(all(f[3] for f in frames), "chunk %d: a frame without pages" % chunk)
    return frames


def unzip(frames):
    """Decompresses all zstd frames at once: zstd takes one after the other."""
    zipped = [f for f in frames if f[0] == 1]
    out = b""
    if zipped:
        out = subprocess.run(["zstd", "-d", "-c", "-q"], input=b"".join(f[2] for f in zipped), stdout=subprocess.PIPE, check=True).stdout
    need(len(out) == PAGE * sum(f[1] for f in zipped), "the frames expand to %d bytes" % len(out))
    at = 0
    for codec, held, data, places, _ in frames:
        if codec == 1:
            data = out[at:at + PAGE * held]
            at += PAGE * held
        yield data, places


def read_ram(directory):
    """Returns how many pages RAM has, and those that are stored, by their numbers."""
    manifest = read_manifest(directory)
    layout = manifest["memory"]
    total = sum(slot["size"] for slot in layout["slots"]) // PAGE
    chunks = (total + CHUNK - 1) // CHUNK
    entries = layout["files"]
    need(1 <= len(entries) <= 64, "manifest: %d memory files" % len(entries))
    files, last = {}, 0
    for entry in entries:
        need(entry["number"] > last, "manifest: memory files out of order")
        last = entry["number"]
        files[last] = MemoryFile(directory, entry, chunks, entry is entries[-1])
    own = files[last]
    root = own.data[own.root:]
    need(crc32c(root) == layout["root_crc32c"], "root: wrong checksum")
    frames = []
    for chunk in range(chunks):
        frames += read_leaf(files, chunk, root[16 * chunk:16 * chunk + 16], min(CHUNK, total - chunk * CHUNK))
    for file in files.values():
        need(file.used == file.said, "memory file %d: %s in use, the manifest says %s" % (file.number, file.used, file.said))
    pages = {}
    for data, places in unzip(frames):
        for slot, page in places.items():
            pages[page] = data[PAGE * slot:PAGE * slot + PAGE]
    stats = {"pages": len(pages), "frames": len(frames), "stored_bytes": sum(len(f[2]) for f in frames)}
    need(stats == manifest["stats"], "the index has %s, the manifest says %s" % (stats, manifest["stats"]))
    return total, pages


def main():
    directory = sys.argv[1]
    try:
        total, pages = read_ram(directory)
    except (Refused, OSError, ValueError, KeyError, TypeError, subprocess.CalledProcessError) as err:
        sys.exit("%s: %s" % (directory, err))
    if sys.argv[2:] == ["--raw"]:
        for page in range(total):
            sys.stdout.buffer.write(pages.get(page, bytes(PAGE)))
        return
    for page in sorted(pages):
        print(page, hashlib.sha256(pages[page]).hexdigest())


if __name__ == "__main__":
    main()
