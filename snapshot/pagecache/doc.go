// Package pagecache keeps pages of snapshots that are restored more than once, decompressed,
// in files that all processes of a host share through its page cache.
//
// A restore reads the frames of its working set, each a group of pages that has to be
// decompressed, which is most of the processor time that waking a VM takes. The next wake
// from the same memory files, of the same snapshot, of a clone of it, or of a descendant,
// finds them here: a frame costs a read from the page cache and a checksum then.
//
//	Open   the cache files for the memory files of a snapshot; never fails
//	Read   the pages of a frame, if they are there and what they were
//	Add    in the background, after a wake: the frames of its working set
//	Sweep  what belongs to no snapshot any more
//
// # It is never needed
//
// Everything in a cache is in a snapshot as well. A file that is missing, short, damaged,
// of another format or of another memory file is as if it were empty, and what cannot be
// written is not there the next time. Nothing that is written to a snapshot is read from here.
//
// # A page is right or it is not delivered
//
// An entry says which bytes of which memory file it was made of: the random id of that
// file, the frame's place and length in it, and the checksum over its compressed bytes, all
// of which must be what the snapshot's index says. So a frame of another snapshot is not
// taken for it. The header and the list of entries have a checksum, and so has each entry's
// content, a CRC-32C as frames have. Content is read into memory of the reader's own by
// pread(2) and looked at there: it cannot change afterwards, and a file that is cut short while it
// is read is an end of file, not a SIGBUS as it were in a mapping.
//
// # Files
//
// One for each memory file that a snapshot refers to, so that clones and chains share what
// they have in common, whatever the depth. It is written under another name and renamed,
// and never changed after that: whoever has the old one open goes on with it. One writer at
// a time has the lock of the directory. Nothing is synced, so a file is of use until the
// host is booted again: what a loss of power has left of one is not looked at. Then, and
// whenever the host has taken the memory of its page cache for something else, a frame is
// read from the snapshot, where it is smaller: Read does not wait for a disk
// (RWF_NOWAIT, preadv2(2)). Numbers are little-endian.
//
//	 0  magic      "DROWSEPC"
//	 8  version    4 bytes, 1
//	12  entries    4 bytes
//	16  id         16 bytes, that of the memory file
//	32  boot       16 bytes, the host's boot id (random(4))
//	48  zeros      12 bytes
//	60  CRC-32C    4 bytes, over all before and the entries
//	64  entries    32 bytes each, in ascending order of offset:
//	     0  offset of the frame in the memory file, 8 bytes
//	     8  its length there, 4 bytes
//	    12  its CRC-32C there, 4 bytes
//	    16  first page of the content in this file, 4 bytes
//	    20  CRC-32C of the content, 4 bytes
//	    24  pages, 1 byte, and 7 bytes of zeros
//	    content of all entries from the next multiple of 4096 on, without gaps, in the
//	    order of the entries, to the end of the file
package pagecache
