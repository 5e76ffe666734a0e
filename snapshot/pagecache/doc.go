// Package pagecache keeps decompressed pages of snapshots that are restored more than once, in files that all
// processes of a host share through its page cache.
//
// A restore reads the frames of its working set. Each is a group of pages, and decompressing them takes most of
// the processor time of waking a VM. The next wake from the same memory files, of the same snapshot, a clone of
// it, or a descendant, finds the frames here. A frame then costs a read from the page cache and a checksum.
//
//	Open   opens the cache files for the memory files of a snapshot; never fails
//	Read   returns the pages of a frame, if they are present and intact
//	Add    adds the frames of the working set, in the background after a wake
//	Sweep  removes the files that no snapshot needs
//
// # The cache is never required
//
// Everything in a cache is in a snapshot too. A file that is missing, short, damaged, of another format or of
// another memory file counts as empty. A frame that cannot be written is missing the next time. Nothing read from
// a cache is ever written to a snapshot.
//
// # Read returns only correct pages
//
// An entry says which bytes of which memory file it was made from: the file's device, inode, times of birth and
// change, and size; the frame's offset and length in it, and the checksum over its compressed bytes. All of them
// must match the open memory file and the snapshot's index, so a frame of another snapshot is not mistaken for it.
// Only a process that has that very file open finds what is kept of it. Add writes only what it has decompressed
// from it. The header and the list of entries have a checksum, and so has each entry's content, a CRC-32C as in
// frames. Read copies content into the caller's memory by pread(2) and checks it there, so it cannot change after
// the check. If a file is truncated while it is read, the reader gets an end of file, not a SIGBUS as from a
// mapping.
//
// # Files
//
// A cache has one file for each memory file that a snapshot refers to, named by a hash of what identifies it, so
// clones and chains of any depth share what they have in common. A writer writes a file under another name and
// renames it, and no file changes after that: a reader that has the old file open keeps using it. Only one writer
// at a time has the lock of the directory. Writers sync nothing, so a file is valid only until the next boot of the
// host, and readers ignore what a power loss has left. Then, and whenever the host has reclaimed its page cache,
// the pager reads the frame from the snapshot, where it is smaller. Read does not wait for a disk (RWF_NOWAIT,
// preadv2(2)). Numbers are little-endian.
//
//	 0  magic      "DROWSEPC"
//	 8  version    4 bytes, 2
//	12  entries    4 bytes
//	16  boot       16 bytes, the host's boot id (random(4))
//	32  device     8 bytes, major and minor number; these five are of the memory file
//	40  inode      8 bytes
//	48  birth      8 bytes, ns since 1970, 0 if unknown
//	56  change     8 bytes, of the content, ns since 1970
//	64  size       8 bytes
//	72  zeros      4 bytes
//	76  CRC-32C    4 bytes, over all before and the entries
//	80  entries    32 bytes each, in ascending order of offset:
//	     0  offset of the frame in the memory file, 8 bytes
//	     8  its length there, 4 bytes
//	    12  its CRC-32C there, 4 bytes
//	    16  first page of the content in this file, 4 bytes
//	    20  CRC-32C of the content, 4 bytes
//	    24  pages, 1 byte, and 7 bytes of zeros
//	    content of all entries from the next multiple of 4096 on, without gaps, in the
//	    order of the entries, to the end of the file
package pagecache
